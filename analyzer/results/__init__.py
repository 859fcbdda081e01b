"""What a run found, as plain data: `Profile`, its records, and what builds it."""
