"""What every package may use: the identity of a case, outcomes, text, units, templates, spans of time."""
