"""A pytest plugin that proves a GEMM backend of PyTorch right and keeps it fast.

Nothing is imported here: pytest loads the plugin in every run, also in those that test no GEMM.
"""

__version__ = "0.1.0"
