"""Optimizers by name: those of PyTorch, and others that people train with."""
from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from analyzer.errors import InputError
from analyzer.record.eager import OptimizerFactory

Tensor = torch.Tensor

_library = torch.library.Library("analyzer", "FRAGMENT")
_library.define("adamw_8bit(Tensor(a!) parameter, Tensor gradient, Tensor(b!) state1, Tensor(c!) state2, Tensor(d!) "
                "absmax1, Tensor(e!) absmax2, Tensor signed, Tensor unsigned, int step, float lr, float beta1, "
                "float beta2, float eps, float weight_decay) -> ()")
_library.define("adamw_32bit(Tensor(a!) parameter, Tensor gradient, Tensor(b!) state1, Tensor(c!) state2, int step, "
                "float lr, float beta1, float beta2, float eps, float weight_decay) -> ()")
ops: Any = torch.ops.analyzer

BLOCK = 256          # bitsandbytes/optim/optimizer.py, Optimizer2State.init_state
_PAGED_FROM = 100_000  # elements from which states may be paged: `get_state_buffer` there
SMALLEST = 4096      # elements from which states have 8 bits: its min_8bit_size


def _evaluate(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _list_inner(parameters: Iterable[Tensor]) -> set[Tensor]:
    """The matrices of blocks: all but tables, which are those with the most rows."""
    matrices = [p for p in parameters if p.ndim == 2]
    rows = max((p.shape[0] for p in matrices), default=0)
    return {p for p in matrices if p.shape[0] < rows}


class _EachByItself(torch.optim.Optimizer):
    """An optimizer that updates one parameter after the other."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = _evaluate(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, self.state[parameter], group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class AdamW8bit(_EachByItself):
    """AdamW whose two states are codes of a byte an element with a float32 scale for each 256; parameters below 4,096
    elements have states in float32 (bitsandbytes 0.50, optim/optimizer.py, `Optimizer2State`). A kernel updates one
    parameter, reads both states and writes them, and takes no memory besides.
    """

    smallest = SMALLEST
    is_paged = False

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, weight_decay: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.values: dict[torch.device, tuple[Tensor, Tensor]] = {}  #: of the codes, signed and not, for each device

    def _update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        parameter, gradient = _own_part(parameter), _own_part(gradient)
        if not state:
            self._begin(parameter, state)
        state["step"] += 1
        rates = (state["step"], group["lr"], *group["betas"], group["eps"], group["weight_decay"])
        both = parameter, gradient.contiguous(), state["state1"], state["state2"]
        if "absmax1" in state:
            ops.adamw_8bit(*both, state["absmax1"], state["absmax2"], *self.values[parameter.device], *rates)
        else:
            ops.adamw_32bit(*both, *rates)

    def _begin(self, parameter: Tensor, state: dict[str, Any]) -> None:
        state["step"] = 0
        is_small = parameter.numel() < self.smallest
        where = "cpu" if self.is_paged and parameter.numel() >= _PAGED_FROM else parameter.device
        for name in ("state1", "state2"):
            state[name] = torch.zeros_like(parameter, dtype=torch.float32 if is_small else torch.uint8, device=where)
        if is_small:
            return
        device = parameter.device
        if device not in self.values:
            self.values[device] = (torch.linspace(-1.0, 1.0, 256, device=device),
                                   torch.linspace(0.0, 1.0, 256, device=device))
        state["qmap1"], state["qmap2"] = self.values[device]
        blocks = -(-parameter.numel() // BLOCK)
        for name in ("absmax1", "absmax2"):
            state[name] = torch.zeros(blocks, dtype=torch.float32, device=device)


class PagedAdamW8bit(AdamW8bit):
    """The same with states in managed memory, which the driver moves to the host where the device is full, and which
    no allocator of PyTorch counts (bitsandbytes 0.50, optim/optimizer.py, `get_state_buffer`). Here they are the
    host's.
    """

    is_paged = True


class PagedAdamW(PagedAdamW8bit):
    """The same with all states in float32."""

    smallest = sys.maxsize


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the matrices of blocks, AdamW for all else: for tables, those with the most rows, and vectors (LLaMA-
    Factory 0.9.6, train/trainer_utils.py, `_create_muon_optimizer`, by names).
    """

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-3) -> None:
        parameters = list(params)
        super().__init__(parameters, {"lr": lr})
        inner = _list_inner(parameters)
        others = [p for p in parameters if p not in inner]
        self.parts: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, lr=lr)] if others else []
        if inner:
            self.parts.append(torch.optim.Muon([p for p in parameters if p in inner], lr=lr))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = _evaluate(closure)
        for part in self.parts:
            part.step()
            self.state.update(part.state)
        return loss


class LowRankAdamW(_EachByItself):
    """AdamW whose states of matrices in blocks are of gradients that are projected to ``rank`` rows or columns; tables,
    those with the most rows, and vectors have usual ones. It ``decomposes`` a gradient to find what it is projected by
    (GaLore: galore_torch 1.0, galore_projector.py and adamw.py), or draws that, and scales the whole gradient (APOLLO:
    apollo_torch 1.0, random_projector.py and apollo.py).
    """

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-3, rank: int = 128, decomposes: bool = True) -> None:
        parameters = list(params)
        super().__init__(parameters, {"lr": lr})
        self.projected = _list_inner(parameters)
        self.rank, self.decomposes = rank, decomposes

    def _update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        parameter.add_(self._find_change(parameter, gradient, state), alpha=-group["lr"])

    def _find_change(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        given, is_tall = gradient, gradient.shape[0] >= gradient.shape[-1]
        if parameter in self.projected:
            if "projector" not in state:
                state["projector"] = self._find_projector(gradient, is_tall)
            given = gradient @ state["projector"].t() if is_tall else state["projector"].t() @ gradient
        if "exp_avg" not in state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(given), torch.zeros_like(given)
        first, second = state["exp_avg"], state["exp_avg_sq"]
        first.mul_(0.9).add_(given, alpha=0.1)
        second.mul_(0.999).addcmul_(given, given, value=0.001)
        change: Tensor = first / second.sqrt().add_(1e-8)
        if parameter not in self.projected:
            return change
        if self.decomposes:
            change = change @ state["projector"] if is_tall else state["projector"] @ change
            return change
        dim = int(is_tall)
        scaled: Tensor = gradient * (change.norm(dim=dim, keepdim=True) / given.norm(dim=dim, keepdim=True))
        return scaled

    def _find_projector(self, gradient: Tensor, is_tall: bool) -> Tensor:
        if not self.decomposes:
            shape = (self.rank, gradient.shape[1]) if is_tall else (gradient.shape[0], self.rank)
            return torch.randn(shape, dtype=gradient.dtype, device=gradient.device)
        left, _, right = torch.linalg.svd(gradient.float(), full_matrices=False)
        found: Tensor = right[:self.rank] if is_tall else left[:, :self.rank]
        return found.to(gradient.dtype)


def _own_part(tensor: Tensor) -> Tensor:
    """What a rank holds of a DTensor, as torchao's optimizers of 8 bits update it (optim/adam.py, `_new_buffer`)."""
    to_local = getattr(tensor, "to_local", None)
    found: Tensor = tensor if to_local is None else to_local()
    return found


def _update(parameter: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: int, lr: float, beta1: float,
            beta2: float, eps: float, weight_decay: float) -> None:
    first.lerp_(gradient.float(), 1 - beta1)
    second.mul_(beta2).addcmul_(gradient.float(), gradient.float(), value=1 - beta2)
    root = (second / (1 - beta2**step)).sqrt_().add_(eps)
    parameter.mul_(1 - lr * weight_decay).sub_((first / root * (lr / (1 - beta1**step))).to(parameter.dtype))


def _update_8bit(parameter: Tensor, gradient: Tensor, state1: Tensor, state2: Tensor, absmax1: Tensor, absmax2: Tensor,
                 signed: Tensor, unsigned: Tensor, *rates: Any) -> None:
    first, second = _decode(state1, absmax1, signed), _decode(state2, absmax2, unsigned)
    _update(parameter, gradient, first, second, *rates)
    _encode(first, state1, absmax1, signed)
    _encode(second, state2, absmax2, unsigned)


def _decode(codes: Tensor, absmax: Tensor, values: Tensor) -> Tensor:
    return values[codes.long()] * absmax.repeat_interleave(BLOCK)[:codes.numel()].reshape(codes.shape)


def _encode(state: Tensor, codes: Tensor, absmax: Tensor, values: Tensor) -> None:
    blocks = torch.nn.functional.pad(state.reshape(-1), (0, -state.numel() % BLOCK)).reshape(-1, BLOCK)
    absmax.copy_(blocks.abs().amax(dim=1))
    scaled = blocks / absmax.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
    found = torch.bucketize(scaled, (values[1:] + values[:-1]) / 2)
    codes.copy_(found.reshape(-1)[:state.numel()].reshape(state.shape))


for _key in ("CPU", "CUDA"):
    _library.impl("adamw_8bit", _update_8bit, _key)
    _library.impl("adamw_32bit", _update, _key)
for _name in ("adamw_8bit", "adamw_32bit"):
    _library.impl(_name, lambda *_: None, "Meta")


class OffloadedAdamW(torch.optim.Optimizer):
    """AdamW whose states and a copy of the parameters are on the host, where the update runs: gradients are copied
    there in each step and parameters back (torchao 0.18, optim/cpu_offload.py, `CPUOffloadOptimizer`). Parameters below
    4,096 elements stay on the device.
    """

    SMALLEST = 4096

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-3) -> None:
        parameters = list(params)
        super().__init__(parameters, {"lr": lr})
        small = [p for p in parameters if p.numel() < self.SMALLEST]
        self.on_device = torch.optim.AdamW(small, lr=lr) if small else None
        self.hosts: dict[Tensor, Tensor] = {}
        for parameter in parameters:
            if parameter.numel() >= self.SMALLEST:
                host = torch.empty_like(parameter, device="cpu", pin_memory=parameter.device.type == "cuda")
                self.hosts[parameter] = host.copy_(parameter.detach())
        self.on_host = torch.optim.AdamW(self.hosts.values(), lr=lr, fused=True) if self.hosts else None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = _evaluate(closure)
        if self.on_device is not None:
            self.on_device.step()
            self.state.update(self.on_device.state)
        for parameter, host in self.hosts.items():
            if parameter.grad is not None:
                if host.grad is None:
                    host.grad = torch.empty_like(host, pin_memory=parameter.device.type == "cuda")
                host.grad.copy_(parameter.grad)
        if self.on_host is not None:
            self.on_host.step()
        for parameter, host in self.hosts.items():
            parameter.copy_(host)
        return loss


# The learning rate does not change a cost; momentum 0.9 is the value of every published recipe.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "adamw8bit": AdamW8bit,
    "adamw_offloaded": OffloadedAdamW,
}
TORCHS_OWN = ("sgd", "momentum", "adam", "adamw", "adamw_fused")  #: names of those whose code is PyTorch's
FORM = "module:Class, e.g. torch.optim:RAdam"


def fold_optimizer(optimizer: Any) -> Any:
    """The name of `OPTIMIZERS` that ``optimizer`` is but for case, hyphens and underscores; all else as it is."""
    if not isinstance(optimizer, str):
        return optimizer
    return {_fold(name): name for name in OPTIMIZERS}.get(_fold(optimizer), optimizer)


def _fold(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def find_optimizer(optimizer: str | OptimizerFactory | None) -> Callable[..., torch.optim.Optimizer] | None:
    """The factory that ``optimizer`` is, or names: one of `OPTIMIZERS`, or ``module:Class``. Raises InputError."""
    if optimizer is None or callable(optimizer):
        return optimizer
    if isinstance(optimizer, str) and (name := fold_optimizer(optimizer)) in OPTIMIZERS:
        return OPTIMIZERS[name]
    if isinstance(optimizer, str) and ":" in optimizer:
        module_name, _, name = optimizer.partition(":")
        try:
            made: Any = getattr(importlib.import_module(module_name), name, None)
        except ImportError as error:
            raise InputError(f"optimizer={optimizer!r}: {module_name} cannot be imported: {error}") from error
        if not callable(made):
            raise InputError(f"optimizer={optimizer!r}: {module_name} has no class or function {name!r}; give {FORM}")
        found: Callable[..., torch.optim.Optimizer] = made
        return found
    shipped = {_fold(name): name for name in OPTIMIZERS}
    known = {**{_fold(name): f"torch.optim:{name}" for name in dir(torch.optim) if name[0].isupper()}, **shipped}
    given = _fold(str(optimizer))
    near = [given] if given in known else difflib.get_close_matches(
        given, shipped, n=1) or difflib.get_close_matches(given, known, n=1)
    hint = f"did you mean {known[near[0]]}? " if near else ""
    raise InputError(f"optimizer={optimizer!r}: {hint}give one of {', '.join(OPTIMIZERS)}, or {FORM}; in "
                     "Python also a function that makes a torch.optim.Optimizer of parameters")
