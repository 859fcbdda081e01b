"""Operators under the mode: the way of a call, the call itself, its kernel where it is met first, known contents."""
