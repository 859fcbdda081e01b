"""A training step captured as a CUDA graph, as PyTorch's notes on CUDA graphs show it, and graphed callables."""
import torch
from torch import nn

model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 8)).cuda()
loss_fn = nn.MSELoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
static_input, static_target = torch.randn(64, 256, device="cuda"), torch.randn(64, 8, device="cuda")
s = torch.cuda.Stream()
s.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(s):
    for _warmup in range(3):
        optimizer.zero_grad(set_to_none=True)
        loss_fn(model(static_input), static_target).backward()
        optimizer.step()
torch.cuda.current_stream().wait_stream(s)
g = torch.cuda.CUDAGraph()
optimizer.zero_grad(set_to_none=True)
with torch.cuda.graph(g):
    static_pred = model(static_input)
    static_loss = loss_fn(static_pred, static_target)
    static_loss.backward()
    optimizer.step()
for _ in range(10):
    static_input.copy_(torch.randn(64, 256))
    static_target.copy_(torch.randn(64, 8))
    g.replay()
print("replayed")
