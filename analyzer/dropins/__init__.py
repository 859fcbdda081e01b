"""Interfaces of other tools under the names of their packages: a script changes its imports (docs/dropins.md)."""
