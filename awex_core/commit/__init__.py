"""MAKES a version live, or leaves the old one whole: digests that do not depend on sharding."""
