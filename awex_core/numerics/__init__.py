"""Arithmetic that both ends agree on, bit for bit: casts, and the mixing of the digest."""
