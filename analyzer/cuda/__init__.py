"""What the device that tensors claim does: which kernels it takes, what these need while they run, its casts, and
`torch.cuda`.
"""
