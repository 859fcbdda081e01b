"""Runs each kind of block once and plays its record for the others, forward and backward."""
from __future__ import annotations

import operator
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.plain_type import ARGUMENTS
from analyzer.meta.storage import MetaStorage, take_numbers
from analyzer.meta.tensor import alias, revive
from analyzer.record.autograd_node import describe_context
from analyzer.record.hold import Holding, find_holdings
from analyzer.record.module_walk import walk_modules
from analyzer.record.recorder import Recorder

from .block_key import ReadValues, structure_key
from .block_place import BlockPlace
from .block_trial import (
    Arguments,
    Backward,
    Borrow,
    GradSpec,
    PassedOn,
    Refused,
    Segment,
    Trial,
    number_of,
    writes_in_place,
)
from .cache_slot import CacheLike, Slot, fill, index_candidates, is_free, like_cache
from .reel import Reel, Take, play
from .reserved import Reserved
from .restart import BLOCK, Restart
from .state_fingerprint import StateFingerprint, describe_tensor_state, tensor_attributes
from .twin import Twin
from .unseen_gradient import BlockGradients

# When a trial pays: it costs about one and a half runs of the block, so a kind needs three, and something to set up, so
# the blocks beyond the second must hold so many leaf modules: section "When a block is tried out" of
# docs/performance.md, which benchmarks/speed.py measures.
FEWEST = 3
LEAST_LEAVES_SAVED = 64
_LEAVES = (torch.Tensor, *ARGUMENTS)
_UNCHANGING = (*ARGUMENTS, CacheLike)


def pays(blocks: int, leaves: int) -> bool:
    """Whether so many alike blocks of so many leaf modules are worth a trial."""
    return blocks >= FEWEST and (blocks - 2) * leaves > LEAST_LEAVES_SAVED


class BlockReuse:
    """Decides for each call of a module whether it is played or run.

    ``reserved`` are blocks that have places and no tensors yet, by id; one that is run is lent its tensors first, by
    ``lend``.
    """

    def __init__(self, recorder: Recorder, root: nn.Module, borrow: Borrow, is_leaf: Callable[[nn.Module], bool],
                 excluded: Collection[type[nn.Module]] = (), reserved: Mapping[int, Reserved] | None = None,
                 lend: Callable[[Reserved], None] = lambda reserved: None) -> None:
        self.recorder, self.borrow, self._lend_tensors = recorder, borrow, lend
        contents: dict[int, Contents] = {}
        twins = self._twins = [r.twin for r in (reserved or {}).values()]
        self._patterns = {id(twin.pattern.block): twin.pattern for twin in twins}
        self._reserved = {id(module): r for r in (reserved or {}).values() for module in r.twin.modules}
        modules = [module for _, module in walk_modules(root)
                   ] if not twins else [m for m in recorder.modules() if id(m) not in self._reserved]
        for twin in twins:
            contents[id(twin.block)] = Contents(twin.modules, twin.pattern.leaves,
                                               list(map(weakref.ref, (*twin.parameters, *twin.buffers))))
        for module in modules:
            _survey(module, contents)
        parents = Counter(id(child) for module in modules for child in module._modules.values() if child is not None)
        owners: Counter[int] = Counter()  # how many places hold a parameter: a tied one is no block's own
        for module in modules:
            if parents[id(module)] > 1:
                owners.update(map(id, contents[id(module)].list_tensors()))
            owners.update(
                id(t) for held in (module._parameters, module._buffers) for t in held.values() if t is not None)
        self._tied = {i for i, n in owners.items() if n > 1}
        keys = self._list_keys(root, modules, contents, lambda module: type(module) in excluded or is_leaf(module),
                               twins)
        counts = self._counts = Counter(k for k in keys.values() if k is not None)
        self._all_keys, self._leaves = keys, {i: contents[i].leaves for i in keys}
        for twin in twins:
            keys[id(twin.block)] = keys[id(twin.pattern.block)]
            counts.update([k for layout in twin.pattern.layouts if (k := keys.get(id(layout.module))) is not None])
        self.keys = {i: k for i, k in keys.items() if k is not None and pays(counts[k], contents[i].leaves)}
        self._contents = {i: contents[i]._replace(modules=list(dict.fromkeys(contents[i].modules))) for i in self.keys}
        # candidates that hold a parameter, by the number of its storage
        self._blocks_of: dict[int, list[nn.Module]] = {}
        self._touched: set[int] = set()  # those whose parameters were read by a call that was run
        self._tensor_states: dict[int, Any] = {}  # of candidates' tensors, by id
        recorder.watched, recorder.touched, recorder.before_backward = set(), self._touch, self._check_backward
        for i in self._contents:
            if i not in self._reserved:
                self._watch(self._contents[i])
        # what a played block read more than once, by the number of its storage, and the block
        self._summed: dict[int, nn.Module] = {}
        self._known: dict[Hashable, list[_Variant]] = {}
        self._unreadable: dict[Hashable, str] = {}  # why blocks of a structure are not tried
        self._views: dict[int, nn.Module] = {}      # outputs that are views, by the number of their storage
        self._context = describe_context()
        self._played: dict[int, nn.Module] = {}  # each module of a played block, by id, and the block
        self._plays: Counter[Hashable] = Counter()  # of another block's record, by structure
        #: the class of each candidate that was called, and why it was run (None: it was replayed), by path
        self.decisions: dict[str, tuple[str, str | None]] = {}

    def _list_keys(self, root: nn.Module, modules: Sequence[nn.Module], contents: dict[int, Contents],
                   is_excluded: Callable[[nn.Module], bool], twins: Sequence[Twin]) -> dict[int, Hashable]:
        """What blocks have in common that may be played for each other, by id(block); None for one of a kind."""
        memo: dict[int, int | None] = {}
        numbers: dict[Hashable, int] = {}
        for twin in twins:
            memo[id(twin.block)] = structure_key(twin.pattern.block, memo, numbers)
        return {id(module): structure_key(module, memo, numbers) for module in modules
                if module is not root and len(module._modules) > 1 and not is_excluded(module)}

    def _watch(self, block: Contents) -> None:
        """Hear of calls that read a block's parameters."""
        for tensor in block.list_tensors():
            self._tensor_states[id(tensor)] = describe_tensor_state(tensor)
            storage = tensor.untyped_storage() if tensor.requires_grad and tensor.layout is torch.strided else None
            if isinstance(storage, MetaStorage):
                self._blocks_of.setdefault(storage.number, []).append(block.modules[0])
                self.recorder.watched.add(storage.number)

    def lend(self, module: nn.Module) -> None:
        """Make the tensors of the block around ``module`` if there are only places for them."""
        reserved = self._reserved.get(id(module))
        if reserved is None:
            return
        self._lend_tensors(reserved)
        twin, recorder = reserved.twin, self.recorder
        for inner, layout in zip(twin.modules, twin.pattern.layouts):
            del self._reserved[id(inner)]
            key = self.keys.get(id(layout.module))
            if key is not None:
                self.keys[id(inner)] = key
                contents = self._contents[id(inner)] = _survey(inner, {})
                self._watch(contents)
        reserved.fingerprint = StateFingerprint(twin.modules)
        reserved.write_out(recorder.log)
        recorder.own_parameters_of(twin.modules)

    def _lend_inside(self, module: nn.Module) -> None:
        """Make the tensors of blocks in a block that has its own."""
        if not self._reserved or id(module) in self._reserved:
            return
        inside = [inner for inner in self.modules_in(module) if id(inner) in self._reserved]
        if inside:
            for inner in inside:
                self.lend(inner)
            self._contents[id(module)] = _survey(module, {})
            self._watch(self._contents[id(module)])

    def has_played(self, block: nn.Module) -> bool:
        """Whether a block was played."""
        return id(block) in self._played

    def path_of(self, module: nn.Module) -> str:
        """The path of a block in the model."""
        return self.recorder.path_of(module)

    def given_up(self, module: nn.Module) -> Collection[int]:
        """Positions of the arguments that are used by the block alone."""
        return ()

    def read_later(self, module: nn.Module) -> Collection[int]:
        """Positions of the arguments that are known to be read after the block."""
        return ()

    def make_trial(self, module: nn.Module, arguments: Arguments, grad_specs: tuple[GradSpec, ...] | None) -> Trial:
        """The first run of a block, or another one for gradients of other specs."""
        return Trial(self.recorder, module, arguments, self.borrow, grad_specs)

    def make_place(self, segment: Segment, module: nn.Module, numbers: Iterable[Sequence[Any]],
                   producers: dict[int, int | None]) -> BlockPlace:
        """The place of a block that is played in the log."""
        recorder = self.recorder
        return BlockPlace(segment, self.path_of(module), numbers, producers, recorder.log, recorder.step,
                          recorder.running_call())

    def explain(self) -> dict[str, tuple[str, str | None]]:
        """The class of each candidate, and why it was run (None: it was replayed), by path; none that is within one."""
        found: dict[str, tuple[str, str | None]] = {}
        for module in self.recorder.modules():
            if id(module) not in self._all_keys:
                continue
            path, key = self.path_of(module), self._all_keys[id(module)]
            if path.rpartition(".")[0] in found and found[path.rpartition(".")[0]][1] is None:
                continue
            if path in self.decisions:
                found[path] = self.decisions[path]
            elif id(module) not in self.keys:
                reason = ("a hook, a script or an object that a tensor holds makes it one of a kind" if key is None else
                          f"it would not pay: {self._counts[key]} alike, of {self._leaves[id(module)]} modules without "
                          f"children")
                found[path] = type(module).__name__, reason
        return {**found, **self.decisions}

    def run(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The block's output, replayed; NotImplemented where it has to be run."""
        result: Any = NotImplemented
        if id(module) in self.keys and self.recorder.step == 0 and self.recorder.phase == "forward":
            path, reason = self.path_of(module), None
            try:
                result = self._replay(module, args, kwargs)
            except Refused as refused:
                reason = str(refused)
            _, earlier = self.decisions.get(path, ("", None))
            self.decisions[path] = type(module).__name__, earlier or reason  # one that was run once was run
        elif self.recorder.step == 0 and id(module) in self._played:
            raise Restart("it is called again", self._played[id(module)])
        if result is NotImplemented:
            self.lend(module)
        return result

    def _replay(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """As `run`. Raises Refused where the block has to be run."""
        key = self.keys[id(module)]
        if id(module) in self._played:
            raise Restart("it is called again", self._played[id(module)])
        if torch.is_grad_enabled() and self.recorder.has_unnamed_nodes():
            raise Refused("an autograd node before it belongs to no operator")
        if describe_context() != self._context:
            raise Refused("autocast, saved-tensor hooks, a mode or another setting of torch is active")
        self._lend_inside(module)
        self._check_tensors(module)
        leaves, structure = _flatten(args, kwargs)
        likes = [x if isinstance(x, _LEAVES) else like_cache(x) or x for x in leaves]
        inputs = input_key(likes)
        if torch.is_grad_enabled() and sum(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves) > 1:
            # Autograd adds each gradient to others of the same tensor when it comes, some in the middle of a block.
            raise Refused("more than one argument has a gradient")
        if key in self._unreadable:
            raise Refused(self._unreadable[key])
        variants = self._known.setdefault((key, structure, inputs, torch.is_grad_enabled()), [])
        for variant in variants:
            if self._may_play(variant.segment, module, leaves) and self._holds(variant, module):
                self._plays[key] += 1
                if variant.segment is None:
                    raise Refused(variant.reason)
                return self._play(variant.segment, module, leaves)
        if len(variants) > self._plays[key]:  # what was tried was of no use to another: trials of more would not pay
            raise Refused(f"it differs from those that were tried: {variants[-1].reason or 'in what they read'}")
        has_cache = any(type(x) is CacheLike for x in likes)
        variant = self._try(
            module,
            Arguments(likes, structure,
                      self._find_indices(module, key) if has_cache else [], self.given_up(module)))
        variants.append(variant)
        if variant.segment is None:
            raise Refused(variant.reason)
        if not self._may_play(variant.segment, module, leaves):
            raise Refused("what it adds a gradient up of is read later, or its slot of a cache is taken")
        return self._play(variant.segment, module, leaves)

    def _check_tensors(self, module: nn.Module) -> None:
        """Raise Refused where parameters are not the block's own, or are not what they were when it was described."""
        if id(module) in self._reserved:
            return
        contents, states = self._contents[id(module)], self._tensor_states
        if id(module) in self._touched:
            raise Refused("its parameters are used outside of it")
        now = _survey(module, {})
        if not _are_identical(now.list_tensors(), contents.list_tensors()) or not _are_identical(
                dict.fromkeys(now.modules), contents.modules):
            raise Refused("its modules or tensors were exchanged")
        for tensor in contents.list_tensors():
            if id(tensor) in self._tied:
                raise Refused("it shares a parameter or buffer with another module")
            if tensor.grad is not None:
                raise Refused("a parameter has a gradient already")
            if states.get(id(tensor)) != describe_tensor_state(tensor):
                raise Refused("a tensor's attribute, hook, storage or requires_grad was changed")

    def reserved(self, block: nn.Module) -> Reserved | None:
        """The places of the tensors of a block that has none yet."""
        return self._reserved.get(id(block))

    def _holds(self, variant: _Variant, module: nn.Module) -> bool:
        """Whether what a forward pass read has these values in a block."""
        reserved, values = self._reserved.get(id(module)), variant.values
        if variant.segment is not None and not variant.shared.is_same():
            return False
        return reserved is not None and values.hold_for_twin(reserved.twin) or values.hold_for(
            module, self._contents[id(module)].modules)

    def modules_in(self, block: nn.Module) -> list[nn.Module]:
        """The modules of a candidate, itself first, as ``modules()`` lists them."""
        return self._contents[id(block)].modules

    def _find_indices(self, module: nn.Module, key: Hashable) -> list[tuple[str, str]]:
        """Integers in which a block differs from the others."""
        blocks = (c.modules[0] for i, c in self._contents.items() if self.keys[i] == key)
        inner = (m for twin in self._twins for m, layout in zip(twin.modules, twin.pattern.layouts)
                 if self.keys.get(id(layout.module)) == key)
        return index_candidates(module, next(m for m in (*blocks, *inner) if m is not module))

    def _may_play(self, segment: Segment | None, module: nn.Module, leaves: list[Any]) -> bool:
        """Whether the slot of a cache that the block would fill is free, and no later call reads what it adds
        gradients up of.
        """
        if segment is None:
            return True
        slot = segment.slot
        return segment.sums.isdisjoint(self.read_later(module)) and (slot is None or is_free(
            leaves[slot.argument], self._index_of(slot, module), slot.layer))

    def _index_of(self, slot: Slot, module: nn.Module) -> int:
        index: int = self._contents[id(module)].modules[slot.module].__dict__[slot.attribute]
        return index

    def _check_backward(self, is_plain: bool) -> None:
        if not is_plain and self._played:
            raise Restart("a gradient is computed within the step, twice or for some tensors only")

    def _touch(self, number: int, signature: Any) -> None:
        """A parameter is read by a call that is run: all uses of it belong to one sum, so its block must be run as
        well.

        So do all uses of what a played block read more than once: autograd adds to what later ones left, one by one.
        """
        if number in self._views and writes_in_place(signature.op):
            raise Restart("its output, a view, is written to", self._views[number])
        if number in self._summed:
            raise Restart("its input is used after it", self._summed[number])
        for block in self._blocks_of.get(number, ()):
            if id(block) in self._played:
                raise Restart("its parameters are used outside of it", self._played[id(block)])
            self._touched.add(id(block))

    def _try(self, module: nn.Module, arguments: Arguments) -> _Variant:
        """Run a block in a sandbox. Raises Refused where that could leave something changed."""
        shared = StateFingerprint(self.modules_in(module), own=False)
        if shared.unreadable:
            self._unreadable[self.keys[id(module)]] = shared.unreadable
            raise Refused(shared.unreadable)
        trial = self.make_trial(module, arguments, None)
        segment: Segment | None = None
        reason = ""
        try:
            segment = trial.run()
        except Refused as refused:
            reason = str(refused)
        finally:
            self.recorder.skip_sequence()
        values = ReadValues(module, trial.reads, self._patterns.get(id(module)))
        if segment is not None and values.outside:
            segment, reason = None, f"it reads {values.outside}, through which more than the block can be reached"
        return _Variant(values, shared, segment, reason)

    def _play(self, segment: Segment, module: nn.Module, leaves: list[Any]) -> Any:
        if torch.is_grad_enabled():
            self._played.update(dict.fromkeys(map(id, self._contents[id(module)].modules), module))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        if torch.is_grad_enabled():
            for tensor in tensors if self._summed else ():
                if number_of(tensor) in self._summed:
                    raise Restart("its input is used after it", module)
            for i in segment.sums:
                self._summed[number_of(leaves[i])] = module
                self.recorder.watched.add(number_of(leaves[i]))
        for text in segment.assumptions:
            self._assume(text, module)
        run = _Run(self, segment, module)
        if torch.is_grad_enabled() and segment.differentiable:
            with torch._C.DisableTorchFunction():
                made = list(_Block.apply(run, _token(), *tensors))  # type: ignore[no-untyped-call]
            run.sequence = self.recorder.skip_sequence()
            self.recorder.let_stand(run.sequence, run.locate(segment.begins_at))
        else:
            made = run.forward(tensors)
        for tensor, output in zip(made, [o for o in segment.outputs if isinstance(o, tuple)]):
            if output[3] and torch.is_grad_enabled():
                self._views[number_of(tensor)] = module
                self.recorder.watched.add(number_of(tensor))
        rest = iter(made)
        outputs = [
            next(rest) if isinstance(o, tuple) else tensors[o.index] if isinstance(o, PassedOn) else o
            for o in segment.outputs
        ]
        if segment.slot is not None:
            count = segment.structure.num_leaves
            fill(leaves[segment.slot.argument], self._index_of(segment.slot, module), segment.slot, outputs[count:])
            del outputs[count:]
        return pytree.tree_unflatten(outputs, segment.structure)


    def _assume(self, text: str, module: nn.Module) -> None:
        self.recorder.mode.state.assume(text.replace(BLOCK, self.path_of(module)))


class _Variant(NamedTuple):
    """What a trial found: what the block read, the state that its code reaches, and what it does or why it is run."""

    values: ReadValues
    shared: StateFingerprint
    segment: Segment | None
    reason: str


def _are_identical(a: Iterable[Any], b: Collection[Any]) -> bool:
    items = list(a)
    return len(items) == len(b) and all(map(operator.is_, items, b))


class Contents(NamedTuple):
    """What is in a module: the modules, itself first, how many of them are leaves, and the tensors."""

    modules: list[nn.Module]
    leaves: int
    tensors: list[weakref.ref[torch.Tensor]]  #: not kept alive: a forward pass may put others in their place

    def list_tensors(self) -> list[torch.Tensor]:
        """The tensors that still exist."""
        return [tensor for ref in self.tensors if (tensor := ref()) is not None]


def _survey(module: nn.Module, found: dict[int, Contents]) -> Contents:
    """The contents of a module and of all below it, by id."""
    known = found.get(id(module))
    if known is not None:
        return known
    found[id(module)] = Contents([], 0, [])  # a module that holds itself
    modules, leaves = [module], 0 if module._modules else 1
    tensors = [weakref.ref(t) for held in (module._parameters, module._buffers) for t in held.values()
               if t is not None]
    for child in module._modules.values():
        if child is not None:
            below = _survey(child, found)
            modules += below.modules
            leaves += below.leaves
            tensors += below.tensors
    contents = found[id(module)] = Contents(modules, leaves, tensors)
    return contents


_flat_structures: dict[tuple[int, tuple[str, ...]], pytree.TreeSpec] = {}


def _flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], pytree.TreeSpec]:
    """As `pytree.tree_flatten`, which makes a function anew for each call, and that in a cycle."""
    leaves = [*args, *kwargs.values()]
    if not all([isinstance(x, _LEAVES) for x in leaves]):
        return pytree.tree_flatten((args, kwargs))
    shape = len(args), tuple(kwargs)
    if shape not in _flat_structures:
        _flat_structures[shape] = pytree.tree_flatten((args, kwargs))[1]
    return leaves, _flat_structures[shape]


_tokens: list[torch.Tensor] = []


def _token() -> torch.Tensor:
    """A leaf that wants a gradient, so that a block has an autograd node also where none of its inputs does."""
    if not _tokens:
        guard = torch._C._DisableTorchDispatch()
        _tokens.append(torch.empty(0, requires_grad=True))
        del guard
    return _tokens[0]


def input_key(leaves: list[Any]) -> Hashable:
    """What of the arguments decides a block's record. Raises Refused where an argument is more than a tensor or a plain
    value.
    """
    key: list[Any] = []
    groups: dict[int, int] = {}
    for x in leaves:
        if isinstance(x, torch.Tensor):
            is_plain = x.layout is torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(x)
            storage = x.untyped_storage() if is_plain else None
            attributes = tensor_attributes(x)
            if not isinstance(storage, MetaStorage) or attributes is None:
                raise Refused("an argument is a sparse, wrapped or real tensor, or has objects for attributes")
            group = groups.setdefault(storage.number, len(groups))
            contents = storage.known or storage.drawn_from
            known = None if contents is None else (id(contents), contents is storage.known)
            key.append((tuple(x.shape), x.stride(), x.dtype, x.storage_offset(), storage.nbytes(), storage.device,
                        x.requires_grad, group, known, storage.density, attributes))
        elif isinstance(x, _UNCHANGING):
            key.append((type(x), x))
        else:
            raise Refused("an argument is an object that its forward pass could change")
    return tuple(key)


class _Run:
    """One block played: the numbers and places of its storages, from its forward to its backward pass."""

    def __init__(self, reuse: BlockReuse, segment: Segment, module: nn.Module) -> None:
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
            self.reuse._assume(text, self.module)
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
            except Refused as reason:
                raise Restart(str(reason), self.module) from None
            if again.reel.births != segment.reel.births:
                raise Restart("it does not do the same twice", self.module)
            found = segment.backwards[specs] = again.backwards[specs]
        return found


class _Block(torch.autograd.Function):
    """A block as one autograd node."""

    @staticmethod
    def forward(ctx: Any, run: _Run, token: torch.Tensor, *tensors: torch.Tensor) -> Any:
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
