"""FLOP formulas by family, a file each, which registers them when `register_flop_impl` is used first."""

FAMILIES = ("attention", "bitsandbytes", "convolution", "fft", "interpolation", "linalg", "loss", "matmul",
            "normalization", "optimizer", "pointwise", "pooling", "reduction", "rnn", "vision")
