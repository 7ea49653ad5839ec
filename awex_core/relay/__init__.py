"""Receivers without an engine: a relay, which holds a version in memory and lends it, and files on disk.

Either is an engine to the rest of the job: one worker, whose layout is the canonical tensors themselves, and a
controller with nothing to pause. So versions, catch-ups, faults and repairs are those of engines.
"""
