"""FLOP formulas by family; importing the package registers them all."""
from . import (
    attention,
    convolution,
    distance,
    embedding,
    fft,
    interpolation,
    linalg,
    loss,
    matmul,
    normalization,
    optimizer,
    pointwise,
    pooling,
    reduction,
    rnn,
    transformer,
    vision,
)

__all__ = [
    "attention", "convolution", "distance", "embedding", "fft", "interpolation", "linalg", "loss", "matmul", "normalization",
    "optimizer", "pointwise", "pooling", "reduction", "rnn", "transformer", "vision",
]
