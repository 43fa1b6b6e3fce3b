"""What the repository's own runs need; nothing of it is installed.

``pytester`` runs pytest inside a test.  It must be named here: pytest takes ``pytest_plugins`` from the
topmost conftest.py only, and the suites themselves need no such thing.
"""

pytest_plugins = ["pytester"]
