"""Memory snapshots of PyTorch: read within limits, told by category and line, replayed under other settings."""
