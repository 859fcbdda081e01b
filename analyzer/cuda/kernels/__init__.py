"""Operators that take another path on the simulated device than on meta, one family a file. Every file here is imported
when a mode is first entered.
"""
