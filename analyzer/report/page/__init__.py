"""The HTML page: parts as data, and one file that holds them and what draws them."""
