"""Hugging Face checkpoints: what they say about themselves, and their weights straight into memory."""
