"""Runs one block in a memory of its own, forward and backward, to learn what it does."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.mode import MetaTensorMode
from analyzer.meta.plain_type import LITERALS
from analyzer.meta.state import MetaState
from analyzer.meta.storage import MetaStorage, find_storage
from analyzer.meta.tensor import new_storage, template, tensor_on
from analyzer.meta.value.known_value import Watched
from analyzer.record.event import BORN, CALLED, DIED, Event
from analyzer.record.hold import ALONE, ALONE_VIEW, Hold, Holding
from analyzer.record.log import Log, LogModule, LogNode
from analyzer.record.module_walk import walk_modules
from analyzer.record.recorder import Recorder

from .attribute_watch import watch_reads
from .cache_slot import CacheLike, Index, Slot, TrialCache, indexed
from .reel import Reel
from .restart import BLOCK
from .state_fingerprint import StateFingerprint

Borrow = Callable[[nn.Module, torch.device], AbstractContextManager[Any]]
GradSpec = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, Holding] | None
"""Shape, stride and dtype of a gradient, and who holds it: only what autograd alone holds dies early, and of that only
what is no view may be added to in place.
"""


class InputLike:
    """A tensor argument of a block, without the tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        assert isinstance(storage, MetaStorage)
        self.shape, self.stride, self.dtype, self.offset = tuple(
            tensor.shape), tensor.stride(), tensor.dtype, tensor.storage_offset()
        self.claim, self.nbytes, self.group = storage.device, storage.nbytes(), storage.number
        self.known, self.drawn_from, self.density = storage.known, storage.drawn_from, storage.density
        self.requires_grad = tensor.requires_grad

    def make(self, state: MetaState, storages: dict[int, MetaStorage]) -> torch.Tensor:
        """A tensor like it; those that shared a storage share one in ``storages``."""
        storage = storages.get(self.group)
        if storage is None:
            storage = storages[self.group] = new_storage(self.nbytes, self.claim, state.space)
            storage.known, storage.drawn_from, storage.density = self.known, self.drawn_from, self.density
        return tensor_on(storage, self.dtype, self.offset, self.shape, self.stride)


class Arguments:
    """The arguments of a block's call, without its tensors.

    ``indices`` are attributes (path, name) that may be no more than the index of a cache slot; ``given_up`` are the
    positions of tensors that would die in the block if it did not save them.
    """

    def __init__(self, leaves: list[Any], structure: pytree.TreeSpec, indices: list[tuple[str, str]],
                 given_up: Collection[int] = ()) -> None:
        self.indices, self.given_up = indices, given_up
        self.leaves = [InputLike(x) if isinstance(x, torch.Tensor) else x for x in leaves]
        self.structure = structure
        self.tensors = [x for x in self.leaves if isinstance(x, InputLike)]
        self.trains = torch.is_grad_enabled()


@dataclass(frozen=True)
class PassedOn:
    """An output that is the tensor argument number ``index`` itself."""

    index: int


@dataclass
class Backward:
    """The backward pass of a block for gradients of certain specs."""

    reel: Reel
    #: for each differentiable output, whether a gradient of it takes a slot
    incoming: list[bool]
    #: per tensor input: slot, a tensor like its gradient, and whether that is a view
    returned: list[tuple[int, torch.Tensor, bool] | None]
    #: place of its module, name, slot and a tensor like its gradient
    parameters: list[tuple[int, str, int, torch.Tensor]]
    dying: set[int]                                   #: slots of inputs and outputs that autograd lets go of
    #: slots of gradients of outputs that the reel itself frees, and the event
    freed: dict[int, int]
    assumptions: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gradients = [slot for _, _, slot, _ in self.parameters]


@dataclass
class Segment:
    """What a block does. Slots number its storages: inputs, what it holds, what its forward pass makes, then those of a
    backward pass.
    """

    log: Log
    reel: Reel                                        #: of the forward pass
    inputs: int                                       #: how many tensors go in
    held: list[str]                                   #: paths of parameters and buffers, in order of their slots
    #: leaves: (slot, tensor like it, requires_grad, whether it is a view), PassedOn, or a plain value
    outputs: list[Any]
    structure: pytree.TreeSpec
    rows: list[int]                                   #: of log.nodes, those that the block adds to the table
    #: the other rows: their index, and the slot of the input that each stands for
    placeholders: list[tuple[int, int]]
    #: slot of an input, output or parameter, and the row that wrote it last
    writers: list[tuple[int, int]]
    first_call: int                                   #: of log.calls, of the forward pass
    #: positions of arguments that it reads more than once: it adds their gradients up
    sums: frozenset[int]
    arguments: Arguments
    #: of a cache, that it fills with the outputs beyond those of ``structure``
    slot: Slot | None = None
    #: what its forward pass takes for granted, with `BLOCK` for its path
    assumptions: list[str] = field(default_factory=list)
    backwards: dict[tuple[GradSpec, ...], Backward] = field(default_factory=dict)
    #: call, module and row that the block's own autograd node goes for
    stands_for: tuple[int, int, int] | None = None
    #: the same for what hooks on its output run before it; None where it has several outputs
    begins_at: tuple[int, int, int] | None = None

    def dying(self) -> set[int]:
        """Slots of inputs and outputs that autograd lets go of in one of the backward passes that are known."""
        return set().union(*(backward.dying for backward in self.backwards.values()))

    @property
    def differentiable(self) -> list[int]:
        """Positions of the outputs that have gradients."""
        return [i for i, o in enumerate(self.outputs) if isinstance(o, tuple) and o[2]]


class Refused(Exception):
    """This block cannot be played again: it does something that a log does not tell."""


class _Source(torch.autograd.Function):
    """Makes the inputs, which autograd then owns as it owns an earlier block's outputs; collects their gradients."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, trial: Any, make: Callable[[], list[torch.Tensor]]) -> Any:
        ctx.trial = trial
        tensors = make()
        ctx.mark_non_differentiable(*[t for t, needs in zip(tensors, trial.needs_grad) if not needs])
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        ctx.trial.returned = list(grads)
        return None, None, None


class _Sink(torch.autograd.Function):
    """Takes the outputs; its backward gives each a fresh gradient that autograd alone owns."""

    @staticmethod
    def forward(ctx: Any, trial: Any, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.trial = trial
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        made = [None if s is None else _make_gradient(s, ctx.trial.claim) for s in ctx.trial.grad_specs]
        ctx.trial.kept = [g for g, s in zip(made, ctx.trial.grad_specs)
                          if s is not None and s[3] not in (ALONE, ALONE_VIEW)]
        ctx.trial.incoming = [None if g is None else number_of(g) for g in made]
        ctx.trial.start_backward()
        return (None, *made)


def _make_gradient(spec: Any, claim: torch.device) -> torch.Tensor:
    shape, stride, dtype, holding = spec
    made = torch.empty_strided(shape, stride, dtype=dtype, device=claim)
    return made.as_strided(shape, stride) if holding is ALONE_VIEW else made


class _TrialRecorder(Recorder):
    """Says where in the block something happens; the last module of its log is the model around the block."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.outermost = len(self.log.modules)
        self.log.modules.append(LogModule(BLOCK, "", None))

    def where(self) -> str:
        below = super().where()
        return f"{BLOCK}.{below}" if below else BLOCK


class Trial:
    """One run of a block in a sandbox."""

    def __init__(self, recorder: Recorder, block: nn.Module, arguments: Arguments, borrow: Borrow,
                 grad_specs: tuple[GradSpec, ...] | None) -> None:
        self.main, self.block, self.borrow = recorder, block, borrow
        self.claim = torch.device(recorder.log.device)
        self.arguments = arguments
        self.needs_grad = [x.requires_grad for x in arguments.tensors]
        self.given_grad_specs = grad_specs
        self.grad_specs: tuple[GradSpec, ...] = ()
        self.incoming: list[int | None] = []
        self.returned: list[torch.Tensor | None] = [None] * len(arguments.tensors)
        self.kept: list[torch.Tensor] = []
        self.reads: set[tuple[str, str]] = set()
        self.indices: dict[tuple[str, str], Index] = {}
        self.contents: list[Watched] = []
        self.feeders: dict[int, int] = {}  # number of an autograd node that gives an input's gradient, and which input

    def run(self) -> Segment:
        """The block's segment, with the backward pass where gradients are wanted. Raises Refused where it cannot be
        played.
        """
        main_state = self.main.mode.state
        mode = MetaTensorMode(main_state.options, adopted_device=main_state.adopted_device)
        with mode:
            with self.borrow(self.block, self.claim) as borrowed, torch.set_grad_enabled(self.arguments.trains):
                recorder = self.recorder = _TrialRecorder(mode, self.block, self.claim, self.main.is_leaf,
                                                          self.main.find_leaf_impl)
                with recorder.recording():
                    with torch._C.DisableTorchFunction():
                        recorder.register_existing(
                            [s for triples in (borrowed.parameters, borrowed.buffers) for _, s, _ in triples])
                        recorder.own_parameters(self.block)
                    self._watch_contents([s for _, s, _ in borrowed.buffers])
                    with indexed(self.block, self.arguments.indices) as self.indices:
                        return self._run(mode.state)

    def _watch_contents(self, buffers: list[torch.Tensor]) -> None:
        """Find out whether the block reads contents of its buffers, in which blocks of one structure can differ."""
        for tensor in buffers:
            storage = find_storage(tensor)
            if type(storage) is MetaStorage and storage.known is not None:
                storage.known = Watched(storage.known)
                self.contents.append(storage.known)

    def _run(self, state: MetaState) -> Segment:
        recorder, log = self.recorder, self.recorder.log
        trains = self.arguments.trains
        held = {n: life.label for n, life in log.storages.items() if life.category in ("parameter", "buffer")}
        inputs = self._make_inputs(state)
        numbers = [number_of(t) for t in inputs]
        known_alive = set(log.storages)
        recorder.start_step(0)
        first_node = recorder.first_node
        before, seed = StateFingerprint(self.block.modules(), keeps=True), state.random_seed
        recorder.begin("forward")
        recorder.skip_sequence()
        forward: list[Event] = []
        recorder.events = forward
        remaining = iter(inputs)
        leaves = [next(remaining) if isinstance(x, InputLike) else TrialCache(x) if type(x) is CacheLike else x
                  for x in self.arguments.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.arguments.structure)
        places = {id(t): i for i, t in enumerate(inputs)}
        given = [id(x) for x in leaves]
        holds = [Hold(x) for i, x in enumerate(leaves) if i in self.arguments.given_up and isinstance(x, torch.Tensor)]
        del leaves, remaining, inputs
        try:
            with torch._C._EnableTorchFunction(), watch_reads(self.block) as self.reads:
                result = self._run_block(args, kwargs)
        except Exception as error:  # the run will raise it again, or takes a true integer for the index of a cache
            if type(error) is Refused:
                raise
            raise Refused(f"it raises {type(error).__name__}: {error}") from error
        finally:
            recorder.events = None
            change = before.change()
            before.put_back()
        if change:
            raise Refused(f"its forward pass changes {change}")
        self._check_forward(state, seed)
        assumptions = list(state.assumptions)
        state.assumptions.clear()
        if any(known.was_read for known in self.contents):
            raise Refused("it reads the contents of a buffer")
        if not all(hold.is_held() for hold in holds):
            raise Refused("an argument dies in its forward pass")
        del holds
        self.reads.difference_update(place for place, index in self.indices.items() if not index.used)
        if trains and recorder.has_unnamed_nodes():
            raise Refused("an autograd node at its end belongs to no operator of its own")
        taken, shape = pytree.tree_flatten((args, kwargs))
        if shape != self.arguments.structure or [id(x) for x in taken] != given:
            raise Refused("its forward pass changes a list or a dictionary that it was given")
        taken_cache = next(((i, x) for i, x in enumerate(taken) if type(x) is TrialCache), None)
        del taken
        out_leaves, structure = pytree.tree_flatten(result)
        del result
        plain_outputs = len(out_leaves)
        slot = self._find_slot(taken_cache, out_leaves)
        del taken_cache
        outputs = self._describe_outputs(out_leaves, known_alive, places)
        del args, kwargs
        self._check(forward, set(numbers), set(held))
        slot_of = {number: slot for slot, number in enumerate((*numbers, *held))}
        reel = Reel(log, [e for e in forward if e[0] < 4], slot_of,
                    len(numbers) + len(held), set(), {}, self.main.memory)
        outputs = [(slot_of[o[0]], *o[1:]) if isinstance(o, tuple) else o for o in outputs]
        first_call = next((what for kind, what in forward if kind == CALLED), len(log.calls))
        segment = Segment(log, reel, len(numbers), list(held.values()), outputs, structure,
                          *_divide(log, first_node, slot_of, numbers, reel, outputs), first_call,
                          self._find_sums(out_leaves), self.arguments, slot, assumptions)
        if not trains or not segment.differentiable:
            return segment
        self.grad_specs = self.given_grad_specs or tuple(  # what is in a cache is not differentiated
            (tuple(o[1].shape), o[1].stride(), o[1].dtype, ALONE) if i < plain_outputs else None
            for i, o in enumerate(outputs) if isinstance(o, tuple) and o[2])
        ends = [x for x, o in zip(out_leaves, outputs) if isinstance(o, tuple) and o[2]]
        if len(ends) == 1 and (of := recorder.call_of_sequence(ends[0].grad_fn._sequence_nr())) is not None:
            segment.begins_at = of, log.calls[of].module, log.calls[of].node
        del out_leaves
        return self._capture_backward(segment, ends, before, forward, state)

    def _make_inputs(self, state: MetaState) -> list[torch.Tensor]:
        """Tensors like the arguments, which autograd owns, marked as inputs of the log."""
        def make() -> list[torch.Tensor]:
            recorder, storages = self.recorder, dict[int, MetaStorage]()
            with without_modes():
                made = [x.make(state, storages) for x in self.arguments.tensors]
            for i, (tensor, needs) in enumerate(zip(made, self.needs_grad)):
                recorder.mark([tensor], "input", f"input{i}")
                life = recorder.log.storages[number_of(tensor)]
                life.requires_grad = life.requires_grad or needs
            return made

        self._token = torch.empty(0, requires_grad=True)  # kept, so that its death is no event of the block
        if not self.arguments.tensors:
            return []
        with torch._C.DisableTorchFunction():
            return list(_Source.apply(self._token, self, make))  # type: ignore[no-untyped-call]

    def _check_forward(self, state: MetaState, seed: int) -> None:
        """Raise Refused where the forward pass did what a replay could not repeat."""
        if state.random_seed != seed or state.conditions or state.unknown_sizes:
            raise Refused("it draws random scalars, or counts how often unknown data decides")
        if any([phase.phase != "forward" for phase in self.recorder.log.phases]):
            raise Refused("a backward pass runs in its forward pass")

    def _capture_backward(self, segment: Segment, ends: list[torch.Tensor], before: StateFingerprint,
                          forward: list[Event], state: MetaState) -> Segment:
        """The segment with its backward pass, which starts at ``ends``; these are let go of as a loss would do it."""
        with torch._C.DisableTorchFunction():
            end = _Sink.apply(self, *ends)  # type: ignore[no-untyped-call]
        ends.clear()
        self._backward: list[Event] = []
        with torch._C._EnableTorchFunction():
            end.backward(torch.empty(0))
        self.recorder.events = None
        change = before.change()
        if change:
            before.put_back()
            raise Refused(f"its backward pass changes {change}")
        backward = segment.backwards[self.grad_specs] = self._finish(segment, forward)
        backward.assumptions = list(state.assumptions)
        del end  # until here the graph was there, with whatever else its nodes hold
        for kind, what in reversed(backward.reel.events):
            if kind == CALLED and (of := self.recorder.log.calls[what].forward) is not None:
                segment.stands_for = of, self.recorder.log.calls[of].module, self.recorder.log.calls[of].node
                break
        return segment

    def _run_block(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return nn.Module.__call__(self.block, *args, **kwargs)  # a class's own ``__call__`` runs around it

    def _find_sums(self, out_leaves: list[Any]) -> frozenset[int]:
        """Arguments to whose gradients more than one autograd node adds, or which are not what is computed last."""
        waiting = [x.grad_fn for x in out_leaves if isinstance(x, torch.Tensor) and x.grad_fn is not None]
        seen, edges = set(waiting), Counter[int]()
        first = min([node._sequence_nr() for node in waiting], default=0)
        while waiting:
            node: Any = waiting.pop()
            if node.name() != "torch::autograd::AccumulateGrad":
                first = min(first, node._sequence_nr())
            for source, output in node.next_functions:
                if getattr(source, "_forward_cls", None) is _Source:
                    edges[output] += 1
                    self.feeders[node._sequence_nr()] = output
                elif source is not None and source not in seen:
                    seen.add(source)
                    waiting.append(source)
        positions = [i for i, x in enumerate(self.arguments.leaves) if isinstance(x, InputLike)]
        last = self.feeders.get(first)  # the engine runs the node last that was made first
        return frozenset(positions[output] for output, count in edges.items() if count > 1 or output != last)

    def _find_slot(self, argument: tuple[int, Any] | None, out_leaves: list[Any]) -> Slot | None:
        """What the block put into the cache that it was given; its tensors are added to the outputs."""
        if argument is None or argument[1]._layer is None:
            return None
        position, cache = argument
        path, attribute = next(place for place, index in self.indices.items() if index is cache._index)
        if cache._index.used:
            raise Refused("it uses the index of its cache slot")
        contents = cache._layer.__dict__
        tensors = [name for name, value in contents.items() if isinstance(value, torch.Tensor)]
        out_leaves += [contents[name] for name in tensors]
        module = next(i for i, (other, _) in enumerate(self.block.named_modules()) if other == path)
        return Slot(position, module, attribute, type(cache._layer),
                    {k: v for k, v in contents.items() if k not in tensors}, tensors)

    def start_backward(self) -> None:
        """The gradients of the outputs are there; what follows is the block's."""
        self.recorder.events = self._backward

    def _describe_outputs(self, leaves: list[Any], known_alive: set[int], places: dict[int, int]) -> list[Any]:
        outputs: list[Any] = []
        seen: set[int] = set()
        for x in leaves:
            if not isinstance(x, torch.Tensor):
                if not isinstance(x, LITERALS):
                    raise Refused(f"it returns a {type(x).__name__}")
                outputs.append(x)
                continue
            if id(x) in places:
                outputs.append(PassedOn(places[id(x)]))
                continue
            number = number_of(x)
            storage: Any = x.untyped_storage()
            followed = storage.known is not None or storage.drawn_from is not None or storage.density is not None
            if number in known_alive or number in seen or followed:
                raise Refused(
                    "an output shares memory with an input, a parameter or another output, or its contents are known")
            seen.add(number)
            outputs.append((number, template(x), x.requires_grad, x._is_view()))
        return outputs

    def _check(self, forward: list[Event], inputs: set[int], held: set[int]) -> None:
        """Refuse a block that touches what is not its own."""
        log = self.recorder.log
        born = {what for kind, what in forward if kind == BORN}
        local = born | inputs | held
        if len(born) < sum([kind == BORN for kind, _ in forward]):
            raise Refused("it resizes a storage")
        for kind, what in forward:
            if kind == CALLED:
                call = log.calls[what]
                if not local.issuperset(call.inputs) or not local.issuperset(call.outputs):
                    raise Refused("it reads a tensor that is neither an input nor its own")
                for number in _written(call):
                    if number in inputs:
                        raise Refused("it writes to an input")
            elif kind == DIED and what not in born:
                raise Refused("something older dies in it")

    def _finish(self, segment: Segment, forward: list[Event]) -> Backward:
        log = self.recorder.log
        events = [e for e in self._backward if e[0] < 4]
        returned = [None if grad is None else (number_of(grad), template(grad), grad._is_view())
                    for grad in self.returned]
        kept = {r[0] for r in returned if r is not None}
        parameters = []
        place_of = {path: i for i, (path, _) in enumerate(walk_modules(self.block))}
        for path, parameter in self.block.named_parameters():
            if parameter.grad is not None:
                number = number_of(parameter.grad)
                if number in kept:
                    raise Refused("gradients share memory")
                kept.add(number)
                log.storages[number].category = "gradient"
                owner, _, name = path.rpartition(".")
                parameters.append((place_of[owner], name, number, template(parameter.grad)))
        self.kept.clear()
        ours = {n for n, life in log.storages.items()
                if life.died is None and n >= 0 and life.nbytes and life.category not in ("parameter", "buffer")}
        started = {what
                   for kind, what in forward + events if kind == BORN} | {n for n in self.incoming if n is not None}
        left = (ours & started) - kept
        if left:
            raise Refused(f"{len(left)} tensors outlive its backward pass")
        born = {what for kind, what in events if kind == BORN}
        if not {n
                for _, _, n, _ in parameters} <= born or not kept <= born | {n for n in self.incoming if n is not None}:
            raise Refused("a gradient was not made in its backward pass")
        slot_of = dict(segment.reel.slot_of)
        outputs = {o[0] for o in segment.outputs if isinstance(o, tuple)}
        made = segment.reel.first_slot
        inner = {n for n, slot in slot_of.items() if slot >= made and slot not in outputs}
        inner.update(n for n in self.incoming if n is not None and n not in kept and log.storages[n].nbytes)
        first = made + segment.reel.births
        slot_of.update((n, first + i) for i, n in enumerate(self.incoming) if n is not None)
        reel = Reel(log, events, slot_of, first + len(self.incoming), inner, dict(segment.reel.elsewhere),
                    self.main.memory)
        dying = {stop.slot for stop in reel.stops if 0 <= stop.slot < first}
        freed = {
            slot_of[what]: i for i, (kind, what) in enumerate(reel.events) if kind == DIED and what in self.incoming
        }
        return Backward(reel, [n is not None for n in self.incoming],
                        [None if r is None else (slot_of[r[0]], *r[1:]) for r in returned],
                        [(place, name, slot_of[n], like) for place, name, n, like in parameters], dying, freed)


def _divide(log: Log, first_node: int, slot_of: dict[int, int], inputs: list[int], reel: Reel,
            outputs: list[Any]) -> tuple[list[int], list[tuple[int, int]], list[tuple[int, int]]]:
    """The rows of a forward pass that are its own, those that stand for inputs, and the last writers of its outputs."""
    nodes: list[LogNode] = log.nodes
    rows = [i for i in range(first_node, len(nodes)) if nodes[i].op != "placeholder"]
    placeholders = [i for i in range(first_node, len(nodes)) if nodes[i].op == "placeholder"]
    seen = {o[0] for o in outputs if isinstance(o, tuple)}
    writers = {slot: row for row in rows for number, _ in nodes[row].outputs
               if (slot := slot_of.get(number, -1)) >= 0 and (slot < reel.first_slot or slot in seen)}
    return rows, [(row, slot_of[number]) for row, number in zip(placeholders, dict.fromkeys(inputs))], list(
        writers.items())


def number_of(tensor: torch.Tensor) -> int:
    """The number of the storage of a tensor of the mode's."""
    storage = tensor.untyped_storage()
    if not isinstance(storage, MetaStorage):
        raise Refused("a tensor with data")
    return storage.number


def _written(call: Any) -> list[int]:
    """Numbers of the storages that a call writes in place."""
    if not writes_in_place(call.signature.op):
        return []
    return [n for n in call.outputs if n in call.inputs] or list(call.inputs[:1])


def writes_in_place(op: Any) -> bool:
    """Whether an operator writes to one of its arguments."""
    schema = getattr(op, "_schema", None)
    return schema is not None and any(a.alias_info and a.alias_info.is_write for a in schema.arguments)
