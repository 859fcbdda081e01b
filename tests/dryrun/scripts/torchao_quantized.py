"""Weights quantized by torchao, for inference."""
import sys

import torch
import torchao.quantization as q
from torch import nn

model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).to(torch.bfloat16).cuda()
q.quantize_(model, getattr(q, sys.argv[1])())
with torch.no_grad():
    print(model(torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)).shape)
