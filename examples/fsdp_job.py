"""A job under FSDP as torchrun starts it: weights loaded on each rank, steps, an evaluation, a checkpoint, resuming."""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
rank = dist.get_rank()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
folder = tempfile.mkdtemp()

model = nn.Sequential(*[nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True) for _ in range(4)])
weights = {name: torch.empty_like(value) for name, value in model.state_dict().items()}  # as torch.load gives them
model.load_state_dict(weights)
del weights
for block in model:
    fully_shard(block.to(device))
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

for _ in range(3):
    model(torch.randn(8, 512, 1024, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
with torch.no_grad():
    model(torch.randn(16, 512, 1024, device=device)).square().mean()

full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if rank == 0:
    torch.save(full, f"{folder}/model.pt")
weights, states = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optimizer": states}, checkpoint_id=f"{folder}/sharded")
del full
set_model_state_dict(model, weights)
