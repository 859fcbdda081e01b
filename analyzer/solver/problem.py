"""A recorded step as numbers for a solver: atoms of the program in order, and the values that pass between them."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import fx
from torch.nn.modules.batchnorm import _NormBase

from analyzer.fx.graph.region import CheckpointRegion, GradRegion
from analyzer.fx.graph.statement import region_of
from analyzer.profilers.flop_registry import count_call
from analyzer.profilers.traffic import traffic_bytes
from analyzer.record.op_call import OpCall

from .kept_product import is_product
from .recorded_step import RecordedStep, alive_bytes, watched

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
    readers: tuple[tuple[int, ...], ...]
    users: tuple[tuple[int, ...], ...]     #: the atoms after its maker that compute with the value, not only view it
    savers: tuple[tuple[int, ...], ...]
    backward_bytes: np.ndarray
    forward_bytes: np.ndarray
    incoming_bytes: np.ndarray
    fwd_cost: float
    node_of: tuple[str, ...] = ()          #: per value the node whose result it is, "" for what lies inside a node
    #: of taking a byte to the host and back; None where values stay on the device
    offload_cost_per_byte: float | None = None
    uncounted: tuple[str, ...] = field(default=())  #: operators whose cost is not known

    def __len__(self) -> int:
        return len(self.atoms)

    @property
    def saved(self) -> np.ndarray:
        """Which values a later operator needs in the backward pass."""
        return self.last_saver >= 0


def read_problem(step: RecordedStep, gm: fx.GraphModule, cost: Callable[[OpCall], float | None],
                 counts_gradients: bool) -> Problem:
    """The problem of the graph whose step was recorded, without a plan; ``cost`` is what running a call again costs.

    With ``counts_gradients`` the gradients of parameters are part of what memory is needed for.
    """
    return _Reader(step, gm, cost, counts_gradients).read()


class _Reader:
    def __init__(self, step: RecordedStep, gm: fx.GraphModule, cost: Callable[[OpCall], float | None],
                 counts_gradients: bool) -> None:
        self.step, self.log, self.gm, self.cost = step, step.log, gm, cost
        self.counts_gradients = counts_gradients
        self.nodes = [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
        self.rows = {record.name: i for i, record in enumerate(self.log.nodes)}
        self.values = {life.number: life for life in watched(self.log)
                       if life.phase == "forward" and life.category in ("", "loss", "cast copy")}
        # row of the log -> place in the program
        self.position = {self.rows[n.name]: i for i, n in enumerate(self.nodes)}
        self.end = len(self.nodes)
        self.place_of_call = self._place_calls()
        self.maker_place = {number: self.place_of_call[life.born_call] for number, life in self.values.items()
                            if life.born_call < len(self.place_of_call)}

    def _place_calls(self) -> list[int]:
        """The place of the node that each call belongs to; what belongs to none goes with what ran before it."""
        out = []
        place, phase = 0, "forward"
        for call in self.log.calls:
            if call.node in self.position:
                place = self.position[call.node]
            elif call.node >= 0 or call.phase != phase:
                place = self.end
            phase = call.phase
            out.append(place)
        return out

    def read(self) -> Problem:
        atom_of = self._make_atoms()
        count = atom_of[-1]
        atoms: list[list[str]] = [[] for _ in range(count)]
        for node, atom in zip(self.nodes, atom_of):
            atoms[atom].append(node.name)
        pinned = np.zeros(count + 1, dtype=bool)
        pinned[[atom_of[i] for i in self._pinned_places()]] = True
        pinned[count] = True
        savers, reads_of_call = self._savers(atom_of)
        readers = self._readers(atom_of)
        order = sorted(self.maker_place, key=lambda v: (self.maker_place[v], v))
        index = {number: i for i, number in enumerate(order)}
        saved_by = [tuple(sorted(savers.get(v, ()))) for v in order]
        read_by = [tuple(sorted(readers.get(v, ()))) for v in order]
        maker = np.array([atom_of[self.maker_place[v]] for v in order], dtype=np.int64)
        calls, uncounted = self._read_calls(atom_of, reads_of_call, index, self._first_uses(atom_of))
        backward, forward, incoming = self._transients(atom_of, maker, order)
        return Problem(
            atoms=tuple(map(tuple, atoms)), calls=calls, pinned=pinned, fences=self._fences(atom_of),
            nbytes=np.array([self.values[v].block_bytes for v in order], dtype=np.int64), maker=maker,
            first_saver=np.array([s[0] if s else count + 1 for s in saved_by], dtype=np.int64),
            last_saver=np.array([s[-1] if s else -1 for s in saved_by], dtype=np.int64),
            last_reader=np.array([r[-1] if r else -1 for r in read_by], dtype=np.int64), readers=tuple(read_by),
            users=self._users(atom_of, order, maker), savers=tuple(saved_by),
            backward_bytes=backward, forward_bytes=forward, incoming_bytes=incoming,
            fwd_cost=sum(c.cost for atom in calls for c in atom), node_of=self._results(order), uncounted=uncounted)

    # ---- atoms

    def _make_atoms(self) -> list[int]:
        """The atom of each place, the loss's last: a value written in place stays with its maker."""
        glued = np.zeros(self.end + 1, dtype=bool)  # glued[i]: place i is in the atom of place i - 1
        for index, call in enumerate(self.log.calls):
            if call.phase == "forward":
                for number in written(call):
                    if number in self.maker_place:
                        glued[self.maker_place[number] + 1:self.place_of_call[index] + 1] = True
        before: CheckpointRegion | None = None
        for i, node in enumerate(self.nodes):
            region = next((r for r in region_of(node) if isinstance(r, CheckpointRegion)), None)
            glued[i] |= region is not None and region == before
            before = region
        glued[0] = glued[self.end] = False
        return list(np.cumsum(~glued) - 1)

    def _pinned_places(self) -> list[int]:
        """Nodes that must not run twice: in a checkpoint of the user's, or changing a parameter or buffer."""
        found = [i for i, n in enumerate(self.nodes) if any(isinstance(r, CheckpointRegion) for r in region_of(n))]
        for index, call in enumerate(self.log.calls):
            place = self.place_of_call[index]
            if call.phase != "forward" or place == self.end or self._is_norm(place):
                continue
            storages = self.log.storages
            if (any(v in storages and storages[v].category in ("parameter", "buffer", "input") for v in written(call))
                    or any(v in storages and storages[v].category == "buffer" for v in running_statistics(call))):
                found.append(place)
        return found

    def _is_norm(self, place: int) -> bool:
        """Whether a node is a layer whose running statistics are put back when it is run again."""
        node = self.nodes[place]
        return node.op == "call_module" and isinstance(self.gm.get_submodule(str(node.target)), _NormBase)

    def _fences(self, atom_of: Sequence[int]) -> tuple[tuple[int, int], ...]:
        spans: dict[object, tuple[int, int]] = {}
        for i, node in enumerate(self.nodes):
            for region in region_of(node):
                if not isinstance(region, GradRegion):
                    spans[region] = (spans.get(region, (atom_of[i], 0))[0], atom_of[i])
        return tuple(spans.values())

    # ---- values

    def _savers(self, atom_of: Sequence[int]) -> tuple[dict[int, set[int]], dict[int, set[int]]]:
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
                life = self.log.storages.get(number)
                if life is None or life.born_call >= first:
                    continue
                if call.forward is not None and not call.recomputed:
                    reads.setdefault(call.forward, set()).add(number)
                if number in self.maker_place:
                    savers.setdefault(number, set()).add(atom_of[self.place_of_call[index]])
        for number, place in self.maker_place.items():
            life = self.values[number]
            if number not in savers and (life.died_call is None or life.died_call > first):
                savers[number] = {atom_of[place]}  # held without being read, by its maker
        return savers, reads

    def _readers(self, atom_of: Sequence[int]) -> dict[int, set[int]]:
        """The atoms that hold each value as an argument: a node of theirs takes a node whose result it is part of."""
        made = {n: [number for number, _ in self.log.nodes[self.rows[n.name]].outputs if number in self.maker_place]
                for n in self.nodes}
        readers: dict[int, set[int]] = {}
        for place, node in enumerate(self.nodes):
            for source in node.all_input_nodes:
                for number in made.get(source, ()):
                    readers.setdefault(number, set()).add(atom_of[place])
        for node in next(iter(reversed(self.gm.graph.nodes))).all_input_nodes:  # what the model returns, the loss reads
            for number in made.get(node, ()):
                readers.setdefault(number, set()).add(atom_of[-1])
        return readers

    def _users(self, atom_of: Sequence[int], order: Sequence[int], maker: np.ndarray) -> tuple[tuple[int, ...], ...]:
        made = {number: int(atom) for number, atom in zip(order, maker)}
        found: dict[int, set[int]] = {}
        for i, call in enumerate(self.log.calls):
            if call.phase == "forward":
                atom = atom_of[self.place_of_call[i]]
                for number in call.inputs:
                    if number in made and number not in call.outputs and atom > made[number]:
                        found.setdefault(number, set()).add(atom)
        return tuple(tuple(sorted(found.get(v, ()))) for v in order)

    def _first_uses(self, atom_of: Sequence[int]) -> dict[int, int]:
        """For each value, the first atom that does more than view it: its maker, or one with a node that takes it."""
        calls_of: list[list[OpCall]] = [[] for _ in range(self.end + 1)]
        for i, call in enumerate(self.log.calls):
            if call.phase == "forward":
                calls_of[self.place_of_call[i]].append(call)
        made = {n: [number for number, _ in self.log.nodes[self.rows[n.name]].outputs if number in self.maker_place]
                for n in self.nodes}
        found: dict[int, int] = {}
        for place, node in enumerate(self.nodes):
            taken = {number for source in node.all_input_nodes for number in made.get(source, ())}
            # no call at all: what it returns is not known to be a view
            if not all(is_view(call) for call in calls_of[place]) or not calls_of[place]:
                for number in taken:
                    found.setdefault(number, atom_of[place])
            for call in calls_of[place]:
                for number in {*call.inputs} - {*call.outputs}:  # neither viewed nor written
                    found.setdefault(number, atom_of[place])
        for number in self.maker_place:
            found.setdefault(number, atom_of[-1])
        return found

    def _results(self, order: Sequence[int]) -> tuple[str, ...]:
        made: dict[int, str] = {}
        for node in self.nodes:
            for number, _ in self.log.nodes[self.rows[node.name]].outputs:
                if self.maker_place.get(number) == self.position[self.rows[node.name]]:
                    made.setdefault(number, node.name)
        return tuple(made.get(v, "") for v in order)

    def _read_calls(self, atom_of: Sequence[int], reads: dict[int, set[int]], index: dict[int, int],
                    first_uses: dict[int, int]) -> tuple[tuple[tuple[CallInfo, ...], ...], tuple[str, ...]]:
        count = atom_of[-1]
        found: list[list[CallInfo]] = [[] for _ in range(count + 1)]
        changed = self._changed_after_use()
        uncounted: dict[str, None] = {}
        forward = [(i, c) for i, c in enumerate(self.log.calls) if c.phase == "forward"]
        costs = {i: self.cost(c) for i, c in forward}
        traffic = {i: traffic_bytes(c) for i, c in forward}
        tie = _TIE_SHARE * sum(c or 0 for c in costs.values()) / max(1, sum(traffic.values()))
        for i, call in forward:
            if costs[i] is None:
                uncounted.setdefault(str(call.signature.op))
            own = set(call.outputs)
            fresh = [v for v in own if v in index and self.values[v].born_call == i]
            count_info = count_call(call.signature)
            product = is_product(call.signature.op)
            keepable = (product and count_info is not None and count_info.macs > 0 and fresh and not own & changed
                        and len(fresh) == len(own))
            into = [v for v in written(call) if v in index and call.inputs and v == call.inputs[0]]
            sizes = {v: self.values[v].block_bytes for v in fresh}
            found[atom_of[self.place_of_call[i]]].append(CallInfo(
                (costs[i] or 0) + tie * traffic[i], saves=bool(reads.get(i)), saves_own=bool(own & reads.get(i, set())),
                is_product=product, keep_bytes=sum(sizes.values()) if keepable else -1,
                keep_value=index[max(fresh, key=sizes.__getitem__)] if keepable else -1,
                first_use=first_uses.get(fresh[0], -1) if product and len(own) == len(fresh) == 1 else -1,
                written_value=index[into[0]] if into else -1))
        return tuple(map(tuple, found)), tuple(uncounted)

    def _changed_after_use(self) -> set[int]:
        """Storages that something reads before they are written in place: what is left of them is not what was read."""
        used: set[int] = set()
        changed: set[int] = set()
        for call in self.log.calls:
            if call.phase == "forward":
                into = written(call)
                changed.update(v for v in into if v in used)
                # a view shares its storage, and reads nothing
                used.update(v for v in call.inputs if v not in call.outputs)
        return changed

    # ---- what memory is needed besides values

    def _transients(self, atom_of: Sequence[int], maker: np.ndarray,
                    order: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        log, step = self.log, self.step
        total = len(log.calls)
        held = alive_bytes([self.values[v] for v in order], total)
        fresh = np.zeros(total, dtype=np.int64)  # values of the atom that runs
        atom_of_call = np.array([atom_of[p] for p in self.place_of_call], dtype=np.int64)
        for v, atom in zip(order, maker):
            life = self.values[v]
            i = life.born_call
            end = total if life.died_call is None else min(total, life.died_call)
            while i < end and atom_of_call[i] == atom and log.calls[i].phase == "forward":
                fresh[i] += life.block_bytes
                i += 1
        others = alive_bytes(
            [s for s in watched(log) if s.number not in self.maker_place and s.category in ("", "loss")], total)
        extra = step.activation_bytes - held
        if self.counts_gradients:
            extra = extra + step.gradient_bytes
            others = others + step.gradient_bytes
        count = atom_of[-1]
        backward, forward, incoming = (np.zeros(count + 1, dtype=np.int64) for _ in range(3))
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
        for atom in range(count - 1, -1, -1):  # what has no gradient of its own lets those of others pass
            if atom not in begun:
                incoming[atom] = incoming[atom + 1]
        return backward, forward, incoming


def written(call: OpCall) -> list[int]:
    """The storages that a call writes in place."""
    op = call.signature.op
    if not isinstance(op, torch._ops.OpOverload) or not op._schema.is_mutable:
        return []
    return [v for v in call.outputs if v in call.inputs]


def is_view(call: OpCall) -> bool:
    """Whether a call does nothing but show storages that it is given."""
    return not written(call) and {*call.outputs} <= {*call.inputs}


def running_statistics(call: OpCall) -> list[int]:
    """What a normalization may write without its schema saying so."""
    return list(call.inputs) if "_norm" in call.signature.op.__name__ and "batch" in call.signature.op.__name__ else []
