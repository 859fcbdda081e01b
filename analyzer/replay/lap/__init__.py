"""Steps of ranks that are periodic in their blocks: some are run, the others are written into the log."""
