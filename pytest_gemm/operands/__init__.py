"""What goes in: tensors, their values, and the memory around them."""
