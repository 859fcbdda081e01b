"""The first screen of a profile: whether it fits, what takes memory and time, what to change, in 40 lines of 120."""
