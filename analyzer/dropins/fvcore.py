"""``fvcore.nn``'s counts: `FlopCountAnalysis`, `ActivationCountAnalysis`, `parameter_count` and their tables."""
from __future__ import annotations

import inspect
import logging
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction

from analyzer.errors import InputError
from analyzer.report.module_tree import list_holders

from .forward import observe_forward, watching_functions, watching_modules, watching_operators
from .fvcore_handle import ACTIVATION_HANDLES, FLOP_HANDLES, IGNORED, Handle, Value, describe_call, describe_function
from .fvcore_table import print_model, print_parameters, print_table

__all__ = ["ActivationCountAnalysis", "FlopCountAnalysis", "Handle", "JitModelAnalysis", "activation_count",
           "flop_count", "flop_count_str", "flop_count_table", "parameter_count", "parameter_count_table"]
A = TypeVar("A", bound="JitModelAnalysis")
_TRACER_MODES = ("all", "no_tracer_warning", "none")


class _OperatorRun(NamedTuple):
    """One call of an operator, and the modules that were running, by path from the outermost."""

    name: str
    inputs: list[Value]
    outputs: list[Value]
    modules: tuple[str, ...]


class _OperatorList:
    def __init__(self, names: Mapping[nn.Module, str]) -> None:
        self.runs: list[_OperatorRun] = []
        self._names, self._open = names, [""]
        self._is_in_function = False

    @contextmanager
    def observing(self) -> Iterator[None]:
        with (watching_modules(self._enter, self._leave), watching_functions(self._apply),
              watching_operators(self._ran)):
            yield

    def _enter(self, module: nn.Module) -> None:
        self._open.append(self._names.get(module, self._open[-1]))

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        self._open.pop()

    def _apply(self, function: Any, args: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        """Call what is one operator in a trace by ``torch.jit``, whatever operators it runs."""
        if function is CheckpointFunction:  # which torch.jit cannot trace
            return call()
        modules, was_in_function, self._is_in_function = tuple(self._open), self._is_in_function, True
        try:
            result = call()
        finally:
            self._is_in_function = was_in_function
        with torch._C.DisableTorchFunction():
            self.runs.append(_OperatorRun(*describe_function(function, args, result), modules))
        return result

    def _ran(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if not self._is_in_function:
            self.runs.append(_OperatorRun(*describe_call(func, args, kwargs, result), tuple(self._open)))


class _CountedStatistics(NamedTuple):
    counts: dict[str, Counter[str]]
    unsupported: dict[str, Counter[str]]
    uncalled: set[str]


class JitModelAnalysis:
    """Sums over the operators of a model, of what handles count of each, by module and by operator.

    Nothing is computed and no trace is made: the model runs without data the first time that a figure is asked for,
    with the training flags that it has. Modules go by their path, the model by ``""``; one that stands in several
    places by the first. Raises KeyError for a name that no module has.
    """

    _counted: Mapping[str, Handle] = {}

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(f"{type(self).__name__}({type(model).__name__}): must be a torch.nn.Module")
        self._model = model
        self._inputs = inputs if isinstance(inputs, tuple) else (inputs, )
        self._first_path: dict[nn.Module, str] = {}
        self._canonical: dict[str, str] = {}
        for path, module in model.named_modules(remove_duplicate=False):  # one that stands in several places in each
            self._canonical[path] = self._first_path.setdefault(module, path)
        self._handles: dict[str, Handle] = dict(self._counted)
        self._ignored = set(IGNORED)
        self._runs: list[_OperatorRun] | None = None
        self._stats: _CountedStatistics | None = None  # this name and the next three are those of fvcore
        self._enable_warn_unsupported_ops = self._enable_warn_uncalled_mods = True
        self._warn_trace, self._ancestors = "no_tracer_warning", "owner"

    def total(self, module_name: str = "") -> int:
        """The sum over a module."""
        return sum(self.by_operator(module_name).values())

    def by_operator(self, module_name: str = "") -> Counter[str]:
        """Sums over a module, by operator."""
        return self._statistics().counts[self.canonical_module_name(module_name)]

    def by_module(self) -> Counter[str]:
        """The sum over each module."""
        return Counter({path: sum(counts.values()) for path, counts in self._statistics().counts.items()})

    def by_module_and_operator(self) -> dict[str, Counter[str]]:
        """Sums over each module, by operator."""
        return self._statistics().counts

    def unsupported_ops(self, module_name: str = "") -> Counter[str]:
        """How often each operator ran that no handle counts, nor is ignored. Arithmetic on sizes is none."""
        return self._statistics().unsupported[self.canonical_module_name(module_name)]

    def uncalled_modules(self) -> set[str]:
        """The modules in which no operator ran."""
        return self._statistics().uncalled

    def canonical_module_name(self, name: str) -> str:
        """The path by which a module's figures go."""
        if not isinstance(name, str):
            raise InputError(f"module_name={name!r}: must be the path of a module, such as 'layer1.0'")
        if name not in self._canonical:
            raise KeyError(f"{name!r} is the path of no module of {type(self._model).__name__}; list(dict("
                           "model.named_modules())) are the paths that there are")
        return self._canonical[name]

    def set_op_handle(self: A, *args: Any, **kwargs: Handle | None) -> A:
        """Count operators by handles of one's own, given as name and handle in turn; None ignores an operator.

        A handle is given lists of arguments and results. They have the methods of ``torch._C.Value`` that handles use
        (``isCompleteTensor()``, ``type().sizes()``, ``toIValue()``, ``node().inputs()``), so those of fvcore work.
        """
        if len(args) % 2:
            raise TypeError(f"set_op_handle: {len(args)} arguments are no pairs of a name and a handle")
        for name, handle in [*zip(args[::2], args[1::2]), *kwargs.items()]:
            if handle is None:
                self._ignored.add(name)
                self._handles.pop(name, None)
            else:
                self._handles[name] = handle
        self._stats = None
        return self

    def clear_op_handles(self: A) -> A:
        """Count no operator."""
        self._handles, self._ignored, self._stats = {}, set(IGNORED), None
        return self

    def ancestor_mode(self: A, mode: str) -> A:
        """Whose an operator is: the innermost module's and its holders' (``"owner"``), or of all (``"caller"``)."""
        if mode not in ("owner", "caller"):
            raise InputError(f"ancestor_mode({mode!r}): must be 'owner' or 'caller'")
        self._ancestors, self._stats = mode, None
        return self

    def unsupported_ops_warnings(self: A, enabled: bool) -> A:
        """Whether operators that no handle counts are logged as warnings."""
        self._enable_warn_unsupported_ops = enabled
        return self

    def uncalled_modules_warnings(self: A, enabled: bool) -> A:
        """Whether modules in which nothing ran are logged as a warning."""
        self._enable_warn_uncalled_mods = enabled
        return self

    def tracer_warnings(self: A, mode: str) -> A:
        """``"none"`` hides warnings of the model's own code; ``"all"`` and ``"no_tracer_warning"`` show them."""
        if mode not in _TRACER_MODES:
            raise InputError(f"tracer_warnings({mode!r}): must be one of {', '.join(map(repr, _TRACER_MODES))}")
        self._warn_trace = mode
        return self

    def copy(self: A, new_model: nn.Module | None = None, new_inputs: Any = None) -> A:
        """The same handles and settings for another model or other inputs."""
        copied = type(self)(new_model or self._model, self._inputs if new_inputs is None else new_inputs)
        copied._handles, copied._ignored = dict(self._handles), set(self._ignored)
        for name in ("_enable_warn_unsupported_ops", "_enable_warn_uncalled_mods", "_warn_trace", "_ancestors"):
            setattr(copied, name, getattr(self, name))
        return copied

    def _statistics(self) -> _CountedStatistics:
        if self._runs is None:
            with warnings.catch_warnings():
                if self._warn_trace == "none":
                    warnings.simplefilter("ignore")
                self._runs = observe_forward(lambda: _OperatorList(self._first_path), self._model,
                                             self._inputs).runs
        if self._stats is None:
            self._stats = self._sum(self._runs)
            self._warn(self._stats)
        return self._stats

    def _sum(self, runs: list[_OperatorRun]) -> _CountedStatistics:
        paths = list(self._first_path.values())
        found = _CountedStatistics({path: Counter() for path in paths}, {path: Counter() for path in paths}, set(paths))
        seen = {""}
        for run in runs:
            owners = set(run.modules) if self._ancestors == "caller" else {
                self._canonical[path] for path in list_holders(run.modules[-1])}
            seen |= owners | set(run.modules)
            handle = self._handles.get(run.name)
            if handle is None:
                if run.name not in self._ignored:
                    for path in owners:
                        found.unsupported[path][run.name] += 1
                continue
            count = handle(run.inputs, run.outputs)
            named = count if isinstance(count, Counter) else {run.name.rpartition("::")[2]: count}
            for path in owners:
                for name, number in named.items():
                    found.counts[path][name] += number  # type: ignore[assignment]  # a handle may give a float
        found.uncalled.difference_update(seen)
        return found

    def _warn(self, found: _CountedStatistics) -> None:
        logger = logging.getLogger(__name__)
        if self._enable_warn_unsupported_ops:
            for name, number in found.unsupported[""].items():
                logger.warning("operator %s ran %d times and is not counted", name, number)
        named = sorted(path for module, path in self._first_path.items() if path in found.uncalled and
                       inspect.getattr_static(type(module), "forward") not in _WITHOUT_FORWARD)
        if self._enable_warn_uncalled_mods and named:
            logger.warning("these modules were never called; what their other methods ran is counted at the "
                           "caller: %s", ", ".join(named))


_WITHOUT_FORWARD = {kind.forward for kind in (nn.Module, nn.ModuleList, nn.ModuleDict, nn.Identity)}


class FlopCountAnalysis(JitModelAnalysis):
    """FLOPs of a forward pass as fvcore counts them: a multiply-add is one.

    >>> import torch
    >>> flops = FlopCountAnalysis(nn.Sequential(nn.Conv2d(3, 10, 1), nn.Flatten(), nn.Linear(1000, 10)),
    ...                           torch.empty(1, 3, 10, 10, device="meta"))
    >>> flops.total(), flops.by_operator(), flops.total("2")
    (13000, Counter({'linear': 10000, 'conv': 3000}), 10000)
    """

    _counted = FLOP_HANDLES


class ActivationCountAnalysis(JitModelAnalysis):
    """Elements of the results of convolutions and matrix products."""

    _counted = ACTIVATION_HANDLES


def flop_count(model: nn.Module, inputs: tuple[Any, ...],
               supported_ops: Mapping[str, Handle] | None = None) -> tuple[defaultdict[str, float], Counter[str]]:
    """GFLOPs by operator, and how often each operator ran that is not counted."""
    return _scale(FlopCountAnalysis(model, inputs), supported_ops, 1e9)


def activation_count(model: nn.Module, inputs: tuple[Any, ...],
                     supported_ops: Mapping[str, Handle] | None = None) -> tuple[defaultdict[str, float],
                                                                                 Counter[str]]:
    """Millions of activations by operator, and how often each operator ran that is not counted."""
    return _scale(ActivationCountAnalysis(model, inputs), supported_ops, 1e6)


def _scale(found: JitModelAnalysis, handles: Mapping[str, Handle] | None,
           unit: float) -> tuple[defaultdict[str, float], Counter[str]]:
    found.set_op_handle(**(handles or {}))
    return defaultdict(float, {name: n / unit for name, n in found.by_operator().items()}), found.unsupported_ops()


def parameter_count(model: nn.Module) -> defaultdict[str, int]:
    """Elements of each parameter and of each module's parameters, by path; ``""`` is the model.

    >>> dict(parameter_count(nn.Sequential(nn.Linear(2, 3))))
    {'': 9, '0': 9, '0.weight': 6, '0.bias': 3}
    """
    found: defaultdict[str, int] = defaultdict(int)
    for name, parameter in model.named_parameters():
        for path in list_holders(name):
            found[path] += parameter.numel()
    return found


def parameter_count_table(model: nn.Module, max_depth: int = 3) -> str:
    """The same as a table, with the shapes of parameters, ``max_depth`` modules deep."""
    return print_parameters(model, parameter_count(model), max_depth)


def flop_count_table(flops: FlopCountAnalysis, max_depth: int = 3, activations: ActivationCountAnalysis | None = None,
                     show_param_shapes: bool = True) -> str:
    """A table of parameters, FLOPs and activations by module, ``max_depth`` modules deep."""
    return print_table(flops._model, parameter_count(flops._model), _quiet(flops, activations), max_depth,
                       show_param_shapes)


def flop_count_str(flops: FlopCountAnalysis, activations: ActivationCountAnalysis | None = None) -> str:
    """The model as it prints itself, with parameters and FLOPs of each module."""
    return print_model(flops._model, parameter_count(flops._model), _quiet(flops, activations))


def _quiet(*analyses: JitModelAnalysis | None) -> list[tuple[Counter[str], set[str]]]:
    given = [one for one in analyses if one is not None]
    for one in given:
        one.unsupported_ops_warnings(False).uncalled_modules_warnings(False).tracer_warnings("none")
    return [(one.by_module(), one.uncalled_modules()) for one in given]
