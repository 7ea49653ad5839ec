"""Verification: whether what was sent is what is there, and whether it is numbers."""
