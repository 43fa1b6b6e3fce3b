"""Tables and pages of speed."""
