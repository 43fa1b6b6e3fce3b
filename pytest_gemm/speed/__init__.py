"""Speed: what is measured, where, and how it is reported."""
