"""Plays a recorded forward and backward pass again: the same calls and the same lives of storages, at whatever addresses are free now.

A steady-state step runs the operators of the first step in the same order; what differs is what is in memory before it. So the second step need
not run the model's code: its events are repeated on the simulated allocator, several times faster than Python can run a model.
"""
from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import nn

from analyzer.meta.address_space import Region
from analyzer.meta.storage import MetaStorage, next_number, revive, template
from analyzer.meta.transient import hold_blocks

from .log import LogNode, StorageLife
from .op_call import OpCall
from .recorder import BEGAN, BORN, CALLED, DIED, HELD, OUTSIDE, Event, Recorder


# What nn.Module itself keeps in every module: hooks and flags that a forward pass does not use to remember anything.
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__) - {"training", "_parameters", "_buffers", "_modules"}


class Footprint:
    """What a forward pass could change that a later step would see; two that differ mean that the next step may differ."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._attributes = {(i, name): (value, len(value) if isinstance(value, (list, dict, set)) else None)
                            for i, m in enumerate(modules) for name, value in m.__dict__.items() if name not in _OF_EVERY_MODULE}
        self._random = random.getstate()

    def is_like(self, other: Footprint) -> bool:
        """Whether nothing that is looked at changed: attributes of modules, sizes of their containers, Python's generator."""
        if self._random != other._random or self._attributes.keys() != other._attributes.keys():
            return False
        return all(value is other._attributes[key][0] and size == other._attributes[key][1]
                   for key, (value, size) in self._attributes.items())


class StepReplay:
    """The events of one recorded stretch, which can be played again.

    Storages that were there before keep their numbers; those born in the stretch get new ones.
    """

    def __init__(self, recorder: Recorder, events: list[Event], first_node: int) -> None:
        self.recorder = recorder
        self.events = events
        self.nodes = recorder.log.nodes[first_node:]
        self.first_node = first_node
        self._left: dict[int, tuple[torch.Tensor, Callable[[torch.Tensor], None]]] = {}
        self._shared = False
        self._survivors: set[int] = set()
        self._closed = True  # nothing that was there before died
        for kind, what in events:
            if kind == BORN:
                self._survivors.add(what)
            elif kind == DIED:
                if what not in self._survivors:
                    self._closed = False
                self._survivors.discard(what)

    def leave(self, tensor: torch.Tensor, receive: Callable[[torch.Tensor], None]) -> None:
        """Say that the stretch leaves ``tensor`` behind; when it is played again, ``receive`` gets its like."""
        if tensor.layout is not torch.strided:
            self._closed = False  # a sparse gradient is several tensors
            return
        storage = tensor.untyped_storage()
        assert isinstance(storage, MetaStorage)
        self._shared = self._shared or storage.number in self._left
        self._left[storage.number] = (template(tensor), receive)

    def is_whole(self) -> bool:
        """Whether all that outlives the stretch is known to `leave`, each on a storage of its own, and nothing older died in it."""
        return self._closed and not self._shared and self._survivors == set(self._left)

    def play(self) -> None:
        """Repeat the stretch as the recorder's present step."""
        recorder, log, space = self.recorder, self.recorder.log, self.recorder.space
        step, storages, calls, offset = recorder.step, log.storages, log.calls, len(log.nodes) - self.first_node
        numbers: dict[int, int] = {}
        regions: dict[int, Region] = {}
        claims: dict[str, torch.device] = {}
        for kind, what in self.events:
            if kind == CALLED:
                old = calls[what]
                call_offset = len(calls) - what
                calls.append(OpCall(
                    old.signature, tuple([numbers.get(n, n) for n in old.inputs]), tuple([numbers.get(n, n) for n in old.outputs]), step,
                    old.phase, old.module, old.node if old.node == OUTSIDE else old.node + offset,
                    None if old.forward is None else old.forward + call_offset, old.recomputed))
            elif kind == BORN:
                life = storages[what]
                claim = claims.get(life.device)
                if claim is None:
                    claim = claims[life.device] = torch.device(life.device)
                region = space.reserve(claim, life.nbytes)
                fresh = numbers[what] = next_number()
                regions[what] = region
                log.events += 1
                storages[fresh] = _copy_life(life, fresh, region, log.events, len(calls), step, offset)
                recorder.watch_peak(0)
            elif kind == DIED:
                life = storages[numbers[what]]
                log.events += 1
                life.died, life.died_call = log.events, len(calls)
                space.give_back(claims[life.device], regions.pop(what))
            elif kind == HELD:
                hold_blocks(recorder.mode.state, *what)
            elif kind == BEGAN:
                recorder.begin(what)
            else:
                recorder.end()
        for node in self.nodes:
            log.nodes.append(_copy_node(node, numbers, offset, step))
        for number, (like, receive) in self._left.items():
            receive(revive(like, claims[storages[number].device], numbers[number], regions[number], space))


def _copy_life(life: StorageLife, number: int, region: Region, event: int, call: int, step: int, offset: int) -> StorageLife:
    copy = StorageLife(number, life.nbytes, region.bytes, region.address, life.device, event, call, life.phase, step,
                       life.node if life.node == OUTSIDE else life.node + offset, life.module)
    copy.category, copy.label, copy.requires_grad, copy.spec = life.category, life.label, life.requires_grad, life.spec
    return copy


def _copy_node(node: LogNode, numbers: dict[int, int], offset: int, step: int) -> LogNode:
    return replace(node, step=step, inputs=[i + offset for i in node.inputs], reads=[numbers.get(n, n) for n in node.reads],
                   outputs=[(numbers.get(n, n), spec) for n, spec in node.outputs])

