"""One run of pytest: its state, its checks, its report."""
