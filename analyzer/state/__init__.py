"""What the code of a model could read and change besides its arguments, and its state before and after a run."""
