"""What a run left of its steps: logs of trainers and devices, traces of torch.profiler."""
