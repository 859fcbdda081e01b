"""Tensors without data."""
