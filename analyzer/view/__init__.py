"""A saved profile in a browser, and what another batch, device or precision would make of it."""
