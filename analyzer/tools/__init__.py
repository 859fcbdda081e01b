"""What stands on the core: each is one thing to do with profiles."""
