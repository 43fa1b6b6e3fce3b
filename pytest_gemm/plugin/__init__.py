"""What pytest calls: options, hooks, fixtures, the selection and scheduling of tests."""
