"""Torch functions under the mode: devices are simulated, data leaves only where it is known."""
