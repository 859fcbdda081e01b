"""Interfaces of other tools, one file each, named for the package that a script imports: its import changed to
``analyzer.dropins.<package>``, the script runs, on models without data too. docs/dropins.md lists them.
"""
