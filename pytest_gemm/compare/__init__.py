"""Two run records in one report: what an upgrade of PyTorch, or another environment, has changed."""
