"""FLOP formulas by family: one file each, which registers its formulas when it is imported (`registration.FlopRegistry`
imports them).
"""

FAMILIES = ("attention", "convolution", "distance", "embedding", "fft", "interpolation", "linalg", "loss", "matmul",
            "normalization", "optimizer", "pointwise", "pooling", "reduction", "rnn", "transformer", "vision")
