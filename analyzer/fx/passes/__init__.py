"""Transformations of traced graphs."""
