"""Operators that run otherwise than on meta, one family a file; each is imported when a mode is first entered."""
