"""The part of a model that a rank of a layout holds: what is before, in and behind its list of alike blocks."""
from __future__ import annotations

import copy
import math
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from analyzer.api.argument import build_model
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.record.tensor_walk import list_blocks
from analyzer.replay.chain import are_alike
from analyzer.zoo.target import Target

from .layout import ModelFacts

LINEAR_WAYS = ("colwise", "rowwise")


class Piece(NamedTuple):
    """Which part of a model a rank holds."""

    blocks: int
    first: bool = True  #: with what comes before the blocks
    last: bool = True  #: with what comes behind them, and the loss


class Template:
    """A model without data, of which parts are copied: the list of its alike blocks, and what runs before and behind.

    ``tensor_plan`` is by names as transformers writes them (``"model.layers.*.mlp.up_proj": "colwise"``), by default
    the model's own ``tp_plan``.
    """

    def __init__(self, target: Target, tensor_plan: dict[str, str] | None = None) -> None:
        self.name = target.name
        self.model = build_model(target.build)
        plan = getattr(self.model, "tp_plan", None) if tensor_plan is None else tensor_plan
        self.plan: dict[str, str] = {path: str(way) for path, way in (plan or {}).items()}
        blocks = list(list_blocks(self.model))
        names = {id(module): path for path, module in self.model.named_modules()}
        paths = [names[id(block)] for block in blocks]
        self.path = paths[0].rpartition(".")[0] if paths else ""
        is_list = bool(paths) and [path.rpartition(".")[0] for path in paths] == [self.path] * len(paths)
        self.blocks = blocks if is_list and are_alike(blocks) else []
        self.before, self.behind = self._list_outside() if self.blocks else ([], [])
        specs = target.choose_inputs((), train=False) or ()
        self.inputs = specs
        # where no inputs are given, a model that begins with an embedding takes tokens
        self.takes_tokens = (len(specs) == 1 and not specs[0].dtype.is_floating_point and len(specs[0].shape) == 2
                             if specs else bool(self.before) and isinstance(
                                 self.model.get_submodule(self.before[0]), nn.Embedding))

    def _list_outside(self) -> tuple[list[str], list[str]]:
        """Modules with parameters outside of the blocks, before and behind them in the order of registration."""
        before: list[str] = []
        behind: list[str] = []
        is_behind = False
        for path, module in self.model.named_modules():
            is_behind = is_behind or path == self.path
            inside = path == self.path or path.startswith(f"{self.path}.")
            if not inside and any(True for _ in module.parameters(recurse=False)):
                (behind if is_behind else before).append(path)
        return before, behind

    @property
    def facts(self) -> ModelFacts:
        """What decides which layouts the model has."""
        ids = [id(p) for p in self.model.parameters()]
        outside = [{id(p) for path in paths for p in self.model.get_submodule(path).parameters()}
                   for paths in (self.before, self.behind)]
        why = ""
        if not self.blocks:
            why = "it has no list of alike blocks"
        elif not self.takes_tokens:
            why = "its only input is not a batch of tokens"
        elif len(self.before) != 1 or not isinstance(self.model.get_submodule(self.before[0]), nn.Embedding):
            why = "what comes before its blocks is not one embedding"
        elif outside[0] & outside[1] or len(ids) < sum(1 for _ in self.model.named_parameters(remove_duplicate=False)):
            why = "its embedding and its head share their weight"
        experts = math.gcd(*[module.num_experts for _, module in list_experts(self.blocks[0])]) if self.blocks else 0
        # nothing here divides each expert over tensor parallel ranks
        limit = 0 if experts else self.find_tensor_limit()
        return ModelFacts(len(self.blocks), limit, why, self.takes_tokens, experts)

    def find_tensor_limit(self) -> int:
        """The largest degree that heads allow: the greatest common divisor of heads, or of what is divided."""
        if not self.plan or not self.blocks or not self.takes_tokens:
            return 0
        config = getattr(self.model, "config", None)
        heads = [getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")]
        sizes = [n for n in heads if isinstance(n, int)]
        for path, module in self.blocks[0].named_modules():
            layer = getattr(module, "base_layer", module)  # of one with an adapter
            if (way := find_way(self.plan, f"{self.path}.0.{path}")) in LINEAR_WAYS and isinstance(layer, nn.Linear):
                sizes.append(layer.out_features if way == "colwise" else layer.in_features)
        return math.gcd(*sizes) if sizes else 0

    def cut(self, part: Piece) -> nn.Module:
        """A copy of a part of the model on meta: so many of its blocks, nothing in the place of what others hold."""
        outside = [*([] if part.first else self.before), *([] if part.last else self.behind)]
        left_out = [*self.blocks[part.blocks:], *(self.model.get_submodule(path) for path in outside)]
        memo: dict[int, Any] = {id(module): nn.Identity() for module in left_out}  # what is there is not copied
        others = {id(module) for root in left_out for module in root.modules()}
        copied_modules = [module for module in self.model.modules() if id(module) not in others]
        for tensor in [t for module in copied_modules for t in (*module.parameters(False), *module.buffers(False))]:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
        with without_modes():
            copied = copy.deepcopy(self.model, memo)
        if self.blocks:
            held = copied.get_submodule(self.path)._modules
            for name in list(held)[part.blocks:]:
                del held[name]
        return copied


def list_experts(block: nn.Module) -> list[tuple[str, Any]]:
    """The modules of a block that hold experts as transformers' do: ``num_experts`` of them in each parameter, along
    its first dimension, and ``forward(tokens, indices of each token's experts, their weights)``.
    """
    found = []
    for path, module in block.named_modules():
        number, held = getattr(module, "num_experts", None), [*module.parameters(recurse=False)]
        if isinstance(number, int) and held and all(p.dim() > 1 and p.shape[0] == number for p in held) and (
                len(signature(module.forward).parameters) == 3):
            found.append((path, module))
    return found


def find_way(plan: dict[str, str], path: str) -> str | None:
    """How a plan divides a module; numbers in its path match ``*``.

    >>> find_way({"layers.*.up": "colwise"}, "layers.7.up")
    'colwise'
    """
    name = ".".join(["*" if word.isdecimal() else word for word in path.split(".")])
    return plan.get(path, plan.get(name))


class StageNet(nn.Module):
    """A part of a model that takes one tensor and gives one: tokens or hidden states to hidden states or logits.
    ``inner`` is the path of what holds the blocks, which alone runs where there is nothing behind them.
    """

    def __init__(self, model: nn.Module, part: Piece, inner: str = "") -> None:
        super().__init__()
        self.model, self.part, self.inner = model, part, "" if part.last else inner
        self.experts: list[nn.Module] = []  # those of which this rank has a part
        config: Any = getattr(model, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False

    def forward(self, *args: Any) -> Any:
        out = self.model.get_submodule(self.inner)(*args)
        return out if isinstance(out, Tensor) else getattr(
            out, "logits" if self.part.last else "last_hidden_state", out)
