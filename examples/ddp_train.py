"""Data-parallel training with DistributedDataParallel: torchrun --nproc-per-node 8 ddp_train.py."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("nccl")
rank, device = dist.get_rank(), int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(device)

model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 8)).to(device)
model = DistributedDataParallel(model, device_ids=[device])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

data = TensorDataset(torch.randn(6400, 256), torch.randint(8, (6400,)))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler, num_workers=2)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    if rank == 0:
        print(f"epoch {epoch}: loss {mean.item():.3f}, {len(loader)} batches a rank")
        torch.save(model.module.state_dict(), "checkpoint.pt")
    dist.barrier()
dist.destroy_process_group()
