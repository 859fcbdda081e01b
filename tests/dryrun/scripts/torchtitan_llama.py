"""torchtitan's Llama by its own parallelize_fn: four ways sharded, two ways tensor parallel."""
import os

import torch
import torch.distributed as dist
import torchtitan.protocols.train_spec as train_spec
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims, utils

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
spec = train_spec.get_train_spec("llama3")
config = JobConfig()
config.model.name, config.model.flavor = "llama3", "debugmodel"
config.training.seq_len, config.training.local_batch_size = 256, 2
config.parallelism.data_parallel_shard_degree, config.parallelism.tensor_parallel_degree = 4, 2
config.activation_checkpoint.mode = "none"
dims = ParallelDims(dp_replicate=1, dp_shard=4, cp=1, tp=2, pp=1, ep=1, etp=1, world_size=8)
arguments = spec.model_args["debugmodel"]
arguments.update_from_config(config)
with torch.device("meta"):
    model = spec.model_cls(arguments)
compute_loss = spec.build_loss_fn(config, parallel_dims=dims, ft_manager=None)
model = spec.parallelize_fn(model, dims, config)
model.to_empty(device="cuda")
with torch.no_grad():
    model.init_weights(buffer_device=None)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(100):
    tokens = torch.randint(0, 1000, (2, 256), device="cuda")
    with utils.get_train_context(True)():
        compute_loss(model(tokens), tokens).backward()
    utils.clip_grad_norm_(list(model.parameters()), 1.0, foreach=True)
    optimizer.step()
    optimizer.zero_grad()
