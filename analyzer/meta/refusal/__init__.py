"""What kernels of devices refuse and those on meta do not: rules by operator, each with its place in torch's source."""
