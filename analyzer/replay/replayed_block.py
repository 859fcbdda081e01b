"""One replayed block: an autograd node, and the places of its storages from its forward to its backward pass."""
from __future__ import annotations

import functools
from itertools import chain, compress
from typing import Any

import torch
from torch import nn

from analyzer.meta.address_space import take_numbers
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.state import Restart
from analyzer.meta.tensor import alias, revive
from analyzer.record.reference_count import Holding, find_holdings

from .block_capture import BlockCapture
from .captured_block import BlockSite, CapturedBackward, CapturedBlock, GradSpec, number_of
from .match import Mismatch
from .segment import Instance, Segment, replay


@functools.cache
def gradient_token() -> torch.Tensor:
    """A leaf that wants a gradient, so that a block has an autograd node also where none of its inputs does."""
    guard = torch._C._DisableTorchDispatch()
    token = torch.empty(0, requires_grad=True)
    del guard
    return token


class ReplayedBlock:
    """One block replayed by a `BlockReplay`, its ``owner``: its storages, from its forward to its backward pass."""

    def __init__(self, owner: Any, captured: CapturedBlock, module: nn.Module) -> None:
        self.owner, self.captured, self.module = owner, captured, module
        self.recorder = owner.recorder
        self.versions: list[tuple[torch.Tensor, int]] = []  # of what autograd saved
        self.awaits_backward, self.sequence = False, -1
        self.slots: list[Any] = []             # what the allocator gave for each slot
        self.instances: list[Instance] = []
        # inputs and outputs that autograd saved, by slot: they die with the last reference
        self.saved: dict[int, torch.Tensor] = {}
        self.incoming: dict[int, torch.Tensor] = {}

    def forward(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        captured, recorder, log = self.captured, self.recorder, self.recorder.log
        segment, path = captured.segment, recorder.path_of(self.module)
        given = [number_of(tensor) for tensor in tensors]
        first = take_numbers()
        numbers = [*given, *captured.held, *range(first, first + segment.births)]
        producers = {row: recorder.producers.get(given[slot]) for row, slot in captured.placeholders}
        site = self.site = BlockSite(captured, path, numbers, producers, recorder)
        self.slots = [None] * len(numbers)
        log.pending.append(site)
        self.instances = replay(recorder, segment, site, self.slots, self._let_go)
        log.node_slots.extend([None] * len(captured.rows))
        log.module_call_slots.extend([None] * (len(captured.log.module_call_slots) - 1))
        for slot, row in captured.writers:
            number = site.numbers[slot]
            recorder.producers[number if isinstance(number, int) else log.number_of_label[f"{path}.{number}"]] = (
                site.rows[row])
        with without_modes():
            return [self._revive(segment, o.slot, o.like) for o in captured.made]

    def _revive(self, segment: Segment, slot: int, like: torch.Tensor) -> torch.Tensor:
        """A tensor of the user's on a storage that was replayed. Without modes."""
        number, space, claim = self.site.numbers[slot], self.recorder.space, segment.claim_of(slot)
        self.recorder.log.expect(number, like.untyped_storage().nbytes(), str(claim))
        birth = slot - segment.first_slot
        for instance in self.instances:
            if instance.start.birth <= birth < instance.stop.birth:
                instance.survivors.append(((slot,), (number,)))
        return revive(like, claim, number, self.recorder.memory.block_of(self.slots[slot], space.stream), space)

    def locate(self, found: tuple[int, int, int] | None) -> tuple[int, int, int] | None:
        if found is None:
            return None
        call, module, row = found
        return call + self.site.call_offset, self.site.module_of(module), self.site.rows[row]

    def save(self, tensors: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        """Keep what autograd saved of the inputs and outputs until the event at which it lets them go."""
        dying = set(chain.from_iterable(backward.dying for backward in self.captured.backwards.values()))
        for slot, tensor in (*enumerate(tensors), *zip([o.slot for o in self.captured.made], made)):
            if slot in dying:
                self.saved[slot] = alias(tensor)
                self.versions.append((self.saved[slot], tensor._version))

    def backward(self, grads: tuple[torch.Tensor | None, ...],
                 holdings: list[Holding | None]) -> list[torch.Tensor | None]:
        captured, site, recorder = self.captured, self.site, self.recorder
        self.awaits_backward = False
        # what autograd does with the block's result belongs to the call whose gradient is the last
        recorder.let_stand(self.sequence, self.locate(captured.stands_for) or (-1, 0, -1))
        if any([tensor._version != version for tensor, version in self.versions]):
            raise Restart("a tensor that it saved was written to", self.module)
        self.versions.clear()
        is_wanted = [o.requires_grad for o in captured.made]
        given = list(compress(grads, is_wanted))
        specs: tuple[GradSpec, ...] = tuple([
            None if g is None or holding is None else (tuple(g.shape), g.stride(), g.dtype, holding)
            for g, holding in zip(given, compress(holdings, is_wanted))])
        numbers_given = [number_of(g) for g in given if g is not None]
        if len(set(numbers_given)) < len(numbers_given):
            raise Restart("two of its outputs have one gradient", self.module)
        backward = self._backward_for(specs)
        for text in backward.assumptions:
            self.owner.assume(text, self.module)
        segment, first = backward.segment, len(self.slots)
        self.incoming = {
            first + i: g for i, (takes, g) in enumerate(zip(backward.incoming, given)) if takes and g is not None}
        born = take_numbers()
        site.numbers += [number_of(g) if g is not None and first + i in self.incoming else None
                         for i, g in enumerate(given)]
        site.numbers += range(born, born + segment.births)
        self.slots += [None] * (len(given) + segment.births)
        for slot in backward.freed:
            storage: Any = self.incoming[slot].untyped_storage()
            if storage.device != segment.claim_of(slot):
                raise Restart("a gradient comes from another device", self.module)
            self.slots[slot] = recorder.memory.place_of(storage.give_away())
        self.instances = replay(recorder, segment, site, self.slots, self._let_go)
        for slot, event in backward.freed.items():
            instance = next(i for i in self.instances if i.start.event <= event < i.stop.event)
            instance.freed.append((slot, site.numbers[slot]))
        modules = self.owner.modules_in(self.module)
        parameters = [modules[index]._parameters[name] for index, name, _, _ in backward.parameters]
        if any([parameter.grad is not None for parameter in parameters]):
            raise Restart("a gradient comes twice", self.module)
        with without_modes():
            for parameter, (_, _, slot, like) in zip(parameters, backward.parameters):
                parameter.grad = self._revive(segment, slot, like)
            return [self._give(segment, item) for item in backward.returned]

    def _give(self, segment: Segment, item: tuple[int, torch.Tensor, bool] | None) -> torch.Tensor | None:
        if item is None:
            return None
        slot, like, is_view = item
        grad = self.incoming.get(slot)
        if grad is None:
            grad = self._revive(segment, slot, like)
        if grad.shape == like.shape and grad._is_view() == is_view:
            return grad
        return grad.as_strided(like.size(), like.stride(), like.storage_offset())

    def __del__(self) -> None:
        if self.awaits_backward:  # autograd let go of the block's node: a run frees now what this one holds
            self.recorder.restart = Restart("its backward pass does not run", self.module)

    def _let_go(self, slot: int) -> None:
        """The block's backward pass is done with a storage that others may hold."""
        if slot in self.saved:
            del self.saved[slot]
        elif slot in self.incoming:
            self.incoming[slot].untyped_storage().give_back_early()  # type: ignore[attr-defined]

    def _backward_for(self, specs: tuple[GradSpec, ...]) -> CapturedBackward:
        """What the block does for gradients of these specs; found out by another capture where they are new."""
        captured = self.captured
        if (found := captured.backwards.get(specs)) is not None:
            return found
        for own, backward in captured.backwards.items():
            if backward.serves(own, specs):
                return backward
        try:
            again = BlockCapture(self.recorder, self.module, captured.arguments, self.owner.borrow, specs).run()
        except Mismatch as reason:
            raise Restart(str(reason), self.module) from None
        if again.segment.births != captured.segment.births:
            raise Restart("it does not do the same twice", self.module)
        found = captured.backwards[specs] = again.backwards[specs]
        return found


class BlockFunction(torch.autograd.Function):
    """A block as one autograd node."""

    @staticmethod
    def forward(ctx: Any, run: ReplayedBlock, gradient_token: torch.Tensor, *tensors: torch.Tensor) -> Any:
        ctx.run, ctx.module = run, run.module
        made = run.forward(list(tensors))
        run.awaits_backward = True
        run.save(list(tensors), made)
        ctx.mark_non_differentiable(*[t for t, o in zip(made, run.captured.made) if not o.requires_grad])
        ctx.set_materialize_grads(False)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        """Replay the backward pass; a second one restarts the run."""
        run, ctx.run = ctx.run, None
        if run is None:
            raise Restart("its backward pass runs twice", ctx.module)
        return (None, None, *run.backward(grads, find_holdings(grads)))
