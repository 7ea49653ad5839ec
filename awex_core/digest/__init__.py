"""PROVES that what was sent is what is there: digests that do not depend on sharding."""
