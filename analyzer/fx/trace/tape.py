"""Writes down, as graph nodes, the torch functions that a model calls; tensors, not proxies, carry the values."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn

from analyzer.errors import DataDependentError, InputError
from analyzer.fx.module_borrow import Borrowed
from analyzer.meta.address_space import MetaStorage
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.operator_info import describe_operator
from analyzer.meta.source_line import is_called_by_user, user_line
from analyzer.meta.state import MetaState, active, mode_in_force
from analyzer.meta.structure import copy_objects, holds_tensor, tensors_of
from analyzer.meta.tensor import device_of
from analyzer.meta.value.contents import read_known

from . import input_check, outline
from .function_call import (
    READS,
    REPEATED,
    STATES_OF_AUTOGRAD,
    NodeCall,
    describe_call,
    is_functional,
    name_target,
    read_state,
    reads_size,
    writes,
)
from .input_check import ContentWatch, keep_read, keep_state, shorten, state_told
from .leak import LeakError, Leaks, LeakWatch, find_leaks
from .module_state import ModuleStates
from .node_writer import NodeWriter
from .outline import Site
from .tracer_impl import BIAS_SPLITS, find_leaf_impl, is_leaf, register_tracer_impl, splits
from .unknown_size import Run, SizeWatch, forget_contents, known_contents, subscript_of_shape


class Tape(NodeWriter):
    """The listener of `MetaFunctionMode` while tracing: a node for each call that returns or changes a tensor."""

    def __init__(self, state: MetaState, borrowed: Borrowed, replays_checkpoints: bool, splits_bias: bool,
                 outlined: Mapping[Site, str]) -> None:
        super().__init__(state, borrowed, replays_checkpoints)
        #: functions and modules that are one node, with the line that asks for what depends on data
        self.outlined = outlined
        self.wanted: dict[Site, str] = {}        #: those that should be as well
        self.sizes, self.states, self.leaks = SizeWatch(state), ModuleStates(borrowed), Leaks(self.wanted)
        self.contents: ContentWatch | None = None
        #: by id of a tensor: what code asked of it besides contents and sizes, and was told
        self.read_states: dict[int, dict[tuple[str, tuple[Any, ...], tuple[Any, ...]], tuple[Any, str | None]]] = {}
        self.asks = False  #: whether the root itself was told what depends on data
        state.expects_contents = False           # code that read them would make them constants of the graph
        self.splits_bias = splits_bias
        self.failed_in: tuple[str, str] | None = None
        self.operator = ""  #: the operator of Python that is being evaluated, such as ``"__add__"``
        self.active_impls: set[Any] = set()  #: functions whose implementation for tracing runs now

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]) -> Any:
        if self.paused:
            return call(func, args, kwargs)
        if torch._C._functorch.peek_interpreter_stack() is not None:  # operators are written down, cast or not
            if any(t.is_floating_point() for t in tensors_of((args, kwargs))):
                self.regions.ask_autocast()
            return call(func, args, kwargs)
        impl = register_tracer_impl.find(func)
        if impl is None and self.splits_bias:
            impl = BIAS_SPLITS.get(func)
        if impl is not None and func not in self.active_impls:
            return self.run_impl(func, impl, args, kwargs)
        operator, self.operator = self.operator, ""
        # of a function that is written in Python, the function mode sees what it calls, too
        around = mode_in_force if is_functional(func) else nullcontext

        def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            with around():
                return call(func, args, kwargs)

        result, differs = self._run_paused(run, args, kwargs)
        self._record(func, args, kwargs, result, differs, operator)
        return result

    def _run_paused(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any],
                    module: nn.Module | None = None) -> tuple[Any, bool]:
        """What ``run`` gives, with nothing written down inside, and whether more than sizes of it depends on data."""
        with self.pause:
            try:
                result = run(args, kwargs)
            except DataDependentError:
                self._want(module)
                raise
            return result, self.sizes.concerns(args, kwargs) and self.sizes.follow(run, args, kwargs, result, module)

    def dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Write down an operator without a torch function: from TorchScript, a C++ extension, vmap or a collective."""
        if self.paused or func.namespace == "profiler" or describe_operator(func).composite:
            return
        if not holds_tensor(result) and not writes(func, kwargs):
            return
        if kwargs.get("device") is not None:  # where C++ made it: what it claims is where the graph will
            kwargs = {**kwargs, "device": device_of(next(tensors_of(result)))}
        node = self.create(NodeCall("call_function", func, _unwrap_numbers(args), _unwrap_numbers(kwargs)))
        if not writes(func, kwargs) and not describe_operator(func).is_random:
            self.optional.append(node)  # autograd's own, such as the detach of a saved result: nothing uses it
        if self.sizes.concerns(args, kwargs):
            with self.pause:
                self.sizes.follow(lambda a, k: active.dispatch_mode.handle(func, a, k), args, kwargs, result)
        self.bind(result, node, rename=not writes(func, kwargs))

    def run_impl(self, func: Any, impl: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Trace ``impl`` in place of ``func``; ``func`` called inside it is itself again."""
        self.active_impls.add(func)
        try:
            with mode_in_force():
                return impl(*args, **kwargs)
        finally:
            self.active_impls.discard(func)

    def is_leaf(self, module: nn.Module) -> bool:
        """Whether ``module`` is one node: a leaf as the graph will find it. Raises InputError where no other way is."""
        if not is_leaf(module) or self.splits_bias and splits(module):
            return False
        found = self.states.are_as_found(module.modules())
        if not found and find_leaf_impl(module) is not None:
            raise InputError(f"forward changes the {type(module).__name__} {self.module_target(module)!r} for a call "
                             "(its flags, settings, parameters or hooks), which a graph cannot show of a module with "
                             "a register_leaf_module_impl. Leave it as it is, or call another module")
        return found

    def run_leaf(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run,
                 module: nn.Module | None = None) -> Any:
        """Run something whose inside is not looked at, as one node."""
        result, differs = self._run_paused(run, args, kwargs, module)
        if module is not None:
            self.states.note_run(module.modules())
        node = self.create(NodeCall(op, target, args, kwargs))
        if differs and not (self.sizes.is_guess and self._want()):
            node = self.with_checks(node, result, str(getattr(target, "__name__", target)))
        self.bind(result, node, rename=True)
        return result

    def run_outlined(self, site: Site, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
                     module: nn.Module | None = None) -> Any:
        """Run ``function``, which asks for what depends on data, as one node; want more where its result shows it."""
        find_leaks((args, kwargs))
        self.leaks.show()
        try:
            return self._run_outlined(site, function, args, kwargs, module)
        finally:
            self.leaks.hide()

    def _run_outlined(self, site: Site, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
                      module: nn.Module | None) -> Any:
        if outline.holds_made_anew((args, kwargs), self.borrowed) and not self._want():
            raise InputError(f"{site} asks for what depends on data at {self.outlined[site]} and is given a module "
                             "with tensors that forward makes anew. Make that module inside of it, or once, as a "
                             "submodule")
        given = tuple(self.to_argument(a) for a in args), {k: self.to_argument(v) for k, v in kwargs.items()}
        held, kept = list(map(id, tensors_of((args, kwargs)))), outline.own_tensors((module, args, kwargs))
        copies: dict[int, tuple[Any, Any]] = {}
        again = copy_objects((args, kwargs), copies)
        versions = self._versions(args, kwargs)
        watch = LeakWatch(self.leaks, function if module is None else module.forward, (module, args, kwargs))
        self._check_what_was_set(site, watch, copies)

        def run_again(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            memo: dict[int, tuple[Any, Any]] = {}
            args, kwargs = copy_objects((args, kwargs), memo)
            watch.restart()
            result = function(*args, **kwargs)
            watch.note((held, memo[id(copy)][1]) for held, copy in copies.values() if id(copy) in memo)
            return result

        with self.pause:
            before = known_contents([*tensors_of((args, kwargs)), *(() if module is None else module.buffers())])
        options, self.state.options = self.state.options, dataclasses.replace(self.state.options,
                                                                              unknown_value="placeholder")
        self.state.expects_contents = True
        try:
            with self.pause:
                result = function(*args, **kwargs)
                watch.note()
                for tensor, known in before:
                    storage: Any = tensor.untyped_storage()
                    if storage.known is not known:  # written to, with what data decides
                        forget_contents(tensor)
                differs = self.sizes.follow(run_again, again[0], again[1], result, module, contents=True)
                if self.contents is not None:
                    self.contents.forget()
        except Exception:  # it cannot run with what unknown data was taken as
            self._want()
            raise
        finally:
            self.state.options, self.state.expects_contents = options, False
        watch.finish(site, self._next_site(), self.outlined[site])
        self.states.note_run(watch.state.modules)
        changed = list(map(id, tensors_of((args, kwargs)))) != held
        if changed:
            given = self._give_copies(given, copies)
        shows = differs or outline.own_tensors((module, args, kwargs)) != kept
        if shows:
            self.asks = not self._want() or self.asks
        elif not changed and result is not None and not holds_tensor(
                result) and self._versions(args, kwargs) == versions:
            return result
        is_method = args and isinstance(args[0], nn.Module)
        target = outline.CallMethod(function) if is_method else name_target(function)
        returned = result
        call = NodeCall("call_function", target, *given) if module is None else NodeCall(
            "call_module", self.module_target(module), *given)
        if changed:  # it put other tensors into its arguments
            returned = result, args if module is None else (module, *args), kwargs
            if module is not None:
                target = outline.CallMethod(outline.call_module)
                given = (self.module_node(module), *given[0]), given[1]
            call = NodeCall("call_function", outline.GiveArguments(target), *given)
        node = self.create(call)
        node = self.with_checks(node, returned, str(site)) if shows else self.with_structure(node, returned)
        self.bind(returned, node, rename=True)
        self.state.assume(
            f"{site} asks for what depends on data at {self.outlined[site]}: it is one node, which runs it as it is")
        return result

    def _check_what_was_set(self, site: Site, watch: LeakWatch, copies: Mapping[int, tuple[Any, Any]]) -> None:
        rebuilt = {id(held if isinstance(held, (list, dict)) else vars(held)) for held, _ in copies.values()
                   if isinstance(held, (list, dict)) or holds_tensor(held)}
        if (names := self.leaks.list_set(watch.state, rebuilt)) and not self._want():
            raise LeakError(f"{site} asks for what depends on data at {self.outlined[site]} and reads "
                            f"{', '.join(sorted(names))}, which forward sets before: the graph would run it with "
                            "what is there without that. Pass it as an argument")

    def _versions(self, *arguments: Any) -> list[int]:
        with self.pause:
            return [t._version for t in (*tensors_of(arguments), *(t for _, t in self.borrowed.fakes))
                    if not t.is_inference()]

    def _give_copies(self, given: Any, copies: dict[int, tuple[Any, Any]]) -> Any:
        """``given`` with a copy, anew in each run, of objects as they were before tensors were put into them."""
        fresh: dict[fx.Node, fx.Node] = {}
        for name, held in list(self.constants.items()):
            if id(held) not in copies or not holds_tensor(held):
                continue
            self.constants[name] = copies[id(held)][1]
            for node in [n for n in self.graph.nodes if n.op == "get_attr" and n.target == name]:
                with self.graph.inserting_after(node):
                    fresh[node] = self.graph.call_function(copy_objects, (node,))
                fresh[node].meta.update(node.meta)
                node.replace_all_uses_with(fresh[node], delete_user_cb=lambda user: user not in fresh.values())
        return fx.node.map_arg(given, lambda node: fresh.get(node, node))

    def follow(self, values: Any, results: Any) -> None:
        for value, result in zip(tensors_of(values), tensors_of(results)):
            self.map(result, self.node_of(value))
            self.sizes.set_dims(result, self.sizes.dims_of(value), self.sizes.is_guessed(value))

    @contextmanager
    def module(self, path: str, kind: str) -> Iterator[None]:
        before = self.modules
        self.modules = (*before, (path, kind))
        try:
            yield
        except BaseException:
            self.failed_in = self.failed_in or self.modules[-1]
            raise
        finally:
            self.modules = before

    @contextmanager
    def checkpoint(self, **options: Any) -> Iterator[None]:
        with self.regions.checkpoint(**options) as frame:
            try:
                yield
            finally:
                for tensor, node in reversed(frame.renamed):
                    self._nodes[id(tensor)] = node

    def _note_version(self, tensor: Tensor, told: int) -> None:
        for path, fake, _ in (*self.borrowed.parameters, *self.borrowed.buffers):
            if fake is tensor:
                self.state.assume(f"_version of {path}, which every write to it counts up, was {told} when traced and "
                                  f"is a constant of the graph, at {user_line()}")

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, differs: bool,
                operator: str) -> None:
        if not holds_tensor(result) and not writes(func, kwargs):
            if differs and reads_size(func):
                self._read_size(func, args)
            elif getattr(func, "__name__", "") in READS:
                self._note_read(func, args, kwargs, result)
            elif getattr(func, "__name__", "") in ("__format__", "__repr__"):
                if not self.dependent.isdisjoint(map(self.find, tensors_of(args))):
                    self.state.assume(f"the text of a tensor's contents is a constant of the graph, at {user_line()}")
            elif (name := read_state(func)) and is_called_by_user(input_check.__file__):
                told, maker = state_told(name, result), self.find(args[0])
                self.read_states.setdefault(id(args[0]), {})[name, args[1:], tuple(kwargs.items())] = told, user_line()
                if name == "_version":
                    self._note_version(args[0], told)
                if name in STATES_OF_AUTOGRAD and maker is not None and maker.op != "placeholder":
                    self.call(keep_state, maker, name, told, user_line())
            return
        node = self.create(describe_call(func, args, kwargs, operator))
        if differs and not (self.sizes.is_guess and self._want()):
            node = self.with_structure(node, result)
        in_place = writes(func, kwargs) or is_functional(func) and any(result is a for a in args)
        self.bind(result, node, rename=not in_place)

    def _next_site(self) -> Site | None:
        return next((site for site in outline.open_sites(self.borrowed) if site not in self.outlined), None)

    def _want(self, leaf: nn.Module | None = None) -> bool:
        """Ask for ``leaf``, or the innermost function or module that runs, to be one node; False for the root alone."""
        inner = None if leaf is None else outline.module_site(leaf, self.borrowed)
        site = self._next_site() if inner is None or inner in self.outlined else inner
        if site is not None:
            self.wanted.setdefault(site, user_line() or "")
        return site is not None

    def _read_size(self, func: Any, args: tuple[Any, ...]) -> None:
        tensor = args[0]
        dims = self.sizes.dims_of(tensor)
        if getattr(func, "__name__", "") == "__get__":
            asked = subscript_of_shape()
            dims = dims if asked is None else dims & {asked % tensor.dim()}
        is_guess = self.sizes.is_guessed(tensor)
        if dims and not (is_guess and self._want()):
            self.state.assume("a size that depends on data is a constant of the graph, which raises where data gives "
                              f"another one, at {user_line()}")
            self.asks |= is_guess
            sizes = {d: tensor.shape[d] for d in sorted(dims)}
            self.map(tensor, self.call(outline.keep_sizes, self.node_of(tensor), sizes, user_line()))

    def _note_read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        given = [(t, node) for t in tensors_of((args, kwargs)) if (node := self._nodes.get(id(t))) in self.dependent]
        for tensor, node in given[:1]:
            self.state.assume(f"{func.__name__} of {node.name} was {shorten(result)} when traced and is a constant of "
                              f"the graph, which raises where it is another, at {user_line()}")
            method, traced = func.__name__, result
            if method not in REPEATED:
                method, args, kwargs, known = "tolist", (tensor,), {}, read_known(tensor)
                with without_modes():
                    traced = None if known is None else known.tolist()
            if isinstance(traced, list):
                traced = self.attribute(traced, "_object", traced)
            self.create(NodeCall("call_function", keep_read, (method, traced, user_line(), *args), kwargs))


def _unwrap_numbers(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        if tree.dim() == 0 and type(tree) is Tensor and not tree.requires_grad and not isinstance(
                tree.untyped_storage(), MetaStorage):
            with without_modes():
                return tree.item()
        return tree
    if type(tree) in (list, tuple):
        return type(tree)(_unwrap_numbers(x) for x in tree)
    return {k: _unwrap_numbers(v) for k, v in tree.items()} if type(tree) is dict else tree
