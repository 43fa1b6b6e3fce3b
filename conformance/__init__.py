"""The correctness suite: its cases, and the tests that judge them.

``cases`` has the problems, ``matrix`` reads those of a level, and the test modules check them.
"""
