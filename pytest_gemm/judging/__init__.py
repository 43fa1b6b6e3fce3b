"""One case, from its operands to its outcome."""
