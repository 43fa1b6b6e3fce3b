"""The store of baselines."""
