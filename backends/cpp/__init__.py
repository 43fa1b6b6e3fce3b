"""Inductor's C++ templates."""
