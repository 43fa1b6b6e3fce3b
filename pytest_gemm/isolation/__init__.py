"""What may hang or die: limits, journals, worker processes."""
