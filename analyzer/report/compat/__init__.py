"""Reports in the layouts of other tools."""
