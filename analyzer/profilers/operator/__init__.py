"""What is known of operators, a family a file: their FLOP formulas and which kernels they run, for how long.

What a kernel holds in memory while it runs is in the file of the same family in `analyzer.cuda.workspaces`.
"""
