"""Arithmetic that every stage agrees on, bit for bit: casts, and the mixing of the digest."""
