"""Tracing: where an engine's own loader puts every element, without moving a byte."""
