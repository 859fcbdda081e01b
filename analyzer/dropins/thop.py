"""``thop.profile`` and ``clever_format``: multiply-adds and parameters of the layers that thop knows."""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.output import drawing_plainly

from .forward import children_first, observe_forward, watching_modules

__all__ = ["clever_format", "profile", "profile_origin"]

#: Counts a call of a module: adds to its ``total_ops``, from its positional arguments and result.
Hook = Callable[[Any, tuple[Any, ...], Any], None]
Rule = Callable[[Any, tuple[Any, ...], Any], float]


def zero_ops(m: nn.Module, x: tuple[Any, ...], y: Any) -> float:
    """Nothing."""
    return 0


def count_convNd(m: Any, x: tuple[Tensor, ...], y: Tensor) -> float:
    """Products of a convolution, of a transposed one as if it were none, without a bias."""
    return int(y.numel() * (x[0].shape[1] // m.groups) * math.prod(m.weight.shape[2:]))


def count_normalization(m: Any, x: tuple[Tensor, ...], y: Tensor) -> float:
    """Two for each element, four with a weight; thop takes an instance norm's flag for it too."""
    return x[0].numel() * (4 if getattr(m, "affine", False) or getattr(m, "elementwise_affine", False) else 2)


def count_prelu(m: nn.Module, x: tuple[Tensor, ...], y: Tensor) -> float:
    """One for each element, in evaluation mode."""
    return 0 if m.training else x[0].numel()


def count_softmax(m: Any, x: tuple[Tensor, ...], y: Tensor) -> float:
    """Exponentials, additions and divisions."""
    features = x[0].shape[m.dim]
    return x[0].numel() // int(features) * int(3 * features - 1)


def count_avgpool(m: nn.Module, x: tuple[Tensor, ...], y: Tensor) -> float:
    """One for each output."""
    return y.numel()


def count_adap_avgpool(m: nn.Module, x: tuple[Tensor, ...], y: Tensor) -> float:
    """The inputs of each output, and one."""
    return int((math.prod(a / b for a, b in zip(x[0].shape[2:], y.shape[2:])) + 1) * y.numel())


def count_linear(m: nn.Linear, x: tuple[Tensor, ...], y: Tensor) -> float:
    """Products, without a bias."""
    return m.in_features * y.numel()


_OF_MODE = {"nearest": 1, "linear": 5, "bilinear": 11, "bicubic": 224 + 35}


def count_upsample(m: nn.Upsample, x: tuple[Tensor, ...], y: Tensor) -> float:
    """So much for each output, by mode; nothing for modes that thop does not know."""
    return _OF_MODE.get(m.mode, 0) * y.numel()


_CELLS = {"RNN": (1, 0), "GRU": (3, 4), "LSTM": (4, 4)}  # gates; products and additions of states by hidden size


def _count_cell(kind: str, inputs: int, hidden: int, bias: bool) -> int:
    gates, besides = _CELLS[kind]
    return gates * (hidden * (inputs + hidden) + hidden * (3 if bias else 1)) + besides * hidden


def count_rnn_cell(m: Any, x: tuple[Tensor, ...], y: Any) -> float:
    """Products, additions and gates of a recurrent cell."""
    return x[0].shape[0] * _count_cell(type(m).__name__.removesuffix("Cell"), m.input_size, m.hidden_size, m.bias)


def count_rnn(m: Any, x: tuple[Any, ...], y: Any) -> float:
    """The same of a recurrent layer, at every position; a packed sequence counts as if all were of the longest."""
    if isinstance(x[0], nn.utils.rnn.PackedSequence):
        positions = x[0].batch_sizes.numel() * int(x[0].batch_sizes.max())
    else:
        positions = x[0].shape[0] * x[0].shape[1]
    ways = 2 if m.bidirectional else 1
    cells = [_count_cell(type(m).__name__, ways * m.hidden_size if i else m.input_size, m.hidden_size, m.bias)
             for i in range(m.num_layers)]
    return ways * sum(cells) * positions


_EACH_DIM = {"Conv{}d": count_convNd, "ConvTranspose{}d": count_convNd, "BatchNorm{}d": count_normalization,
             "InstanceNorm{}d": count_normalization, "MaxPool{}d": zero_ops, "AdaptiveMaxPool{}d": zero_ops,
             "AvgPool{}d": count_avgpool, "AdaptiveAvgPool{}d": count_adap_avgpool}
register_hooks: dict[type[nn.Module], Rule] = {
    **{getattr(nn, name.format(d)): rule for name, rule in _EACH_DIM.items() for d in (1, 2, 3)},
    nn.ZeroPad2d: zero_ops, nn.LayerNorm: count_normalization, nn.SyncBatchNorm: count_normalization,
    nn.PReLU: count_prelu, nn.Softmax: count_softmax, nn.ReLU: zero_ops, nn.ReLU6: zero_ops, nn.LeakyReLU: zero_ops,
    nn.Linear: count_linear, nn.Dropout: zero_ops, nn.Upsample: count_upsample, nn.UpsamplingBilinear2d: count_upsample,
    nn.UpsamplingNearest2d: count_upsample, nn.RNNCell: count_rnn_cell, nn.GRUCell: count_rnn_cell,
    nn.LSTMCell: count_rnn_cell, nn.RNN: count_rnn, nn.GRU: count_rnn, nn.LSTM: count_rnn, nn.Sequential: zero_ops,
    nn.PixelShuffle: zero_ops}


class LayerCosts:
    """Multiply-adds of each module that has a rule, and its parameters where it ran, in one forward pass. A hook of the
    user's finds ``total_ops`` and ``total_params`` on the module, as numbers in tensors, as long as it listens.
    """

    def __init__(self, model: nn.Module, hooks: Mapping[type[nn.Module], Hook]) -> None:
        self.ops: dict[nn.Module, float] = {}
        self.params: dict[nn.Module, float] = {}
        self._hooks, self._hooked = hooks, [m for m in model.modules() if type(m) in hooks]
        self._known = set(model.modules())

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Listen for the length of a block."""
        with ExitStack() as undo:
            for module in self._hooked:
                for name in ("total_ops", "total_params"):
                    object.__setattr__(module, name, _zero())
                    undo.callback(module.__dict__.pop, name, None)
            with watching_modules(lambda module: None, self._leave):
                yield
            for module in self._hooked:
                with without_modes():
                    self.ops[module] = float(module.total_ops)  # type: ignore[arg-type]

    def _leave(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        hook, rule = self._hooks.get(type(module)), register_hooks.get(type(module))
        if module not in self._known or hook is None and rule is None:
            return
        with torch._C.DisableTorchFunction():
            if hook is not None:
                with without_modes():
                    hook(module, args, result)
            elif rule is not None:
                self.ops[module] = self.ops.get(module, 0.0) + rule(module, args, result)
            self.params[module] = float(sum(p.numel() for p in module.parameters()))


def _zero() -> Tensor:
    with without_modes():
        return torch.zeros(1, dtype=torch.float64)


def profile(model: nn.Module, inputs: Iterable[Any], custom_ops: Mapping[type[nn.Module], Hook] | None = None,
            verbose: bool = True, ret_layer_info: bool = False, report_missing: bool = False) -> tuple[Any, ...]:
    """Multiply-adds and parameters of a forward pass in evaluation mode, as thop counts them; with ``ret_layer_info``
    also those of each module, by name, with its children.

    Modules without a rule are the sum of their children, and their own parameters and operators are nothing;
    ``report_missing`` names them. ``custom_ops`` are hooks by class, which add to the ``total_ops`` of the module.

    >>> profile(nn.Sequential(nn.Linear(10, 20), nn.GELU()), inputs=(torch.ones(3, 10),), verbose=False)
    (600.0, 220.0)
    """
    hooks = dict(custom_ops or {})
    with drawing_plainly(), torch.no_grad():
        _print_rules(model, hooks, verbose or report_missing, report_missing)
        costs = observe_forward(lambda: LayerCosts(model, hooks), model, tuple(inputs))
    ops, params, layers = _sum(model, costs, set(hooks) | set(register_hooks))
    return (ops, params, layers) if ret_layer_info else (ops, params)


profile_origin = profile  #: thop's older function; what a module with children does itself counts here too


def _print_rules(model: nn.Module, hooks: Mapping[type[nn.Module], Hook], names_rules: bool,
                 names_missing: bool) -> None:
    for kind in dict.fromkeys(map(type, children_first(model))):
        rule = hooks.get(kind) or register_hooks.get(kind)
        if rule is not None and names_rules:
            verb = "Customize rule {}() {}." if kind in hooks else "Register {}() for {}."
            print("[INFO] " + verb.format(rule.__qualname__, kind))
        elif rule is None and names_missing:
            print(f"[WARN] Cannot find rule for {kind}. Treat it as zero Macs and zero Params.")


def _sum(module: nn.Module, costs: LayerCosts, known: set[type]) -> tuple[float, float, dict[str, Any]]:
    """Of a module: its own multiply-adds and those of its children, and the parameters of these."""
    total_ops, total_params = float(costs.ops.get(module, 0)), 0.0
    layers: dict[str, Any] = {}
    below: dict[str, Any]
    if type(module) in known and not isinstance(module, (nn.Sequential, nn.ModuleList)):
        total_params = costs.params.get(module, 0.0)  # a model that is one layer
        if next(module.children(), None) is None:
            return total_ops, total_params, {}
    for name, child in module.named_children():
        if type(child) in known and not isinstance(child, (nn.Sequential, nn.ModuleList)):
            ops, params, below = costs.ops.get(child, 0.0), costs.params.get(child, 0.0), {}
        else:
            ops, params, below = _sum(child, costs, known)
        layers[name] = ops, params, below
        total_ops, total_params = total_ops + ops, total_params + params
    return total_ops, total_params, layers


def clever_format(nums: float | Iterable[float], format: str = "%.2f") -> Any:
    """Numbers with T, G, M, K or B behind them: one text, or a tuple of several.

    >>> clever_format([4_133_742_592, 25_557_032], "%.3f"), clever_format(999)
    (('4.134G', '25.557M'), '999.00B')
    """
    values = list(nums) if isinstance(nums, Iterable) else [nums]
    texts = [next((format % (n / size) + unit for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K"))
                   if n > size), format % n + "B") for n in values]
    return texts[0] if len(texts) == 1 else tuple(texts)
