"""Parts of a network as graphed callables."""
import torch
from torch import nn

first, second = nn.Linear(256, 512).cuda(), nn.Sequential(nn.Linear(512, 8), nn.ReLU()).cuda()
optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
x, h = torch.randn(64, 256, device="cuda"), torch.randn(64, 512, device="cuda", requires_grad=True)
first = torch.cuda.make_graphed_callables(first, (x,))
second = torch.cuda.make_graphed_callables(second, (h,))
for _ in range(10):
    optimizer.zero_grad(set_to_none=True)
    second(first(torch.randn(64, 256, device="cuda"))).sum().backward()
    optimizer.step()
