"""What is computed: data types, operations, steps, flags, and the problem line."""
