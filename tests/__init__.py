"""Tests, the demo and what they need. Nothing here is shipped."""
