"""What kernels hold while they run, one family a file; each file is imported when a mode is first entered."""
