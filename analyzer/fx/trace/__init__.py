"""A module's own code becomes a graph."""
