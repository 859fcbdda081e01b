"""Optimizers whose steps are captured on a few parameters and replayed for all."""
