"""What one call of torch.distributed communicates, by operator."""
