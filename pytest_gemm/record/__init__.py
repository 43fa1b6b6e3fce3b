"""Outcomes as data: the run record."""
