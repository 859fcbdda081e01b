"""FLOP formulas by family, a file each, which registers them when `registration.FlopRegistry` imports it."""

FAMILIES = ("attention", "bitsandbytes", "convolution", "fft", "interpolation", "linalg", "loss", "matmul",
            "normalization", "optimizer", "pointwise", "pooling", "reduction", "rnn", "vision")
