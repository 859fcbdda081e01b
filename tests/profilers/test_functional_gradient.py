"""Steps written with torch.func and forward-mode AD cost what their products cost when they run on data."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from analyzer import profile

X, IMAGES = torch.rand(4, 8), torch.rand(4, 3, 8, 8)
IDS, LABELS = torch.arange(20).reshape(4, 5) % 10, torch.arange(4) % 3


class Convnet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.fc(self.norm(self.conv(x)).relu().mean((2, 3)))


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.fc = nn.Embedding(10, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.fc(self.norm(self.embedding(x)).mean(1))


def linear():
    return nn.Linear(8, 3)


def cross_entropy(model, parameters, x, y):
    return functional.cross_entropy(functional_call(model, parameters, (x,)), y)


def nll(model, parameters, x, y):
    return functional.nll_loss(functional.log_softmax(functional_call(model, parameters, (x,)), -1), y)


def detached(model):
    return {name: p.detach() for name, p in model.named_parameters()}


def gradient_of(loss):
    return lambda model, optimizer, x, y: grad(lambda p: loss(model, p, x, y))(detached(model))


def gradient_per_sample(loss):
    return lambda model, optimizer, x, y: vmap(
        grad(lambda p, one, label: loss(model, p, one[None], label[None])), (None, 0, 0))(detached(model), x, y)


def dual(model, optimizer, x, y):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


STEPS = {
    "jacrev": lambda m, o, x, y: jacrev(lambda p: functional_call(m, p, (x,)))(detached(m)),
    "hessian": lambda m, o, x, y: hessian(lambda p: cross_entropy(m, p, x, y))(detached(m)),
    "vjp": lambda m, o, x, y: vjp(lambda p: cross_entropy(m, p, x, y), detached(m))[1](torch.ones((), device=x.device)),
    "jvp": lambda m, o, x, y: jvp(lambda x: functional.cross_entropy(m(x), y), (x,), (torch.ones_like(x),)),
    "jacfwd": lambda m, o, x, y: jacfwd(lambda x: functional_call(m, detached(m), (x,)))(x[0]),
    "dual": dual,
}


@pytest.mark.parametrize("make, args, step", [
    *((linear, X, gradient_of(loss)) for loss in (cross_entropy, nll)),
    *((linear, X, gradient_per_sample(loss)) for loss in (cross_entropy, nll)),
    *((make, x, kind(cross_entropy)) for make, x in ((Convnet, IMAGES), (Embedded, IDS))
      for kind in (gradient_of, gradient_per_sample)),
    *((linear, X, step) for step in STEPS.values()),
    *((Convnet, IMAGES, STEPS[name]) for name in ("jvp", "dual")),
])
def test_products_are_those_of_a_run_on_data(make, args, step):
    model = make()
    # torch's counter takes the grouped convolution, which a convolution under vmap is, for a dense one
    plain = gradient_of(cross_entropy) if make is Convnet and step not in STEPS.values() else step
    with FlopCounterMode(display=False) as counter:
        plain(model, None, args, LABELS)
    for reuse in (True, False):
        p = profile(model, (args, LABELS), step=step, device="h100", reuse=reuse)
        assert 2 * (p.fwd_macs + p.bwd_macs) == counter.get_total_flops()
