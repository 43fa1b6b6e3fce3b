"""The backends that come with pytest-gemm: one module for each source of kernels."""
