"""What models do besides calling layers, each as a small module: a table, ``layer_features.txt``, and what it needs."""
from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

from benchmarks.feature_table import compile_classes, read_table


class Feature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.build(None)

    def build(self, at: None) -> None:
        self.linear = nn.Linear(8, 8)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).unflatten(-1, (2, 4)).transpose(1, 2)


class ByData(Feature):
    factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.factor = float(x.shape[0])
        return self.linear(self.scale(x))

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor if x.sum() > 4 else x - self.factor


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return 3 * ctx.saved_tensors[0] * grads[0]  # not the true gradient: a trace that looks inside would differ


@torch.library.custom_op("analyzer_benchmark::product", mutates_args=())
def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.detach().numpy() * y.detach().numpy())


@product.register_fake
def product_shape(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def product_gradients(ctx: Any, grad: torch.Tensor) -> Any:
    x, y = ctx.saved_tensors
    return grad * y, grad * x


product.register_autograd(product_gradients, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


@torch.library.triton_op("analyzer_benchmark::double", mutates_args={})
def double(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x).copy_(x * 2)  # in place of a kernel, as Triton has none for a host


double.register_autograd(lambda ctx, grad: grad * 2, setup_context=lambda ctx, inputs, output: None)


@torch.compile
def compiled_function(x: torch.Tensor) -> torch.Tensor:
    return x.relu() * 2


@torch.jit.script
def scripted(x: torch.Tensor, scale: float) -> torch.Tensor:
    if x.shape[0] > 2:
        return x.relu() * scale
    return x


class Gate(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x)


def make_weight_norms() -> nn.Module:
    whole = parametrizations.weight_norm(nn.Linear(8, 8),
                                         dim=None)  # type: ignore[arg-type]  # None: over all dimensions
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 8)), nn.ReLU(), whole)


def make_old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(nn.Linear(8, 8))


class Symmetric(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w.triu() + w.triu(1).T


def make_symmetric() -> nn.Module:
    layer = nn.Linear(8, 8)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


def make_pruned() -> nn.Module:
    layer = nn.Linear(8, 8)
    prune.l1_unstructured(layer, "weight", 0.5)
    return layer


def make_hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model[1].register_forward_hook(lambda module, args, output: output + 1)
    model[2].register_full_backward_hook(lambda module, grad_input, grad_output: None)
    model.get_parameter("0.weight").register_hook(lambda grad: grad * 0.5)
    return model


class RoutedExperts(nn.Module):  # each expert gets the tokens that chose it, as mixture-of-experts layers do
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.router = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == i)
            if token.numel():
                out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


class OffsetExperts(RoutedExperts):  # tokens are sorted by expert and split where counts say
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.router(x).argmax(-1)
        order = chosen.argsort()
        parts = x[order].split(torch.bincount(chosen, minlength=4).tolist())
        out = torch.cat([expert(part) for expert, part in zip(self.experts, parts)])
        return torch.empty_like(out).index_copy(0, order, out)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    quantized_layers = torch.ao.quantization.quantize_dynamic(  # takes weights with data
        nn.Sequential(nn.Linear(8, 8)), {nn.Linear}, dtype=torch.qint8)


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclass
class Output:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...] = ()
    name: str = ""


class Distinct(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = x[x.sum(-1) > 0]
        if kept.shape[0] == 0:
            return kept.sum(0)
        classes, places = torch.unique((kept * 2).long().flatten(), return_inverse=True)
        sums = torch.zeros(len(classes), device=x.device).index_add(0, places, kept.flatten())
        return torch.stack([s * i for i, s in enumerate(sums.unbind())]).sum()


def _list_features() -> list[tuple[str, Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]]:
    """Of each feature its name, what builds it, and what makes its inputs."""
    table = Path(__file__).with_suffix(".txt")
    room = read_table(table)["features"]
    names = {**globals(), "random": random, "F": F, "parametrizations": parametrizations, "checkpoint": checkpoint}
    kinds = {f"Feature{number}": entry for number, entry in enumerate(room.entries)}
    exec(compile_classes(room, kinds, f"<{table.name}>"), names)
    return [(entry.name, names.get(kind) or partial(eval, entry.text.removeprefix("= "), names),
             partial(eval, f"({entry.told},)", names)) for kind, entry in kinds.items()]


FEATURES = _list_features()
