"""Tensors without data in place of a user's, the hooks on these, and the random numbers of a run."""
from __future__ import annotations

import copy
import dis
import functools
import random
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from analyzer.meta.address_space import MetaStorage, bytes_on_meta
from analyzer.meta.argument import dispatches, keep_subclass
from analyzer.meta.intercept.mode_stack import attributes_of, without_modes
from analyzer.meta.spec import LEAVES, SPARSE_LAYOUTS, parts_of
from analyzer.meta.state import CPU, MetaState, check_ordinal, place_among
from analyzer.meta.tensor import META, count_on, device_of, sparse_like, take_class, tensor_on
from analyzer.meta.value.barred import FAR_BELOW
from analyzer.meta.value.known_value import Deferred, small_enough
from analyzer.record.optimizer_step import has_gradient_hooks, is_updated_in_backward, share_gradient_hooks
from analyzer.record.tensor_walk import REGISTRIES

# Weights of bitsandbytes that a move to the GPU quantizes: layers that were only built hold them whole.

def is_unquantized(tensor: torch.Tensor) -> bool:
    """Whether ``Module.cuda()`` would quantize ``tensor``: bitsandbytes.nn.modules, Params4bit.to and Int8Params.to."""
    kind = type(tensor)
    if kind.__module__ != "bitsandbytes.nn.modules":
        return False
    held: dict[str, Any] = tensor.__dict__
    if kind.__name__ == "Params4bit":
        return not held.get("bnb_quantized", True)
    return kind.__name__ == "Int8Params" and not held.get("has_fp16_weights", True) and tensor.dtype != torch.int8


def quantize_on(device: torch.device, weight: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """A fake tensor on ``device`` that is quantized as ``weight`` of ``module`` would be. Called under the mode."""
    whole = torch.empty(weight.shape, dtype=weight.dtype)
    kind: Any = type(weight)
    fake = torch.Tensor._make_subclass(kind, whole, weight.requires_grad)
    fake.__dict__.update(weight.__dict__)
    if "module" in fake.__dict__:
        fake.__dict__["module"] = module
    return fake.to(device)  # type: ignore[no-any-return,unused-ignore]


# The states of random number generators: of the host, around a run, and of one that an operator drew from.

def save_generators() -> tuple[Any, Any, Any]:
    """The states of the host's random number generators: torch's, Python's and numpy's, where it is imported."""
    numpy = import_module("numpy.random") if "numpy.random" in sys.modules else None  # waits for a thread's import
    with without_modes():
        return torch.default_generator.get_state(), random.getstate(), None if numpy is None else numpy.get_state()


def restore_generators(saved: tuple[Any, Any, Any], *, is_torchs_moved: bool = True) -> None:
    """Put back what `save_generators` found; torch's only where no other thread may have drawn from it meanwhile."""
    if is_torchs_moved or threading.active_count() == 1:
        with without_modes():
            torch.default_generator.set_state(saved[0])
    random.setstate(saved[1])
    if saved[2] is not None:
        sys.modules["numpy.random"].set_state(saved[2])


class GeneratorState(NamedTuple):
    """A state of the default generator of a device, for when what was drawn after it is given again."""

    device: torch.device
    state: torch.Tensor

    @classmethod
    def after(cls, func: Any, out: Any) -> GeneratorState | None:
        """The state now, when ``func`` has just returned ``out``; None where it draws nothing."""
        if not isinstance(func, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in func.tags:
            return None
        tensor = next((t for t in tree_leaves(out) if isinstance(t, torch.Tensor)), None)
        if tensor is None or isinstance(tensor.untyped_storage(), MetaStorage):
            return None  # without data, nothing is drawn
        if tensor.device.type == "cpu":
            return cls(tensor.device, torch.get_rng_state())
        return cls(tensor.device, torch.get_device_module(tensor.device).get_rng_state(tensor.device))

    def restore(self) -> None:
        if self.device.type == "cpu":
            torch.set_rng_state(self.state)
        else:
            torch.get_device_module(self.device).set_rng_state(self.state, self.device)


class FakeTensors:
    """Makes fake tensors and remembers what stands for what. They have shape, strides, dtype and ``requires_grad`` of
    their originals, share storages as these do, and claim ``claim`` where given; where ``placed``, those made under a
    mode keep their claims; where it ``keeps_meta``, those on meta stay there until an operator uses them. Contents of
    small integers, booleans, masks and scalars can be read where ``readable``, of small constants always. Used inside
    `without_modes`.
    """

    def __init__(self, state: MetaState, claim: torch.device | None = None, placed: bool = False, *,
                 keeps_meta: bool = False) -> None:
        self.state, self.claim, self.placed, self.keeps_meta = state, claim, placed, keeps_meta
        # by id of the original and of the fake tensor, which dies when the forward replaces what held it
        self._fakes: dict[int, tuple[Tensor, weakref.ref[Tensor]]] = {}
        self._originals: dict[int, tuple[Tensor, weakref.ref[Tensor]]] = {}
        self._adopted: list[int] = []  # keys put into state.fakes
        self._templates: list[int] = []  # keys put into state.templates
        self.on_host: set[int] = set()  #: ids of originals that are on the host wherever others are

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for original, ref in list(self._fakes.values()):
            if (fake := ref()) is not None:
                yield original, fake

    def of(self, original: Tensor) -> Tensor | None:
        found = self._fakes.get(id(original))
        return None if found is None else found[1]()

    def original_of(self, fake: Tensor) -> Tensor | None:
        found = self._originals.get(id(fake))
        return found[0] if found is not None and found[1]() is fake else None

    def make(self, original: Tensor, readable: bool, constant: bool = False) -> Tensor:
        """The fake tensor of ``original``, made at the first call; a fake tensor is its own."""
        fake = self.of(original)
        if fake is None and self.original_of(original) is not None:
            return original
        if fake is None:
            fake = self._make(original, readable, constant)
            self.stand_in(original, fake)
        return fake

    def stand_in(self, original: Tensor, fake: Tensor) -> None:
        ref = weakref.ref(fake)
        self._fakes[id(original)] = (original, ref)
        self._originals[id(fake)] = (original, ref)

    def let_go(self) -> None:
        """Let storages be adopted anew, and fake tensors die: autograd's nodes may lead from one to itself."""
        for _, fake in self:
            fake.__dict__.clear()
        for key in self._adopted:
            self.state.fakes.pop(key, None)
        self._adopted.clear()
        for number in self._templates:
            self.state.templates.pop(number, None)
        self._templates.clear()

    def _make(self, original: Tensor, readable: bool, constant: bool) -> Tensor:
        is_parameter = type(original) is nn.Parameter
        if not is_parameter:
            if isinstance(original, (UninitializedParameter, UninitializedBuffer)):
                # a lazy parameter of its own, so that the user's is not materialised
                kind: Any = type(original)
                lazy = kind(requires_grad=original.requires_grad, device=META, dtype=original.dtype)
                self.state.space.attach(lazy, self.claim or CPU)
                return lazy  # type: ignore[no-any-return]
            if is_traceable_wrapper_subclass(original):
                return self._wrapper(original, readable)
        if original.layout in SPARSE_LAYOUTS:
            parts = [self._strided(part, readable, constant) for part in parts_of(original)]
            out: Tensor = sparse_like(original, parts)
        elif original.layout is not torch.strided:
            return original
        else:
            out = self._strided(original, readable, constant)
        take_class(out)
        attributes = attributes_of(original)
        if is_parameter or isinstance(original, nn.Parameter):
            if self.state.has_plain_tensors:
                out.__class__ = _class_of_parameter(type(original))
                out.__dict__ = {name: value for name, value in attributes.items() if name != "_is_param"}
            else:  # what isinstance(x, Parameter) asks: torch/nn/parameter.py
                out.__dict__ = {**attributes, "_is_param": True}
            for name, value in () if is_parameter and not attributes else attributes.items():
                if isinstance(value, Tensor):  # scales of a quantized parameter
                    out.__dict__[name] = self.make(value, readable=False)
        else:
            out = keep_subclass(original, out)
            out.__dict__.update(attributes)
        if original.requires_grad:
            out.requires_grad_()
        return out

    def _strided(self, original: Tensor, readable: bool, constant: bool) -> Tensor:
        real = original.untyped_storage()
        found = self.state.fakes.get(real._cdata)
        storage = None if found is None else found[1]()
        if storage is None:
            nbytes = real.nbytes()
            is_whole = original.storage_offset() == 0 and original.numel() * original.itemsize == nbytes
            fills = is_whole and original.is_contiguous()
            if fills:
                base = torch.empty_strided(original.shape, original.stride(), dtype=original.dtype, device=META)
            else:
                base = bytes_on_meta(nbytes)
            place = self._claim(original, real)
            is_template = self.keeps_meta and type(real) is not MetaStorage and original.device.type == "meta"
            storage = self.state.space.attach(base, META if is_template else place)
            if is_template:
                self.state.templates[storage.number] = place
                self._templates.append(storage.number)
            if type(real) is MetaStorage:
                storage.followed = real.followed
            elif readable and real.device.type == "cpu" and _is_readable(original, nbytes, constant):
                storage.known = Deferred(original.detach())
            self.state.fakes[real._cdata] = (real, weakref.ref(storage))
            self._adopted.append(real._cdata)
            if fills:
                return count_on(base, original)
        return count_on(tensor_on(storage, original.dtype, int(original.storage_offset()), original.size(),
                                  original.stride()), original)

    def _claim(self, original: Tensor, real: torch.UntypedStorage) -> torch.device:
        if id(original) in self.on_host:
            return CPU
        if type(real) is MetaStorage and (self.placed or self.claim is None):
            return check_ordinal(real.device)
        if self.claim is not None:
            return place_among(self.state, device_of(original), self.claim)
        claim = device_of(original)
        return self.state.adopted_device if claim.type in ("cpu", "meta") else claim

    def _wrapper(self, original: Any, readable: bool) -> Tensor:
        names, context = original.__tensor_flatten__()
        inner = {name: self.make(getattr(original, name), readable) for name in names}
        out = type(original).__tensor_unflatten__(inner, context, original.size(), original.stride())
        if isinstance(original, nn.Parameter):
            return nn.Parameter(out, requires_grad=original.requires_grad)
        return out.requires_grad_(original.requires_grad)  # type: ignore[no-any-return]


def _class_of_parameter(kind: Any) -> type[nn.Parameter]:
    """The class of a fake parameter: that of its original, where it dispatches nothing on its own."""
    is_like = issubclass(kind, nn.Parameter) and kind.__basicsize__ == nn.Parameter.__basicsize__
    overrides = dispatches(kind) or kind.__torch_function__ is not torch._C._disabled_torch_function_impl
    return kind if is_like and not overrides else nn.Parameter


def _is_readable(original: Tensor, nbytes: int, constant: bool) -> bool:
    if not small_enough(nbytes // original.itemsize, original.dtype):
        return False
    is_exact = not original.dtype.is_floating_point and not original.dtype.is_complex
    return constant or is_exact or original.numel() == 1 or _is_mask(original)


def _is_mask(tensor: Tensor) -> bool:
    """Whether real numbers say what is left out: some are far below any score, or they are zeros and a number far
    above, which is subtracted, or zeros and ones.
    """
    if type(tensor) is not Tensor or not tensor.numel() or not tensor.dtype.is_floating_point or tensor.itemsize == 1:
        return False
    least = tensor.min()
    if least:
        return bool(least <= FAR_BELOW)
    most = tensor.max()
    return bool(most >= -FAR_BELOW) or bool(most == 1) and bool(((tensor == 0) | (tensor == 1)).all())


# Hooks on a user's parameters run on the fake tensors: so does what they reach, an optimizer above all.

_PLAIN = LEAVES - {types.FunctionType, types.MethodType, functools.partial}
_MAPPINGS = (dict, OrderedDict, defaultdict)
_SEQUENCES = (list, set, deque)
_DEEPEST = 2  # objects in objects that a hook reaches, functions that functions call; not the whole heap behind them


class GradientHooks:
    """Gives the hooks of parameters, and what they reach, to fake tensors; ``undo`` gets what puts it back."""

    def __init__(self, fakes: FakeTensors, undo: list[Any]) -> None:
        self.fakes, self.undo = fakes, undo
        self._on_host = FakeTensors(fakes.state, CPU)    # an optimizer's counters
        self._replaced: dict[int, tuple[Any, Any]] = {}  # by id: the original, and what takes its place
        self._in_optimizer = False

    def take(self) -> bool:
        """Give them their hooks; whether there are any."""
        self.undo.append(self._on_host.let_go)
        if any(is_updated_in_backward(original) for original, _ in self.fakes):
            self.fakes.state.assume("hooks on the autograd nodes of parameters are not run: gradients, and the "
                                    "optimizers that they step in the backward pass, are counted as if there were none")
        hooked = [pair for pair in self.fakes if has_gradient_hooks(pair[0])]
        for original, fake in hooked:
            for hooks in share_gradient_hooks(original, fake):
                if id(hooks) not in self._replaced:
                    self._replaced[id(hooks)] = hooks, hooks
                    self.undo.append(functools.partial(_set_contents, hooks, dict(hooks)))
                    hooks.update([(key, self._replace(hook, 0)) for key, hook in hooks.items()])
        return bool(hooked)

    def _replace(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in _PLAIN or isinstance(value, (torch.jit.ScriptModule, types.ModuleType, type)):
            return value
        if id(value) in self._replaced:
            return self._replaced[id(value)][1]
        if isinstance(value, Tensor):
            known = self.fakes.of(value)
            if known is not None or not self._in_optimizer:  # operators that meet other tensors adopt them
                return value if known is None else known
            is_counter = value.dim() == 0 and value.device.type == "cpu"
            return (self._on_host if is_counter else self.fakes).make(value, readable=True)
        if kind in _MAPPINGS or kind in _SEQUENCES:
            new = copy.copy(value)
            self._replaced[id(value)] = value, new
            new.clear()
            if kind in _MAPPINGS:
                new.update([(self._replace(k, depth), self._replace(v, depth)) for k, v in value.items()])
            else:
                (new.update if kind is set else new.extend)([self._replace(v, depth) for v in value])
            return new
        if kind is tuple:
            return tuple([self._replace(v, depth) for v in value])
        if kind is functools.partial:
            arguments = self._replace((value.args, value.keywords), depth)
            return functools.partial(self._replace(value.func, depth), *arguments[0], **arguments[1])
        self._replaced[id(value)] = value, value
        if kind is types.MethodType:
            self._replace(value.__self__, depth)
            self._replace(value.__func__, depth)
        elif kind is types.FunctionType:
            self._enter_function(value, depth)
        else:
            self._enter_object(value, depth)
        return value

    def _enter_function(self, function: types.FunctionType, depth: int) -> None:
        if (function.__module__ or "").partition(".")[0] in ("torch", "analyzer") or depth > _DEEPEST:
            return
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            self.undo.append(functools.partial(setattr, cell, "cell_contents", value))
            cell.cell_contents = self._replace(value, depth)
        for name in ("__defaults__", "__kwdefaults__"):
            value = getattr(function, name)
            if value:
                self.undo.append(functools.partial(setattr, function, name, value))
                setattr(function, name, self._replace(value, depth))
        variables = function.__globals__
        for name in _list_globals(function.__code__) & variables.keys():
            value = variables[name]
            self.undo.append(functools.partial(variables.__setitem__, name, value))
            variables[name] = self._replace(value, depth + 1)

    def _enter_object(self, value: Any, depth: int) -> None:
        owner, attributes = type(value).__module__, getattr(value, "__dict__", None)
        is_foreign = owner.startswith(("torch.", "types", "builtins")) and not owner.startswith("torch.optim.")
        if type(attributes) is not dict or depth >= _DEEPEST or is_foreign:
            return
        self.undo.append(functools.partial(_set_contents, attributes, dict(attributes)))
        before, self._in_optimizer = self._in_optimizer, isinstance(value, torch.optim.Optimizer)
        attributes.update([(key, self._replace(held, depth + 1)) for key, held in attributes.items()
                           if key not in REGISTRIES])
        self._in_optimizer = before
        if callable(value) and not isinstance(value, nn.Module):
            self._replace(value.__call__, depth)


def _set_contents(mapping: dict[Any, Any], contents: dict[Any, Any]) -> None:
    mapping.clear()
    mapping.update(contents)


def _list_globals(code: types.CodeType) -> set[str]:
    found = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "STORE_GLOBAL")}
    return found.union(*[_list_globals(c) for c in code.co_consts if isinstance(c, types.CodeType)])
