"""Writes down, as graph nodes, the torch functions that a model calls; tensors, not proxies, carry the values."""
from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from analyzer.errors import DataDependentError, InputError
from analyzer.fx.graph.traced_graph import TracedGraph
from analyzer.fx.module_borrow import Borrowed
from analyzer.meta.active_mode import active_dispatch_mode, mode_in_force
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.operator_info import describe_operator
from analyzer.meta.source_line import user_line
from analyzer.meta.state import MetaState
from analyzer.meta.storage import MetaStorage
from analyzer.meta.tensor import claim_of
from analyzer.meta.value.contents import read_known

from .bias_split import register_bias_split, splits
from .call_target import ApplyFunction, name_target
from .changed_content import ChangedContent, ContentWatch, keep_contents
from .function_call import READS, NodeCall, describe_call, reads_size, writes
from .graph_value import to_argument
from .leaf_module import is_leaf
from .outline import (
    CallMethod,
    GiveArguments,
    HeldModule,
    Site,
    call_module,
    expected_structure,
    held_tensors,
    holds_made_anew,
    keep_sizes,
    keep_structure,
    module_site,
    open_sites,
    own_tensors,
)
from .region_stack import RegionStack
from .structure import children, copy_objects, holds_tensor, tensors_of
from .tracer_impl import register_tracer_impl
from .unknown_size import Run, SizeWatch, forget_contents, known_contents, subscript_of_shape

Tensor = torch.Tensor

_RANDOM = ("rand", "randn", "randint", "randperm", "bernoulli", "multinomial", "normal", "dropout", "rrelu")
_SPEC_ONLY = frozenset({
    "zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full", "arange",
    "zeros", "ones", "full", "empty"
})


class _Pause:
    """While it is entered, the tape writes nothing down."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape

    def __enter__(self) -> None:
        self.tape.paused += 1

    def __exit__(self, *exc: object) -> None:
        self.tape.paused -= 1


class Tape:
    """The listener of `MetaFunctionMode` while tracing.

    Every tensor result of a recorded call is mapped to the node that made it; a tensor without a node is a parameter or
    buffer of the root (a ``get_attr`` node), or a constant that the graph module will hold.
    """

    def __init__(self, state: MetaState, borrowed: Borrowed, replays_checkpoints: bool = False,
                 splits_bias: bool = False, outlined: Mapping[Site, str] | None = None) -> None:
        self.state, self.borrowed = state, borrowed
        #: functions and modules that are one node, with the line that asks for what depends on data
        self.outlined = outlined or {}
        self.wanted: dict[Site, str] = {}        #: those that should be as well
        self.sizes = SizeWatch(state)
        self.contents: ContentWatch | None = None
        self.keeps_sizes = False                 #: whether the root was told a size that depends on data
        state.expects_contents = False           # code that read them would make them constants of the graph
        self.splits_bias = splits_bias
        self.regions = RegionStack(replays_checkpoints)
        self.graph = TracedGraph()
        self.paused = 0
        self._pause = _Pause(self)
        self.constants: dict[str, Any] = {}      #: attribute name on the graph module -> tensor, module or object
        self.modules: tuple[tuple[str, str], ...] = () #: (path, class) of the modules that run, outermost first
        self.failed_in: tuple[str, str] | None = None
        #: nodes that nobody asked for, such as the parts of a container; dropped where unused
        self.optional: list[fx.Node] = []
        self._nodes: dict[int, fx.Node] = {}
        self._kept: list[Any] = [borrowed.buffers] # keeps what `_nodes` names by id alive
        self._held: dict[int, Tensor] = {}       # id(tensor without a node) -> what the graph module holds for it
        self.dependent: set[fx.Node] = set()     #: nodes whose contents depend on inputs, parameters or chance
        self._active_impls: set[Any] = set()
        self._paths = {
            id(stand_in): path for group in (borrowed.parameters, borrowed.buffers) for path, stand_in, _ in group
        }

    # -- what the mode calls -------------------------------------------------------------------------------------

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]) -> Any:
        """Run a torch function and write it down."""
        if self.paused or torch._C._functorch.peek_interpreter_stack() is not None:
            return call(func, args, kwargs)  # under vmap or grad, the operators that come out of it are written down
        impl = register_tracer_impl.find(func)
        if impl is None and self.splits_bias:
            impl = register_bias_split.find(func)
        if impl is not None and func not in self._active_impls:
            return self.run_impl(func, impl, args, kwargs)
        with self.pause():
            try:
                result = call(func, args, kwargs)
            except DataDependentError:
                self._want()
                raise
            differs = self.sizes.concerns(args, kwargs) and self.sizes.follow(lambda a, k: call(func, a, k), args,
                                                                              kwargs, result)
        self._record(func, args, kwargs, result, differs)
        return result

    def dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Write down an operator that no torch function announced: from TorchScript, a C++ extension, vmap or a
        collective.
        """
        if self.paused or func.namespace == "profiler" or describe_operator(func).composite:
            return
        if not holds_tensor(result) and not writes(func, kwargs):
            return
        if kwargs.get("device") is not None:  # where C++ made it: what it claims is where the graph will
            kwargs = {**kwargs, "device": claim_of(next(tensors_of(result)))}
        node = self._create(NodeCall("call_function", func, _unwrap_numbers(args), _unwrap_numbers(kwargs)))
        if not writes(func, kwargs) and not describe_operator(func).is_random:
            self.optional.append(node)  # autograd's own, such as the detach of a saved result: nobody uses it
        if self.sizes.concerns(args, kwargs):
            with self.pause():
                self.sizes.follow(lambda a, k: active_dispatch_mode().handle(func, a, k), args, kwargs, result)
        self._bind(result, node, rename=not writes(func, kwargs))

    def run_impl(self, func: Any, impl: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Trace ``impl`` in place of ``func``; ``func`` called inside it is itself again."""
        self._active_impls.add(func)
        try:
            with mode_in_force():
                return impl(*args, **kwargs)
        finally:
            self._active_impls.discard(func)

    def is_leaf(self, module: nn.Module) -> bool:
        """Whether ``module`` is to be one node."""
        return is_leaf(module) and not (self.splits_bias and splits(module))

    def is_inside_impl(self, func: Any) -> bool:
        return func in self._active_impls

    # -- what the patches call -----------------------------------------------------------------------------------

    def run_leaf(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run,
                 module: nn.Module | None = None) -> Any:
        """Run something whose inside is not looked at, as one node."""
        with self.pause():
            try:
                result = run(args, kwargs)
            except DataDependentError:
                self._want(module)
                raise
            differs = self.sizes.concerns(args, kwargs) and self.sizes.follow(run, args, kwargs, result, module)
        node = self._create(NodeCall(op, target, args, kwargs))
        if differs and not self._want():
            node = self._with_structure(node, result)
        self._bind(result, node, rename=True)
        return result

    def run_outlined(self, site: Site, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
                     module: nn.Module | None = None) -> Any:
        """Run code that asks for what depends on data, as one node; where its result shows what that was, code around
        it is wanted too.

        ``function`` is that of ``site``, or what runs ``module``.
        """
        def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return function(*args, **kwargs)

        if holds_made_anew((args, kwargs), self.borrowed) and not self._want():
            raise InputError(
                f"{site} asks for what depends on data at {self.outlined[site]} and is given a module with tensors that forward makes anew. "
                f"Make that module inside of it, or once, as a submodule")
        given = tuple(to_argument(self, a) for a in args), {k: to_argument(self, v) for k, v in kwargs.items()}
        held, kept = held_tensors((args, kwargs)), own_tensors((module, args, kwargs))
        copies: dict[int, tuple[Any, Any]] = {}
        again = copy_objects((args, kwargs), copies)
        versions = self._versions(args, kwargs)
        before = known_contents([*tensors_of((args, kwargs)), *(() if module is None else module.buffers())])
        options, self.state.options = self.state.options, dataclasses.replace(self.state.options,
                                                                              unknown_value="placeholder")
        self.state.expects_contents = True
        try:
            with self.pause():
                result = run(args, kwargs)
                for tensor, known in before:
                    if tensor.untyped_storage(
                    ).known is not known:  # type: ignore[attr-defined]  # written to, with what data decides
                        forget_contents(tensor)
                differs = self.sizes.follow(lambda a, k: run(*copy_objects((a, k))), again[0], again[1], result, module,
                                            contents=True)
                if self.contents is not None:
                    self.contents.forget()
        except Exception:  # it cannot run with what unknown data was taken as
            self._want()
            raise
        finally:
            self.state.options, self.state.expects_contents = options, False
        changed = held_tensors((args, kwargs)) != held
        if changed:
            given = self._give_copies(given, copies)
        if differs or own_tensors((module, args, kwargs)) != kept:
            self._want()
        elif not changed and result is not None and not holds_tensor(
                result) and self._versions(args, kwargs) == versions:
            return result
        target = CallMethod(function) if args and isinstance(args[0], nn.Module) else name_target(function)
        if changed:  # it put other tensors into its arguments
            returned = result, args, kwargs
            if module is not None:
                target, given = CallMethod(call_module), ((self.module_node(module), *given[0]), given[1])
                returned = result, (module, *args), kwargs
            node = self._create(NodeCall("call_function", GiveArguments(target), *given))
            self._bind(returned, self._with_structure(node, returned), rename=True)
        else:
            call = NodeCall("call_function", target, *given) if module is None else NodeCall(
                "call_module", self.module_target(module), *given)
            self._bind(result, self._with_structure(self._create(call), result), rename=True)
        self.state.assume(
            f"{site} asks for what depends on data at {self.outlined[site]}: it is one node, which runs it as it is")
        return result

    def _versions(self, *arguments: Any) -> list[int]:
        """How often arguments, and tensors that the root holds, were written to."""
        return [t._version for t in (*tensors_of(arguments), *(t for _, t in self.borrowed.stand_ins))
                if not t.is_inference()]

    def _give_copies(self, given: Any, copies: dict[int, tuple[Any, Any]]) -> Any:
        """``given``, nodes of arguments, with objects that tensors have been put into as they were before: another copy
        of it in each run.
        """
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

    def run_function(self, cls: type[torch.autograd.Function], args: tuple[Any, ...], kwargs: dict[str, Any],
                     run: Run) -> Any:
        """Run a custom autograd function as one node."""
        return self.run_leaf("call_function", ApplyFunction(cls), args, kwargs, run)

    def follow(self, values: Any, results: Any) -> None:
        """Let ``results`` be what ``values`` are in the graph."""
        for value, result in zip(tensors_of(values), tensors_of(results)):
            self.map(result, self.node_of(value))
            self.sizes.set_dims(result, self.sizes.dims_of(value))

    @contextmanager
    def module(self, path: str, kind: str) -> Iterator[None]:
        """A module that runs."""
        before = self.modules
        self.modules = (*before, (path, kind))
        try:
            yield
        except BaseException:
            self.failed_in = self.failed_in or self.modules[-1]
            raise
        finally:
            self.modules = before

    def pause(self) -> _Pause:
        """Write nothing down inside."""
        return self._pause

    @contextmanager
    def checkpoint(self, **options: Any) -> Iterator[None]:
        """A checkpointed function runs."""
        with self.regions.checkpoint(**options) as frame:
            try:
                yield
            finally:
                for tensor, node in reversed(frame.renamed):
                    self._nodes[id(tensor)] = node

    # -- nodes ---------------------------------------------------------------------------------------------------

    def placeholder(self, name: str, default: tuple[Any, ...], value: Any) -> None:
        """An argument of the forward, with what is inside it."""
        node = self.graph.create_node("placeholder", name, default, name=name.lstrip("*"))
        node.meta.update(region=(), module_path="", module_stack=(), source=None)
        self.dependent.add(node)
        self._bind(value, node)

    def output(self, value: Any) -> None:
        """The result of the forward; ends the graph."""
        node = self.graph.output(to_argument(self, value))
        node.meta.update(region=(), module_path="", module_stack=(), source=None)
        for unused in reversed(self.optional):
            if not unused.users:
                self.graph.erase_node(unused)

    def assign_buffer(self, buffer: Tensor, value: Tensor) -> None:
        """The forward replaced a registered buffer: the graph writes the new contents into it."""
        target = to_argument(self, buffer)
        self.create_from(NodeCall("call_function", assign_buffer, (target, self.node_of(value)), {}))

    def check_content(self, changed: ChangedContent) -> None:
        """Let the graph begin with a check that a tensor that it changes has the contents that were read of it."""
        name = self._paths.get(id(changed.tensor)) or self.node_of(changed.tensor).target
        with self.graph.inserting_before(next(n for n in self.graph.nodes if n.op != "placeholder")):
            tensor = self.create_from(NodeCall("get_attr", name, (), {}))
            traced = self.attribute(changed.value, "_tensor_constant", changed.value)
            self.create_from(NodeCall("call_function", keep_contents, (tensor, traced, name), {}))
        self.state.assume(f"forward reads {name} and changes it: the graph raises where it is not "
                          f"{changed.value.tolist()!r:.60} when forward begins")

    def node_of(self, tensor: Tensor) -> fx.Node:
        """The node that stands for ``tensor``; made now for parameters, buffers and constants."""
        node = self._nodes.get(id(tensor))
        if node is not None:
            return node
        path = self._paths.get(id(tensor))
        if path is None:
            original = self.borrowed.original_of(tensor)
            held = self._held.get(id(tensor))
            if held is None:
                held = self._held[id(tensor)] = original if original is not None else self._constant(tensor)
            return self.attribute(tensor, "_tensor_constant", held)
        node = self._attribute_node(tensor, path)
        self.dependent.add(node)
        return node

    def find(self, value: Any) -> fx.Node | None:
        """The node of a tensor, or of a container that a call returned, if it has one."""
        return self._nodes.get(id(value))

    def _constant(self, tensor: Tensor) -> Tensor:
        """The tensor that the graph module will hold for one that was not made by a recorded call."""
        if tensor.layout is not torch.strided or not isinstance(tensor.untyped_storage(), MetaStorage):
            return tensor
        originals = [original for original, _ in self.borrowed.stand_ins]
        if originals and all(torch._C.TensorBase.device.__get__(t).type == "meta" for t in originals):
            with self.pause():
                return tensor.detach()
        value = read_known(tensor)
        if value is None:
            raise InputError(
                f"a tensor of shape {tuple(tensor.shape)} and dtype {tensor.dtype} in module {self.where()!r} at {user_line()} was made where "
                f"tracing does not look (inside a leaf module, or before tracing, without data). Return it from the leaf module's forward, "
                f"or trace into that module with register_non_leaf_module")
        with without_modes():
            return value.clone().to(claim_of(tensor))

    def attribute(self, key: Any, prefix: str, value: Any) -> fx.Node:
        """A ``get_attr`` node of something that only the graph module holds."""
        for name, held in self.constants.items():
            if held is value:
                return self._attribute_node(key, name)
        name = f"{prefix}{sum(n.startswith(prefix) for n in self.constants)}"
        self.constants[name] = value
        return self._attribute_node(key, name)

    def _attribute_node(self, key: Any, target: str) -> fx.Node:
        attributes = self.regions.frame.attributes
        node = attributes.get(id(key))
        if node is None:
            node = attributes[id(key)] = self.create_from(NodeCall("get_attr", target, (), {}))
            self._kept.append(key)
        return node

    def module_node(self, module: nn.Module) -> fx.Node:
        """The node of a module that is an argument."""
        path = self.borrowed.modules.get(id(module))
        if path:
            return self._attribute_node(module, path)
        if path is None:
            return self._attribute_node(module, self.module_target(module))
        held = next(
            (value for value in self.constants.values() if isinstance(value, HeldModule)), None) or HeldModule(module)
        return self.attribute(module, "_root", held)

    def module_target(self, module: nn.Module) -> str:
        """The target of a ``call_module`` node: the module's path, or a name on the graph module for one that is not
        registered.
        """
        path = self.borrowed.modules.get(id(module))
        if path is not None:
            return path
        for name, held in self.constants.items():
            if held is module:
                return name
        name = f"_module{sum(n.startswith('_module') for n in self.constants)}"
        self.constants[name] = module
        return name

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, differs: bool) -> None:
        if not holds_tensor(result) and not writes(func, kwargs):
            if differs and reads_size(func):
                self._read_size(func, args)
            elif getattr(func, "__name__", "") in READS:
                self._note_read(func, args, result)
            return
        node = self._create(describe_call(func, args, kwargs))
        if differs and not self._want():
            node = self._with_structure(node, result)
        self._bind(result, node, rename=not writes(func, kwargs))

    def _want(self, leaf: nn.Module | None = None) -> bool:
        """Ask for ``leaf``, or the innermost function or module that runs, to be one node that may depend on data;
        False where only the root does.
        """
        inner = None if leaf is None else module_site(leaf, self.borrowed)
        site = next((s for s in (inner, *open_sites(self.borrowed)) if s is not None and s not in self.outlined), None)
        if site is not None:
            self.wanted.setdefault(site, user_line() or "")
        return site is not None

    def _read_size(self, func: Any, args: tuple[Any, ...]) -> None:
        """Python code was told a size that depends on data."""
        tensor = args[0]
        dims = self.sizes.dims_of(tensor)
        if getattr(func, "__name__", "") == "__get__":
            asked = subscript_of_shape()
            dims = dims if asked is None else dims & {asked % tensor.dim()}
        if dims and not self._want():
            self.state.assume(
                f"a size that depends on data is a constant of the graph, which raises where data gives another one, at {user_line()}"
            )
            self.keeps_sizes = True
            sizes = {d: tensor.shape[d] for d in sorted(dims)}
            node = self.create_from(
                NodeCall("call_function", keep_sizes, (self.node_of(tensor), sizes, user_line()), {}))
            self.map(tensor, node)

    def _with_structure(self, node: fx.Node, result: Any) -> fx.Node:
        """``node``, checked when it runs to give as many items as now, where it gives a container."""
        expected = expected_structure(result)
        return node if expected is None else self.create_from(
            NodeCall("call_function", keep_structure, (node, expected), {}))

    def _note_read(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        tensor = next(tensors_of(args), None)
        node = None if tensor is None else self._nodes.get(id(tensor))
        if node is not None and node in self.dependent:
            text = repr(result)
            text = text if len(text) < 60 else text[:57] + "..."
            self.state.assume(
                f"{func.__name__} of {node.name} was {text} when traced and is a constant of the graph at {user_line()}"
            )

    def _create(self, call: NodeCall) -> fx.Node:
        """A node for ``call``, whose arguments hold tensors."""
        args = tuple([to_argument(self, a) for a in call.args])
        kwargs = {k: to_argument(self, v) for k, v in call.kwargs.items()} if call.kwargs else {}
        node = self.create_from(NodeCall(call.op, call.target, args, kwargs))
        name = str(getattr(call.target, "__name__", call.target)).rpartition(".")[2]
        if call.op == "call_module":
            node.meta["module_path"] = call.target
        if name not in _SPEC_ONLY and not self.dependent.isdisjoint(node.all_input_nodes) or name.startswith(_RANDOM):
            self.dependent.add(node)
        return node

    def create_from(self, call: NodeCall) -> fx.Node:
        """A node for ``call``, whose arguments hold nodes."""
        node = self.graph.create_node(call.op, call.target)
        node.args = call.args  # given to create_node, they would be searched for symbolic sizes
        if call.kwargs:
            node.kwargs = call.kwargs
        node.meta.update(region=self.regions.current(), module_path=self.where(), module_stack=self.modules,
                         source=user_line())
        return node

    def where(self) -> str:
        """Path of the module that runs."""
        return self.modules[-1][0] if self.modules else ""

    def map(self, tensor: Any, node: fx.Node) -> None:
        """Let ``node`` stand for a tensor, or for a container that a call returned."""
        self._nodes[id(tensor)] = node
        self._kept.append(tensor)

    def _bind(self, value: Any, node: fx.Node, rename: bool = False) -> None:
        """Map ``value``, the result of ``node``, and what is inside it.

        With ``rename``, a tensor that had a node before is the same tensor, given back by a call that did not write to
        it.
        """
        if isinstance(value, Tensor):
            frame = self.regions.frame
            if rename and frame.prefix:
                before = self._nodes.get(id(value))
                if before is not None and before.meta["region"][:len(frame.prefix)] != frame.prefix:
                    frame.renamed.append((value, before))
            self.map(value, node)
            return
        if isinstance(value, tuple):
            self.map(value, node)
        held = [(access, child) for access, child in children(value) if holds_tensor(child)]
        for access, child in held:
            accessor: Callable[..., Any] = getattr if access.attribute else operator.getitem
            part = self.graph.create_node("call_function", accessor)
            part.args = (node, access.key)
            part.meta.update(node.meta)
            self.optional.append(part)
            if node in self.dependent:
                self.dependent.add(part)
            self._bind(child, part, rename)
        if held:
            node.meta["container"] = True


def assign_buffer(buffer: Tensor, value: Tensor) -> None:
    """Give ``buffer`` the contents of ``value``, whatever its shape, keeping its identity."""
    buffer.data = value.detach()


def _unwrap_numbers(tree: Any) -> Any:
    """Numbers that C++ wrapped into tensors on the host, as numbers."""
    if isinstance(tree, Tensor):
        if tree.dim() == 0 and type(tree) is Tensor and not tree.requires_grad and not isinstance(
                tree.untyped_storage(), MetaStorage):
            with without_modes():
                return tree.item()
        return tree
    if type(tree) in (list, tuple):
        return type(tree)(_unwrap_numbers(x) for x in tree)
    return {k: _unwrap_numbers(v) for k, v in tree.items()} if type(tree) is dict else tree
