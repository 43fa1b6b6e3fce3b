"""What the author of a backend implements."""
