"""torch.nn itself: every layer and every loss, and what models build from them (attention variants, parametrizations,
hooks ...).
"""
from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.coverage.check import Candidate, Case, Inputs
from benchmarks.coverage.layer_features import FEATURES
from benchmarks.coverage.library import make

_Row = tuple[str, Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]  #: a name, a model, and its inputs
_TABLE: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
#: What maps the output of a linear layer to where a loss is defined.
_OF: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "": lambda x: x, "sigmoid": torch.sigmoid, "log_softmax": partial(F.log_softmax, dim=1)}


def layer_cases() -> list[Case]:
    found = [_case("layer", name, build, make) for name, build, make in _layers()]
    found += [_case("loss", name, build, make) for name, build, make in _losses()]
    found += [_case("feature", name, build, make) for name, build, make in FEATURES]
    missing = uncovered_layers()
    assert not missing, f"layers of torch.nn without a case: {sorted(missing)}"
    return found


def uncovered_layers() -> set[str]:
    """Classes of torch.nn that no case builds; containers without a forward and base classes do not count."""
    names = {n for n in dir(nn) if isinstance(getattr(nn, n), type) and issubclass(getattr(nn, n), nn.Module)}
    covered = {name.partition("(")[0] for name, _, _ in [*_layers(), *_losses()]}
    without_forward = {"Module", "Container", "ModuleList", "ModuleDict", "ParameterList", "ParameterDict", "RNNBase",
                       "RNNCellBase", "CrossMapLRN2d"}  # the last: LocalResponseNorm before PyTorch 1.0
    return names - covered - without_forward


def _case(group: str, name: str, build: Callable[[], nn.Module], make_inputs: Callable[[], tuple[Any, ...]]) -> Case:
    def inputs(model: nn.Module, train: bool) -> Inputs:
        torch.manual_seed(11)
        return make_inputs(), {}

    return Case(f"torch.nn:{name}", "torch.nn", group, lambda: [Candidate("layer", build, inputs)])


class _Then(nn.Module):  # a layer behind one with weights, so that there is something to train
    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.before = nn.Linear(width, width)
        self.layer = layer

    def forward(self, x: torch.Tensor, *rest: Any) -> Any:
        return self.layer(self.before(x), *rest)


def _read_layers() -> Iterator[_Row]:
    """Those of layers.json: layers with words for their inputs (`make`), alone or after a linear layer."""
    for row in _TABLE["layers"]:
        options = {name: _as_tuples(value) for name, value in row.get("options", {}).items()}
        build = partial(getattr(nn, row["layer"]), *map(_as_tuples, row.get("args", ())), **options)
        if "after" in row:
            build = partial(_build_after, build, int(row["inputs"][0].rpartition("x")[2]))
        yield _name(row["layer"], row.get("note")), build, partial(_make_all, row["inputs"])


def _as_tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _name(kind: str, note: str | None) -> str:
    return f"{kind}({note})" if note else kind


def _build_after(build: Callable[[], nn.Module], width: int) -> nn.Module:
    return _Then(build(), width)


def _make_all(words: list[Any]) -> tuple[Any, ...]:
    return tuple(map(make, words))


def _layers() -> list[_Row]:
    found = [*_read_layers()]
    for n in (1, 2, 3):
        pool, shape = getattr(nn, f"MaxPool{n}d")(2, return_indices=True), (2, 4, *(8,) * n)
        found.append((f"MaxUnpool{n}d", partial(_build_after, partial(getattr(nn, f"MaxUnpool{n}d"), 2), 4),
                      lambda pool=pool, shape=shape: pool(torch.rand(shape))))  # type: ignore[misc]
    for weights in ("with", "without"):
        found.append((f"MultiheadAttention({weights} weights)", partial(_SelfAttention, weights == "with"),
                      lambda: (torch.rand(2, 5, 8),)))
    found += [
        ("TransformerEncoder", lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
         lambda: (torch.rand(2, 5, 8), None, torch.zeros(2, 5, dtype=torch.bool))),
        ("TransformerDecoder", lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16), 2, nn.LayerNorm(8)),
         lambda: (torch.rand(5, 2, 8), torch.rand(4, 2, 8))),
        ("Sequential", lambda: nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)), lambda: (torch.rand(2, 8),)),
        ("DataParallel", lambda: nn.DataParallel(nn.Linear(8, 4)), lambda: (torch.rand(2, 8),))]
    return found


class _SelfAttention(nn.Module):
    def __init__(self, with_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.with_weights = with_weights

    def forward(self, x: torch.Tensor) -> Any:
        return self.attention(x, x, x, need_weights=self.with_weights)


class _Loss(nn.Module):  # a loss of what a linear layer gives; ``squash`` maps its output to where the loss is defined
    def __init__(self, loss: nn.Module, width: int, squash: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.loss, self.squash = nn.Linear(width, width), loss, squash

    def forward(self, x: torch.Tensor, *targets: Any) -> torch.Tensor:
        return self.loss(self.squash(self.linear(x)), *targets)  # type: ignore[no-any-return]


def _losses() -> list[_Row]:
    found: list[_Row] = []
    for row in _TABLE["losses"]:
        name, options = row["loss"], row.get("options", {})
        label = name if name not in {n for n, _, _ in found} else f"{name}({', '.join(options) or 'probabilities'})"
        found.append((label, partial(_build_loss, name, options, _OF[row.get("of", "")]),
                      partial(_make_all, ["rand 4x8", *row["targets"]])))
    found.append(("CTCLoss", lambda: _Loss(nn.CTCLoss(), 8, partial(F.log_softmax, dim=-1)), lambda:
                  (torch.rand(9, 2, 8), torch.randint(1, 8, (2, 3)), torch.tensor([9, 9]), torch.tensor([3, 2]))))
    if hasattr(nn, "LinearCrossEntropyLoss"):
        found.append(("LinearCrossEntropyLoss", lambda: nn.LinearCrossEntropyLoss(8, 5), lambda:
                      (torch.rand(4, 8), torch.randint(0, 5, (4, )))))
    return found


def _build_loss(name: str, options: dict[str, Any], squash: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _Loss(getattr(nn, name)(**options), 8, squash)
