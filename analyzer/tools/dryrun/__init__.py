"""A training script as it is, executed without data or a GPU."""
