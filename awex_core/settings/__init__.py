"""Settings: from arguments, flags and environment variables."""
