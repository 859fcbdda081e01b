"""PyTorch's CUDA caching allocator, simulated."""
