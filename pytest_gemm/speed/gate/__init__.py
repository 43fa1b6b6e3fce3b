"""The gate: stored and new samples to a verdict."""
