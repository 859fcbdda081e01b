"""What users pass to a driver, and what follows of it for a run."""
from __future__ import annotations

import copy
import inspect
import itertools
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from analyzer.api.result import Profile
from analyzer.errors import DataDependentError, InputError, is_count
from analyzer.fx.module_wrapper import explain_call, exported_module, uncompiled
from analyzer.hardware import DeviceSpec
from analyzer.hardware.catalogue import simulated_spec, simulating
from analyzer.hardware.unseen import list_unseen
from analyzer.memory.allocator import DeviceOutOfMemoryError
from analyzer.meta.address_space import MetaStorage, find_storage
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.mode import MetaTensorMode
from analyzer.meta.state import MetaOptions, Restart, current
from analyzer.meta.structure import replace_tensors, tensor_paths
from analyzer.meta.tensor import keep_class
from analyzer.meta.value.known_value import LARGEST_FLOATING
from analyzer.record.call_table import OpCall
from analyzer.record.log import Log
from analyzer.record.options import ProfileOptions, count_listed
from analyzer.record.recorder import Recorder
from analyzer.registry import signature_of
from analyzer.units import format_bytes


def expect_values(run: Callable[[ProfileOptions], Profile], options: ProfileOptions) -> Profile:
    """``run(options)``; expected contents are followed only in a second run, for a model that asks for them."""
    if options.unknown_value != "expected":
        return run(options)
    try:
        return run(replace(options, unknown_value="error"))
    except DataDependentError as error:
        try:
            return run(options)
        except (Restart, DeviceOutOfMemoryError):
            raise
        except Exception:  # what was expected leads nowhere
            raise error from None


_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
_DRAWS = frozenset(["native_dropout", "_fused_dropout", "bernoulli", "bernoulli_"])


def depends_on_training(module: nn.Module) -> bool:
    """Whether the class of a module is known to do something else where its ``training`` is True.

    >>> [depends_on_training(m) for m in (nn.Dropout(0.1), nn.Dropout(0.0), nn.BatchNorm1d(2), nn.LayerNorm(2))]
    [True, False, True, False]
    """
    if isinstance(module, _NORMS):
        return module.running_mean is not None  # else statistics are those of the batch in both
    if isinstance(module, nn.RNNBase):
        return bool(module.dropout and module.num_layers > 1)
    if isinstance(module, nn.MultiheadAttention):
        return bool(module.dropout)
    name = type(module).__name__
    # torchvision's StochasticDepth, timm's DropPath and DropBlock2d, the DropPath that many models of transformers have
    if isinstance(module, nn.modules.dropout._DropoutNd) or name == "StochasticDepth" or "DropPath" in name or (
            "DropBlock" in name):
        return bool(getattr(module, "p", getattr(module, "drop_prob", None)))
    return isinstance(module, nn.RReLU)


def describe_training(walked: Iterable[tuple[str, nn.Module]], log: Log) -> str | None:
    """A sentence on what of the (path, module) pairs ran as in training in an inference step; None for nothing."""
    training = [(path, module) for path, module in walked if module.training]
    if not training:
        return None
    found = [(path, type(module).__name__) for path, module in training if depends_on_training(module)]
    draws = sum(number for step, call, _, number in log.tallies() if step == log.steps - 1 and draws_mask(call))
    counts = [f"{number} {name}" for name, number in Counter(name for _, name in found).items()]
    counts += [f"{draws} random {'mask' if draws == 1 else 'masks'}"] if draws else []
    if not counts:
        return None
    first = f", the first module {found[0][0] or 'the model'!r}" if found else ""
    return (f"modules are in training mode, which mode='infer' leaves as it is: {', '.join(counts)} would not be the "
            f"same after model.eval(){first}; with eval=True the model is profiled as after model.eval()")


def draws_mask(call: OpCall) -> bool:
    """Whether a call draws at random what dropout or stochastic depth leave out."""
    op = call.signature.op
    schema = getattr(op, "_schema", None)
    if schema is None:
        return False
    if schema.name.partition("::")[2] in _DRAWS:
        return True
    for at, argument in enumerate(schema.arguments):
        if argument.name == "dropout_p":  # of fused attention
            return at < len(call.signature.args) and bool(call.signature.args[at])
    return False


def check_arguments(mode: str, autocast: Any, options: Any, evaluates: Any = False, **functions: Any) -> None:
    """Raise InputError for values that no run could use; ``functions`` are callables or None."""
    if mode not in ("train", "infer"):
        raise InputError(f"mode={mode!r}: must be 'train' or 'infer'")
    if autocast is not None and not isinstance(autocast, torch.dtype):
        raise InputError(f"autocast={autocast!r}: must be a torch.dtype such as torch.bfloat16, or None")
    if not isinstance(options, ProfileOptions):
        raise InputError(f"options={options!r}: must be a ProfileOptions")
    if not isinstance(evaluates, bool):
        raise InputError(f"eval={evaluates!r}: must be True or False")
    if options.inference_mode and mode != "infer":
        raise InputError("inference_mode=True: no gradient is computed in it; leave it out, or profile an inference "
                         "step with mode='infer'")
    if not is_count(options.steps, 1):
        raise InputError(f"options.steps={options.steps!r}: at least one step is needed, and a whole number of them")
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise InputError(f"{name}={function!r}: must be callable, or None")
    if (why := _why_not_called(functions.get("loss_fn"), None)) is not None:
        raise InputError(f"loss_fn={functions['loss_fn']!r}: {why}; it is called with the model's output alone, so "
                         "write loss_fn=lambda output: ..., which takes the targets from where it is defined")


def _why_not_called(function: Any, *given: Any) -> str | None:
    """Why a function, or a module, cannot be called with so many arguments; None where it can, or that is not known."""
    if function is None:
        return None
    signature = signature_of(function.forward if isinstance(function, torch.nn.Module) else function)
    try:
        if signature is not None:
            signature.bind(*given)
    except TypeError as error:
        return str(error)
    return None


def check_inference(mode: str, optimizer: Any, step: Any) -> None:
    """Raise InputError where an inference step is given what a training step alone has."""
    for name, value in (("optimizer", optimizer), ("step", step)):
        if mode == "infer" and value is not None:
            said = getattr(value, "__name__", None) or repr(value)
            raise InputError(f"mode='infer', {name}={said}: an inference step is the forward pass alone; leave {name} "
                             "out, or use mode='train'")


def limit_memory(options: ProfileOptions, spec: DeviceSpec | None) -> tuple[ProfileOptions, str | None]:
    """``options`` with the device's memory as the capacity if asked for, and a remark. Raises InputError if unknown."""
    if not options.limit_to_device or spec is None:
        return options, None
    if spec.memory_bytes is None:
        raise InputError(
            f"limit_to_device=True: the memory of {spec.name!r} is not known; give ProfileOptions(capacity_bytes=...)")
    unseen = list_unseen(spec)
    known = sum(u.bytes or 0 for u in unseen)
    remark = (f"the allocator may take {format_bytes(spec.memory_bytes - known)}: the memory of {spec.name}" +
              "".join(f", less {format_bytes(u.bytes)} for {u.what}" if u.bytes else
                      f" ({u.what}: unknown, not taken off)" for u in unseen))
    return replace(options, limit_to_device=False, capacity_bytes=int(spec.memory_bytes - known)), remark


def as_arguments(args: Any) -> tuple[Any, ...]:
    """Positional arguments that were given as a tuple or a list of them, or as the only one, as a named tuple is."""
    is_one = not isinstance(args, (tuple, list)) or hasattr(type(args), "_fields")
    return tuple(map(_as_argument, (args,) if is_one else args))


def as_keywords(kwargs: Any) -> dict[str, Any]:
    """Keyword arguments, None being none. Raises InputError for what is no mapping of names."""
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise InputError(f"kwargs={kwargs!r}: must be a dictionary of keyword arguments, or None")
    return {name: _as_argument(value) for name, value in kwargs.items()}


_MOST_ITEMS = 10_000  # of an iterator; others have no end, as itertools.count()


class Repeated(Iterator[Any]):
    """What an iterator gives, once for each run through it: every step is given a new one."""

    def __init__(self, items: list[Any]) -> None:
        self.items, self.place = items, 0

    def __next__(self) -> Any:
        if self.place == len(self.items):
            self.place = 0
            raise StopIteration
        self.place += 1
        return self.items[self.place - 1]


def _as_argument(value: Any) -> Any:
    """An argument of every step."""
    if not isinstance(value, Iterator) or type(value).__module__ not in ("builtins", "itertools"):
        return value
    items = list(itertools.islice(value, _MOST_ITEMS))
    if not items:
        raise InputError(f"{type(value).__name__}: an iterator among the arguments that gives nothing, so that nothing "
                         "would be run with it; give a list of batches, or an iterator that was not used up")
    return Repeated(items) if len(items) < _MOST_ITEMS else itertools.chain(items, value)


def build_model(factory: Any, remarks: list[str] | None = None, spec: DeviceSpec | None = None,
                devices: int = 1) -> torch.nn.Module:
    """Call a factory under its own mode, in which there are ``devices`` devices of ``spec`` (None: the usual one), by
    default as many as around it, adding what it assumes to ``remarks``. Raises InputError for no module.
    """
    if isinstance(module := exported_module(factory), torch.nn.Module):
        moved = None if module is factory or spec is None else _move_program(module, spec.kind)
        if remarks is not None:
            remarks += [] if moved is None else [moved]
            remarks.append("a program by torch.export runs as it was exported, in training or not: mode, train() and "
                           "eval() change no layer in it")
        return module
    outer = current()
    options = MetaOptions(devices=devices if outer is None or devices > 1 else outer.options.devices)
    try:
        with MetaTensorMode(options, has_plain_tensors=True) as mode, simulating(spec or simulated_spec()):
            module = call_factory(factory)
            if remarks is not None:
                remarks.extend(mode.state.assumptions)
        for tensor in (*module.parameters(), *module.buffers()):  # which outlive the mode
            keep_class(tensor)
        return module
    except Exception as error:
        files = [frame.f_code.co_filename.replace("\\", "/") for frame, _ in traceback.walk_tb(error.__traceback__)]
        if not any(name.endswith(_TRACERS) for name in files):
            raise
    with torch.random.fork_rng(devices=[]):  # torch's own tracers take only tensors with data
        return call_factory(factory)


def _move_program(module: nn.Module, kind: str) -> str | None:
    """Let the module of an exported program, which keeps the device that it was exported on in its calls, name one of
    another ``kind``: ``"cuda"``. The result says so in a sentence; None where nothing is changed.
    """
    named: set[str] = set()

    def move(value: Any) -> Any:
        if not isinstance(value, torch.device) or value.type in (kind, "meta"):
            return value
        named.add(str(value))
        return torch.device(kind)

    graphs = [inner for inner in module.modules() if isinstance(inner, torch.fx.GraphModule)]
    for graph_module in graphs:
        for node in graph_module.graph.nodes:
            node.args = torch.fx.node.map_aggregate(node.args, move)
            node.kwargs = torch.fx.node.map_aggregate(node.kwargs, move)
    if not named:
        return None
    for graph_module in graphs:
        graph_module.recompile()
    return f"a program that was exported on {', '.join(sorted(named))} runs as one that was exported on {kind}"


#: Where torch makes a graph of a model: `torch.export.export`, `make_fx`, `torch.jit.trace`.
_TRACERS = ("torch/export/_trace.py", "torch/fx/experimental/proxy_tensor.py", "torch/jit/_trace.py")


def call_factory(factory: Any) -> torch.nn.Module:
    """What a factory gives in the mode that is active. Raises InputError as `build_model` does."""
    factory = exported_module(factory)
    if isinstance(factory, torch.nn.Module):
        return factory
    if not callable(factory):
        raise InputError(f"model={factory!r}: must be a torch.nn.Module or a callable of no arguments that builds one")
    method = inspect.unwrap(factory, stop=inspect.ismethod)  # what was compiled wraps it
    if inspect.ismethod(method) and method.__name__ == "forward" and isinstance(method.__self__, torch.nn.Module):
        raise InputError(f"model={factory!r}: is the forward of {type(method.__self__).__name__}; pass the module, as "
                         "it is or under one torch.compile")
    if (why := _why_not_called(factory)) is not None:
        raise InputError(f"model={factory!r}: {why}; pass a module, or a function without arguments that builds one")
    module = exported_module(factory())
    if not isinstance(module, torch.nn.Module):
        raise InputError(f"model: {factory!r} returned {type(module).__name__}, not a torch.nn.Module")
    return module


@contextmanager
def set_training(module: torch.nn.Module, training: bool) -> Iterator[None]:
    """Put a module in training or in evaluation for a block; afterwards every flag is as it was."""
    with keep_flags(module):
        module.train(training)
        yield


@contextmanager
def keep_flags(module: torch.nn.Module) -> Iterator[list[torch.nn.Module]]:
    """The modules of ``module``, whose training flags are at the end of the block as they were before it."""
    flags = [(inner, inner.training) for inner in module.modules()]
    try:
        yield [inner for inner, _ in flags]
    finally:
        for inner, flag in flags:
            inner.training = flag


def argument_names(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any],
                   step: Callable[..., Any] | None = None) -> list[str]:
    """Names of the positional arguments of forward or ``step``. Raises InputError where the call fits neither."""
    module = uncompiled(module)  # whose own forward takes whatever it is given
    try:
        signature = inspect.signature(module.forward)
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        if step is not None:  # it gives the model what it likes
            return [f"arg{i}" for i in range(len(args))]
        name = f"{type(module).__name__}.forward"
        raise InputError(explain_call(name, signature, args, kwargs, error)) from None
    except ValueError:  # a builtin without a signature
        return [f"arg{i}" for i in range(len(args))]
    names: list[str] = []
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            names.extend(f"{name}_{i}" for i in range(len(value)))
        elif kind is not inspect.Parameter.VAR_KEYWORD:
            names.append(name)
    return names


def without_data(arguments: Any) -> Any:
    """Arguments for a later run: copies of small tensors, whose contents decide what runs."""
    def forget(item: torch.Tensor) -> torch.Tensor:
        if item.layout is not torch.strided or item.is_nested:
            return item
        if item.device.type == "cpu" and not item.requires_grad and item.numel() <= LARGEST_FLOATING and not isinstance(
                find_storage(item), MetaStorage):
            return item.clone()
        return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device="meta").requires_grad_(
            item.requires_grad)

    with torch._C.DisableTorchFunction():
        return replace_tensors(arguments, forget)


def copy_without_data(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of a model with its parameters and buffers on meta; that of tied tensors is one."""
    held: dict[int, Any] = {}
    for t in (*model.parameters(), *model.buffers()):
        empty = t.detach().to("meta")
        held[id(t)] = torch.nn.Parameter(empty, t.requires_grad) if isinstance(t, torch.nn.Parameter) else empty
        held[id(t)].__dict__.update(t.__dict__)  # such as what a packed parameter stands for
    with without_modes():  # tensors that are no parameter keep their data
        return copy.deepcopy(model, held)


def mark_inputs(recorder: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Iterable[str]) -> None:
    """Mark a step's inputs, by the ``names`` of the positional ones: ``batch_x`` is ``batch.x`` or ``batch["x"]``."""
    named = [*zip(names, args), *kwargs.items()]
    recorder.log.listed_samples = count_listed([value for _, value in named])
    for name, value in named:
        for path, tensor in tensor_paths(value):
            label = re.sub(r"\W", "_", "_".join([name, *[str(step.key) for step in path]]))
            recorder.memory.mark([tensor], "input", label)
