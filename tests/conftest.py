"""Settings of the project's own tests."""

from hypothesis import settings

# A deadline would time the examples, and machines that run tests are shared.
settings.register_profile("pytest-gemm", deadline=None)
settings.load_profile("pytest-gemm")
