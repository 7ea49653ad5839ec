"""The fault campaign: ``python -m tests.chaos``, see ``__main__``."""
