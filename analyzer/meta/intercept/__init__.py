"""What of torch is replaced or called ahead of itself while a mode is active."""
