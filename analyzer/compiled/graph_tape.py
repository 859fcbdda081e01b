"""What a compiled function's operators are as nodes of its joint graph.

AOTAutograd makes this graph with tensors that claim the device of the step, for which it needs that device. Here the
function runs under the mode, in a memory of its own: the mode already takes the path of the claimed device (attention
kernels, autocast's casts), and each operator that Inductor decomposes is decomposed where it is dispatched. A write is
made functional before, as torch's functionalization does it (``torch/csrc/functionalization`` and torchgen's kernels).
"""
from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized, can_auto_functionalize
from torch.utils._pytree import tree_leaves

from analyzer.meta.argument import own
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.spec import TensorSpec
from analyzer.meta.state import active_state
from analyzer.meta.tensor import alias, device_of
from analyzer.meta.value.contents import read_known
from analyzer.record.reference_count import next_sequence_number

from .checkpoint import Tag
from .frame import is_asserting
from .functional import View, communicate, ends_before, functional_of, is_view, view_inverse
from .traced_tensor import GraphBreak, Place, place_of, space_of, specs_of

_aten = torch.ops.aten
Tensor = torch.Tensor


_PUTS = frozenset({_aten.index_put, _aten.index_put_, _aten._index_put_impl_})


class GraphTape:
    """Writes down each operator that is dispatched. A write to a tensor is a new value of its storage."""

    ends_before = staticmethod(ends_before)

    def __init__(self, decompositions: Mapping[Any, Callable[..., Any]], locate: Callable[[], int],
                 find_tag: Callable[[], Tag | None]) -> None:
        self.graph = fx.Graph()
        self.decompositions, self.locate = decompositions, locate
        self.find_tag = find_tag                              #: of the checkpoint that is under way
        self.primals: list[Tensor] = []
        self.written: list[int] = []
        self.in_backward = False
        self.primal_of: dict[int, int] = {}                   #: index of a primal by the number of its storage
        self._values: dict[Place, tuple[fx.Node, int]] = {}   # with the version of the storage that it is of
        self._versions: dict[int, int] = {}
        self._bases: dict[int, tuple[fx.Node, Tensor]] = {}   # value of a whole storage, and a tensor that is all of it
        self._views: dict[Place, View] = {}
        self.placeholders: list[fx.Node] = []                 #: of the primals
        self._last_placeholder: fx.Node | None = None
        self._forward_of: dict[int, fx.Node] = {}             # by number of the autograd node that it made
        self._sequence = next_sequence_number()
        self._written_at: dict[int, Place] = {}               # by number of the autograd node that a write may make
        self.called: Any = None                               #: the operator of the user's that runs
        self._pauses = False

    def placeholder(self, tensor: Tensor, name: str) -> fx.Node:
        """An input of the graph, behind those that are there; in backward behind the primals, before the tangents."""
        last = next(reversed(self.placeholders), None) if self.in_backward else self._last_placeholder
        first = next(iter(self.graph.nodes), None) if last is None else last.next
        with self.graph.inserting_before(first if first is not None else self.graph._root):
            node = self.graph.placeholder(name)
        self._last_placeholder = node
        node.meta["spec"] = specs_of(tensor)
        self._keep(tensor, node)
        return node

    def value(self, tensor: Tensor) -> fx.Node:
        """The node whose value ``tensor`` is now; one that the graph has not met is an input."""
        place = place_of(tensor)
        version = self._versions.get(place[0])
        known = self._values.get(place)
        # one that a gradient is asked of is an input of its own beside the same elements detached
        is_new = known is not None and tensor.requires_grad and not known[0].meta.get("requires_grad", True)
        if known is not None and known[1] == version and not is_new:
            node = self._find_saved(place, version, known[0]) if self.in_backward else known[0]
            if node is not None:
                return node
        # tensors that share a storage from before, as the parts of one that was split, are inputs each for itself
        is_part = version == 0 and place[0] in self.primal_of and place not in self._views
        if version is None and space_of(tensor) is active_state().space:  # the function made it by no operator
            number = read_known(tensor)
            if number is not None and number.numel() == 1:
                with without_modes():
                    value = number.item()
                options = {"dtype": tensor.dtype, "device": device_of(tensor)}
                node = self._call(_aten.full.default, (place[2], value), options, tensor)
                self._keep(tensor, node)
                return node
        if version is None or is_part and not self.in_backward:
            self.primal_of.setdefault(place[0], len(self.primals))
            self.primals.append(tensor)
            self.placeholders.append(self.placeholder(tensor, f"primals_{len(self.primals)}"))
            self.placeholders[-1].meta["requires_grad"] = tensor.requires_grad
            return self.placeholders[-1]
        view = self._views.get(place)
        if view is not None:
            node = self._look(view, self.value(view.source), tensor)
        else:
            base, whole = self._bases[place[0]]
            offset = int(tensor.storage_offset() - whole.storage_offset())
            node = self._call(_aten.as_strided.default, (base, place[2], place[3], offset), {}, tensor)
        self._values[place] = node, version
        return node

    def _find_saved(self, place: Place, version: int, latest: fx.Node) -> fx.Node | None:
        """The node that was saved for the gradient that is computed: the forward operator's own input, as each layer
        may have made the same view, else the ``latest`` one. None where an operator saved what it wrote to a view, as
        ``relu_`` does: the whole was made of that since, and torch's functional tensors take its view again.
        """
        current = torch._C._current_autograd_node()
        number = None if current is None else current._sequence_nr()
        if number is None:
            return latest
        if place in self._views and self._written_at.get(number) == place:
            return None
        origin = self._forward_of.get(number)
        inputs = () if origin is None else origin.all_input_nodes
        return next((node for node in inputs if node.meta.get("value_of") == (place, version)), latest)

    def write_back(self, primal: int) -> None:
        """The present contents of a primal are put where it is."""
        tensor = self.primals[primal]
        node = self._call(_aten.copy_.default, (self.placeholders[primal], self.value(tensor)), {}, tensor)
        node.meta["partitioner_tag"] = "must_be_in_forward"

    def composition(self, func: Any) -> Callable[..., Any] | None:
        """What takes an operator apart: the compiler's decomposition, or its functional form and a write."""
        if self._pauses:
            return None
        if func.namespace == "c10d":
            return partial(self._communicate, func)
        if func._schema.is_mutable:
            return partial(self._write_functionally, func)
        if func is _aten._to_copy.default and active_state().pending_device is not None:
            return self._move
        return self.decompositions.get(func)

    def _move(self, x: Tensor, *, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        """A copy to another device, which the compiler's decomposition (``_to_copy`` of torch/_refs/__init__.py) would
        not see: all tensors are on meta. What is moved to the CPU is converted before, all else afterwards.
        """
        state = active_state()
        device, dtype = state.pending_device, dtype or x.dtype
        assert device is not None
        if device.type == "cpu" and dtype != x.dtype:
            x = state.call_on(None, _aten._to_copy.default, x, dtype=dtype)
        moved: Tensor = self._unrecorded(_aten._to_copy.default, (x,), options)
        self._keep(moved, self._call(torch.ops.prims.device_put.default, (self.value(x), device), {}, moved))
        return moved if dtype == x.dtype else state.call_on(None, _aten._to_copy.default, moved, dtype=dtype)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any],
             whole: bool) -> Any:
        """An operator of the user's runs, with all that it is made of, unless it is to stay ``whole``."""
        if not self.in_backward and func.overloadpacket in _PUTS and args[2].requires_grad and any(
                index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]):
            raise GraphBreak(f"the gradient of {func} needs the contents of its mask")
        self.called, last = func, self.graph._root.prev
        try:
            result = run(func, args, kwargs, whole)
        finally:
            self.called = None
        self._tag_since(last, func, args, kwargs, result)
        return result

    def call_around(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        """An operator on tensors around others: a checkpoint's policy is asked of it, and of nothing that it runs."""
        last, find_tag = self.graph._root.prev, self.find_tag
        self.find_tag = lambda: None
        try:
            result = run()
        finally:
            self.find_tag = find_tag
        self._tag_since(last, func, args, kwargs, result)
        return result

    def _tag_since(self, last: fx.Node, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """``func`` put what is behind ``last`` into the graph."""
        tag = self.find_tag()
        if tag is not None:
            made = []
            while last.next is not self.graph._root:
                last = last.next
                if last.op != "placeholder":  # a parameter's, which is first read here
                    made.append(last)
            tag(made, func, args, kwargs, result)

    def dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """An operator ran that is one in the graph."""
        if self._pauses or func is _aten.detach.default or func is _aten.alias.default:
            return  # the same place in the same storage
        is_one = isinstance(result, Tensor)
        if is_one and args and result is args[0]:
            return  # a conversion to what it is already
        tensors: list[Tensor] = []
        values = self._values_of(args, tensors)
        named = {name: self._values_of(value, tensors) for name, value in kwargs.items()}
        if is_one and tensors and is_view(func) and place_of(result) == place_of(tensors[0]):
            return
        node = self._call(func, values, named, result)
        parts = [(None, result)] if is_one else list(enumerate(result)) if isinstance(result, (list, tuple)) else []
        for index, part in parts:
            if not isinstance(part, Tensor):
                continue
            place = place_of(part)
            one = node if index is None else self._call(operator.getitem, (node, index), {}, part)
            base = self._bases.get(place[0])
            if base is not None and place not in self._views and place != place_of(base[1]):
                origin = next((t for t in tensors if place_of(t)[0] == place[0]), None)
                if origin is not None and args and origin is args[0]:
                    self._views[place] = View(alias(origin), func, args[1:], kwargs, index)
            self._keep(part, one, place)

    def _values_of(self, given: Any, tensors: list[Tensor]) -> Any:
        """``given`` with the present value of each tensor in its place; the tensors are added to ``tensors``."""
        if isinstance(given, Tensor):
            tensors.append(own(active_state(), given))  # one with data is a constant
            return self.value(tensors[-1])
        if isinstance(given, (list, tuple)):
            found = [self._values_of(value, tensors) for value in given]
            return tuple(found) if isinstance(given, tuple) else found
        return given

    def asked(self, func: Any) -> None:
        """The contents of a tensor are asked for, or decide a size: torch's compiler breaks the graph there. What is
        asserted it asserts on the device.
        """
        if not self.in_backward and not is_asserting():
            name = func if isinstance(func, torch._ops.OpOverload) else f"Tensor.{func.__name__}"
            raise GraphBreak(f"{name} needs the contents of a tensor")

    def _write_functionally(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """The result of an operator that writes to its arguments, which the graph has as one that returns them."""
        schema = func._schema
        given = {a.name: value for a, value in zip(schema.arguments, args)} | kwargs
        written = [(a, t) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
                   for t in tree_leaves(given.get(a.name)) if isinstance(t, Tensor)]
        if torch.Tag.inplace_view in func.tags:
            return self._change_geometry(func, args, kwargs)
        functional = functional_of(func)
        if functional is None:
            return self._write_as_given(func, given, [t for _, t in written])
        outputs = {a.name for a in schema.arguments if a.is_out}
        keep = len(args) - sum(a.name in outputs for a in schema.arguments[:len(args)])
        others = {k: v for k, v in kwargs.items() if k not in outputs}
        others |= {a.name: a.default_value for a, b in zip(schema.arguments, functional._schema.arguments)
                   if a.name not in given and a.has_default_value() and not b.has_default_value()}
        found = tree_leaves(functional(*args[:keep], **others))
        answer = self._unrecorded(func, args, kwargs)
        own, news = found[:len(found) - len(written)], found[len(found) - len(written):]
        for (_, tensor), new in zip(written, news):
            self._written_at[next_sequence_number()] = place_of(tensor)  # of `CopySlices`, where it is a view
            if new.dtype != tensor.dtype:
                new = _aten._to_copy.default(new, dtype=tensor.dtype)
            self.write(tensor, self.value(new))
        if not own:
            return answer
        return tuple(own) if len(own) > 1 else own[0]

    def _write_as_given(self, func: Any, given: dict[str, Any], written: list[Tensor]) -> Any:
        """An operator without a functional form, as the higher-order operator that copies what it writes to before."""
        if not can_auto_functionalize(func):
            raise GraphBreak(f"{func}, which writes to its arguments and has no functional form")
        nodes = {name: self._values_of(value, []) for name, value in given.items()}
        answer = self._unrecorded(func, (), given)
        own = [] if answer is None else list(answer) if isinstance(answer, (list, tuple)) else [answer]
        node = self._call(auto_functionalized, (func,), nodes, (*(own or [None]), *written))
        for i, tensor in enumerate(own):
            self._keep(tensor, self._call(operator.getitem, (node, i), {}, tensor))
        for i, tensor in enumerate(written, max(1, len(own))):
            self.write(tensor, self._call(operator.getitem, (node, i), {}, tensor))
        return answer

    def _communicate(self, func: Any, *args: Any) -> Any:
        communicate(func, args)
        return self._unrecorded(func, args, {})

    def _change_geometry(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``unsqueeze_`` and its like: the tensor is another view from now on."""
        functional = functional_of(func)
        if functional is None:
            raise GraphBreak(str(func))
        functional(*args, **kwargs)
        return self._unrecorded(func, args, kwargs)

    def _unrecorded(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call as the mode has it, for what it tells of contents."""
        self._pauses = True
        try:
            return func(*args, **kwargs)
        finally:
            self._pauses = False

    def _look(self, view: View, source: fx.Node, tensor: Tensor) -> fx.Node:
        """A view of another value than the one that it was made of."""
        if view.part is None:
            return self._call(view.func, (source, *view.args), view.kwargs, tensor)
        given = source.meta["spec"]
        with without_modes():
            plain = torch.empty_strided(given, given.stride, dtype=given.dtype, device="meta")
            parts = [TensorSpec.of(tuple(part.shape), part.stride(), part.dtype, given.device)
                     for part in view.func(plain, *view.args, **view.kwargs)]
        node = self.graph.call_function(view.func, (source, *view.args), view.kwargs)
        self._describe(node, parts)
        return self._call(operator.getitem, (node, view.part), {}, tensor)

    def _call(self, func: Any, args: Any, kwargs: Any, result: Any) -> fx.Node:
        if isinstance(result, Tensor) and torch.device in map(type, (*args, *kwargs.values())):
            device = device_of(result)  # the mode calls factories on meta
            args = [device if isinstance(value, torch.device) else value for value in args]
            kwargs = {name: device if isinstance(value, torch.device) else value for name, value in kwargs.items()}
        node = self.graph.call_function(func)  # with arguments it would look for symbols in them
        node.args = tuple(args)
        if kwargs:
            node.kwargs = dict(kwargs)
        self._describe(node, specs_of(result))
        return node

    def _describe(self, node: fx.Node, specs: Any) -> None:
        """What torch's passes, and the program, are told of a node."""
        node.meta["spec"] = specs
        node.meta["original_aten"] = self.called or node.target
        if "custom" in fx.traceback.current_meta:  # torch.fx.traceback.annotate
            node.meta["custom"] = dict(fx.traceback.current_meta["custom"])
        if self.in_backward:
            node.meta["partitioner_tag"] = "is_backward"
            current = torch._C._current_autograd_node()
            origin = None if current is None else self._forward_of.get(current._sequence_nr())
            node.meta["module"] = self.locate() if origin is None else origin.meta["module"]
            node.meta["forward"] = origin
            return
        node.meta["partitioner_tag"] = "is_forward"
        node.meta["module"] = self.locate()
        sequence = next_sequence_number()
        for number in range(self._sequence, sequence):
            self._forward_of[number] = node
        self._sequence = sequence

    def _keep(self, tensor: Tensor, node: fx.Node, place: Place | None = None) -> None:
        """``node`` is the value of ``tensor``; of its storage where the tensor is the first one of it."""
        place = place or place_of(tensor)
        version = self._versions.setdefault(place[0], 0)
        if place[0] not in self._bases:
            self._bases[place[0]] = node, alias(tensor)  # of which no user's code has a reference
        self._values[place] = node, version
        node.meta["value_of"] = place, version

    def write(self, tensor: Tensor, node: fx.Node) -> None:
        """``tensor`` has the value ``node`` from now on, and what shares its storage another one than before.

        Each view on the way from the whole storage to ``tensor`` is undone by the operator that puts a part back.
        """
        place = place_of(tensor)
        number = place[0]
        self.value(tensor)  # it may never have been read
        base, whole = self._bases[number]
        changed = {place: node}
        while place != place_of(whole):
            view = self._views.get(place)
            inverse = None if view is None else view_inverse(view, tensor)
            if view is None or inverse is None:
                offset = int(tensor.storage_offset() - whole.storage_offset())
                node = self._call(_aten.as_strided_scatter.default, (base, node, place[2], place[3], offset), {}, whole)
                tensor = whole
            else:
                func, arguments, takes_source = inverse
                before = (self.value(view.source),) if takes_source else ()
                node = self._call(func, (*before, node, *arguments), {}, view.source)
                tensor = view.source
            place = place_of(tensor)
            changed[place] = node
        version = self._versions[number] = self._versions[number] + 1
        self._bases[number] = node, whole
        for place, node in changed.items():
            self._values[place] = node, version
        primal = self.primal_of.get(number)
        if primal is not None and primal not in self.written:
            if sum(place_of(p)[0] == number for p in self.primals) > 1:
                raise GraphBreak("a write to one of several arguments that share memory")
            self.written.append(primal)
