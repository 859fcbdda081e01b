"""What kernels hold of the device's memory while they run, one family a file. Every file here is imported when a mode
is first entered.
"""
