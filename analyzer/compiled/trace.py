"""The call of a compiled function under the mode, for the sake of the joint graphs that are made of it."""
from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodWrapperType
from typing import Any

import torch
from torch import fx
from torch._dynamo import config as dynamo_config
from torch.utils._pytree import tree_leaves

from analyzer.errors import AnalyzerError
from analyzer.memory.allocator import DeviceOutOfMemoryError
from analyzer.meta.address_space import AddressSpace, MetaStorage
from analyzer.meta.intercept.replacement import InterruptsHeld
from analyzer.meta.state import MetaState, mode_in_force
from analyzer.meta.tensor import alias, device_of
from analyzer.record.reference_count import next_sequence_number

from .checkpoint import tagged_checkpoints
from .gradient_bucket import BucketEnds
from .joint_graph import GraphBreak, GraphTape, JointGraph, place_of
from .live_tensor import Hooks, exchange, is_held, is_in_transform, put_saved_tensor_hooks, take_saved_tensor_hooks
from .wrapped_tensor import GraphShape, coerce_like, is_wrapped, parts_of, rebuild_like

Tensor = torch.Tensor

#: What ``nn.RNN``, ``nn.LSTM`` and ``nn.GRU`` call.
_RECURRENT = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})


class _Apart(torch.autograd.Function):
    """The same contents, which may be written in place."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@dataclass
class _Replaced:
    """A tensor with a history, which a graph's own history must not reach into: a leaf is in its place meanwhile."""

    tensor: Tensor
    other: Tensor  #: has the C++ tensor meanwhile
    leaf: Tensor
    node: Any      #: that the tensor is made by; another one after a write


class FunctionTrace:
    """One call of a compiled function. Its code runs once, in a memory of its own; where a graph ends, ``run`` is given
    it and runs it for real, and tensors that the code still holds become the graph's results in place: whatever holds
    them, the function's result, lists, attributes of modules, has the real ones.

    ``end`` is told why a graph ends before the function does.
    """

    def __init__(self, state: MetaState, decompositions: Mapping[Any, Callable[..., Any]],
                 run: Callable[[JointGraph], Sequence[Tensor | None]], end: Callable[[str], None],
                 config: dict[str, Any], buckets: BucketEnds | None = None) -> None:
        self.state, self.decompositions, self._run, self._end = state, decompositions, run, end
        self.config = config  #: of the compiler
        self._buckets, self._depth = buckets, 0  # how many torch functions run that others call
        self.space, self._outside_space = AddressSpace(), state.space
        self.tape: GraphTape | None = None
        self._made: dict[int, weakref.ref[Tensor]] = {}
        self._replaced: dict[int, _Replaced] = {}
        self._wrapped: dict[int, Tensor] = {}  # from before the graph, that need a gradient
        self._with_gradient: dict[int, Tensor] = {}  # to which a gradient was assigned
        self._hooks: Hooks | None = None  # around the call
        self._first_node = self.given = 0
        self.region: Any = None  #: the checkpoint that is under way: `checkpoint.Region`

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``function`` gives for these arguments."""
        self._begin([t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)])
        try:
            with tagged_checkpoints(self):
                result = function(*args, **kwargs)
            self._note(tree_leaves(result))  # a transform's are not seen as they are made
            self.cut()
            return result
        except Exception as error:
            if not isinstance(error, (AnalyzerError, DeviceOutOfMemoryError)):
                self.cut()  # what the function did until then has its tensors, as where nothing is compiled
            raise
        finally:
            self._leave()

    # ---- what the mode tells

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]) -> Any:
        """A torch function is called, or a custom function applied; one that needs contents runs between two graphs."""
        if self.tape is None or self.tape.in_backward or self.tape.called is not None:  # a part of an operator
            return call(func, args, kwargs)
        with torch._C.DisableTorchFunction():
            is_counted = self._buckets is not None and not self._depth and type(func) is not MethodWrapperType
            ends = is_counted and self._buckets.is_before(args)  # type: ignore[union-attr]
        if ends:
            with self.between():
                pass
        with torch._C.DisableTorchFunction():
            for value in (*args, *kwargs.values()):
                for tensor in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(tensor, Tensor):
                        self._replace(tensor)
        self._depth += 1
        try:
            if func is torch.gru_cell:
                raise GraphBreak("PyTorch's compiler has no kernel for the shapes of aten._thnn_fused_gru_cell")
            if func in _RECURRENT and not dynamo_config.allow_rnn:
                raise GraphBreak("Dynamo takes no nn.RNN, nn.LSTM or nn.GRU")
            result = call(func, args, kwargs)
        except GraphBreak as reason:
            if is_in_transform():
                raise
            with self.outside(str(reason)):
                return call(func, args, kwargs)
        finally:
            self._depth -= 1
        if type(func) is MethodWrapperType and getattr(func.__self__, "__name__", "") == "grad":
            if len(args) > 1:
                self._with_gradient[id(args[0])] = args[0]
            return result  # it is another tensor's
        self._note(result if isinstance(result, (list, tuple)) else (result,))
        return result

    def _note(self, results: Iterable[Any]) -> None:
        for made in results:
            if isinstance(made, Tensor) and (is_wrapped(made) or _is_plain(made)):
                self._made[id(made)] = weakref.ref(made)

    def is_transforming(self) -> bool:
        """Whether a transform of ``torch.func`` runs, whose gradients are a part of the graph."""
        return is_in_transform()

    @contextmanager
    def outside(self, reason: str) -> Iterator[None]:
        """A block that runs as it is written, between two graphs."""
        if self.tape is None:
            yield
            return
        self._end(reason)
        with self.between():
            yield

    @contextmanager
    def between(self) -> Iterator[None]:
        """A block between two graphs, for which no compiler breaks them."""
        if self.tape is None:
            yield
            return
        self.cut()
        try:
            yield
        finally:
            self._begin([t for ref in self._made.values() if (t := ref()) is not None])

    # ---- one graph

    def _begin(self, tensors: Iterable[Tensor]) -> None:
        with InterruptsHeld():
            self._enter(tensors)

    def _enter(self, tensors: Iterable[Tensor]) -> None:
        state = self.state
        self.tape = GraphTape(self.decompositions, (lambda: 0) if state.recorder is None else state.recorder._running,
                              lambda: self.region)
        self._made, self._with_gradient, self._first_node = {}, {}, next_sequence_number()
        self._wrapped = {}
        state.space, state.graph, state.tracing = self.space, self.tape, self
        hooks = take_saved_tensor_hooks()  # those around the call are for what the compiled graph saves
        if self._hooks is None:
            self._hooks = hooks
        put_saved_tensor_hooks(hooks[len(self._hooks):])
        with torch._C.DisableTorchFunction():
            for tensor in tensors:
                self._replace(tensor)
                for part in parts_of(tensor):
                    if _is_plain(part):
                        self.tape.value(part)
        self.given = len(self.tape.primals)

    def _leave(self) -> None:
        if self.tape is None:
            return
        state = self.state
        with InterruptsHeld():
            state.space, state.graph, state.tracing, self.tape = self._outside_space, None, None, None
            for replaced in self._replaced.values():
                exchange(replaced.tensor, replaced.other)
            self._replaced = {}
            put_saved_tensor_hooks([*(self._hooks or ()), *take_saved_tensor_hooks()])

    def _replace(self, tensor: Tensor) -> None:
        if not tensor.requires_grad or tensor.grad_fn is None and not tensor._backward_hooks and not is_wrapped(tensor):
            return
        if tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= self._first_node:
            return  # the graph made it
        if is_wrapped(tensor):
            self._wrapped[id(tensor)] = tensor
            if tensor.grad_fn is None:
                return
        if id(tensor) in self._replaced or not is_wrapped(tensor) and not _is_plain(tensor):
            return
        with torch.enable_grad():
            leaf = (tensor.detach() if is_wrapped(tensor) else alias(tensor)).requires_grad_()
            other: Tensor = _Apart.apply(leaf)  # type: ignore[no-untyped-call]
        exchange(tensor, other)
        self._replaced[id(tensor)] = _Replaced(tensor, other, leaf, tensor.grad_fn)

    def cut(self) -> None:
        """The graph ends here, and runs."""
        if self.tape is None:
            return
        with torch._C.DisableTorchFunction(), _unheard(self.state):
            end = _GraphEnd(self, self.tape)
            joint = end.close()
        self._leave()
        with mode_in_force():
            with torch._C._EnableTorchFunction():
                results: Sequence[Any] = ()
                if joint is not None:
                    joint.primals = [_place_constant(self.state, p) if _space_of(p) is self.space else p
                                     for p in joint.primals]
                    results = self._run(joint)
            with torch._C.DisableTorchFunction():
                end.finish(results)

    def list_live(self) -> list[Tensor]:
        """The tensors that were made and that Python code holds."""
        found = []
        for made in self._made.values():
            tensor = made()
            if tensor is not None and is_held(tensor):
                found.append(tensor)
        return found


def _space_of(tensor: Tensor) -> AddressSpace | None:
    return getattr(tensor.untyped_storage(), "space", None)


def _place_constant(state: MetaState, tensor: Tensor) -> Tensor:
    """What stands for a tensor that the function made of numbers, as torch.tensor does: the compiler has it ready."""
    with _unheard(state):
        found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device_of(tensor))
        found.untyped_storage().followed = tensor.untyped_storage().followed  # type: ignore[attr-defined]
    return found


def _is_plain(tensor: Tensor) -> bool:
    return (tensor.layout is torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
            and isinstance(tensor.untyped_storage(), MetaStorage))


@contextmanager
def _unheard(state: MetaState) -> Iterator[None]:
    before, state.recorder, tracing, state.tracing = state.recorder, None, state.tracing, None
    try:
        yield
    finally:
        state.recorder, state.tracing = before, tracing


@dataclass
class _Put:
    """A tensor that gets a part of a result, or of a primal."""

    tensor: Tensor
    base: int | Tensor      #: index of the result, or the primal
    part: Any = None        #: (offset from the result's own, shape, strides), None: all of it
    is_leaf: bool = False

    def make(self, results: Sequence[Any]) -> Tensor:
        base: Tensor = self.base if isinstance(self.base, Tensor) else results[self.base]
        if self.part is None:
            return base
        offset, shape, stride, needs_gradient = self.part
        offset += 0 if isinstance(self.base, Tensor) else base.storage_offset()
        with torch._C._EnableTorchFunction():
            found = base.as_strided(shape, stride, offset)
            return found if needs_gradient else found.detach()


class _GraphEnd:
    """Where a graph ends: what its results are, and which tensors get them."""

    def __init__(self, trace: FunctionTrace, tape: GraphTape) -> None:
        self.trace, self.tape = trace, tape
        self.results: list[Tensor] = []  # of the trace
        self._puts: list[_Put] = []
        self._copies: list[tuple[Tensor, int]] = []  # primals that results are copied to
        self._followed: list[tuple[int, Any, int]] = []
        self._gradients = [(t, t.grad) for t in trace._with_gradient.values() if t.grad is not None]

    def close(self) -> JointGraph | None:
        """The graph; None where there is none."""
        trace, tape = self.trace, self.tape
        groups: dict[int, list[Tensor]] = {}
        listed = {id(t): t for t in (*trace.list_live(), *[g for _, g in self._gradients])}
        for tensor in listed.values():
            if is_wrapped(tensor):
                self._add_wrapped(tensor)
                continue
            number, offset, shape, stride, _ = place_of(tensor)
            primal = tape.primal_of.get(number)
            if _space_of(tensor) is trace.space:
                groups.setdefault(number, []).append(tensor)
            elif primal is not None and tensor.grad_fn is not None and id(tensor) not in trace._replaced and all(
                    tensor is not p for p in tape.primals):
                self._puts.append(_Put(tensor, tape.primals[primal], (offset, shape, stride, True)))
        for group in groups.values():
            self._add_group(group)
        self._write_primals()
        return self._make_graph() if self.results or tape.written else None

    def _add_wrapped(self, tensor: Tensor) -> None:
        is_made = any(getattr(part.untyped_storage(), "space", None) is self.trace.space for part in parts_of(tensor))
        if is_made or tensor.grad_fn is not None and id(tensor) not in self.trace._wrapped:
            self._puts.append(_Put(tensor, len(self.results)))
            self.results.append(tensor)

    def _add_group(self, group: list[Tensor]) -> None:
        """Tensors on one storage: one result, of which the others are views as AOTAutograd makes them again."""
        base = next((t for t in group if t.requires_grad), group[0])
        if len({place_of(t) for t in group}) > 1:
            whole = next((t for t in group if not t._is_view()), base._base)
            if whole is None:  # in inference mode views do not tell what they are of
                for tensor in group:
                    self._add_group([tensor])
                return
            base = whole
        self.results.append(base)
        index, storage, start = len(self.results) - 1, base.untyped_storage(), base.storage_offset()
        assert isinstance(storage, MetaStorage)
        if storage.followed != (None, None, None, None):
            self._followed.append((index, storage.followed, storage.nbytes()))
        for tensor in group:
            part = None if tensor is base else (
                tensor.storage_offset() - start, tuple(tensor.shape), tensor.stride(), tensor.requires_grad)
            self._puts.append(_Put(tensor, index, part, tensor.is_leaf and tensor.requires_grad))

    def _write_primals(self) -> None:
        """A primal that got a history is written outside of the graph, where autograd sees it."""
        for i in self.tape.written:
            primal = self.tape.primals[i]
            replaced = self.trace._replaced.get(id(primal))
            if primal.grad_fn is None or replaced is not None and primal.grad_fn is replaced.node:
                self.tape.write_back(i)
            else:
                self.results.append(primal)
                self._copies.append((primal, len(self.results) - 1))

    def _make_graph(self) -> JointGraph:
        tape, trace = self.tape, self.trace
        forward = [tape.value(part) for t in self.results for part in parts_of(t)]
        primals = list(tape.primals)
        inputs, own = self._list_inputs(primals)
        leaves = [trace._replaced[id(p)].leaf if id(p) in trace._replaced else p for p in inputs]
        wanted = [i for i, t in enumerate(leaves) if t.requires_grad and t.is_leaf]
        differentiated = [i for i, t in enumerate(self.results) if t.grad_fn is not None]
        if not torch.is_grad_enabled() or not wanted:
            differentiated = []
        gradients: list[fx.Node | None] = [None] * len(primals)
        shape = GraphShape([(len(parts_of(t)), rebuild_like(t)) for t in self.results],
                           [coerce_like(self.results[i]) for i in differentiated], [None] * len(inputs))
        if differentiated:
            tangents = []
            for i in differentiated:
                with torch._C._EnableTorchFunction():
                    tangents.append(torch.empty_like(self.results[i]))
            for number, part in enumerate([part for t in tangents for part in parts_of(t)], 1):
                tape.placeholder(part, f"tangents_{number}")
            tape.in_backward = True
            with torch._C._EnableTorchFunction():  # for custom functions' backward passes, which may make tensors
                found = torch.autograd.grad([self.results[i] for i in differentiated], [leaves[i] for i in wanted],
                                            tangents, allow_unused=True)
            for i, gradient in zip(wanted, found):
                if gradient is not None:
                    shape.gradients[i] = own[i], rebuild_like(gradient)
                    for place, part in zip(own[i], parts_of(gradient), strict=True):
                        gradients[place] = tape.value(part)
        for primal, _ in self._copies:
            if id(primal) not in trace._replaced:  # it had no history before
                exchange(primal, alias(primal))
        tape.graph.output((*forward, *gradients))
        for node in reversed(tape.graph.nodes):
            if not node.users and not node.is_impure():
                tape.graph.erase_node(node)
        places = {node: place for place, node in enumerate(tape.graph.nodes)}
        for node, place in places.items():
            node.meta["place"] = place
        return JointGraph(
            tape.graph, primals, min(trace.given, len(primals)), len(forward), differentiated,
            [node.meta.get("module", 0) for node in places],
            [places.get(node.meta.get("forward")) if node.meta.get("partitioner_tag") == "is_backward" else place
             for node, place in places.items()], inputs, shape)

    def _list_inputs(self, primals: list[Tensor]) -> tuple[list[Tensor], list[list[int]]]:
        """The tensors that may get a gradient, and of which primals each consists."""
        index = {id(primal): i for i, primal in enumerate(primals)}
        wrapped = {id(t): [index[id(part)] for part in parts_of(t) if id(part) in index]
                   for t in self.trace._wrapped.values()}
        found = [t for t in self.trace._wrapped.values() if wrapped[id(t)]]
        parts = {i for t in found for i in wrapped[id(t)]}
        plain = [i for i in range(len(primals)) if i not in parts]
        return [*[primals[i] for i in plain], *found], [*[[i] for i in plain], *[wrapped[id(t)] for t in found]]

    def finish(self, results: Sequence[Any]) -> None:
        """Tensors that the code holds become the real ones."""
        for index, followed, nbytes in self._followed:
            storage = results[index].untyped_storage()
            if storage.nbytes() == nbytes:
                storage.followed = followed
        for primal, index in self._copies:
            with torch._C._EnableTorchFunction():
                primal.copy_(results[index])
        found = [put.make(results) for put in self._puts]
        for put, real in zip(self._puts, found):
            if put.is_leaf:
                real.requires_grad_()
            for part, other in zip(parts_of(put.tensor), parts_of(real)) if is_wrapped(real) else ():
                exchange(part, other)
            exchange(put.tensor, real)
        for holder, gradient in self._gradients:
            holder.grad = gradient
