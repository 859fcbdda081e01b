"""A recorded step as numbers for a solver: atoms of the program in order, and the values that pass between them."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import fx
from torch.nn.modules.batchnorm import _NormBase

from analyzer.fx.graph.statement import CheckpointRegion, GradRegion, region_of
from analyzer.profilers.flop_registry import count_call
from analyzer.profilers.traffic import traffic_bytes
from analyzer.record.call_table import OpCall

from .call_memory import alive_bytes, watched, written
from .kept_result import is_product
from .recorded_step import RecordedStep

_SOON = 8  # nodes between a value's maker and a write to it that are one atom: ResNet's shortcuts take five
_TIE_SHARE = 1e-6  # of the step's cost: what separates plans of equal cost by the bytes that recomputing moves


@dataclass(frozen=True, slots=True)
class CallInfo:
    """One operator call of the forward pass, as running it again would meet it."""

    cost: float
    saves: bool            #: autograd saves some tensor for its gradient
    saves_own: bool        #: among them one that the call itself makes: it must run to give it again
    is_product: bool       #: counts in the order by which a policy tells what to keep
    keep_bytes: int = -1   #: what keeping its result costs; -1 where it cannot be kept
    keep_value: int = -1   #: the value that it makes
    #: of a product with one result: the first atom that does more with it than view it; -1 where it must run
    first_use: int = -1
    written_value: int = -1  #: the value that it writes to in place; where that is kept, it does not run again


@dataclass(frozen=True)
class Problem:
    """The forward pass as ``atoms``: groups of nodes that no boundary may separate. Atom n, the last, is the loss.

    Per value (a storage made in the forward pass), sorted by maker: bytes, the atom that makes it, the first and the
    last atom whose gradient reads it (n + 1 and -1 if none), the last atom that reads it forward. Per atom: what its
    backward, its forward and the gradients that flow into it take besides values.
    """

    atoms: tuple[tuple[str, ...], ...]     #: names of nodes
    calls: tuple[tuple[CallInfo, ...], ...]
    pinned: np.ndarray                     #: atoms that are never run again
    fences: tuple[tuple[int, int], ...]    #: spans that a region holds whole or lies in: autocast blocks
    nbytes: np.ndarray
    maker: np.ndarray
    first_saver: np.ndarray
    last_saver: np.ndarray
    last_reader: np.ndarray
    users: tuple[tuple[int, ...], ...]     #: the atoms after its maker that compute with the value, not only view it
    backward_bytes: np.ndarray
    forward_bytes: np.ndarray
    incoming_bytes: np.ndarray
    uncounted: tuple[str, ...]             #: operators whose cost is not known

    def __len__(self) -> int:
        return len(self.atoms)

    @property
    def saved(self) -> np.ndarray:
        return self.last_saver >= 0

    @property
    def fwd_cost(self) -> float:
        return sum(c.cost for atom in self.calls for c in atom)


def read_problem(step: RecordedStep, gm: fx.GraphModule, cost: Callable[[OpCall], float | None],
                 counts_gradients: bool) -> Problem:
    """The problem of the graph whose step was recorded, without a plan; ``cost`` is what running a call again costs.

    With ``counts_gradients`` the gradients of parameters are part of what memory is needed for.
    """
    reader = _Reader(step, gm)
    count, order = reader.count, reader.order
    atoms: list[list[str]] = [[] for _ in range(count)]
    for node, atom in zip(reader.nodes, reader.atom_of):
        atoms[atom].append(node.name)
    pinned = np.zeros(count + 1, dtype=bool)
    pinned[[*(reader.atom_of[i] for i in reader.pinned_places()), count]] = True
    savers, reads_of_call = reader.find_savers()
    last_readers, users = reader.find_last_readers(), reader.find_users()
    calls, uncounted = reader.read_calls(cost, reads_of_call)
    backward, forward, incoming = reader.measure_transients(counts_gradients)
    return Problem(
        atoms=tuple(map(tuple, atoms)), calls=calls, pinned=pinned, fences=reader.find_fences(),
        nbytes=np.array([reader.values[v].block_bytes for v in order], dtype=np.int64),
        maker=np.array([reader.maker[v] for v in order], dtype=np.int64),
        first_saver=np.array([min(savers.get(v, (count + 1,))) for v in order], dtype=np.int64),
        last_saver=np.array([max(savers.get(v, (-1,))) for v in order], dtype=np.int64),
        last_reader=np.array([last_readers.get(v, -1) for v in order], dtype=np.int64),
        users=tuple(tuple(sorted(users.get(v, ()))) for v in order),
        backward_bytes=backward, forward_bytes=forward, incoming_bytes=incoming,
        uncounted=uncounted)


class _Reader:
    """A recorded step by place (of a node in the program; ``end`` is the loss) and by atom; values by their number."""

    def __init__(self, step: RecordedStep, gm: fx.GraphModule) -> None:
        self.step, self.log, self.gm = step, step.log, gm
        self.nodes = [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
        self.end = len(self.nodes)
        rows = {record.name: i for i, record in enumerate(self.log.nodes)}
        self.place_of_row = {rows[n.name]: i for i, n in enumerate(self.nodes)}
        self.place_of_call = self._place_calls()
        self.forward = [(i, call) for i, call in enumerate(self.log.calls) if call.phase == "forward"]
        self.values = {lifetime.number: lifetime for lifetime in watched(self.log)
                       if lifetime.born_call < len(self.log.calls) and lifetime.phase == "forward"
                       and lifetime.category in ("", "loss", "cast copy")}
        self.maker_place = {number: self.place_of_call[lifetime.born_call] for number, lifetime in self.values.items()}
        self.order = sorted(self.values, key=lambda v: (self.maker_place[v], v))
        self.index = {number: i for i, number in enumerate(self.order)}
        #: values in what each node returns
        self.returned = {n: [number for number, _ in self.log.nodes[rows[n.name]].outputs if number in self.values]
                         for n in self.nodes}
        self.atom_of = self._make_atoms()  #: of each place
        self.count = self.atom_of[-1]      #: of atoms, without the loss
        self.maker = {number: self.atom_of[place] for number, place in self.maker_place.items()}

    def _place_calls(self) -> list[int]:
        """The place of the node that each call belongs to; what belongs to none goes with what ran before it."""
        out = []
        place, phase = 0, "forward"
        for call in self.log.calls:
            if call.node in self.place_of_row:
                place = self.place_of_row[call.node]
            elif call.node >= 0 or call.phase != phase:
                place = self.end
            phase = call.phase
            out.append(place)
        return out

    def _make_atoms(self) -> list[int]:
        """The atom of each place, the loss's last: a value written in place soon after stays with its maker. Where it
        is written later, what touches it until then is `touching` and never run again.
        """
        glued = np.zeros(self.end + 1, dtype=bool)  # glued[i]: place i is in the atom of place i - 1
        last_writes: dict[int, int] = {}
        for i, call in self.forward:
            last_writes.update((n, self.place_of_call[i]) for n in written(call) if n in self.values)
        late = {n: last for n, last in last_writes.items() if last - self.maker_place[n] > _SOON}
        for number in last_writes.keys() - late.keys():
            glued[self.maker_place[number] + 1:last_writes[number] + 1] = True
        self.touching = {self.place_of_call[i] for i, call in self.forward for n in (*call.inputs, *call.outputs)
                         if self.place_of_call[i] <= late.get(n, -1)}
        before: CheckpointRegion | None = None
        for i, node in enumerate(self.nodes):
            region = next((r for r in region_of(node) if isinstance(r, CheckpointRegion)), None)
            glued[i] |= region is not None and region == before
            before = region
        glued[0] = glued[self.end] = False
        return list(np.cumsum(~glued) - 1)

    def pinned_places(self) -> list[int]:
        """In a checkpoint of the user's, changing a parameter or buffer, or touching a value written later."""
        found = [*self.touching, *(i for i, n in enumerate(self.nodes)
                                   if any(isinstance(r, CheckpointRegion) for r in region_of(n)))]
        storages = self.log.storages
        for i, call in self.forward:
            place = self.place_of_call[i]
            # running statistics of a layer are put back when it is run again
            if place == self.end or (node := self.nodes[place]).op == "call_module" and isinstance(
                    self.gm.get_submodule(str(node.target)), _NormBase):
                continue
            # and a normalization writes them without its schema saying so
            name = call.signature.op.__name__
            statistics = call.inputs if "_norm" in name and "batch" in name else ()
            if (any(v in storages and storages[v].category in ("parameter", "buffer", "input") for v in written(call))
                    or any(v in storages and storages[v].category == "buffer" for v in statistics)):
                found.append(place)
        return found

    def find_fences(self) -> tuple[tuple[int, int], ...]:
        """First and last atom of each region that no checkpoint may cut."""
        spans: dict[object, tuple[int, int]] = {}
        for node, atom in zip(self.nodes, self.atom_of):
            for region in region_of(node):
                if not isinstance(region, GradRegion):
                    spans[region] = (spans.get(region, (atom, 0))[0], atom)
        return tuple(spans.values())

    def find_savers(self) -> tuple[dict[int, set[int]], dict[int, set[int]]]:
        """The atoms whose gradient reads each value; what each forward call's gradient reads, with parameters."""
        savers: dict[int, set[int]] = {}
        reads: dict[int, set[int]] = {}
        calls = self.log.calls
        first = next((i for i, c in enumerate(calls) if c.phase == "backward"), len(calls))
        for index in range(first, len(calls)):
            call = calls[index]
            if call.phase != "backward":
                continue
            for number in call.inputs:
                lifetime = self.log.storages.get(number)
                if lifetime is None or lifetime.born_call >= first:
                    continue
                if call.forward is not None and not call.recomputed:
                    reads.setdefault(call.forward, set()).add(number)
                if number in self.values:
                    savers.setdefault(number, set()).add(self.atom_of[self.place_of_call[index]])
        for number, lifetime in self.values.items():
            if number not in savers and (lifetime.died_call is None or lifetime.died_call > first):
                savers[number] = {self.maker[number]}  # held without being read, by its maker
        return savers, reads

    def find_last_readers(self) -> dict[int, int]:
        """The last atom that holds each value as an argument: a node of it takes a node whose result it is part of."""
        found = {number: atom for node, atom in zip(self.nodes, self.atom_of) for number in self._taken(node)}
        loss = self.atom_of[-1]  # reads what the model returns
        return found | dict.fromkeys(self._taken(next(iter(reversed(self.gm.graph.nodes)))), loss)

    def _taken(self, node: fx.Node) -> set[int]:
        return {number for source in node.all_input_nodes for number in self.returned.get(source, ())}

    def find_users(self) -> dict[int, set[int]]:
        found: dict[int, set[int]] = {}
        for i, call in self.forward:
            atom = self.atom_of[self.place_of_call[i]]
            for number in {*call.inputs} - {*call.outputs}:
                if number in self.values and atom > self.maker[number]:
                    found.setdefault(number, set()).add(atom)
        return found

    def _first_uses(self) -> dict[int, int]:
        """For each value, the first atom that does more than view it: its maker, or one with a node that takes it."""
        calls_of: list[list[OpCall]] = [[] for _ in range(self.end + 1)]
        for i, call in self.forward:
            calls_of[self.place_of_call[i]].append(call)
        found: dict[int, int] = {}
        for node, atom, calls in zip(self.nodes, self.atom_of, calls_of):
            # of calls that do nothing but show storages; no call at all: what it returns is not known to be a view
            is_view = all(not written(call) and {*call.outputs} <= {*call.inputs} for call in calls)
            used = set() if calls and is_view else self._taken(node)
            for call in calls:
                used |= {*call.inputs} - {*call.outputs}  # neither viewed nor written
            for number in used:
                found.setdefault(number, atom)
        return dict.fromkeys(self.values, self.atom_of[-1]) | found

    def read_calls(self, cost: Callable[[OpCall], float | None],
                   reads: dict[int, set[int]]) -> tuple[tuple[tuple[CallInfo, ...], ...], tuple[str, ...]]:
        """The forward calls of each atom; the operators whose cost is not known."""
        found: list[list[CallInfo]] = [[] for _ in range(self.count + 1)]
        changed, first_uses = self._changed_after_use(), self._first_uses()
        uncounted: dict[str, None] = {}
        costs = {i: cost(c) for i, c in self.forward}
        traffic = {i: traffic_bytes(c) for i, c in self.forward}
        tie = _TIE_SHARE * sum(c or 0 for c in costs.values()) / max(1, sum(traffic.values()))
        for i, call in self.forward:
            if costs[i] is None:
                uncounted.setdefault(str(call.signature.op))
            own = set(call.outputs)
            fresh = [v for v in own if v in self.values and self.values[v].born_call == i]
            count_info = count_call(call.signature)
            product = is_product(call.signature.op)
            keepable = (product and count_info is not None and count_info.macs > 0 and fresh and not own & changed
                        and len(fresh) == len(own))
            into = [v for v in written(call) if v in self.values and call.inputs and v == call.inputs[0]]
            sizes = {v: self.values[v].block_bytes for v in fresh}
            found[self.atom_of[self.place_of_call[i]]].append(CallInfo(
                (costs[i] or 0) + tie * traffic[i], saves=bool(reads.get(i)), saves_own=bool(own & reads.get(i, set())),
                is_product=product, keep_bytes=sum(sizes.values()) if keepable else -1,
                keep_value=self.index[max(fresh, key=sizes.__getitem__)] if keepable else -1,
                first_use=first_uses.get(fresh[0], -1) if product and len(own) == len(fresh) == 1 else -1,
                written_value=self.index[into[0]] if into else -1))
        return tuple(map(tuple, found)), tuple(uncounted)

    def _changed_after_use(self) -> set[int]:
        """Storages that something reads before they are written in place: what is left of them is not what was read."""
        used: set[int] = set()
        changed: set[int] = set()
        for _, call in self.forward:
            changed |= used.intersection(written(call))
            used |= {*call.inputs} - {*call.outputs}  # a view shares its storage, and reads nothing
        return changed

    def measure_transients(self, counts_gradients: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What each atom's backward, its forward and the gradients that flow into it take besides values."""
        log, step = self.log, self.step
        total = len(log.calls)
        held = alive_bytes(list(self.values.values()), total)
        fresh = np.zeros(total, dtype=np.int64)  # values of the atom that runs
        atom_of_call = [self.atom_of[p] for p in self.place_of_call]
        for number, lifetime in self.values.items():
            i = lifetime.born_call
            end = total if lifetime.died_call is None else min(total, lifetime.died_call)
            while i < end and atom_of_call[i] == self.maker[number] and log.calls[i].phase == "forward":
                fresh[i] += lifetime.block_bytes
                i += 1
        others = alive_bytes(
            [s for s in watched(log) if s.number not in self.values and s.category in ("", "loss")], total)
        extra = step.activation_bytes - held
        if counts_gradients:
            extra = extra + step.gradient_bytes
            others = others + step.gradient_bytes
        backward, forward, incoming = (np.zeros(self.count + 1, dtype=np.int64) for _ in range(3))
        begun: set[int] = set()
        for i, call in enumerate(log.calls):
            atom = atom_of_call[i]
            if call.phase == "forward":
                forward[atom] = max(forward[atom], extra[i] + fresh[i])
            elif call.phase == "backward":
                backward[atom] = max(backward[atom], extra[i])
                if atom not in begun:
                    begun.add(atom)
                    incoming[atom] = others[i - 1]
        for atom in range(self.count - 1, -1, -1):  # what has no gradient of its own lets those of others pass
            if atom not in begun:
                incoming[atom] = incoming[atom + 1]
        return backward, forward, incoming


