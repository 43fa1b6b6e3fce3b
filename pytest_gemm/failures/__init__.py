"""What a failure leaves: a text, a script that reproduces it, and files."""
