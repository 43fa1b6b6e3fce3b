"""The correctness suite: ``pytest --pyargs pytest_gemm.conformance --gemm-backends=...``.

``cases`` has the problems, ``matrix`` reads those of a level, and the test modules check them.
"""
