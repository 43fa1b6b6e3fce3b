"""The correctness suite: ``pytest --pyargs pytest_gemm.conformance --gemm-backends=...``.

``matrix`` says which problems there are at each level; the test modules say what is asked of them.
"""
