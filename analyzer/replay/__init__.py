"""Segments of a run that are captured once and replayed: steps, blocks, subgraphs, optimizers."""
