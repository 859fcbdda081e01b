"""A decoder sharded with fully_shard, saved with torch.distributed.checkpoint: torchrun fsdp2_train.py."""
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

WIDTH, LAYERS, TOKENS, LENGTH = 256, 4, 1024, 128


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
                                    for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("cpu:gloo,cuda:nccl")
mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("shard",))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
with torch.device("meta"):
    model = Decoder()
for layer in model.layers:
    fully_shard(layer, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
model.to_empty(device="cuda")
for module in model.modules():
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

for step in range(1, 101):
    tokens = torch.randint(0, TOKENS, (8, LENGTH), device="cuda")
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}, norm {norm.full_tensor().item():.3f}")
    if step == 1:
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
        dcp.save(states, checkpoint_id="checkpoint")
        dcp.async_save(states, checkpoint_id="checkpoint_async").result()
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            torch.save(whole, "model.pt")
        del whole, states
dist.destroy_process_group()
