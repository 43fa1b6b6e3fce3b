"""The speed suite."""
