"""Timing of calls: blocks of subject and comparator, on CPU and CUDA."""
