"""The PyTorch program of a problem."""
