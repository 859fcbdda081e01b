"""Writes graph nodes for values: tensors, containers, parameters, constants, and calls on them."""
from __future__ import annotations

import enum
import keyword
import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.hooks import RemovableHandle

from analyzer.errors import InputError
from analyzer.fx.graph.graph_module import TracedGraph
from analyzer.fx.module_borrow import Borrowed
from analyzer.meta.address_space import MetaStorage
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.source_line import name_line, user_frame, user_line
from analyzer.meta.spec import ARGUMENTS
from analyzer.meta.state import MetaState
from analyzer.meta.structure import children, holds_tensor, is_plain_object
from analyzer.meta.tensor import device_of
from analyzer.meta.value.contents import read_known
from analyzer.state.value import MISSING, look_up

from .function_call import BuildFunction, BuildObject, CallTarget, HeldModule, NodeCall
from .input_check import keep_contents
from .module_state import RegionStack
from .outline import expected_structure, keep_numbers, keep_structure, numbers_of

_RANDOM = ("rand", "randn", "randint", "randperm", "bernoulli", "multinomial", "normal", "dropout", "rrelu",
           "gumbel_softmax", "fractional_max_pool")
_SPEC_ONLY = frozenset({"zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty",
                        "new_full", "arange", "zeros", "ones", "full", "empty"})
_LITERALS = (*ARGUMENTS, type(Ellipsis), range, enum.Enum)
_NOWHERE: dict[str, Any] = {"region": (), "module_path": "", "module_stack": (), "source": None}


class NodeWriter:
    """A graph that is being written: tensors are mapped to nodes; one without is the root's, or a constant."""

    def __init__(self, state: MetaState, borrowed: Borrowed, replays_checkpoints: bool) -> None:
        self.state, self.borrowed = state, borrowed
        self.regions = RegionStack(replays_checkpoints)
        self.graph = TracedGraph()
        self.paused = 0
        self.constants: dict[str, Any] = {}      #: attribute name on the graph module -> tensor, module or object
        self.modules: tuple[tuple[str, str], ...] = () #: (path, class) of the modules that run, outermost first
        #: nodes that the model did not ask for, such as the parts of a container; dropped where unused
        self.optional: list[fx.Node] = []
        self.codes: set[CodeType] = set()        #: of functions in which nodes came up
        self.dependent: set[fx.Node] = set()     #: nodes whose contents depend on inputs, parameters or chance
        self._nodes: dict[int, fx.Node] = {}
        self._kept: list[Any] = [borrowed.buffers] # keeps what `_nodes` names by id alive
        self._held: dict[int, Any] = {}          # id(value without a node) -> what the graph module holds for it
        self._paths = {id(fake): path if is_plain(path) else self._hold("_weight", original)
                       for group in (borrowed.parameters, borrowed.buffers) for path, fake, original in group}

    @property
    @contextmanager
    def pause(self) -> Iterator[None]:
        """What no node is written in; made anew, as one that were kept would keep the model in a cycle with it."""
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    def placeholder(self, name: str, default: tuple[Any, ...], value: Any) -> None:
        node = self.graph.create_node("placeholder", name, default, name=name.lstrip("*"))
        node.meta.update(_NOWHERE)
        self.dependent.add(node)
        self.bind(value, node)

    def output(self, value: Any) -> None:
        self.graph.output(self.to_argument(value)).meta.update(_NOWHERE)
        for unused in reversed(self.optional):
            if not unused.users:
                self.graph.erase_node(unused)

    def check_content(self, changed: Tensor, value: Tensor) -> None:
        """Let the graph begin with a check that a tensor that it changes has the contents that were read of it."""
        name = self._paths.get(id(changed)) or self.node_of(changed).target
        with self.graph.inserting_before(next(n for n in self.graph.nodes if n.op != "placeholder")):
            tensor = self.create_from(NodeCall("get_attr", name, (), {}))
            self.call(keep_contents, tensor, self.attribute(value, "_tensor_constant", value), name)
        self.state.assume(f"forward reads {name} and changes it: the graph raises where it is not "
                          f"{value.tolist()!r:.60} when forward begins")

    def node_of(self, tensor: Tensor) -> fx.Node:
        """The node that stands for ``tensor``; made now for parameters, buffers and constants."""
        node = self._nodes.get(id(tensor))
        if node is not None:
            return node
        path = self._paths.get(id(tensor))
        if path is not None:
            node = self._attribute_node(tensor, path)
            self.dependent.add(node)
            return node
        if id(tensor) not in self._held:
            original = self.borrowed.original_of(tensor)
            self._held[id(tensor)] = original if original is not None else self._constant(tensor)
        return self.attribute(tensor, "_tensor_constant", self._held[id(tensor)])

    def find(self, value: Any) -> fx.Node | None:
        """The node of a tensor, or of a container that a call returned, if it has one."""
        return self._nodes.get(id(value))

    def _constant(self, tensor: Tensor) -> Tensor:
        """The tensor that the graph module will hold for one that was not made by a recorded call."""
        is_fake = tensor.layout is torch.strided and isinstance(tensor.untyped_storage(), MetaStorage)
        if not is_fake and (tensor.layout is not torch.strided or device_of(tensor).type != "meta"):
            return tensor
        originals = [original for original, _ in self.borrowed.fakes]
        if originals and all(torch._C.TensorBase.device.__get__(t).type == "meta" for t in originals):
            with self.pause:
                return tensor.detach()
        value = read_known(tensor) if is_fake else None
        if value is None:
            raise InputError(f"a tensor of shape {tuple(tensor.shape)} and dtype {tensor.dtype} in module "
                             f"{self.where()!r} at {user_line()} was made where tracing does not look (inside a leaf "
                             "module, in another thread, or before tracing, without data). Return it from the leaf "
                             "module's forward, or trace into that module with register_non_leaf_module")
        with without_modes():
            return value.clone().to(device_of(tensor))

    def attribute(self, key: Any, prefix: str, value: Any) -> fx.Node:
        return self._attribute_node(key, self._hold(prefix, value))

    def _hold(self, prefix: str, value: Any) -> str:
        known = next((name for name, held in self.constants.items() if held is value), None)
        name = known or f"{prefix}{sum(n.startswith(prefix) for n in self.constants)}"
        self.constants[name] = value
        return name

    def _attribute_node(self, key: Any, target: str) -> fx.Node:
        attributes = self.regions.frame.attributes
        node = attributes.get(id(key))
        if node is None:
            node = attributes[id(key)] = self.create_from(NodeCall("get_attr", target, (), {}))
            self._kept.append(key)
        return node

    def module_node(self, module: nn.Module) -> fx.Node:
        target = self.module_target(module)
        if target:
            return self._attribute_node(module, target)
        known = (value for value in self.constants.values() if isinstance(value, HeldModule))
        return self.attribute(module, "_root", next(known, None) or HeldModule(module))

    def module_target(self, module: nn.Module) -> str:
        """The target of a ``call_module`` node: the module's path, or a name on the graph module without one."""
        path = self.borrowed.modules.get(id(module))
        return path if path is not None and is_plain(path) else self._hold("_module", module)

    def to_argument(self, value: Any) -> Any:
        """``value`` as an argument: tensors become nodes, containers keep their form, objects are rebuilt or held."""
        if isinstance(value, Tensor):
            return self.node_of(value)
        if isinstance(value, fx.Node):
            return value
        kind = type(value)
        if kind.__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
            # before what is a literal: numpy.float64 is a float, but generated code does not know its name
            return value.item()
        if isinstance(value, _LITERALS):
            return value
        if kind is tuple or kind is torch.Size:
            found = self.find(value)
            return tuple(self.to_argument(v) for v in value) if found is None else found
        if kind is list:
            return [self.to_argument(v) for v in value]
        if kind is dict and all(isinstance(k, _LITERALS) for k in value):
            return {k: self.to_argument(v) for k, v in value.items()}
        if kind is slice:
            return slice(self.to_argument(value.start), self.to_argument(value.stop), self.to_argument(value.step))
        found = self.find(value)
        if found is not None:
            return found
        if isinstance(value, nn.Module):
            return self.module_node(value)
        enclosed = [look_up(cell, "") for cell in value.__closure__ or ()] if kind is FunctionType else []
        if holds_tensor(enclosed) and not any(v is MISSING for v in enclosed):
            # of variables that hold no tensor, the object itself
            return self.call(BuildFunction(value), *[
                self.to_argument(v) if holds_tensor(v) or isinstance(v, _LITERALS) else
                self.attribute(v, "_object", HeldModule(v) if isinstance(v, nn.Module) else v) for v in enclosed])
        if holds_tensor(value) or isinstance(value, (tuple, dict, list)):
            return self._rebuild(value)
        return self.attribute(value, "_object", value)

    def _rebuild(self, value: Any) -> fx.Node:
        kind = type(value)
        if isinstance(value, tuple):
            parts = tuple(self.to_argument(v) for v in value)
            build = CallTarget(kind) if kind.__module__.partition(".")[0] == "torch" else kind
            return self.call(build, *(parts if hasattr(value, "_fields") else (parts,)))
        params = getattr(kind, "__dataclass_params__", None)
        # a dataclass whose constructor takes exactly its fields, such as transformers' ``ModelOutput``
        if params is not None and params.init and (not hasattr(value, "__post_init__") or hasattr(
                value, "to_tuple")) and all(f.init for f in kind.__dataclass_fields__.values()):
            return self.call(kind, **{a.key: self.to_argument(v) for a, v in children(value) if v is not None})
        if not isinstance(value, (list, dict)) and not is_plain_object(value):
            raise InputError(f"{kind.__module__}.{kind.__qualname__} holds tensors in a way that a graph cannot "
                             f"rebuild; return or pass tensors, containers, dataclasses or objects with a __dict__")
        attributes = {k: self.to_argument(v) for k, v in getattr(value, "__dict__", {}).items()}
        items = list(value.items() if isinstance(value, dict) else value if isinstance(value, list) else ())
        return self.call(BuildObject(kind), self.to_argument(items), attributes)

    def with_structure(self, node: fx.Node, result: Any) -> fx.Node:
        """``node``, checked when it runs to give as many items as now, where it gives a container."""
        expected = expected_structure(result)
        return node if expected is None else self.call(keep_structure, node, expected)

    def with_checks(self, node: fx.Node, result: Any, place: str) -> fx.Node:
        """``node``, checked when it runs to give as many items and the same numbers as now."""
        node, numbers = self.with_structure(node, result), numbers_of(result)
        return self.call(keep_numbers, node, numbers, place) if numbers else node

    def create(self, call: NodeCall) -> fx.Node:
        args = tuple([self.to_argument(a) for a in call.args])
        kwargs = {k: self.to_argument(v) for k, v in call.kwargs.items()} if call.kwargs else {}
        node = self.create_from(NodeCall(call.op, call.target, args, kwargs))
        if call.op == "call_module":
            node.meta["module_path"] = call.target
        return node

    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> fx.Node:
        return self.create_from(NodeCall("call_function", function, args, kwargs))

    def call_method(self, name: str, *args: Any) -> fx.Node:
        return self.create_from(NodeCall("call_method", name, args, {}))

    def create_from(self, call: NodeCall) -> fx.Node:
        node = self.graph.create_node(call.op, call.target)
        node.args = call.args  # given to create_node, they would be searched for symbolic sizes
        if call.kwargs:
            node.kwargs = call.kwargs
        frame = user_frame()
        if frame is not None:
            self.codes.add(frame.f_code)
        node.meta.update(region=self.regions.current(), module_path=self.where(), module_stack=self.modules,
                         source=None if frame is None else name_line(frame.f_code.co_filename, frame.f_lineno))
        name = str(getattr(call.target, "__name__", call.target)).rpartition(".")[2]
        if name not in _SPEC_ONLY and not self.dependent.isdisjoint(node.all_input_nodes) or name.startswith(_RANDOM):
            self.dependent.add(node)
        return node

    def where(self) -> str:
        return self.modules[-1][0] if self.modules else ""

    def map(self, tensor: Any, node: fx.Node) -> None:
        self._nodes[id(tensor)] = node
        self._kept.append(tensor)

    def unbind(self, tensors: Iterable[Tensor]) -> None:
        """Let tensors be without a node again: the graph will hold them."""
        for tensor in tensors:
            self._nodes.pop(id(tensor), None)

    def bind(self, value: Any, node: fx.Node, rename: bool = False, around: tuple[Any, ...] = ()) -> None:
        """Map ``value``, which ``node`` gave, and its parts; with ``rename``, ``node`` wrote to none of them."""
        if isinstance(value, Tensor):
            frame = self.regions.frame
            if rename and frame.prefix:
                before = self._nodes.get(id(value))
                if before is not None and before.meta["region"][:len(frame.prefix)] != frame.prefix:
                    frame.renamed.append((value, before))
            self.map(value, node)
            return
        if isinstance(value, (tuple, RemovableHandle)):
            self.map(value, node)
        around = (*around, value)
        for access, child in children(value):
            if not holds_tensor(child) or any(child is outer for outer in around):
                continue
            accessor: Callable[..., Any] = getattr if access.attribute else operator.getitem
            part = self.graph.create_node("call_function", accessor)
            part.args = (node, access.key)
            part.meta.update(node.meta)
            self.optional.append(part)
            if node in self.dependent:
                self.dependent.add(part)
            self.bind(child, part, rename, around)


def is_plain(path: str) -> bool:
    """Whether torch.fx can write down a path of a graph module; what has another is held under a name of its own."""
    return '"' not in path and "\\" not in path and path.isprintable() and not any(
        map(keyword.iskeyword, path.split(".")))
