"""A loop of one's own with Accelerate and FSDP2: accelerate launch, or torchrun, accelerate_fsdp.py."""
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Sequential):
    pass


plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap",
                                        transformer_cls_names_to_wrap=["Block"])
accelerator = Accelerator(fsdp_plugin=plugin)
model = nn.Sequential(*[Block(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)) for _ in range(3)],
                      nn.Linear(256, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(4096, 256), torch.randint(8, (4096,))), 64, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _epoch in range(3):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(accelerator.gather(loss.detach()).mean().item(), accelerator.num_processes)
    accelerator.wait_for_everyone()
