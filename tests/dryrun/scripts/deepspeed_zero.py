"""ZeRO of the stage that is given: deepspeed --num_gpus 8 deepspeed_zero.py 3."""
import sys

import deepspeed
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
                                      for _ in range(4)])

    def forward(self, x, y):
        return nn.functional.mse_loss(self.layers(x), y)


deepspeed.init_distributed("nccl")
model = Net()
config = {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True,
          "zero_optimization": {"stage": int(sys.argv[1]), "overlap_comm": False, "reduce_bucket_size": 2**24}}
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
for _ in range(100):
    x = torch.randn(4, 256, device="cuda", dtype=torch.bfloat16)
    engine.backward(engine(x, x.clone()))
    engine.step()
