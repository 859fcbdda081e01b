"""A profile in; text, pages and files out."""
