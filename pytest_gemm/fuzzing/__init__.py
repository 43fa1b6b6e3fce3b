"""Fuzzing: trials, their shrinking, their judgement in a process that may die."""
