"""Decides which blocks of a model need not be traced again: those like one that was, whose nodes are written for them
too.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from analyzer.fx.module_borrow import save_generators
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.source_line import user_line
from analyzer.meta.storage import MetaStorage, attach, next_number, template
from analyzer.meta.tensor import META, MetaTensor
from analyzer.meta.value.known_value import Known, reads
from analyzer.record.autograd_node import saves_are_hooked
from analyzer.replay.block_key import ReadValues, structure_key, watch_reads
from analyzer.replay.block_reuse import input_key
from analyzer.replay.footprint import Footprint
from analyzer.replay.shared_state import SharedState

from .block_nodes import BlockNodes, NotCopied, Place, Surroundings

if TYPE_CHECKING:
    from .tape import Tape

Tensor = torch.Tensor

# Where copying pays: writing a block's nodes costs about as much as running three layers, and finding out what the
# first read costs more: section "When a block's nodes are copied" of docs/performance.md, which benchmarks/speed.py
# measures.
LEAVES_OF_A_COPY = 3
LEAST_LEAVES_SAVED = 64
_PLAIN = (int, float, bool, str, type(None))
_OWN_ATTRIBUTES = {"_is_param"}  # what a stand-in has that is no attribute of the user's


class Retrace(BaseException):
    """A copied block would show: the forward asks for what running it would have made. It is to be traced again without
    copies.

    Not an Exception, so that no handler in the model's code takes it.
    """


class _Stale(Known):
    """Contents of a buffer that a copied block would have written."""

    __slots__ = ()

    def compute(self) -> Tensor:
        raise Retrace


class _Candidate(NamedTuple):
    """A block that others are like."""

    key: Hashable
    path: str
    modules: list[nn.Module]  #: it and all below it


class _Call(NamedTuple):
    """How a block is called."""

    key: Hashable
    leaves: list[Any]
    structure: pytree.TreeSpec
    tensors: list[Tensor]
    inputs: list[fx.Node]  #: of the tensors


class _Output(NamedTuple):
    """A tensor that a block returns: like ``like``, claiming ``claim``, the result of ``node``."""

    like: Tensor
    claim: torch.device
    requires_grad: bool
    node: fx.Node


class _PassedOn(NamedTuple):
    """An input that a block returns."""

    position: int


class _Traced(NamedTuple):
    """What is known of a block that was traced."""

    nodes: BlockNodes
    #: parameters and buffers that have nodes, and what follows the block's path in their targets
    attributes: list[tuple[Place, str]]
    mapped: list[tuple[Place, fx.Node]]        #: those of them that a call gave back, and its node
    renamed: list[tuple[int, fx.Node]]         #: inputs that a call gave back unchanged, and its node
    restored: list[int]                        #: inputs that get their nodes back at the end of a checkpoint
    written: list[Place]                       #: buffers whose contents were known and change
    outputs: list[Any]
    structure: pytree.TreeSpec


class _Variant(NamedTuple):
    """What the forward of one block read, and what it did; None where that is not to be copied."""

    values: ReadValues
    state: SharedState
    traced: _Traced | None


class BlockCopies:
    """Calls blocks for a tape, or copies their nodes from the first of their kind."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.copied = False  #: whether any block was
        self.refusals: Counter[str] = Counter()  #: why blocks are no model for others
        self._trying = False
        self._known: dict[Hashable, list[_Variant]] = {}
        self._copies: Counter[Hashable] = Counter()
        self._kept: list[Any] = []  # keeps what keys name by id alive
        with torch._C.DisableTorchFunction():
            self._candidates = dict(_find_candidates(tape))

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        """The result of ``run()``, which calls ``module`` under ``args`` and ``kwargs`` in the tape's current module."""
        candidate = self._candidates.get(id(module))
        if candidate is None or self._trying:
            return run()
        # of the books, which also read properties, nothing is written down
        with self.tape.pause(), torch._C.DisableTorchFunction():
            call = self._describe(args, kwargs)
            if call is None or self._lends_others(candidate):
                return self._run(run)
            kind = (candidate.key, call.key)
            variants = self._known.setdefault(kind, [])
            for values, shared, traced in variants:
                if values.hold_for(module, candidate.modules) and shared.is_same():
                    if traced is None or not self._may_copy(traced, candidate):
                        return self._run(run)
                    self._copies[kind] += 1
                    return self._copy(traced, candidate, call)
            if len(variants) > self._copies[kind] + 1:  # what was tried was of no use to another
                return self._run(run)
            return self._try(candidate, args, kwargs, call, run, variants)

    def _lends_others(self, candidate: _Candidate) -> bool:
        """Whether the block holds tensors in place of its own, as `torch.func.functional_call` gives them to it."""
        original_of = self.tape.borrowed.original_of
        return any(t is not None and original_of(t) is None for m in candidate.modules
                   for t in (*m._parameters.values(), *m._buffers.values()))

    def _run(self, run: Callable[[], Any]) -> Any:
        """Run the block as if nobody had looked at it."""
        paused, self.tape.paused = self.tape.paused, 0
        try:
            with torch._C._EnableTorchFunction():
                return run()
        finally:
            self.tape.paused = paused

    def _describe(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
        """The call, with a key of all that is not the block's own; None where it is given or surrounded by something
        that is not understood.
        """
        tape = self.tape
        if saves_are_hooked() or torch.is_inference_mode_enabled() or any(
                map(self._holds_result, (*args, *kwargs.values()))):
            return None
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        inputs: list[fx.Node] = []
        for t in tensors:
            node = tape.find(t)
            if node is None or type(t) is not MetaTensor or t.__dict__ or tape.sizes.dims_of(t):
                return None
            inputs.append(node)
        key = input_key(leaves)
        if key is None:
            return None
        frame = tape.regions.frame
        order: dict[int, int] = {}
        alike = tuple([(order.setdefault(id(t), len(order)), order.setdefault(id(n), len(order)), n
                        in tape.dependent, t.is_leaf) for t, n in zip(tensors, inputs)])
        autocast = tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cuda", "cpu"))
        context = (torch.is_grad_enabled(), frame.grad_mode, bool(frame.prefix), autocast,
                   torch.is_autocast_cache_enabled(), torch.get_default_dtype(), torch.get_default_device(),
                   torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack(), tape.active_impls(),
                   user_line())
        self._kept += [(s.known, s.drawn_from) for t in tensors  # type: ignore[attr-defined]
                       if (s := t.untyped_storage()).known is not None or s.drawn_from is not None  # type: ignore[attr-defined]
                       ]
        return _Call((key, structure, alike, context), leaves, structure, tensors, inputs)

    def _holds_result(self, value: Any) -> bool:
        """Whether a container is the very one that a call returned: it is a node, as its parts are."""
        if isinstance(value, (tuple, list)):
            return self.tape.find(value) is not None or any(map(self._holds_result, value))
        return isinstance(value, dict) and (self.tape.find(value) is not None
                                            or any(map(self._holds_result, value.values())))

    def _may_copy(self, traced: _Traced, candidate: _Candidate) -> bool:
        """Whether nothing that the block holds has nodes already."""
        tape = self.tape
        attributes = tape.regions.frame.attributes
        for place, below in traced.attributes:
            tensor = place.get(candidate.modules)
            if id(tensor) in attributes or tape.find(tensor) is not None or tape.path_of(
                    tensor) != candidate.path + below:
                return False
        return True

    # -- the first of a kind -------------------------------------------------------------------------------------

    def _try(self, candidate: _Candidate, args: Any, kwargs: Any, call: _Call, run: Callable[[], Any],
             variants: list[_Variant]) -> Any:
        tape, block = self.tape, candidate.modules[0]
        around = Surroundings(tape, candidate.path)
        last = next(iter(reversed(tape.graph.nodes)))
        shared = SharedState(candidate.modules)
        before, first_storage = self._state(candidate, call), next_number()
        tensors = [t for m in candidate.modules for t in m._buffers.values() if t is not None]
        contents = [_contents(t) for t in tensors]
        self._trying = True
        try:
            with watch_reads(block) as seen:
                result = self._run(run)
        finally:
            self._trying = False
        traced: _Traced | None = None
        try:
            if not self._state(candidate, call) == before or not shared.is_same():
                raise NotCopied("it changes more than the graph")
            taken, structure = pytree.tree_flatten((args, kwargs))
            if structure != call.structure or any(a is not b for a, b in zip(taken, call.leaves)):
                raise NotCopied("it changes a list or a dictionary that it was given")
            traced = self._describe_block(candidate, call, around, last, result, first_storage)
            self._note_written(traced, candidate, contents)
        except NotCopied as reason:
            self.refusals[str(reason)] += 1
        variants.append(_Variant(ReadValues(block, seen), shared, traced))
        return result

    def _state(self, candidate: _Candidate, call: _Call) -> tuple[Any, ...]:
        """What a block that is copied leaves as it is."""
        tape = self.tape
        state = tape.state
        torch_generator, _, numpy_generator = save_generators()
        with without_modes():
            generators = torch_generator.numpy().tobytes(), [
                x.tobytes() if hasattr(x, "tobytes") else x for x in numpy_generator or ()
            ]
        parameters = [t for m in candidate.modules for t in m._parameters.values() if t is not None]
        held = [[id(x) for d in (m._parameters, m._buffers, m._modules) for x in d.values()] for m in candidate.modules]
        return (_Same(candidate.modules), held, generators, reads.count, state.random_seed, state.unknown_sizes,
                len(state.assumptions), len(state.conditions), len(tape.constants), len(
                    tape.wanted), len(tape.regions.frames), len(tape.regions.open_autocasts()), torch.is_grad_enabled(),
                torch.get_default_dtype(), [t._version for t in (*call.tensors, *parameters)])

    def _describe_block(self, candidate: _Candidate, call: _Call, around: Surroundings, last: fx.Node, result: Any,
                        first_storage: int) -> _Traced:
        tape = self.tape
        made: list[fx.Node] = []
        node = last.next
        while node.op != "root":
            made.append(node)
            node = node.next
        path = candidate.path
        places = {f"{path}{below}": place for place, below in _list_places(candidate)}
        nodes = BlockNodes(tape, around, made, call.inputs, places)
        attributes = [(copied.attribute, copied.below) for copied in nodes.copies
                      if copied.attribute is not None and copied.below is not None]
        own = set(made)
        renamed = [(i, n) for i, (t, before) in enumerate(zip(call.tensors, call.inputs))
                   if (n := tape.find(t)) is not None and n is not before]
        mapped = [(place, n) for place in places.values() if (n := tape.find(place.get(candidate.modules))) is not None]
        position = {id(t): i for i, t in reversed(list(enumerate(call.tensors)))}
        restored = [position.get(id(t), -1) for t, _ in tape.regions.frame.renamed[around.renamed:]]
        if -1 in restored or not own.issuperset(n for _, n in (*renamed, *mapped)):
            raise NotCopied("a call in it gave back a tensor that is neither an input nor its own")
        if self._holds_result(result):
            raise NotCopied("it returns a container that a call returned")
        leaves, structure = pytree.tree_flatten(result)
        storages: set[int] = set()
        outputs: list[Any] = []
        for x in leaves:
            if not isinstance(x, Tensor):
                if not isinstance(x, _PLAIN):
                    raise NotCopied(f"it returns a {type(x).__name__}")
                outputs.append(x)
            elif id(x) in position:
                outputs.append(_PassedOn(position[id(x)]))
            else:
                outputs.append(_describe_output(x, tape.find(x), own, first_storage, storages))
        return _Traced(nodes, attributes, mapped, renamed, restored, [], outputs, structure)

    def _note_written(self, traced: _Traced, candidate: _Candidate, contents: list[tuple[Any, ...]]) -> None:
        buffers = [
            Place(i, "_buffers", name) for i, m in enumerate(candidate.modules) for name, t in m._buffers.items()
            if t is not None
        ]
        for place, before in zip(buffers, contents):
            now = _contents(place.get(candidate.modules))
            if now[0] is not before[0]:
                traced.written.append(place)
            if now[1:] != before[1:]:
                raise NotCopied("it changes what is known of a buffer")

    # -- the others ----------------------------------------------------------------------------------------------

    def _copy(self, traced: _Traced, candidate: _Candidate, call: _Call) -> Any:
        tape = self.tape
        self.copied = True
        of = traced.nodes.write(tape, Surroundings(tape, candidate.path), call.inputs, candidate.modules)
        tape.regions.frame.renamed += [(call.tensors[i], call.inputs[i]) for i in traced.restored]
        for place, node in traced.mapped:
            tape.map(place.get(candidate.modules), of[node])
        for i, node in traced.renamed:
            tape.map(call.tensors[i], of[node])
        for place in traced.written:
            place.get(candidate.modules).untyped_storage().known = _Stale()  # type: ignore[attr-defined]
        outputs: list[Any] = []
        for x in traced.outputs:
            if type(x) is _Output:
                made = _make(x, tape)
                tape.map(made, of[x.node])
                outputs.append(made)
            else:
                outputs.append(call.tensors[x.position] if type(x) is _PassedOn else x)
        return pytree.tree_unflatten(outputs, traced.structure)

    def keep_history(self) -> None:
        """A backward pass starts inside the forward: it would end at the outputs of copied blocks. Raises Retrace where
        there are any.
        """
        if self.copied:
            raise Retrace


class _Same:
    """A `Footprint` that compares as a value."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.footprint = Footprint(modules)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.footprint.is_like(other.footprint)


def _contents(tensor: Tensor) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()
    return (storage.known, storage.drawn_from, storage.density) if isinstance(storage, MetaStorage) else (None, None,
                                                                                                          None)


def _describe_output(x: Tensor, node: fx.Node | None, own: set[fx.Node], first_storage: int,
                     storages: set[int]) -> _Output:
    storage = x.untyped_storage() if type(x) is MetaTensor and x.layout is torch.strided else None
    if not isinstance(storage,
                      MetaStorage) or node not in own or x.__dict__ or x._backward_hooks or x.is_conj() or x.is_neg():
        raise NotCopied("it returns a tensor that is not a call's plain result")
    if storage.number < first_storage or storage.number in storages:
        raise NotCopied("an output shares memory with an input, a parameter or another output")
    if any(c is not None for c in _contents(x)):
        raise NotCopied("the contents of an output are known")
    if x.requires_grad and (x.is_leaf or torch._debug_has_internal_overlap(x) != 0 or x.retains_grad):
        raise NotCopied("an output is a leaf of autograd, or its elements share memory")
    storages.add(storage.number)
    assert node is not None
    return _Output(template(x), storage.claim, x.requires_grad, node)


_histories: dict[torch.dtype, Tensor] = {}


def _make(output: _Output, tape: Tape) -> Tensor:
    """A tensor like the output of another block, with a history where that has one."""
    made = template(output.like)
    attach(made, output.claim, tape.state.space)
    made.__class__ = MetaTensor
    if output.requires_grad:
        with without_modes(), torch.enable_grad():
            leaf = _histories.get(made.dtype)
            if leaf is None:
                leaf = _histories[made.dtype] = torch.zeros((), dtype=made.dtype, device=META, requires_grad=True)
            made.add_(leaf)
    return made


def _list_places(candidate: _Candidate) -> Iterator[tuple[Place, str]]:
    """Parameters and buffers of a block, and what follows its path in theirs."""
    for i, (path, module) in enumerate(candidate.modules[0].named_modules()):
        for held in ("_parameters", "_buffers"):
            for name, tensor in getattr(module, held).items():
                if tensor is not None:
                    yield Place(i, held, name), f".{path}.{name}" if path else f".{name}"


class _Survey(NamedTuple):
    """A module with all below it: the modules, how many are leaves, whether all are registered there and hold plain
    stand-ins, and what these claim.
    """

    modules: list[nn.Module]
    leaves: int
    plain: bool
    claims: frozenset[torch.device]


def _find_candidates(tape: Tape) -> Iterator[tuple[int, _Candidate]]:
    """Blocks that are worth it, by id: of alike blocks within alike blocks, those that there is more in."""
    paths, root = tape.borrowed.modules, tape.borrowed.root
    found: dict[int, _Survey] = {}
    _survey(root, paths, found)
    modules = [
        m for m in tape.borrowed.by_path.values()
        if m is not root and m._modules and found[id(m)].plain and not tape.is_leaf(m)
    ]
    shapes = Counter((type(m), found[id(m)].leaves) for m in modules)
    modules = [m for m in modules if shapes[type(m), found[id(m)].leaves] > 1]
    memo: dict[int, int | None] = {}
    numbers: dict[Hashable, int] = {}
    settings: dict[int, Hashable] = {}
    keys = {id(m): (structure, found[id(m)].claims, _settings_of(found[id(m)].modules, settings)) for m in modules
            if (structure := structure_key(m, memo, numbers)) is not None}
    counts = Counter(keys.values())
    saved = {i: (counts[key] - 1) * (found[i].leaves - LEAVES_OF_A_COPY) for i, key in keys.items()}
    for module in modules:
        mine = saved.get(id(module))
        if mine is not None and mine > LEAST_LEAVES_SAVED and all(
                saved.get(id(m), mine) <= mine for m in found[id(module)].modules):
            yield id(module), _Candidate(keys[id(module)], paths[id(module)], found[id(module)].modules)


def _settings_of(modules: list[nn.Module], known: dict[int, Hashable]) -> Hashable:
    """What is likely to be read of a block and tells it from others before it is: its numbers, except integers, which
    count and index blocks.
    """
    for module in modules:
        if id(module) not in known:
            known[id(module)] = tuple([
                tuple(v) if type(v) is list else v for v in module.__dict__.values()
                if type(v) is float or type(v) in (list, tuple) and v and type(v[0]) in (int, float) and _is_flat(v)
            ])
    return tuple([known[id(m)] for m in modules])


def _is_flat(values: Any) -> bool:
    return all(type(v) in (int, float) for v in values)


def _survey(module: nn.Module, paths: dict[int, str], found: dict[int, _Survey]) -> _Survey:
    known = found.get(id(module))
    if known is not None:
        return known
    found[id(module)] = _Survey([], 0, False, frozenset())  # a module that holds itself
    path = paths.get(id(module), "")
    modules, leaves, plain = [module], 0 if module._modules else 1, True
    claims: set[torch.device] = set()
    for held in (module._parameters, module._buffers):
        for tensor in held.values():
            if type(tensor) is MetaTensor and tensor.__dict__.keys() <= _OWN_ATTRIBUTES:
                claims.add(tensor.device)
            elif tensor is not None:
                plain = False
    for name, child in module._modules.items():
        if child is not None:
            below = _survey(child, paths, found)
            modules += below.modules
            leaves += below.leaves
            claims |= below.claims
            plain = plain and below.plain and paths.get(id(child)) == (f"{path}.{name}" if path else name)
    survey = found[id(module)] = _Survey(modules, leaves, plain and len(claims) < 2, frozenset(claims))
    return survey
