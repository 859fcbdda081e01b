"""The traced graph: its module, code, regions, saved results, and the interpreters that run it."""
