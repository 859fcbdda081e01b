"""FLOP formulas by family, a file each, which registers them when `register_flop_impl` is used first."""

FAMILIES = (
    "attention", "convolution", "matmul", "pointwise", "reduction")
