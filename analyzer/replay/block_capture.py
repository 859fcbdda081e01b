"""Runs one block in a memory of its own, forward and backward, to learn what it does."""
from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from analyzer.meta.address_space import MetaStorage, find_storage
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.mode import MetaTensorMode
from analyzer.meta.spec import LITERALS
from analyzer.meta.state import MetaState
from analyzer.meta.tensor import name_of_node, template
from analyzer.meta.value.known_value import Watched
from analyzer.record.log import Log, LogNode
from analyzer.record.recorder import Recorder
from analyzer.record.reference_count import ALONE
from analyzer.record.storage_lifetime import BORN, CALLED, DIED, HELD, Event
from analyzer.record.tensor_walk import walk_modules

from .cache_slot import CacheLike, CaptureCache, Index, Slot, indexed
from .captured_block import (
    BLOCK,
    Arguments,
    Borrow,
    CapturedBackward,
    CapturedBlock,
    GradSpec,
    InputLike,
    Output,
    PassedOn,
    Sink,
    Source,
    number_of,
    writes_in_place,
)
from .match import USES_STREAMS, Mismatch, watch_reads
from .segment import Segment
from .state_fingerprint import CodeRecord, StateFingerprint


class BlockCapture:
    """One run of a block in a sandbox; with ``grad_specs`` its backward pass is for such gradients."""

    def __init__(self, recorder: Recorder, block: nn.Module, arguments: Arguments, borrow: Borrow,
                 grad_specs: tuple[GradSpec, ...] | None, code: CodeRecord | None = None) -> None:
        self.main, self.block, self.arguments, self.borrow = recorder, block, arguments, borrow
        self.claim, self.given_grad_specs = torch.device(recorder.log.device), grad_specs
        self.code = code  # what the block's code reaches, where that was recorded just now
        self.grad_specs: tuple[GradSpec, ...] = ()
        self.incoming: list[int | None] = []
        self.returned: list[torch.Tensor | None] = [None] * len(arguments.tensors)
        self.kept: list[torch.Tensor] = []
        self.backward: list[Event] = []
        self.reads: set[tuple[str, str]] = set()
        self.indices: dict[tuple[str, str], Index] = {}
        self.contents: list[Watched] = []

    def run(self) -> CapturedBlock:
        """What the block does, with its backward pass where it trains. Raises Mismatch where it has to be run."""
        main_state = self.main.mode.state
        mode = MetaTensorMode(main_state.options, adopted_device=main_state.adopted_device)
        mode.space.counts = False
        with mode, self.borrow(self.block, self.claim) as borrowed, torch.set_grad_enabled(self.arguments.trains):
            recorder = self.recorder = Recorder(mode, self.block, self.claim, self.main.is_leaf,
                                                self.main.find_leaf_impl, around=BLOCK)
            if main_state.compile is not MetaState.compile:
                mode.state.compile, recorder.compiled = _refuse_compiled, self.main.compiled
            with recorder.recording():
                buffers = [s for _, s, _ in borrowed.buffers]
                with torch._C.DisableTorchFunction():
                    recorder.register_existing([*(s for _, s, _ in borrowed.parameters), *buffers])
                    recorder.own_parameters(self.block)
                for storage in map(find_storage, buffers):  # contents in which blocks of one structure can differ
                    if type(storage) is MetaStorage and storage.known is not None:
                        storage.known = Watched(storage.known)
                        self.contents.append(storage.known)
                with indexed(self.block, self.arguments.indices) as self.indices:
                    captured = self._run(mode.state)
                if recorder.log.streams:
                    raise Mismatch(USES_STREAMS)
                return captured

    def _run(self, state: MetaState) -> CapturedBlock:
        recorder, log, arguments = self.recorder, self.recorder.log, self.arguments
        held = {n: lifetime.label for n, lifetime in log.storages.items()
                if lifetime.category in ("parameter", "buffer")}
        inputs = self._make_inputs(state)
        numbers = [number_of(t) for t in inputs]
        known_alive = set(log.storages)
        recorder.start_step(0)
        before, seed = StateFingerprint(self.block.modules(), keeps=True, code=self.code), state.random_seed
        recorder.begin("forward")
        recorder.skip_sequence()
        forward: list[Event] = []
        recorder.events = forward
        remaining = iter(inputs)
        leaves = [next(remaining) if isinstance(x, InputLike) else CaptureCache(x) if type(x) is CacheLike else x
                  for x in arguments.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, arguments.structure)
        places, given = {id(t): i for i, t in enumerate(inputs)}, [id(x) for x in leaves]
        del leaves, remaining, inputs
        result = self._run_forward(args, kwargs, before)
        self.reads.difference_update(place for place, index in self.indices.items() if not index.used)
        self._check_forward(state, seed)
        assumptions = list(state.assumptions)
        state.assumptions.clear()
        taken, shape = pytree.tree_flatten((args, kwargs))
        if shape != arguments.structure or [id(x) for x in taken] != given:
            raise Mismatch("its forward pass changes a list or a dictionary that it was given")
        taken_cache = next(((i, x) for i, x in enumerate(taken) if type(x) is CaptureCache), None)
        del taken
        out_leaves, structure = pytree.tree_flatten(result)
        del result
        slot = self._find_slot(taken_cache, out_leaves)
        del taken_cache
        outputs = self._describe_outputs(out_leaves, known_alive, places)
        del args, kwargs
        self._check(forward, set(numbers), set(held))
        slot_of = {number: slot for slot, number in enumerate((*numbers, *held))}
        segment = Segment(log, [e for e in forward if e[0] <= HELD], slot_of, len(numbers) + len(held), set(), {},
                          self.main.memory)
        outputs = [o._replace(slot=slot_of[o.slot]) if isinstance(o, Output) else o for o in outputs]
        captured = CapturedBlock(
            log, segment, len(numbers), list(held.values()), outputs, structure,
            *_divide(log, recorder.first_node, slot_of, numbers, segment, outputs),
            next((what for kind, what in forward if kind == CALLED), len(log.calls)), self._find_sums(out_leaves),
            arguments, slot, assumptions)
        if not captured.is_differentiable:
            return captured
        if not arguments.trains:
            raise Mismatch("it enables gradients")
        self.grad_specs = self.given_grad_specs or tuple(  # what is in a cache is not differentiated
            (tuple(o.like.shape), o.like.stride(), o.like.dtype, ALONE) if i < structure.num_leaves else None
            for i, o in enumerate(outputs) if isinstance(o, Output) and o.requires_grad)
        ends = [x for x, o in zip(out_leaves, outputs) if isinstance(o, Output) and o.requires_grad]
        if len(ends) == 1 and (of := recorder.call_of_sequence.get(ends[0].grad_fn._sequence_nr())) is not None:
            captured.begins_at = of, log.calls[of].module, log.calls[of].node
        del out_leaves
        return self._capture_backward(captured, ends, before, forward, state)

    def _run_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], before: StateFingerprint) -> Any:
        """What the block returns; all that it changed is put back."""
        try:
            with torch._C._EnableTorchFunction(), watch_reads(self.block) as self.reads:
                result = nn.Module.__call__(self.block, *args, **kwargs)  # a class's own ``__call__`` runs around it
        except Mismatch:
            raise
        except Exception as error:  # the run will raise it again, or takes a true integer for the index of a cache
            raise Mismatch(f"it raises {type(error).__name__}: {error}") from error
        finally:
            self.recorder.events = None
            change = before.change()
            if change:
                before.put_back()
        if change:
            raise Mismatch(f"its forward pass changes {change}")
        return result

    def _make_inputs(self, state: MetaState) -> list[torch.Tensor]:
        def make() -> list[torch.Tensor]:
            recorder, storages = self.recorder, dict[int, MetaStorage]()
            with without_modes():
                made = [x.make(state, storages) for x in self.arguments.tensors]
            for i, (tensor, like) in enumerate(zip(made, self.arguments.tensors)):
                recorder.mark([tensor], "input", f"input{i}")
                lifetime = recorder.log.storages[number_of(tensor)]
                lifetime.requires_grad = lifetime.requires_grad or like.requires_grad
            return made

        self._token = torch.empty(0, requires_grad=True)  # kept, so that its death is no event of the block
        if not self.arguments.tensors:
            return []
        with torch._C.DisableTorchFunction():
            return list(Source.apply(self._token, self, make))  # type: ignore[no-untyped-call]

    def _check_forward(self, state: MetaState, seed: int) -> None:
        if state.random_seed != seed or state.conditions or state.unknown_sizes:
            raise Mismatch("it draws random scalars, or counts how often unknown data decides")
        if any([phase.phase != "forward" for phase in self.recorder.log.phases]):
            raise Mismatch("a backward pass runs in its forward pass")
        if any(known.was_read for known in self.contents):
            raise Mismatch("it reads the contents of a buffer")
        if self.arguments.trains and self.recorder.has_unnamed_nodes():
            raise Mismatch("an autograd node at its end belongs to no operator of its own")

    def _find_sums(self, out_leaves: list[Any]) -> frozenset[int]:
        """Arguments to whose gradients more than one autograd node adds, or which are not what is computed last."""
        waiting = [x.grad_fn for x in out_leaves if isinstance(x, torch.Tensor) and x.grad_fn is not None]
        seen, edges, feeders = set(waiting), Counter[int](), dict[int, int]()
        first = min([node._sequence_nr() for node in waiting], default=0)
        while waiting:
            node: Any = waiting.pop()
            if name_of_node(node) != "torch::autograd::AccumulateGrad":
                first = min(first, node._sequence_nr())
            for source, output in node.next_functions:
                if getattr(source, "_forward_cls", None) is Source:
                    edges[output] += 1
                    feeders[node._sequence_nr()] = output
                elif source is not None and source not in seen:
                    seen.add(source)
                    waiting.append(source)
        positions = [i for i, x in enumerate(self.arguments.leaves) if isinstance(x, InputLike)]
        last = feeders.get(first)  # the engine runs the node last that was made first
        return frozenset(positions[output] for output, count in edges.items() if count > 1 or output != last)

    def _find_slot(self, argument: tuple[int, Any] | None, out_leaves: list[Any]) -> Slot | None:
        """What the block put into the cache that it was given; its tensors are added to the outputs."""
        if argument is None or argument[1]._layer is None:
            return None
        position, cache = argument
        path, attribute = next(place for place, index in self.indices.items() if index is cache._index)
        if cache._index.used:
            raise Mismatch("it uses the index of its cache slot")
        contents = cache._layer.__dict__
        tensors = [name for name, value in contents.items() if isinstance(value, torch.Tensor)]
        out_leaves += [contents[name] for name in tensors]
        module = next(i for i, (other, _) in enumerate(self.block.named_modules()) if other == path)
        return Slot(position, module, attribute, type(cache._layer),
                    {k: v for k, v in contents.items() if k not in tensors}, tensors)

    def _describe_outputs(self, leaves: list[Any], known_alive: set[int], places: dict[int, int]) -> list[Any]:
        """The leaves of what the block gave, each `Output` with the number of its storage for its slot."""
        outputs: list[Any] = []
        seen = set(known_alive)
        for x in leaves:
            if not isinstance(x, torch.Tensor):
                if not isinstance(x, LITERALS):
                    raise Mismatch(f"it returns a {type(x).__name__}")
                outputs.append(x)
            elif id(x) in places:
                outputs.append(PassedOn(places[id(x)]))
            else:
                number, storage = number_of(x), x.untyped_storage()
                if number in seen or any(fact is not None for fact in storage.followed):  # type: ignore[attr-defined]
                    raise Mismatch("an output shares memory with an input, a parameter or another output, or its "
                                   "contents are known")
                seen.add(number)
                outputs.append(Output(number, template(x), x.requires_grad, x._is_view()))
        return outputs

    def _check(self, forward: list[Event], inputs: set[int], held: set[int]) -> None:
        log = self.recorder.log
        born = _born(forward)
        local = born | inputs | held
        if len(born) < sum([kind == BORN for kind, _ in forward]):
            raise Mismatch("it resizes a storage")
        for kind, what in forward:
            if kind == CALLED:
                call = log.calls[what]
                if not local.issuperset(call.inputs) or not local.issuperset(call.outputs):
                    raise Mismatch("it reads a tensor that is neither an input nor its own")
                if not inputs.isdisjoint(_written(call)):
                    raise Mismatch("it writes to an input")
            elif kind == DIED and what not in born:
                raise Mismatch("something older dies in it")

    def _capture_backward(self, captured: CapturedBlock, ends: list[torch.Tensor], before: StateFingerprint,
                          forward: list[Event], state: MetaState) -> CapturedBlock:
        """The block with its backward pass, which starts at ``ends``; these are let go of as a loss would do it."""
        with torch._C.DisableTorchFunction():
            end = Sink.apply(self, *ends)  # type: ignore[no-untyped-call]
        ends.clear()
        with torch._C._EnableTorchFunction():
            end.backward(torch.empty(0, device=self.claim))
        self.recorder.events = None
        if change := before.change():
            before.put_back()
            raise Mismatch(f"its backward pass changes {change}")
        if self.given_grad_specs is None and any([like.requires_grad and grad is None for like, grad in zip(
                self.arguments.tensors, self.returned)]):
            raise Mismatch("an argument gets no gradient, so that a run does not hold it")
        backward = captured.backwards[self.grad_specs] = self._finish(captured, forward, list(state.assumptions))
        del end  # until here the graph was there, with whatever else its nodes hold
        calls = self.recorder.log.calls
        captured.stands_for = next(((of, calls[of].module, calls[of].node) for kind, what in reversed(
            backward.segment.events) if kind == CALLED and (of := calls[what].forward) is not None), None)
        return captured

    def _finish(self, captured: CapturedBlock, forward: list[Event], assumptions: list[str]) -> CapturedBackward:
        log, storages = self.recorder.log, self.recorder.log.storages
        events = [e for e in self.backward if e[0] <= HELD]
        returned = [None if grad is None else (number_of(grad), template(grad), grad._is_view())
                    for grad in self.returned]
        kept = {r[0] for r in returned if r is not None}
        parameters = []
        place_of = {path: i for i, (path, _) in enumerate(walk_modules(self.block))}
        for path, parameter in self.block.named_parameters():
            if parameter.grad is not None:
                number = number_of(parameter.grad)
                if number in kept:
                    raise Mismatch("gradients share memory")
                kept.add(number)
                storages[number].category = "gradient"
                owner, _, name = path.rpartition(".")
                parameters.append((place_of[owner], name, number, template(parameter.grad)))
        self.kept.clear()
        incoming = [n for n in self.incoming if n is not None]
        ours = {n for n, lifetime in storages.items() if lifetime.died is None and n >= 0 and lifetime.nbytes
                and lifetime.category not in ("parameter", "buffer")}
        if left := (ours & _born(forward + events).union(incoming)) - kept:
            raise Mismatch(f"{len(left)} tensors outlive its backward pass")
        born = _born(events)
        if not {n for _, _, n, _ in parameters} <= born or not kept <= born.union(incoming):
            raise Mismatch("a gradient was not made in its backward pass")
        slot_of, made = dict(captured.segment.slot_of), captured.segment.first_slot
        outputs = {o.slot for o in captured.made}
        inner = {n for n, slot in slot_of.items() if slot >= made and slot not in outputs}
        inner.update(n for n in incoming if n not in kept and storages[n].nbytes)
        first = made + captured.segment.births
        slot_of.update((n, first + i) for i, n in enumerate(self.incoming) if n is not None)
        segment = Segment(log, events, slot_of, first + len(self.incoming), inner, dict(captured.segment.elsewhere),
                          self.main.memory)
        written = kept.union(*[_written(log.calls[what]) for kind, what in events if kind == CALLED])
        return CapturedBackward(
            segment, [n is not None for n in self.incoming],
            [None if r is None else (slot_of[r[0]], *r[1:]) for r in returned],
            [(place, name, slot_of[n], like) for place, name, n, like in parameters],
            {stop.slot for stop in segment.stops if 0 <= stop.slot < first},
            {slot_of[what]: i for i, (kind, what) in enumerate(segment.events) if kind == DIED and what in incoming},
            frozenset(i for i, n in enumerate(self.incoming) if n not in written), assumptions)


def _born(events: list[Event]) -> set[int]:
    return {what for kind, what in events if kind == BORN}


def _divide(log: Log, first_node: int, slot_of: dict[int, int], inputs: list[int], segment: Segment,
            outputs: list[Any]) -> tuple[list[int], list[tuple[int, int]], list[tuple[int, int]]]:
    """The rows of a forward pass that are its own, those that stand for inputs, and the last writers of its outputs."""
    nodes: list[LogNode] = log.nodes
    rows = [i for i in range(first_node, len(nodes)) if nodes[i].op != "placeholder"]
    placeholders = [i for i in range(first_node, len(nodes)) if nodes[i].op == "placeholder"]
    seen = {o.slot for o in outputs if isinstance(o, Output)}
    writers = {slot: row for row in rows for number, _ in nodes[row].outputs
               if (slot := slot_of.get(number, -1)) >= 0 and (slot < segment.first_slot or slot in seen)}
    return rows, [(row, slot_of[number]) for row, number in zip(placeholders, dict.fromkeys(inputs))], list(
        writers.items())


def _written(call: Any) -> list[int]:
    if not writes_in_place(call.signature.op):
        return []
    return [n for n in call.outputs if n in call.inputs] or list(call.inputs[:1])


def _refuse_compiled(function: Any, args: Any, kwargs: Any, config: Any, is_bare: bool = False) -> Any:
    """What is called in place of a compiled function that is a part of a block, whose code a capture would run."""
    raise Mismatch("a part of it is under torch.compile")
