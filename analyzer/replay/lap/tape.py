"""The blocks of a sharded model that are alike, of which some are run, and what is noted of their run."""
from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from analyzer.meta.address_space import MetaStorage
from analyzer.meta.intercept.replacement import replace
from analyzer.meta.state import StreamAction
from analyzer.record.recorder import Recorder
from analyzer.record.run_listener import RunListener
from analyzer.record.storage_lifetime import BORN, ENDED
from analyzer.record.tensor_walk import tensors_in, walk_modules
from analyzer.replay.match import Mismatch

from ..cache_slot import Filled, fill_as
from ..chain import compare_blocks, outline

HEAD, TAIL = 4, 3  # blocks that are run before and behind those that are not
REFERENCE = HEAD - 1  #: the last block before them, whose laps are played for each of them
_FEWEST = 12  # of fewer, running all takes no longer than looking at what some do: docs/performance.md

class RankChain(NamedTuple):
    """Blocks of one list, of which those between `HEAD` and `TAIL` are not run; ``unread`` are attributes of the
    reference (path, name) in which others differ, ``around`` the modules that the blocks are in.
    """

    blocks: list[nn.Module]
    paths: list[str]
    unread: set[tuple[str, str]]
    around: list[nn.Module]

    @property
    def skipped(self) -> range:
        return range(HEAD, len(self.blocks) - TAIL)


def find_chain(root: nn.Module) -> RankChain:
    """The longest list of blocks in ``root`` that are alike. Raises Mismatch where there is none."""
    walked = walk_modules(root)
    for _, module in walked:
        if isinstance(module, (nn.parallel.DistributedDataParallel, torch.distributed.fsdp.FullyShardedDataParallel)):
            raise Mismatch(f"{type(module).__name__} holds the blocks' parameters in buffers of its own")
    lists = [list(m.children()) for _, m in walked if isinstance(m, (nn.ModuleList, nn.ModuleDict, nn.Sequential))]
    longest = max(lists, key=len, default=[])
    if len(longest) < _FEWEST:
        raise Mismatch(f"no list of {_FEWEST} or more blocks")
    path_of = {id(module): path for path, module in walked}
    if len({id(block) for block in longest}) < len(longest):
        raise Mismatch("its blocks are one module")
    unread, reference = set[tuple[str, str]](), outline(longest[REFERENCE])
    for block in longest[1:-1]:
        compare_blocks(reference, outline(block), unread)
    paths = [path_of[id(block)] for block in longest]
    around = [module for path, module in walked if not path or paths[0].startswith(f"{path}.")]
    return RankChain(longest, paths, unread, around)


STEP, LAP, ORDERED, KEPT = range(ENDED + 1, ENDED + 5)
"""Events beside those of a step that is captured: STEP with its number, LAP with a `LapCut`, ORDERED with what was
asked of a stream, KEPT with the number of a library's workspace. Here BORN is with a number and bytes: a storage that
is resized is born once more.
"""


class LapCut(NamedTuple):
    """A block is called: its place in the chain, and how many nodes and calls of modules there were before."""

    block: int
    nodes: int
    module_calls: int


class LapTape(RunListener):
    """What is noted of a run in which the blocks of ``chain`` between its ends pass on what they are given.

    ``gradients`` of run blocks are storages by number, each with the block whose parameters it is of; ``stand_ins`` are
    those of other blocks, with the block, and the storage of the reference block's that each stands beside; where none
    ``stands_in``, ``states`` are the optimizer's, likewise with the block. ``filled`` are slots of caches that the
    reference block has filled: the others' are filled as they are.
    """

    def __init__(self, recorder: Recorder, chain: RankChain, stands_in: bool, filled: list[Filled]) -> None:
        self.recorder, self.chain, self.stands_in, self.filled = recorder, chain, stands_in, filled
        self.states: dict[int, int] = {}
        self.returned: set[int] = set()  #: storages of what the modules around the blocks gave
        self.events: list[Any] = []
        self.gradients: dict[int, int] = {}
        self.stand_ins: dict[int, tuple[int, int]] = {}
        self._place = {id(block): place for place, block in enumerate(chain.blocks)}
        self._output: Any = None  # what the last block gave: its tensor, and in a tuple which others are None
        self._parameters = [[p for m in walk_modules(block) for p in m[1]._parameters.values() if p is not None]
                            for block in chain.blocks]

    @contextmanager
    def running(self) -> Iterator[None]:
        recorder: Any = self.recorder
        recorder.run.events, recorder.modules.skip_block = self.events, self._enter
        recorder.run.listeners.append(self)

        def completing(original: Any) -> Any:
            def run_backward(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                with torch._C.DisableTorchFunction(), torch.no_grad():
                    self._complete_gradients()
                return result
            return run_backward

        undo = replace(torch.autograd, "_engine_run_backward", completing)
        try:
            yield
        finally:
            undo()
            recorder.run.listeners.remove(self)
            recorder.run.events = None

    # ---- RunListener

    def born(self, storage: MetaStorage) -> None:
        if self.recorder.run.events is self.events:
            self.events[-1] = BORN, (storage.number, storage.nbytes())

    def ordered(self, action: StreamAction, stream: int, event: int) -> None:
        self.events.append((ORDERED, (action, stream, event)))

    def kept(self, number: int) -> None:
        self.events.append((KEPT, number))

    def step_begins(self, step: int) -> None:
        self.events.append((STEP, step))

    def module_left(self, module: nn.Module, result: Any) -> None:
        if self.recorder.run.phase != "forward":
            return
        if id(module) in self._place:
            self._left(result)
        elif any(module is around for around in self.chain.around):
            with torch._C.DisableTorchFunction():
                self.returned.update([n for t in tensors_in(result) if (n := self._number(t)) is not None])

    def states_marked(self, optimizer: torch.optim.Optimizer) -> None:
        for place, parameter in self._parameters_run():
            self.states.update((n, place) for tensor in tensors_in(optimizer.state.get(parameter))
                               if (n := self._number(tensor)) is not None)

    # ---- blocks

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A module is called: one that is not to be run gives what the block before it gave."""
        place = self._place.get(id(module))
        if place is None or self.recorder.run.phase != "forward":
            return NotImplemented
        log, call = self.recorder.log, self.recorder.modules.running_call()
        count = len(log.module_call_slots)
        is_own = call == count - 1 and call is not None
        self.events.append((LAP, LapCut(place, len(log.node_slots), count - is_own)))
        if place not in self.chain.skipped:
            self.filled.clear()  # the next to be filled is the reference block's, and no cache is kept for longer
            return NotImplemented
        for filled in self.filled:
            fill_as(filled, filled.slot + place - REFERENCE)
        output = None if self._output is None else self._output[0]()
        if output is None or not any(t is output for t in tensors_in((args, kwargs))):
            raise Mismatch("a block is not given what the one before it gave")
        shape = self._output[1]
        return output if shape is None else tuple([None if is_none else output for is_none in shape])

    def _left(self, result: Any) -> None:
        tensors, is_tensor = tensors_in(result), isinstance(result, torch.Tensor)
        is_plain = is_tensor or isinstance(result, tuple) and all(
            x is None or isinstance(x, torch.Tensor) for x in result)
        self._output = None if len(tensors) != 1 or not is_plain else (
            weakref.ref(tensors[0]), None if is_tensor else [x is None for x in result])

    def _parameters_run(self) -> Iterator[tuple[int, torch.Tensor]]:
        return ((place, parameter) for place, parameters in enumerate(self._parameters)
                if place not in self.chain.skipped for parameter in parameters)

    def _complete_gradients(self) -> None:
        """Note whose gradients there are; make those of blocks that were not run where they stand in."""
        recorder: Any = self.recorder
        for place, parameter in self._parameters_run():
            if parameter.grad is not None and (number := self._number(parameter.grad)) is not None:
                self.gradients.setdefault(number, place)
        if self.stands_in:
            recorder.run.events = []
            try:
                for place in self.chain.skipped:
                    made: dict[int, torch.Tensor] = {}
                    for mine, theirs in zip(self._parameters[place], self._parameters[REFERENCE]):
                        self._stand_in(place, mine, theirs, made)
            finally:
                recorder.run.events = self.events

    def _number(self, tensor: Any) -> int | None:
        storage = self.recorder.memory.storage_of(tensor._local_tensor if isinstance(tensor, DTensor) else tensor)
        return None if storage is None else storage.number

    def _stand_in(self, place: int, mine: Any, theirs: Any, made: dict[int, torch.Tensor]) -> None:
        gradient = theirs.grad
        if gradient is None:
            if mine.grad is not None:
                raise Mismatch("gradients of a block that was run are dropped before the step ends")
            return
        number = self._number(gradient)
        if mine.grad is not None:
            known = self.stand_ins.get(self._number(mine.grad) or -1)
            if known is None or known[1] != number:
                raise Mismatch("a backward pass replaces gradients")
            return
        local = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
        if number is None:
            raise Mismatch("a gradient is in no memory of the world's")
        if number not in made:
            made[number] = torch.empty(local.untyped_storage().nbytes(), dtype=torch.uint8,
                                       device=self.recorder.memory.storage_of(local).device)  # type: ignore[union-attr]
            found = self._number(made[number])
            assert found is not None
            self.stand_ins[found] = place, number
        view = made[number].view(local.dtype).as_strided(local.shape, local.stride(), local.storage_offset())
        mine.grad = DTensor(view, gradient._spec, requires_grad=False) if isinstance(gradient, DTensor) else view
