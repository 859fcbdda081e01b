"""What a script holds itself: modules that it calls from outside of any module, and parameters of no module."""
from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from analyzer.distributed.world_state import current_world
from analyzer.meta.intercept.compiled_function import written_forward
from analyzer.meta.tensor import device_of

from .memory_recorder import ROOT
from .module_recorder import ModuleRecorder
from .script_module import ObjectNumbers, ScriptRoot, ScriptRoots
from .storage_lifetime import OUTSIDE, StorageLifetime
from .tensor_walk import tensors_in


class Script(torch.nn.Module):
    """Holds, once a script has ended, the modules that it called from outside of any module and that are there yet."""


class ScriptHoldings:
    """Takes what a script calls into the log while it runs, and into ``script`` once it has ended.

    What the script lets go of is freed as without a recorder: ``describe`` is given each module and parameter of the
    script's own, and what tells them apart, and what it answers is kept in place of them.
    """

    def __init__(self, modules: ModuleRecorder, script: Script,
                 describe: Callable[[Any, Callable[[Any], int]], Any]) -> None:
        self.modules, self.memory, self.run, self.log = modules, modules.memory, modules.run, modules.log
        self.script, self._describe = script, describe
        #: what the script called and stepped that was there in the step described, with what was written down of it
        self.gathered: list[ScriptRoot] = []
        self._numbers = ObjectNumbers(self._forget)
        self._roots = ScriptRoots(self.log, modules.index_of, self._numbers)
        self._new: list[ScriptRoot] = []
        self._leaves: dict[int, Callable[[], torch.Tensor | None]] = {}  # that get gradients, of no module, by id
        #: of a rank: what its wrappers know of the world is asked at the end
        self._held: list[torch.nn.Module] | None = None if current_world() is None else []

    def _forget(self, key: int) -> None:
        """An object of this id is gone: the next that gets it is another."""
        self.modules.index_of.pop(key, None)
        self.modules.owners.pop(key, None)
        self._leaves.pop(key, None)

    def _step(self) -> int:
        return self.run.step

    # ---- modules

    def meet(self, module: torch.nn.Module) -> None:
        """The script calls a module, which may be a new one."""
        if not self._roots.knows(module):
            self._adopt(module)

    def _adopt(self, module: torch.nn.Module) -> None:
        """Take a module that the script calls into the log; one without state, such as a loss, stands for its class."""
        root, settled = self._roots.take(module, self._step)
        moved = [module for _, module in settled]
        for lifetime in self._lifetimes_of(moved):
            if lifetime.category in ("parameter", "buffer"):
                lifetime.category = ""  # it has another path now
        self.modules.own_parameters_of(moved)
        for tensor in (t for one in moved for t in (*one._parameters.values(), *one._buffers.values())):
            if tensor is not None:
                self._numbers(tensor)  # which tells of its death
        self._new.append(root)
        if self._held is not None:
            self._held.append(module)

    def _lifetimes_of(self, modules: list[torch.nn.Module]) -> Iterator[StorageLifetime]:
        for module in modules:
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                storage = None if tensor is None or is_lazy(tensor) else self.memory.storage_of(tensor)
                lifetime = None if storage is None else self.log.storages.get(storage.number)
                if lifetime is not None and lifetime.module == self.modules.index_of[id(module)]:
                    yield lifetime

    # ---- parameters of no module

    def leaf_met(self, variable: torch.Tensor) -> None:
        """A leaf of no module gets a gradient: it may be a parameter of the script's own."""
        if id(variable) not in self._leaves:
            self._numbers(variable)
            self._leaves[id(variable)] = weakref.ref(variable)

    def adopt_leaves(self, optimizer: torch.optim.Optimizer) -> None:
        """Take parameters of the script's own into the log: leaves that get gradients and that an optimizer steps."""
        for parameter in [p for group in optimizer.param_groups for p in group["params"] if id(p) in self._leaves]:
            if self._leaves.pop(id(parameter), None) is not None:
                root = self._roots.keep(parameter, self._step)
                self.modules.owners[id(parameter)] = ROOT
                self.modules.own(parameter, "parameter", root.name, ROOT)
                root.shape = self._describe(parameter, self._numbers)

    # ---- inputs

    def mark_inputs(self, module: torch.nn.Module, args: Any, kwargs: Any) -> dict[str, tuple[int, ...]]:
        """What a module is called with from outside and no module made is an input; the shapes by name. What a module
        without parameters is given on the host alone is none, as of transforms of a data set.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        if next(module.parameters(), None) is None and all(
                [device_of(t).type == "cpu" and self._is_input(t) for t in tensors_in((args, kwargs))]):
            return shapes
        names: list[str] = []
        with suppress(TypeError, ValueError):
            names += inspect.signature(written_forward(module)).parameters
        for i, (name, value) in enumerate([*((None, a) for a in args), *kwargs.items()]):
            label = name or (names[i] if i < len(names) else f"input_{i}")
            inputs = [t for t in tensors_in(value) if self._is_input(t)]
            self.memory.mark(inputs, "input", label)
            shapes.update((label if place == 0 else f"{label}_{place}", tuple(t.shape))
                          for place, t in enumerate(inputs))
        return shapes

    def _is_input(self, tensor: torch.Tensor) -> bool:
        if tensor.requires_grad or tensor.layout is not torch.strided:
            return False
        storage = self.memory.storage_of(tensor)
        lifetime = None if storage is None else self.log.storages.get(storage.number)
        return lifetime is not None and lifetime.node == OUTSIDE and lifetime.module == 0

    # ---- what is written down

    def describe_new(self, module: torch.nn.Module) -> None:
        """A call of a module has ended, which what was adopted in it is written down behind."""
        for root in self._new:
            root.shape = self._describe(module, self._numbers.new if root.is_class else self._numbers)
        self._new.clear()

    def describe_all(self) -> None:
        for root, found in self._roots.live():
            root.shape = self._describe(found, self._numbers)

    def join_steps(self) -> None:
        """What were taken for steps are parts of the first."""
        for root in self._roots.roots:
            root.died_in = None if root.died_in is None else 0

    def gather(self) -> None:
        """The script has ended: hold what is there, and write it down."""
        self.describe_all()
        self.gathered = self._roots.gather(self.modules.described_step)
        for root in self.gathered:
            found = root.find()
            if isinstance(found, torch.nn.Module):
                self.script.add_module(root.name, found)
            elif found is not None:
                self.script._parameters[root.name] = found
