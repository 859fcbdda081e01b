"""What changed from one profile to another, and which modules explain it."""
