"""A loop of one's own with Accelerate."""
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
loader = DataLoader(TensorDataset(torch.randn(1024, 256), torch.randint(8, (1024,))), 64, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for _epoch in range(3):
    total = 0
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            total += loss.detach().float()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        gathered = accelerator.gather_for_metrics(loss.detach())
        accelerator.print(gathered.mean().item())
