"""From an operator call to the kernels that it runs: which model of `analyzer.hardware.kernel_time`, on which sizes."""
