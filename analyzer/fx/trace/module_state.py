"""What modules are like when a forward begins: one that a call finds otherwise is not one node of the graph.

A graph calls a module as the module is when the graph runs. What forward itself sets on it (flags, settings, other
parameters, hooks, another forward) is not in the graph, so such a call is traced into, with all of that in force.
"""
from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize

from analyzer.errors import InputError
from analyzer.fx.graph.statement import AutocastRegion, CheckpointRegion, GradRegion, Region
from analyzer.fx.module_borrow import Borrowed
from analyzer.meta.source_line import user_line
from analyzer.meta.spec import VALUES
from analyzer.meta.state import MetaState

_State = dict[str, tuple[Any, tuple[Any, ...]]]
"""Attributes by name, each with what it holds where it is a container."""
_MISSING: tuple[Any, tuple[Any, ...]] = None, ()
_CONTAINERS = (dict, list, set)
_TOLD = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")  # by `Assignments`, as the next
_TOLD_KINDS = torch.Tensor, nn.Module, torch._C.Generator
_CLASS = "class"  # no attribute has the name of a keyword


class ModuleStates:
    """Attributes, parameters, hooks and flags of modules, as the graph will find them when it calls the modules."""

    def __init__(self, borrowed: Borrowed) -> None:
        self.borrowed = borrowed
        self._found = {id(module): (module, _read(module)) for module in borrowed.every}
        self._unknown: list[nn.Module] = []  # such as those of a closure
        self._shared = _read_shared()

    def are_as_found(self, modules: Iterable[nn.Module]) -> bool:
        """Whether modules are as the graph will find them; one that was not there when forward began is."""
        for module in modules:
            if id(module) not in self._found:
                self._unknown.append(module)
                self._found[id(module)] = module, _read(module)
            elif not _are_same(self._found[id(module)][1], _read(module)):
                return False
        return _are_same(self._shared, _read_shared())

    def note_run(self, modules: Iterable[nn.Module]) -> None:
        """Code of ``modules`` ran as one node: what it set on them, it sets where the graph runs, too."""
        for m in modules:
            self._found[id(m)] = m, _read(m)

    def tell(self, state: MetaState) -> None:
        """Note what forward leaves otherwise. Raises InputError where a module that is none of the root's is so."""
        for module in self._unknown:
            if not _are_same(self._found[id(module)][1], _read(module)):
                raise InputError(f"forward runs a {type(module).__name__} that is no submodule of the traced module "
                                 "and changes it afterwards, so that the graph would run it as changed. Make it a "
                                 "submodule")
        others: dict[str, list[str]] = {}  # by name, of what cannot be told in full: the paths of modules that have it
        for module, before in self._found.values():
            now, path = _read(module), self.borrowed.modules.get(id(module))
            for name in () if path is None else {**before, **now}:
                one, other = entries = before.get(name, _MISSING), now.get(name, _MISSING)
                if _is_same(one, other) or type(module).__module__.startswith("torch.") and name.startswith(
                        "_") and not name.endswith("_hooks"):  # DistributedDataParallel's own state
                    continue
                if all(isinstance(value, (*VALUES, *_CONTAINERS)) and all(isinstance(item, VALUES) for item in items)
                       for value, items in entries):
                    found, left = (items if isinstance(value, _CONTAINERS) else value for value, items in entries)
                    state.assume(f"forward leaves {f'{path}.{name}'.lstrip('.')} as {left!r:.60} where it "
                                 f"finds {found!r:.60}: the graph does not set it, and does what a call does that "
                                 "finds the latter")
                elif name not in _TOLD and not any(isinstance(v, _TOLD_KINDS) for v in (one[0], other[0])):
                    others.setdefault(name, []).append(path or "the model")
        for name, paths in others.items():
            more = f" and {len(paths) - 1} others" * (len(paths) > 1)
            state.assume(f"forward changes {name} of {paths[0]}{more}: the graph does not")


def _read(module: nn.Module) -> _State:
    if isinstance(module, torch.jit.ScriptModule):  # whose attributes C++ holds
        return {"training": (module.training, ())}
    state = {name: (value, _items(value)) for name, value in vars(module).items()}
    state[_CLASS] = type(module), (type(module).forward,)
    return state


def _read_shared() -> _State:
    return {**{name: (value, _items(value)) for name, value in vars(torch_module).items()
               if name.startswith("_global_")}, "parametrize": (parametrize._cache_enabled, ())}


def _items(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, _CONTAINERS) or not value:
        return ()
    return (*value, *value.values()) if isinstance(value, dict) else tuple(value)


def _are_same(one: _State, other: _State) -> bool:
    return one.keys() == other.keys() and all(map(_is_same, one.values(), map(other.__getitem__, one)))


def _is_same(one: tuple[Any, tuple[Any, ...]], other: tuple[Any, tuple[Any, ...]]) -> bool:
    (value, items), (now, items_now) = one, other
    if value is not now and not (type(value) is type(now) and isinstance(value, VALUES) and value == now):
        return False
    return len(items) == len(items_now) and all(map(operator.is_, items, items_now))


# The regions that are open while a forward is traced.

def _grad_mode() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


@dataclass
class Frame:
    """The root of the graph, or one checkpointed function in it."""

    prefix: tuple[Region, ...]
    autocasts: int  #: how many autocast blocks were open outside
    grad_mode: tuple[bool, bool] = field(default_factory=_grad_mode)
    sets_grad: bool = False  #: whether code inside has set the grad mode that is in force
    leaves_inference: bool = False  #: whether it did so by ``inference_mode(False)``
    kept: bool | None = None  #: ``sets_grad`` before code that sets a mode without a block, to put it back
    attributes: dict[int, fx.Node] = field(default_factory=dict)  #: id(tensor or object) -> its get_attr node
    #: tensors that a call inside gave back unchanged, with their nodes outside
    renamed: list[tuple[torch.Tensor, fx.Node]] = field(default_factory=list)


class RegionStack:
    """What surrounds the next node. The grad mode is asked, as code may set it without a block; the others are told."""

    def __init__(self, replays_checkpoints: bool) -> None:
        self.replays_checkpoints = replays_checkpoints
        self.frames = [Frame((), 0)]
        self._autocasts: list[AutocastRegion] = []
        #: by id of a block that sets the grad mode: the block, ``sets_grad`` and ``leaves_inference`` before it
        self._grads: dict[int, tuple[Any, bool, bool]] = {}
        self.names_set: set[str] = set()  #: functions that set other modes without a block, which are nodes
        #: what Python code asked of the modes around forward, and was told, where: see `Asked`
        self.asked: dict[tuple[str, tuple[Any, ...]], tuple[Any, str | None]] = {}
        self._autocast_ids, self._checkpoint_ids = count(), count()

    @property
    def frame(self) -> Frame:
        return self.frames[-1]

    def current(self) -> tuple[Region, ...]:
        """The regions of a node made now, outermost first."""
        frame = self.frame
        region = (*frame.prefix, *self._autocasts[frame.autocasts:])
        mode = _grad_mode()
        sets = mode != frame.grad_mode or frame.sets_grad and ("is_grad_enabled", ()) not in self.asked
        if frame.leaves_inference:
            region, sets = (*region, GradRegion(True, leaves_inference=True)), not mode[0]
        return (*region, GradRegion(*mode)) if sets else region

    def set_grad(self, block: Any) -> None:
        """A block that sets the grad mode is made, which may set it, or begins."""
        frame = self.frame
        self._grads.setdefault(id(block), (block, frame.sets_grad, frame.leaves_inference))
        frame.sets_grad = True
        if isinstance(block, torch.inference_mode):
            frame.leaves_inference = not block.mode

    def exchange_grad(self) -> None:
        """Code that sets the grad mode without a block does so, or puts back what there was."""
        frame = self.frame
        frame.sets_grad, frame.kept = (True, frame.sets_grad) if frame.kept is None else (frame.kept, None)

    def reset_grad(self, block: Any) -> None:
        _, self.frame.sets_grad, self.frame.leaves_inference = self._grads.pop(id(block), (block, False, False))

    def ask_autocast(self) -> None:
        """What is written down is as autocast, if there is some around forward, makes it."""
        for device in ("cpu", "cuda"):
            names = ("is_autocast_enabled", *(["get_autocast_dtype"] if torch.is_autocast_enabled(device) else []))
            for name in names if (names[0], (device,)) not in self.asked else ():
                if not self.is_set(name, (device,)):
                    self.asked[name, (device,)] = getattr(torch, name)(device), user_line()

    def check_end(self) -> None:
        """Raise InputError where forward leaves another grad mode than it found."""
        if _grad_mode() != self.frame.grad_mode:
            raise InputError(f"forward leaves gradients {'on' if torch.is_grad_enabled() else 'off'}, which a graph "
                             "does not do to its caller. Set the grad mode in a `with` block, or put it back")

    def is_set(self, name: str, args: tuple[Any, ...]) -> bool:
        """Whether forward itself has set the mode that ``torch.<name>(*args)`` asks for."""
        topics = ("autocast", "default_dtype", "deterministic", "matmul_precision")
        if any(topic in name and any(topic in other for other in self.names_set) for topic in topics):
            return True
        if "autocast" in name:
            device = torch.device(args[0]).type if args else "cpu" if "cpu" in name else "cuda"
            return any(block.device_type == device for block in self._autocasts)
        return name in ("is_grad_enabled", "is_inference_mode_enabled") and any(f.sets_grad for f in self.frames)

    @contextmanager
    def checkpoint(self, **options: Any) -> Iterator[Frame]:
        region = CheckpointRegion(id=next(self._checkpoint_ids), replay=self.replays_checkpoints,
                                  restores_buffers=False, **options)
        self.frames.append(Frame((*self.current(), region), len(self._autocasts)))
        try:
            yield self.frame
        finally:
            self.frames.pop()

    def enter_autocast(self, device_type: str, dtype: torch.dtype, enabled: bool, cache_enabled: bool) -> None:
        self._autocasts.append(AutocastRegion(next(self._autocast_ids), device_type, dtype, enabled, cache_enabled))

    def exit_autocast(self) -> None:
        if self._autocasts:
            self._autocasts.pop()
