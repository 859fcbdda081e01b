"""What is known, or expected, of the contents of tensors without data."""
