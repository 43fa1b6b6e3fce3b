"""What every package may use: the identity of a case, outcomes, text, spans of time."""
