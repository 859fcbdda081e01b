"""What torch.compile makes of a function: its graphs, their kernels and buffers, and the step that runs them."""
