"""The log of a run, and what writes it: calls, storage lifetimes, allocator events, attribution, the eager step."""
