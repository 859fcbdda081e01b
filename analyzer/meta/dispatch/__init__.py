"""Operators under the mode, in the order of an operator's way: resolve, execute, propagate, account."""
