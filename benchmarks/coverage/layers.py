"""torch.nn itself: every layer and every loss, and what models build from them (attention variants, parametrizations,
hooks ...).
"""
from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.coverage.check import Candidate, Case, Inputs
from benchmarks.coverage.layer_features import FEATURES

_Maker = Callable[[], tuple[Any, ...]]


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


def _case(group: str, name: str, build: Callable[[], nn.Module], make: _Maker) -> Case:
    def inputs(model: nn.Module, train: bool) -> Inputs:
        torch.manual_seed(11)
        return make(), {}

    return Case(f"torch.nn:{name}", "torch.nn", group, lambda: [Candidate("layer", build, inputs)])


def _leaf(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, requires_grad=True)


class _Then(nn.Module):  # a layer behind one with weights, so that there is something to train
    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.before = nn.Linear(width, width)
        self.layer = layer

    def forward(self, x: torch.Tensor, *rest: Any) -> Any:
        return self.layer(self.before(x), *rest)


def _after(layer: Callable[..., nn.Module], width: int, *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    return lambda: _Then(layer(*args, **kwargs), width)


def _random(*shape: int) -> _Maker:
    return lambda: (torch.rand(shape),)


def _pooled(pool: nn.Module, shape: tuple[int, ...]) -> tuple[Any, ...]:
    found: tuple[Any, ...] = pool(torch.rand(shape))
    return found


def _targets(makers: Iterable[Callable[[], torch.Tensor]]) -> tuple[Any, ...]:
    return (torch.rand(4, 8), *(make() for make in makers))


def _layers() -> list[tuple[str, Callable[[], nn.Module], _Maker]]:
    found: list[tuple[str, Callable[[], nn.Module], _Maker]] = []

    def add(name: str, make: _Maker, *args: Any, suffix: str = "", **kwargs: Any) -> None:
        found.append((name + (f"({suffix})" if suffix else ""), partial(getattr(nn, name), *args, **kwargs), make))

    def plain(name: str, shape: tuple[int, ...], *args: Any, suffix: str = "", **kwargs: Any) -> None:
        label = name + (f"({suffix})" if suffix else "")
        found.append((label, _after(getattr(nn, name), shape[-1], *args, **kwargs), _random(*shape)))

    for n in (1, 2, 3):
        shape = (2, 4, *(8,) * n)
        add(f"Conv{n}d", _random(*shape), 4, 6, 3)
        add(f"Conv{n}d", _random(*shape), 4, 8, 3, suffix="grouped, dilated", groups=2, dilation=2, padding=2,
            bias=False)
        add(f"Conv{n}d", _random(*shape), 4, 4, 3, suffix="reflect", padding=1, padding_mode="reflect")
        add(f"Conv{n}d", _random(*shape), 4, 4, 3, suffix="same", padding="same")
        add(f"ConvTranspose{n}d", _random(*shape), 4, 6, 3, stride=2)
        add(f"LazyConv{n}d", _random(*shape), 6, 3)
        add(f"LazyConvTranspose{n}d", _random(*shape), 6, 3)
        add(f"BatchNorm{n}d", _random(*shape), 4)
        add(f"LazyBatchNorm{n}d", _random(*shape))
        add(f"InstanceNorm{n}d", _random(*shape), 4, affine=True, track_running_stats=True)
        add(f"LazyInstanceNorm{n}d", _random(*shape), affine=True)
        for kind, args in (("MaxPool", (2,)), ("AvgPool", (2,)), ("AdaptiveAvgPool", (3,)), ("AdaptiveMaxPool", (3,)),
                           ("LPPool", (2, 2)), ("ReflectionPad", (1,)), ("ReplicationPad", (1,)), ("ZeroPad", (1,)),
                           ("CircularPad", (1,)), ("ConstantPad", (1, 0.5))):
            plain(f"{kind}{n}d", shape, *args)
        plain(f"MaxPool{n}d", shape, 2, suffix="indices", return_indices=True)
        if n > 1:
            plain(f"FractionalMaxPool{n}d", shape, 2, output_size=4)
            plain(f"Dropout{n}d", shape, 0.3)
        pool = getattr(nn, f"MaxPool{n}d")(2, return_indices=True)
        found.append((f"MaxUnpool{n}d", _after(getattr(nn, f"MaxUnpool{n}d"), 4, 2),
                      partial(_pooled, pool, shape)))
    plain("Dropout1d", (2, 4, 8), 0.3)
    for name in ("ReLU", "ReLU6", "ELU", "SELU", "CELU", "GELU", "SiLU", "Mish", "Hardswish", "Hardsigmoid", "Hardtanh",
                 "Hardshrink", "Softshrink", "Softplus", "Softsign", "Tanhshrink", "Sigmoid", "LogSigmoid", "Tanh",
                 "LeakyReLU", "Dropout", "AlphaDropout", "FeatureAlphaDropout", "Identity", "Flatten", "RReLU"):
        plain(name, (2, 6, 8))
    plain("GELU", (2, 8), suffix="tanh", approximate="tanh")
    plain("ReLU", (2, 8), suffix="in place", inplace=True)
    plain("Threshold", (2, 8), 0.5, 0.1)
    plain("GLU", (2, 8))
    plain("PReLU", (2, 8))
    plain("Softmax", (2, 8), dim=-1)
    plain("Softmin", (2, 8), dim=-1)
    plain("LogSoftmax", (2, 8), dim=-1)
    plain("Softmax2d", (2, 4, 6, 8))
    plain("Unflatten", (2, 8), 1, (2, 4))
    plain("LayerNorm", (2, 8), 8)
    plain("RMSNorm", (2, 8), 8)
    plain("GroupNorm", (2, 4, 8), 2, 4)
    plain("LocalResponseNorm", (2, 4, 8, 8), 2)
    plain("ChannelShuffle", (2, 4, 8, 8), 2)
    plain("PixelShuffle", (2, 4, 8, 8), 2)
    plain("PixelUnshuffle", (2, 4, 8, 8), 2)
    found.append(("Fold", _after(nn.Fold, 9, (4, 4), (2, 2)), lambda: (torch.rand(2, 8, 9),)))
    plain("Unfold", (2, 4, 8, 8), 3)
    plain("SyncBatchNorm", (2, 4, 8), 4)
    for mode, shape in (("nearest", (2, 4, 8)), ("linear", (2, 4, 8)), ("bilinear", (2, 4, 8, 8)),
                        ("bicubic", (2, 4, 8, 8)), ("trilinear", (2, 4, 4, 4, 4)), ("nearest-exact", (2, 4, 8, 8))):
        plain("Upsample", shape, suffix=mode, scale_factor=2, mode=mode)
    plain("UpsamplingNearest2d", (2, 4, 8, 8), scale_factor=2)
    plain("UpsamplingBilinear2d", (2, 4, 8, 8), scale_factor=2)
    add("Linear", lambda: (torch.rand(2, 8),), 8, 4)
    add("LazyLinear", lambda: (torch.rand(2, 8),), 4)
    add("Bilinear", lambda: (torch.rand(2, 8), torch.rand(2, 6)), 8, 6, 4)
    add("Embedding", lambda: (torch.randint(0, 10, (2, 5)),), 10, 6)
    add("Embedding", lambda: (torch.randint(0, 10, (2, 5)),), 10, 6, suffix="sparse gradient", sparse=True)
    add("Embedding", lambda: (torch.randint(0, 10, (2, 5)),), 10, 6, suffix="renormalised", max_norm=1.0, padding_idx=0)
    add("EmbeddingBag", lambda: (torch.randint(0, 10, (2, 5)),), 10, 6)
    for mode in ("sum", "mean", "max"):
        add("EmbeddingBag", lambda: (torch.randint(0, 10, (7,)), torch.tensor([0, 3])), 10, 6, suffix=mode, mode=mode)
    add("EmbeddingBag", lambda: (torch.randint(0, 10, (2, 5)), ), 10, 6, suffix="sparse gradient", sparse=True,
        mode="sum")
    for name in ("LSTM", "GRU", "RNN"):
        add(name, lambda: (torch.rand(2, 5, 8),), 8, 6, batch_first=True)
        add(name, lambda: (torch.rand(5, 2, 8), ), 8, 6, num_layers=2, suffix="two layers, both ways, dropout",
            bidirectional=True, dropout=0.2)
    add("LSTM", lambda: (torch.rand(5, 2, 8),), 8, 6, suffix="projected", proj_size=4)
    add("LSTMCell", lambda: (torch.rand(2, 8),), 8, 6)
    add("GRUCell", lambda: (torch.rand(2, 8),), 8, 6)
    add("RNNCell", lambda: (torch.rand(2, 8),), 8, 6)
    for weights in (True, False):
        found.append((f"MultiheadAttention({'with' if weights else 'without'} weights)", partial(
            _SelfAttention, weights), lambda: (torch.rand(2, 5, 8), )))
    found.append(("MultiheadAttention", partial(nn.MultiheadAttention, 8, 2, kdim=6, vdim=4, add_bias_kv=True,
                                                add_zero_attn=True),
                  lambda: (torch.rand(5, 2, 8), torch.rand(7, 2, 6), torch.rand(7, 2, 4))))
    add("Transformer", lambda: (torch.rand(2, 5, 8), torch.rand(2, 4, 8)), 8, 2, 1, 1, 16, batch_first=True)
    add("TransformerEncoderLayer", lambda: (torch.rand(2, 5, 8),), 8, 2, 16, batch_first=True)
    add("TransformerEncoderLayer", lambda: (torch.rand(2, 5, 8), None, torch.zeros(2, 5, dtype=torch.bool)), 8, 2, 16,
        suffix="padding mask", batch_first=True)
    add("TransformerEncoderLayer", lambda: (torch.rand(5, 2, 8), ), 8, 2, 16, suffix="norm first, gelu",
        norm_first=True, activation="gelu")
    found.append(
        ("TransformerEncoder", lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
         lambda: (torch.rand(2, 5, 8), None, torch.zeros(2, 5, dtype=torch.bool))))
    add("TransformerDecoderLayer", lambda: (torch.rand(2, 5, 8), torch.rand(2, 4, 8)), 8, 2, 16, batch_first=True)
    found.append(
        ("TransformerDecoder", lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16), 2, nn.LayerNorm(8)),
         lambda: (torch.rand(5, 2, 8), torch.rand(4, 2, 8))))
    found.append(("Sequential", lambda: nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)), lambda:
                  (torch.rand(2, 8), )))
    found.append(("DataParallel", lambda: nn.DataParallel(nn.Linear(8, 4)), lambda: (torch.rand(2, 8),)))
    add("CosineSimilarity", lambda: (_leaf(2, 8), _leaf(2, 8)))
    add("PairwiseDistance", lambda: (_leaf(2, 8), _leaf(2, 8)))
    add("AdaptiveLogSoftmaxWithLoss", lambda: (torch.rand(6, 8), torch.randint(0, 20, (6,))), 8, 20, [4, 10])
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


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _losses() -> list[tuple[str, Callable[[], nn.Module], _Maker]]:
    def classes() -> torch.Tensor:
        return torch.randint(0, 8, (4,))

    def signs() -> torch.Tensor:
        return torch.randint(0, 2, (4, 8)) * 2.0 - 1

    def ones() -> torch.Tensor:
        return torch.ones(4)

    def dense() -> torch.Tensor:
        return torch.rand(4, 8)

    table: list[tuple[str, dict[str, Any], Callable[[torch.Tensor], torch.Tensor], tuple[Callable[[], Any], ...]]] = [
        ("CrossEntropyLoss", {}, _same, (classes, )),
        ("CrossEntropyLoss", {"label_smoothing": 0.1, "ignore_index": 3}, _same, (classes, )),
        ("CrossEntropyLoss", {}, _same, (dense, )),
        ("NLLLoss", {}, partial(F.log_softmax, dim=1), (classes, )),
        ("NLLLoss2d", {}, partial(F.log_softmax, dim=1), (classes, )),
        ("MSELoss", {}, _same, (dense, )),
        ("L1Loss", {}, _same, (dense, )),
        ("SmoothL1Loss", {}, _same, (dense, )),
        ("HuberLoss", {}, _same, (dense, )),
        ("BCELoss", {}, torch.sigmoid, (dense, )),
        ("BCEWithLogitsLoss", {}, _same, (dense, )),
        ("KLDivLoss", {"reduction": "batchmean"}, _same, (dense, )),
        ("PoissonNLLLoss", {}, _same, (dense, )),
        ("GaussianNLLLoss", {}, _same, (dense, lambda: torch.ones(4, 1))),
        ("SoftMarginLoss", {}, _same, (signs, )),
        ("HingeEmbeddingLoss", {}, _same, (signs, )),
        ("MultiLabelSoftMarginLoss", {}, _same, (dense, )),
        ("MultiMarginLoss", {}, _same, (classes, )),
        ("MultiLabelMarginLoss", {}, _same, (lambda: torch.full((4, 8), -1), )),
        ("MarginRankingLoss", {}, _same, (dense, signs)),
        ("CosineEmbeddingLoss", {}, _same, (dense, ones)),
        ("TripletMarginLoss", {}, _same, (dense, dense)),
        ("TripletMarginWithDistanceLoss", {}, _same, (dense, dense)),
    ]
    found: list[tuple[str, Callable[[], nn.Module], _Maker]] = []
    for name, options, squash, targets in table:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NLLLoss2d is deprecated
            build = partial(_build_loss, name, options, squash)
        label = name if name not in {n for n, _, _ in found} else f"{name}({', '.join(options) or 'probabilities'})"
        found.append((label, build, partial(_targets, targets)))
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
