"""Conformance suites for transports and engine plugins: subclass, give the fixtures, inherit the tests."""
