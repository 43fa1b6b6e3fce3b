"""Plausible regressions of PyTorch's own template sources, and what finds which of them the suite sees.

``python tests/studies/template_mutant_study.py`` is the command.  A mutant is a change of the source text of a module
of Inductor or of a template file, made when it is imported; nothing that is installed is written.
"""
