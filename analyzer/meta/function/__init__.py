"""Torch functions under the mode: device arguments become claims, data leaves only where it is known."""
