"""The run record: the only door between judging and showing."""
