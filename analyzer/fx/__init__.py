"""Graphs: traced from a model's own code, transformed, and run without data."""
