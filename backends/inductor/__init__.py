"""Inductor: templates, artifacts, and the adapter to its internals."""
