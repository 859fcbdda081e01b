"""One replayed block: an autograd node, and the places of its storages from its forward to its backward pass."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Any, Protocol

import torch
from torch import nn

from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.restart import Restart
from analyzer.meta.storage import take_numbers
from analyzer.meta.tensor import alias, revive
from analyzer.record.hold import Holding, find_holdings
from analyzer.record.recorder import Recorder

from .block_place import BlockPlace
from .block_trial import Trial
from .match import Mismatch
from .reel import Reel, Take, play
from .reserved import Reserved
from .segment import Arguments, Backward, GradSpec, Segment, number_of
from .unseen_gradient import BlockGradients

_tokens: list[torch.Tensor] = []


def gradient_token() -> torch.Tensor:
    """A leaf that wants a gradient, so that a block has an autograd node also where none of its inputs does."""
    if not _tokens:
        guard = torch._C._DisableTorchDispatch()
        _tokens.append(torch.empty(0, requires_grad=True))
        del guard
    return _tokens[0]


class BlockOwner(Protocol):
    """What an instance of a block asks of `BlockReuse`."""

    recorder: Recorder

    def path_of(self, module: nn.Module) -> str: ...
    def modules_in(self, block: nn.Module) -> list[nn.Module]: ...
    def reserved(self, block: nn.Module) -> Reserved | None: ...
    def lend(self, module: nn.Module) -> None: ...
    def assume(self, text: str, module: nn.Module) -> None: ...
    def make_place(self, segment: Segment, module: nn.Module, numbers: Iterable[Sequence[Any]],
                   producers: dict[int, int | None]) -> BlockPlace: ...
    def make_trial(self, module: nn.Module, arguments: Arguments, grad_specs: tuple[GradSpec, ...] | None) -> Trial: ...


class BlockInstance:
    """One block played: the numbers and places of its storages, from its forward to its backward pass."""

    def __init__(self, reuse: BlockOwner, segment: Segment, module: nn.Module) -> None:
        self.reuse, self.segment, self.module = reuse, segment, module
        self.recorder, self.space = reuse.recorder, reuse.recorder.space
        self.versions: list[tuple[torch.Tensor, int]] = []  # of what autograd saved
        self.awaits_backward, self.sequence = False, -1
        self.slots: list[Any] = []             # what the allocator gave for each slot
        self.takes: list[Take] = []
        # inputs and outputs that autograd saved, by slot: they die with the last reference
        self.holds: dict[int, torch.Tensor] = {}
        self.incoming: dict[int, torch.Tensor] = {}

    def forward(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Play the forward pass; the tensors that it returns."""
        segment, recorder = self.segment, self.recorder
        log, reel, path = recorder.log, segment.reel, self.reuse.path_of(self.module)
        given = [number_of(tensor) for tensor in tensors]
        first = take_numbers()
        numbers = (given, segment.held, range(first, first + reel.births))
        producers = {row: recorder.producer_of(given[slot]) for row, slot in segment.placeholders}
        place = self.place = self.reuse.make_place(segment, self.module, numbers, producers)
        self.slots = [None] * place.count_slots()
        log.pending.append(place)
        self.takes = play(recorder, reel, place, self.slots, self._let_go)
        place.reserve(log)
        for slot, row in segment.writers:
            number = place.number_at(slot)
            recorder.set_producer(number if isinstance(number, int) else log.labelled(f"{path}.{number}"),
                                  place.row_at(row))
        with without_modes():
            return [self._revive(reel, o[0], o[1]) for o in segment.outputs if isinstance(o, tuple)]

    def _outlive(self, reel: Reel, slots: Sequence[int], numbers: Sequence[int]) -> None:
        """Take note of storages that were played and live on."""
        for take in self.takes:
            first, end = take.start.birth + reel.first_slot, take.stop.birth + reel.first_slot
            if first == end:
                continue
            inside = [first <= slot < end for slot in slots]
            if all(inside):
                take.survivors.append((slots, numbers))
                return
            if any(inside):
                take.survivors.append((list(compress(slots, inside)), list(compress(numbers, inside))))

    def _revive(self, reel: Reel, slot: int, like: torch.Tensor) -> torch.Tensor:
        """A tensor of the user's on a storage that was played. Without modes."""
        number, space, claim = self.place.number_at(slot), self.space, reel.claim_of(slot)
        self.recorder.log.expect(number, like.untyped_storage().nbytes(), str(claim))
        self._outlive(reel, (slot,), (number,))
        return revive(like, claim, number, self.recorder.memory.block_of(self.slots[slot], space.stream), space)

    def locate(self, found: tuple[int, int, int] | None) -> tuple[int, int, int] | None:
        """Call, module and row of the log for those of the segment's."""
        if found is None:
            return None
        call, module, row = found
        return call + self.place.call_offset, self.place.module_of(module), self.place.row_at(row)

    def hold(self, tensors: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        """Keep what autograd saved of the inputs and outputs until the event at which it lets them go."""
        dying = self.segment.dying()
        if not dying:
            return
        outputs = [o[0] for o in self.segment.outputs if isinstance(o, tuple)]
        for slot, tensor in (*enumerate(tensors), *zip(outputs, made)):
            if slot in dying:
                self.holds[slot] = alias(tensor)
                self.versions.append((self.holds[slot], tensor._version))

    def backward(self, grads: tuple[torch.Tensor | None, ...],
                 holdings: list[Holding | None]) -> list[torch.Tensor | None]:
        """Play the backward pass; the gradients of the inputs."""
        segment, place = self.segment, self.place
        self.awaits_backward = False
        # what autograd does with the block's result belongs to the call whose gradient is the last
        self.recorder.let_stand(self.sequence, self.locate(segment.stands_for) or (-1, 0, -1))
        if any([tensor._version != version for tensor, version in self.versions]):
            raise Restart("a tensor that it saved was written to", self.module)
        self.versions.clear()
        differentiable = [o[2] for o in segment.outputs if isinstance(o, tuple)]
        given = [g for g, d in zip(grads, differentiable) if d]
        specs: tuple[GradSpec, ...] = tuple([
            None if g is None or holding is None else (tuple(g.shape), g.stride(), g.dtype, holding)
            for g, holding in zip(given, [h for h, d in zip(holdings, differentiable) if d])])
        place.grad_specs = specs
        numbers_given = [number_of(g) for g in given if g is not None]
        if len(set(numbers_given)) < len(numbers_given):
            raise Restart("two of its outputs have one gradient", self.module)
        backward = self._backward_for(specs)
        for text in backward.assumptions:
            self.reuse.assume(text, self.module)
        reel = backward.reel
        first = len(self.slots)
        self.incoming = {
            first + i: g for i, (takes, g) in enumerate(zip(backward.incoming, given)) if takes and g is not None
        }
        place.add_slots([number_of(g) if first + i in self.incoming else None  # type: ignore[arg-type]
                         for i, g in enumerate(given)])
        born = take_numbers()
        place.add_slots(range(born, born + reel.births))
        self.slots += [None] * (len(given) + reel.births)
        for slot in backward.freed:
            storage: Any = self.incoming[slot].untyped_storage()
            if storage.device != reel.claim_of(slot):
                raise Restart("a gradient comes from another device", self.module)
            self.slots[slot] = self.recorder.memory.place_of(storage.give_away())
        self.takes = play(self.recorder, reel, place, self.slots, self._let_go)
        for slot, event in backward.freed.items():
            take = next(take for take in self.takes if take.start.event <= event < take.stop.event)
            take.freed.append((slot, place.number_at(slot)))
        unseen = self.recorder.unseen_gradients
        if unseen is None or not reel.elsewhere.keys().isdisjoint(backward.gradients):
            self.reuse.lend(self.module)
            unseen = None
        reserved = self.reuse.reserved(self.module)
        parameters: list[Any] = []
        if reserved is None:
            modules = self.reuse.modules_in(self.module)
            parameters = [modules[index]._parameters[name] for index, name, _, _ in backward.parameters]
            if any([parameter.grad is not None for parameter in parameters]):
                raise Restart("a gradient comes twice", self.module)
        with without_modes():
            if unseen is None:
                for parameter, (_, _, slot, like) in zip(parameters, backward.parameters):
                    parameter.grad = self._revive(reel, slot, like)
            else:
                numbers = [
                    born + slot - reel.first_slot if slot >= reel.first_slot else place.number_at(slot)
                    for slot in backward.gradients
                ]
                self._outlive(reel, backward.gradients, numbers)
                places = [self.slots[slot] for slot in backward.gradients]
                if reserved is None:
                    unseen.add(parameters, numbers, places, [like for _, _, _, like in backward.parameters],
                               self.module)
                else:
                    unseen.add_block(reserved, BlockGradients(numbers, places, backward.parameters, self.module))
            return [self._give(reel, item) for item in backward.returned]

    def _give(self, reel: Reel, item: tuple[int, torch.Tensor, bool] | None) -> torch.Tensor | None:
        """The gradient of an input."""
        if item is None:
            return None
        slot, like, is_view = item
        grad = self.incoming.get(slot)
        if grad is None:
            grad = self._revive(reel, slot, like)
        if grad.shape == like.shape and grad._is_view() == is_view:
            return grad
        return grad.as_strided(like.size(), like.stride(), like.storage_offset())

    def __del__(self) -> None:
        if self.awaits_backward:  # autograd let go of the block's node: a run frees now what this one holds
            self.recorder.restart = Restart("its backward pass does not run", self.module)

    def _let_go(self, slot: int) -> None:
        """The block's backward pass is done with a storage that others may hold."""
        if slot in self.holds:
            del self.holds[slot]
        elif slot in self.incoming:
            self.incoming[slot].untyped_storage().give_back_early()  # type: ignore[attr-defined]

    def _backward_for(self, specs: tuple[GradSpec, ...]) -> Backward:
        """What the block does for gradients of these specs; found out by another trial where they are new."""
        segment = self.segment
        found = segment.backwards.get(specs)
        if found is None:
            try:
                again = self.reuse.make_trial(self.module, segment.arguments, specs).run()
            except Mismatch as reason:
                raise Restart(str(reason), self.module) from None
            if again.reel.births != segment.reel.births:
                raise Restart("it does not do the same twice", self.module)
            found = segment.backwards[specs] = again.backwards[specs]
        return found


class BlockFunction(torch.autograd.Function):
    """A block as one autograd node."""

    @staticmethod
    def forward(ctx: Any, run: BlockInstance, gradient_token: torch.Tensor, *tensors: torch.Tensor) -> Any:
        ctx.run, ctx.module = run, run.module
        made = run.forward(list(tensors))
        run.awaits_backward = True
        run.hold(list(tensors), made)
        ctx.mark_non_differentiable(
            *[t for t, o in zip(made, [o for o in run.segment.outputs if isinstance(o, tuple)]) if not o[2]])
        ctx.set_materialize_grads(False)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        run, ctx.run = ctx.run, None
        if run is None:
            raise Restart("its backward pass runs twice", ctx.module)
        return (None, None, *run.backward(grads, find_holdings(grads)))
