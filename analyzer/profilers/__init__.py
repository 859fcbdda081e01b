"""The log in, annotations out: FLOPs, memory, traffic, communication and latency."""
