"""Runs each kind of block once and plays its record for the others, forward and backward."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from analyzer.meta.address_space import Region
from analyzer.meta.library_workspace import library_needs, take_library_workspaces
from analyzer.meta.storage import MetaStorage, alias, next_number, revive
from analyzer.meta.transient import hold_blocks

from .autograd_node import saves_are_hooked
from .block_key import ReadValues, structure_key
from .block_trial import Arguments, Backward, Borrow, GradSpec, PassedOn, Refused, Segment, Trial, number_of
from .hold import is_autograds_alone
from .log import Log, StorageLife
from .op_call import OpCall
from .recorder import BORN, CALLED, DIED, OUTSIDE, Event, Recorder

# When a trial pays. It costs about one and a half runs of the block and, in setting up, as much as two dozen leaf modules (section "where" of
# benchmarks/speed.py). So a kind needs three blocks, and those beyond the second must hold more leaves than that.
_FEWEST = 3
LEAST_LEAVES_SAVED = 24
_PLAIN = (str, int, float, bool, type(None), torch.dtype, torch.device)


class PlayedTwice(BaseException):
    """A module that was played is called again: its gradients are sums, which a record of one call does not tell.

    Not an Exception, so that no handler in the model's code takes it.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(type(module).__name__)
        self.kind = type(module)


class BlockReuse:
    """Decides for each call of a module whether it is played or run."""

    def __init__(self, recorder: Recorder, root: nn.Module, borrow: Borrow, is_leaf: Callable[[nn.Module], bool],
                 excluded: Collection[type[nn.Module]] = ()) -> None:
        self.recorder, self.borrow = recorder, borrow
        memo: dict[int, int | None] = {}
        numbers: dict[Hashable, int] = {}
        keys: dict[int, int | None] = {}
        owners: Counter[int] = Counter()  # how many places hold a parameter: a tied one is no block's own
        parents = Counter(id(child) for module in root.modules() for child in module._modules.values() if child is not None)
        for module in root.modules():
            if parents[id(module)] > 1:
                owners.update(id(t) for t in (*module.parameters(), *module.buffers()))
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    owners[id(tensor)] += 1
        for module in root.modules():
            if module is not root and type(module) not in excluded and not is_leaf(module) and len(module._modules) > 1:
                keys[id(module)] = structure_key(module, memo, numbers)
        counts = Counter(k for k in keys.values() if k is not None)
        worth = {id(m) for m in root.modules() if (key := keys.get(id(m))) is not None and counts[key] >= _FEWEST
                 and (counts[key] - 2) * sum(not c._modules for c in m.modules()) > LEAST_LEAVES_SAVED}
        tied = {i for i, n in owners.items() if n > 1}
        self.keys = {i: k for i, k in keys.items() if i in worth}
        self._tied = tied
        self._known: dict[Hashable, list[tuple[ReadValues, Segment | None]]] = {}
        self._has_tied: dict[int, bool] = {}
        self._played: dict[int, nn.Module] = {}  # each module of a played block, by id, and the block
        self._plays: Counter[Hashable] = Counter()  # of another block's record, by structure
        self.refusals: Counter[str] = Counter()  #: why blocks were run, by reason

    def run(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The block's output, played; NotImplemented where it has to be run."""
        key = self.keys.get(id(module))
        recorder = self.recorder
        if recorder.step == 0 and id(module) in self._played:
            raise PlayedTwice(self._played[id(module)])
        if key is None or recorder.phase != "forward" or recorder.step != 0 or not _is_plain_context() or self._ties(module):
            return NotImplemented
        leaves, structure = pytree.tree_flatten((args, kwargs))
        inputs = _input_key(leaves)
        if inputs is None:
            self.refusals["an argument is an object that its forward pass could change"] += 1
            return NotImplemented
        if torch.is_grad_enabled() and sum(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves) > 1:
            # Autograd adds each gradient to others of the same tensor when it comes, some in the middle of a block.
            self.refusals["more than one argument has a gradient"] += 1
            return NotImplemented
        kind = (key, structure, inputs, torch.is_grad_enabled())
        variants = self._known.setdefault(kind, [])
        for values, segment in variants:
            if values.hold_for(module):
                self._plays[key] += 1
                return NotImplemented if segment is None else self._play(segment, module, leaves)
        if len(variants) > self._plays[key]:  # what was tried was of no use to another: trials of more would not pay
            return NotImplemented
        segment = self._try(module, Arguments(leaves, structure), variants)
        return NotImplemented if segment is None else self._play(segment, module, leaves)

    def _ties(self, module: nn.Module) -> bool:
        found = self._has_tied.get(id(module))
        if found is None:
            found = self._has_tied[id(module)] = any(id(p) in self._tied or p.grad is not None for p in module.parameters())
        return found

    def _try(self, module: nn.Module, arguments: Arguments, variants: list[tuple[ReadValues, Segment | None]]) -> Segment | None:
        segment: Segment | None = None
        trial = Trial(self.recorder, module, arguments, self.borrow, None)
        try:
            segment = trial.run()
        except Refused as reason:
            self.refusals[str(reason)] += 1
        finally:
            self.recorder.skip_sequence()
        variants.append((ReadValues(module, trial.reads), segment))
        return segment

    def _play(self, segment: Segment, module: nn.Module, leaves: list[Any]) -> Any:
        if torch.is_grad_enabled():
            self._played.update((id(m), module) for m in module.modules())
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        run = _Run(self, segment, module)
        if torch.is_grad_enabled() and segment.differentiable:
            with torch._C.DisableTorchFunction():
                made = list(_Block.apply(run, _token(), *tensors))  # type: ignore[no-untyped-call]
            self.recorder.skip_sequence(run.first_call())
        else:
            made = run.forward(tensors)
        rest = iter(made)
        outputs = [next(rest) if isinstance(o, tuple) else tensors[o.index] if isinstance(o, PassedOn) else o for o in segment.outputs]
        return pytree.tree_unflatten(outputs, segment.structure)


_tokens: list[torch.Tensor] = []


def _token() -> torch.Tensor:
    """A leaf that wants a gradient, so that a block has an autograd node also where none of its inputs does."""
    if not _tokens:
        guard = torch._C._DisableTorchDispatch()
        _tokens.append(torch.empty(0, requires_grad=True))
        del guard
    return _tokens[0]


def _is_plain_context() -> bool:
    """Whether nothing is active that looks into what autograd saves or casts what operators get."""
    return not (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu") or saves_are_hooked() or torch.is_inference_mode_enabled())


def _input_key(leaves: list[Any]) -> Hashable:
    """What of the arguments decides a block's record; None where an argument is more than a tensor or a plain value."""
    key: list[Any] = []
    groups: dict[int, int] = {}
    for x in leaves:
        if isinstance(x, torch.Tensor):
            storage = x.untyped_storage() if x.layout is torch.strided else None
            if not isinstance(storage, MetaStorage):
                return None
            group = groups.setdefault(storage.number, len(groups))
            contents = storage.known or storage.drawn_from
            known = None if contents is None else (id(contents), contents is storage.known)
            key.append((tuple(x.shape), x.stride(), x.dtype, x.storage_offset(), storage.nbytes(), storage.claim, x.requires_grad, group, known,
                        storage.density))
        elif isinstance(x, _PLAIN):
            key.append((type(x), x))
        else:
            return None
    return tuple(key)


class _Run:
    """One block played: the numbers and places of its storages, from its forward to its backward pass."""

    def __init__(self, reuse: BlockReuse, segment: Segment, module: nn.Module) -> None:
        self.reuse, self.segment, self.module = reuse, segment, module
        self.recorder = reuse.recorder
        self.numbers: dict[int, int] = {}
        self.regions: dict[int, Region] = {}
        self.holds: dict[int, torch.Tensor] = {}  # inputs and outputs that autograd saved: they die with the last reference
        self.node_offset = 0
        self.call_offset = 0

    def forward(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Play the forward pass; the tensors that it returns."""
        segment, recorder = self.segment, self.recorder
        path = recorder.path_of(self.module)
        log, local = recorder.log, segment.log
        modules = self.modules = [recorder.index_of_path(f"{path}.{m.path}" if m.path else path) for m in local.modules]
        for number, own in segment.held.items():
            self.numbers[number] = recorder.number_of_label(f"{path}.{own}")
        for number, tensor in zip(segment.inputs, tensors):
            self.numbers[number] = number_of(tensor)
        for i, theirs in zip(modules, local.modules):
            mine = log.modules[i]
            if theirs.path:  # the block's own call is counted by whoever calls it
                mine.calls += theirs.calls
            mine.inputs, mine.outputs = mine.inputs or theirs.inputs, mine.outputs or theirs.outputs
        recorder.copy_module_calls(local, modules)
        first, last = segment.nodes
        self.node_offset = len(log.nodes) - first
        placeholders = {i for i in range(first, last) if local.nodes[i].op == "placeholder"}
        self.rows: dict[int, int] = {OUTSIDE: OUTSIDE}
        for i in range(first, last):
            if i not in placeholders:
                self.rows[i] = len(log.nodes) + len(self.rows) - 1
        self._play(segment.log, segment.forward)
        inputs = {node: number for node, number in zip(sorted(placeholders), dict.fromkeys(segment.inputs))}
        recorder.copy_nodes(local, [i for i in range(first, last) if i not in placeholders], self.rows, self.numbers, modules, inputs, path)
        made = []
        for output in segment.outputs:
            if isinstance(output, tuple):
                number, like, _ = output
                tensor = revive(like, _claim(local, number), self.numbers[number], self.regions.pop(number), recorder.space)
                made.append(tensor)
        return made

    def first_call(self) -> int | None:
        """The forward call whose gradient is the last that the block computes: what autograd does with its result belongs there."""
        for backward in self.segment.backwards.values():
            for kind, what in reversed(backward.events):
                if kind == CALLED and (forward := backward.log.calls[what].forward) is not None:
                    return forward + self.call_offset
        return None

    def hold(self, tensors: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        """Keep what autograd saved of the inputs and outputs until the event at which it lets them go."""
        dying = {backward.forward[what] for backward in self.segment.backwards.values() for kind, what in backward.events
                 if kind == DIED and what in backward.forward}
        outputs = [o[0] for o in self.segment.outputs if isinstance(o, tuple)]
        for number, tensor in (*zip(self.segment.inputs, tensors), *zip(outputs, made)):
            if number in dying:
                self.holds[number] = alias(tensor)

    def backward(self, grads: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor | None]:
        """Play the backward pass; the gradients of the inputs."""
        segment, recorder = self.segment, self.recorder
        differentiable = [o[2] for o in segment.outputs if isinstance(o, tuple)]
        given = [g for g, d in zip(grads, differentiable) if d]
        specs: tuple[GradSpec, ...] = tuple(None if g is None else (tuple(g.shape), g.stride(), g.dtype, is_autograds_alone(g)) for g in given)
        backward = self._backward_for(specs)
        incoming = self._incoming = {n: g for n, g in zip(backward.incoming, given) if n is not None and g is not None}
        there = {ours: theirs for theirs, ours in backward.forward.items()}
        self.numbers = {there[n]: number for n, number in self.numbers.items() if n in there}
        self.regions = {there[n]: region for n, region in self.regions.items()}
        self.holds = {there[n]: storage for n, storage in self.holds.items()}
        for number, grad in incoming.items():
            self.numbers[number] = number_of(grad)
        self._play(backward.log, backward.events)
        parameters = dict(self.module.named_parameters())
        for path, number, like in backward.parameters:
            parameters[path].grad = revive(
                like, _claim(backward.log, number), self.numbers[number], self.regions.pop(number), recorder.space)
        out: list[torch.Tensor | None] = []
        for item in backward.returned:
            if item is None:
                out.append(None)
            elif item[0] in incoming:
                out.append(incoming[item[0]].as_strided(item[1].size(), item[1].stride(), item[1].storage_offset())
                           if incoming[item[0]].shape != item[1].shape else incoming[item[0]])
            else:
                out.append(revive(
                    item[1], _claim(backward.log, item[0]), self.numbers[item[0]], self.regions.pop(item[0]), recorder.space))
        return out

    def _backward_for(self, specs: tuple[GradSpec, ...]) -> Backward:
        """What the block does for gradients of these specs; found out by another trial where they are new."""
        segment = self.segment
        found = segment.backwards.get(specs)
        if found is None:
            assert segment.arguments is not None
            again = Trial(self.recorder, self.module, segment.arguments, self.reuse.borrow, specs).run()
            found = again.backwards[specs]
            assert len(again.born) == len(segment.born)
            found.forward = dict(zip(again.born, segment.born))
            segment.backwards[specs] = found
        return found

    def _play(self, local: Log, events: list[Event]) -> None:
        recorder = self.recorder
        log, space, numbers, regions = recorder.log, recorder.space, self.numbers, self.regions
        state = recorder.mode.state
        claims: dict[str, torch.device] = {}
        rows, modules = self.rows, self.modules
        tape = recorder.events
        for kind, what in events:
            if kind == CALLED:
                theirs = local.calls[what]
                if needs := library_needs(theirs.signature):
                    take_library_workspaces(state, theirs.signature, needs)
                index = len(log.calls)
                if theirs.phase == "forward":
                    self.call_offset = index - what
                if tape is not None:
                    tape.append((CALLED, index))
                log.calls.append(OpCall(
                    theirs.signature, tuple([numbers[n] for n in theirs.inputs]), tuple([numbers[n] for n in theirs.outputs]), recorder.step,
                    theirs.phase, modules[theirs.module], rows[theirs.node], None if theirs.forward is None else theirs.forward + self.call_offset,
                    theirs.recomputed))
            elif kind == BORN:
                life = local.storages[what]
                claim = claims.get(life.device)
                if claim is None:
                    claim = claims[life.device] = torch.device(life.device)
                region = regions[what] = space.reserve(claim, life.nbytes)
                number = numbers[what] = next_number()
                log.events += 1
                if tape is not None:
                    tape.append((BORN, number))
                copy = log.storages[number] = StorageLife(
                    number, life.nbytes, region.bytes, region.address, life.device, log.events, len(log.calls), life.phase, recorder.step,
                    rows[life.node], modules[life.module])
                copy.requires_grad = life.requires_grad
                recorder.watch_peak(0)
            elif kind == DIED:
                if what in regions:
                    self._end(numbers[what])
                    life = local.storages[what]
                    space.give_back(torch.device(life.device), regions.pop(what))
                elif what in self.holds:
                    del self.holds[what]
                elif what in self._incoming:
                    self._incoming[what].untyped_storage().give_back_early()  # type: ignore[attr-defined]
            else:
                hold_blocks(state, *what)

    _incoming: dict[int, torch.Tensor] = {}

    def _end(self, number: int) -> None:
        log = self.recorder.log
        log.events += 1
        if self.recorder.events is not None:
            self.recorder.events.append((DIED, number))
        life = log.storages[number]
        life.died, life.died_call = log.events, len(log.calls)


def _claim(log: Log, number: int) -> torch.device:
    return torch.device(log.storages[number].device)


class _Block(torch.autograd.Function):
    """A block as one autograd node."""

    @staticmethod
    def forward(ctx: Any, run: _Run, token: torch.Tensor, *tensors: torch.Tensor) -> Any:
        ctx.run = run
        made = run.forward(list(tensors))
        run.hold(list(tensors), made)
        ctx.mark_non_differentiable(*[t for t, o in zip(made, [o for o in run.segment.outputs if isinstance(o, tuple)]) if not o[2]])
        ctx.set_materialize_grads(False)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        run, ctx.run = ctx.run, None
        return (None, None, *run.backward(grads))
