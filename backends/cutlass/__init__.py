"""Inductor's CUTLASS templates."""
