"""A checkpoint of a folder, loaded onto the GPU and trained by a plain loop; or the same model without weights."""
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

if sys.argv[2] == "built":
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1]), dtype=torch.bfloat16).cuda()
else:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], device_map=sys.argv[2], dtype=torch.bfloat16)
model.gradient_checkpointing_enable()
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
for step in range(100):
    tokens = torch.randint(0, 1024, (4, 128), device=model.device)
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
