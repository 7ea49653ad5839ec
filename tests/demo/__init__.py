"""The demonstration: real parts, on this machine's CPU, with proof at the end."""
