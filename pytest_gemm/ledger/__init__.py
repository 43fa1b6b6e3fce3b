"""Known failures: entries, their file, and what they explained."""
