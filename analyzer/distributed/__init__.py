"""`torch.distributed` without other processes: a world of any size of which one rank runs, and no data is moved."""
