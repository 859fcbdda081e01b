"""What users call, and the one session that all drivers share."""
