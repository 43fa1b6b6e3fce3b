"""What is right: rounding, reference, intervals, and how far a result may lie from it."""
