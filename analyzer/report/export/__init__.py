"""What a profile is written to: files that other tools open, and records of other libraries."""
