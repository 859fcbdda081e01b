"""A user's module run without its data: every tensor that it holds is swapped and put back."""
from __future__ import annotations

import functools
import operator
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from analyzer.meta.intercept.compiled_function import settings_of_module
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.intercept.replacement import InterruptsHeld
from analyzer.meta.spec import LEAVES
from analyzer.meta.state import MetaState, active, current, indexed_device
from analyzer.meta.structure import host_tensors, make_tuple
from analyzer.meta.tensor import MetaTensor, device_of
from analyzer.record.tensor_walk import REGISTRIES, walk_modules
from analyzer.state.value import behind_proxy, refill_mapping

from .fake_tensor import FakeTensors, GradientHooks, is_unquantized, quantize_on, restore_generators, save_generators
from .module_wrapper import uncompiled

_CONTAINERS = (list, dict, set, deque)
_EMPTY = frozenset({list, dict, set, OrderedDict})
_REGISTERED = frozenset(REGISTRIES)
_OBJECT_DEPTH = 2  # plain objects of a module's (a config, a cache) and what they hold; not the whole heap behind them


@contextmanager
def borrow_module(root: nn.Module, claim: torch.device | None = None,
                  others: Mapping[str, nn.Module] = MappingProxyType({}),
                  walked: list[tuple[str, nn.Module]] | None = None) -> Iterator[Borrowed]:
    """Swap the tensors of ``root`` (``walked`` where its modules were listed), and of ``others`` that run with it, by
    the paths that they get, for fake tensors; on leaving, everything is as it was, also after an exception.

    To be entered inside an active `MetaTensorMode`. Fake tensors claim ``claim``, or without one the device of the
    original (the state's ``adopted_device`` for CPU and meta); a model made under a mode, put on an accelerator, keeps
    its claims. They are allocated in the order of ``Module.to``: children, parameters, buffers. Tied tensors stay tied
    and shared storages shared. Put back: attributes and their containers, registered tensors and modules, hooks,
    training flags, classes of lazy modules, random number generators, torch's grad mode and default dtype.

    >>> from analyzer.meta.mode import MetaTensorMode
    >>> layer = nn.Linear(2, 3)
    >>> with MetaTensorMode(), borrow_module(layer, torch.device("cuda")) as borrowed:
    ...     print(layer.weight.device, [path for path, _, _ in borrowed.parameters])
    cuda:0 ['weight', 'bias']
    >>> layer.weight.device
    device(type='cpu')
    """
    state = current()
    assert state is not None, "borrow_module() needs an active MetaTensorMode"
    borrowed = Borrowed(root, state, None if claim is None else indexed_device(claim), others,
                        walk_modules(root) if walked is None else walked)
    generators, moves = save_generators(), active.generator_moves
    grad_enabled, default_dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    deterministic = torch.get_deterministic_debug_mode()
    try:
        borrowed.take()
        yield borrowed
    finally:
        with InterruptsHeld():
            torch.set_grad_enabled(grad_enabled)
            torch.set_default_dtype(default_dtype)
            torch.set_deterministic_debug_mode(deterministic)
            borrowed.give_back()
            restore_generators(generators, is_torchs_moved=active.generator_moves != moves)




class Borrowed:
    """What stands for what while a module is borrowed, and how to undo it. ``parameters`` and ``buffers`` list (path,
    fake tensor, original), a tensor of several names once. ``modules`` maps id(module) to its first path, ``by_path``
    the other way; ``walked`` has registered modules in order, ``every`` all. ``root`` is the module to call, ``others``
    are not part of it. Buffers and attributes are listed until the forward replaces them, which frees their memory.
    """

    def __init__(self, root: nn.Module, state: MetaState, claim: torch.device | None,
                 others: Mapping[str, nn.Module], of_root: list[tuple[str, nn.Module]]) -> None:
        self.root, self._state, self._claim, self._of_root = uncompiled(root), state, claim, of_root
        inside = {id(module) for _, module in of_root} if others else set()
        self.others = {path: uncompiled(other) for path, other in others.items() if id(other) not in inside}
        walked = [*of_root, *(pair for path, module in others.items() for pair in walk_modules(module, path))]
        #: how each module under torch.compile is compiled, by id; None for one under torch.compiler.disable
        self.compiled: dict[int, dict[str, Any] | None] = {}
        for _, module in walked:
            self._note_compiled(module)
        # where tensors made under a mode were put on an accelerator, others are on the host on purpose
        is_placed = any(t is not None and type(t) is not nn.Parameter and isinstance(t, MetaTensor)
                        and t.device.type not in ("cpu", "meta")
                        for _, m in walked for tensors in (m._parameters, m._buffers) for t in tensors.values())
        # where all that is registered has data, what is on meta besides is no model without data, but a template
        with without_modes():
            places = {device_of(t).type for _, m in walked for tensors in (m._parameters, m._buffers)
                      for t in tensors.values() if t is not None and not is_lazy(t)}
        self.fakes = FakeTensors(state, claim, is_placed, keeps_meta=bool(places) and "meta" not in places)
        self.original_of = self.fakes.original_of
        self.parameters: list[tuple[str, Tensor, Tensor]] = []
        self._buffers: list[tuple[str, weakref.ref[Tensor], Tensor]] = []
        self.modules: dict[int, str] = {}
        self.by_path: dict[str, nn.Module] = {}
        self.walked: list[tuple[str, nn.Module]] = []
        self.every: list[nn.Module] = []
        self.has_gradient_hooks = False
        self._undo: list[Callable[[], object] | dict[Any, Any]] = []  # mappings, each before what was in it
        self._unquantized: list[tuple[nn.Module, str, Tensor]] = []
        self._empty: list[Any] = []         # containers that were empty
        self._seen: dict[int, object] = {}  # modules, containers and objects already walked

    @property
    def buffers(self) -> list[tuple[str, Tensor, Tensor]]:
        """(path, fake tensor, original) of each buffer, as long as nothing replaced it."""
        return [(path, fake, original) for path, ref, original in self._buffers if (fake := ref()) is not None]

    @property
    def attributes(self) -> list[tuple[Tensor, Tensor]]:
        """Fake tensors and originals of tensors that are not registered, as long as nothing replaced them."""
        named = {id(fake) for group in (self.parameters, self.buffers) for _, fake, _ in group}
        return [(fake, original) for original, fake in self.fakes if id(fake) not in named]

    def take(self) -> None:
        with without_modes():
            for module in (self.root, *self.others.values()):
                self._walk(module)
            self.has_gradient_hooks = GradientHooks(self.fakes, self._undo).take()
        for module, name, tensor in self._unquantized:  # weights that a move to the GPU quantizes are so
            fake = self.fakes.of(tensor)
            if fake is None:
                assert self._claim is not None
                fake = quantize_on(self._claim, tensor, module)
                self.fakes.stand_in(tensor, fake)
            module._parameters[name] = fake  # type: ignore[assignment]
        self._unquantized.clear()
        for seen in self._seen.values():
            if isinstance(seen, nn.RNNBase):  # as `Module.to` does: the weights move into one buffer
                seen.flatten_parameters()
        with without_modes():
            self._list_all()

    def give_back(self) -> None:
        while self._undo:
            last = self._undo.pop()
            if type(last) is not dict:
                last()  # type: ignore[operator]
                continue
            contents: Any = self._undo.pop()
            # some mappings refuse to be changed
            if len(contents) != len(last) or not all(map(operator.is_, contents.values(), last.values())) or not all(
                    map(operator.is_, contents, last)):
                refill_mapping(contents, last, last.values())
        for container in self._empty:
            if container:
                container.clear()
        self._empty.clear()
        self.fakes.let_go()

    def _note_compiled(self, module: nn.Module) -> None:
        inner = uncompiled(module)
        if inner is not module or module.__dict__.get("_compiled_call_impl") is not None:
            self.compiled[id(inner)] = settings_of_module(module)

    def _walk(self, module: nn.Module) -> None:
        if id(module) in self._seen:
            return
        self._seen[id(module)] = module
        if isinstance(module, torch.jit.ScriptModule):
            self._walk_scripted(module)
            return
        attributes = module.__dict__
        self._snapshot(attributes)
        if isinstance(module, nn.modules.lazy.LazyModuleMixin):  # becomes another class in its first forward
            self._undo.append(functools.partial(object.__setattr__, module, "__class__", type(module)))
        children = attributes["_modules"]
        self._empty += [held for name in REGISTRIES if not (held := attributes[name])]
        if children:
            self._snapshot(children)
            for name, child in children.items():
                if child is not None:
                    inner = uncompiled(child)
                    if inner is not child:
                        children[name] = inner
                    self._walk(inner)
        for tensors, is_buffer in ((attributes["_parameters"], False), (attributes["_buffers"], True)):
            if tensors:
                self._take_registered(module, tensors, is_buffer)
        if attributes.get("_compiled_call_impl") is not None:
            attributes["_compiled_call_impl"] = None
        self._walk_items(attributes, _REGISTERED, 0)

    def _take_registered(self, module: nn.Module, tensors: dict[str, Tensor | None], is_buffer: bool) -> None:
        self._snapshot(tensors)
        on_gpu = self._claim is not None and self._claim.type == "cuda"
        for name, tensor in tensors.items():
            if on_gpu and tensor is not None and type(tensor) is not nn.Parameter and is_unquantized(tensor):
                self._unquantized.append((module, name, tensor))
            elif tensor is not None:
                tensors[name] = self.fakes.make(tensor, readable=is_buffer)
                for value in vars(tensor).values():  # how it is quantized, or what code notes of it
                    if type(value) not in LEAVES and not isinstance(value, Tensor):
                        self._replace(value, 0)

    def _walk_scripted(self, module: torch.jit.ScriptModule) -> None:
        """A module of TorchScript, whose tensors C++ holds. It runs as written: its executor differentiates what
        it has run twice on its own (getPlanFor in torch/csrc/jit/runtime/profiling_graph_executor_impl.cpp).
        """
        as_written = torch.jit.optimized_execution(False)  # type: ignore[attr-defined]
        as_written.__enter__()
        self._undo.append(functools.partial(as_written.__exit__, None, None, None))
        self._state.assume("a module of TorchScript is profiled operator by operator, as the module that it was made "
                           "from: its fuser is not simulated")
        held: Any = module._c
        for name in held._method_names():
            held._get_method(name)._debug_flush_compilation_cache()
        for tensors, is_buffer in ((module._parameters, False), (module._buffers, True)):
            for name, tensor in list(tensors.items()):
                if tensor is not None:
                    self._undo.append(functools.partial(held.setattr, name, tensor))
                    held.setattr(name, self.fakes.make(tensor, readable=is_buffer))
        for child in module.children():
            self._walk(child)

    def _snapshot(self, contents: dict[Any, Any]) -> None:
        self._undo += contents, dict(contents)

    def _walk_items(self, contents: dict[Any, Any], skipped: frozenset[str], depth: int) -> None:
        changes: list[tuple[Any, Any]] = []
        for key, value in contents.items():
            kind = type(value)
            if kind in LEAVES or key in skipped:
                continue
            if kind in _EMPTY and not value:  # most of what a module has: no hooks
                self._empty.append(value)
                continue
            new = self._replace(value, depth)
            if new is not value:
                changes.append((key, new))
        if changes:
            contents.update(changes)

    def _replace(self, value: Any, depth: int) -> Any:
        """``value`` with its tensors replaced: containers in place, tuples and weak references as new objects."""
        if type(value) in weakref.ProxyTypes:
            if isinstance(target := behind_proxy(value), nn.Module):
                self._walk(target)
            return value
        if isinstance(value, Tensor):
            return self.fakes.make(value, readable=True, constant=True)
        if isinstance(value, nn.Module):
            inner = uncompiled(value)
            self._note_compiled(value)
            self._walk(inner)
            return inner
        if isinstance(value, _CONTAINERS):
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                self._replace_in(value, depth)
            return value
        if isinstance(value, torch._C.Generator):
            self._undo.append(functools.partial(value.set_state, value.get_state()))
            return value
        if isinstance(value, tuple):
            self.fakes.on_host.update(map(id, host_tensors(value)))
            new = [v if type(v) in LEAVES else self._replace(v, depth) for v in value]
            return value if all(a is b for a, b in zip(new, value)) else make_tuple(value, new)
        if type(value) is weakref.ref:
            target = value()
            new_target = self.fakes.of(target) if isinstance(target, Tensor) else None
            return value if new_target is None else weakref.ref(new_target)
        attributes = getattr(value, "__dict__", None)
        # functions, classes and torch's own are none of the model's
        is_foreign = isinstance(value, type) or (type(value).__module__.startswith(("torch.", "types"))
                                                 and type(value) is not SimpleNamespace)
        if type(attributes) is dict and attributes and depth < _OBJECT_DEPTH and not is_foreign and id(
                value) not in self._seen:
            self._seen[id(value)] = value
            self._snapshot(attributes)
            self._walk_items(attributes, frozenset(), depth + 1)
        return value

    def _replace_in(self, container: Any, depth: int) -> None:
        if not container:
            self._empty.append(container)
        elif isinstance(container, dict):
            self._snapshot(container)
            self._walk_items(container, frozenset(), depth)
        else:
            items, is_set = list(container), isinstance(container, set)
            self._undo += [functools.partial(container.update if is_set else container.extend, items), container.clear]
            for i, value in () if is_set else enumerate(items):
                if type(value) not in LEAVES and (new := self._replace(value, depth)) is not value:
                    container[i] = new

    def _list_all(self) -> None:
        named: set[int] = set()
        self.walked = walk_modules(self.root) if self.compiled else list(self._of_root)  # without those around others
        for path, other in self.others.items():
            before = {id(module) for _, module in self.walked}
            self.walked += [pair for pair in walk_modules(other, path) if id(pair[1]) not in before]
        self.every = [value for value in self._seen.values() if isinstance(value, nn.Module)]
        for path, module in self.walked:
            self.modules[id(module)] = path
            self.by_path[path] = module
            for tensors, is_buffer in ((module._parameters, False), (module._buffers, True)):
                for name, fake in tensors.items():
                    if fake is not None and id(fake) not in named:
                        named.add(id(fake))
                        original = self.original_of(fake)
                        assert original is not None
                        full = f"{path}.{name}" if path else name
                        if is_buffer:
                            self._buffers.append((full, weakref.ref(fake), original))
                        else:
                            self.parameters.append((full, fake, original))
