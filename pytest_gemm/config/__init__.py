"""What a run was asked for: options, settings, and which of them have an effect."""
