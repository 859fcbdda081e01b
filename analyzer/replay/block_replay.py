"""Runs each kind of block once and replays its record for the others, forward and backward."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from analyzer.meta.address_space import MetaStorage
from analyzer.meta.state import Restart
from analyzer.record.recorder import Recorder
from analyzer.record.reference_count import describe_context
from analyzer.record.tensor_walk import walk_modules

from .block_capture import BlockCapture
from .block_key import LEAF_TYPES, Contents, ReadValues, flatten_arguments, input_key, structure_key, survey
from .cache_slot import CacheLike, Slot, fill, index_candidates, is_free, like_cache
from .captured_block import BLOCK, Arguments, Borrow, CapturedBlock, Output, PassedOn, number_of, writes_in_place
from .match import Mismatch
from .replayed_block import BlockFunction, ReplayedBlock, gradient_token
from .state_fingerprint import StateFingerprint
from .state_value import describe_tensor_state

# When a capture pays: it costs about one and a half runs of the block, so a kind needs three, and something to set up,
# so the blocks beyond the second must hold so many leaf modules: docs/performance.md, "When a block is tried out".
FEWEST = 3
LEAST_LEAVES_SAVED = 64


class BlockReplay:
    """Decides for each call of a module whether it is replayed or run."""

    def __init__(self, recorder: Recorder, root: nn.Module, borrow: Borrow, is_leaf: Callable[[nn.Module], bool],
                 excluded: Collection[type[nn.Module]] = (),
                 is_in_chain: Callable[[nn.Module], bool] = lambda module: False) -> None:
        self.recorder, self.borrow = recorder, borrow
        self.is_in_chain = is_in_chain  #: whether a few other blocks may stand for one that cannot be replayed
        contents: dict[int, Contents] = {}
        modules = [module for _, module in walk_modules(root)]
        for module in modules:
            survey(module, contents)
        parents = Counter(id(child) for module in modules for child in module._modules.values() if child is not None)
        owners: Counter[int] = Counter()  # how many places hold a parameter: a tied one is no block's own
        for module in modules:
            if parents[id(module)] > 1:
                owners.update(map(id, contents[id(module)].list_tensors()))
            held = (*module._parameters.values(), *module._buffers.values())
            owners.update(id(tensor) for tensor in held if tensor is not None)
        self._tied = {i for i, n in owners.items() if n > 1}
        memo: dict[int, int | None] = {}
        numbers: dict[Hashable, int] = {}
        # what blocks have in common that may be replayed for each other, by id(block); None for one of a kind
        keys = {id(module): structure_key(module, memo, numbers) for module in modules
                if module is not root and len(module._modules) > 1
                and not (type(module) in excluded or is_leaf(module))}
        counts = self._counts = Counter(k for k in keys.values() if k is not None)
        self._all_keys, self._leaves = keys, {i: contents[i].leaves for i in keys}
        self.keys = {i: k for i, k in keys.items() if k is not None and counts[k] >= FEWEST
                     and (counts[k] - 2) * contents[i].leaves > LEAST_LEAVES_SAVED}
        self._contents = {i: contents[i]._replace(modules=list(dict.fromkeys(contents[i].modules))) for i in self.keys}
        # candidates that hold a parameter, by the number of its storage
        self._blocks_of: dict[int, list[nn.Module]] = {}
        self._touched: set[int] = set()  # those whose parameters were read by a call that was run
        self._tensor_states: dict[int, Any] = {}  # of candidates' tensors, by id
        recorder.watched, recorder.touched, recorder.before_backward = set(), self._touch, self._check_backward
        for block in self._contents.values():
            for tensor in block.list_tensors():
                self._tensor_states[id(tensor)] = describe_tensor_state(tensor)
                storage = tensor.untyped_storage() if tensor.requires_grad and tensor.layout is torch.strided else None
                if isinstance(storage, MetaStorage):  # hear of calls that read it
                    self._blocks_of.setdefault(storage.number, []).append(block.modules[0])
                    recorder.watched.add(storage.number)
        # what a replayed block read more than once, by the number of its storage, and the block
        self._summed: dict[int, nn.Module] = {}
        self._known: dict[Hashable, list[_Variant]] = {}
        self._unreadable: dict[Hashable, str] = {}  # why blocks of a structure are not tried
        self._views: dict[int, nn.Module] = {}      # outputs that are views, by the number of their storage
        self._context = describe_context()
        self._replayed: dict[int, nn.Module] = {}  # each module of a replayed block, by id, and the block
        self._replays: Counter[Hashable] = Counter()  # of another block's record, by structure
        #: the class of each candidate that was called, and why it was run (None: it was replayed), by path
        self.decisions: dict[str, tuple[str, str | None]] = {}

    def explain(self) -> dict[str, tuple[str, str | None]]:
        """The class of each candidate, and why it was run (None: it was replayed), by path; none that is within one."""
        found: dict[str, tuple[str, str | None]] = {}
        for module in [module for module in self.recorder.modules() if id(module) in self._all_keys]:
            path, key = self.recorder.path_of(module), self._all_keys[id(module)]
            if found.get(path.rpartition(".")[0], ("", ""))[1] is None:
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
        if self.recorder.step > 0:
            return NotImplemented
        if id(module) in self._replayed:
            raise Restart("it is called again", self._replayed[id(module)])
        if id(module) not in self.keys or self.recorder.phase != "forward":
            return NotImplemented
        path, reason, result = self.recorder.path_of(module), None, NotImplemented
        try:
            captured, leaves = self._match(module, args, kwargs)
        except Mismatch as mismatch:
            reason = str(mismatch)
            if self.is_in_chain(module):
                raise Restart(reason, module) from None
        else:
            result = self._replay(captured, module, leaves)
        _, earlier = self.decisions.get(path, ("", None))
        self.decisions[path] = type(module).__name__, earlier or reason  # one that was run once was run
        return result

    def _match(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[CapturedBlock, list[Any]]:
        """What a candidate may replay, captured now where nothing alike was, and its arguments. Raises Mismatch."""
        key = self.keys[id(module)]
        if torch.is_grad_enabled() and self.recorder.has_unnamed_nodes():
            raise Mismatch("an autograd node before it belongs to no operator")
        if self.recorder.reentrant_checkpoints:
            raise Mismatch("it is in a reentrant checkpoint")
        if describe_context() != self._context:
            raise Mismatch("autocast, saved-tensor hooks, a mode or another setting of torch is active")
        self._check_tensors(module)
        leaves, structure = flatten_arguments(args, kwargs)
        likes = [x if isinstance(x, LEAF_TYPES) else like_cache(x) or x for x in leaves]
        inputs = input_key(likes)
        if torch.is_grad_enabled() and sum(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves) > 1:
            # Autograd adds each gradient to others of the same tensor when it comes, some in the middle of a block.
            raise Mismatch("more than one argument has a gradient")
        if key in self._unreadable:
            raise Mismatch(self._unreadable[key])
        variants = self._known.setdefault((key, structure, inputs, torch.is_grad_enabled()), [])
        # whether what a forward pass read has these values in this block
        variant = next((v for v in variants if (v.captured is None or v.shared.is_same())
                        and v.values.hold_for(module, self.modules_in(module))), None)
        if variant is not None:
            self._replays[key] += 1
        elif len(variants) > self._replays[key]:  # what was captured was of no use to another: more would not pay
            raise Mismatch(f"it differs from those that were tried: {variants[-1].reason or 'in what they read'}")
        else:
            indices: list[tuple[str, str]] = []
            if any(type(x) is CacheLike for x in likes):
                blocks = (c.modules[0] for i, c in self._contents.items() if self.keys[i] == key)
                indices = index_candidates(module, next(m for m in blocks if m is not module))
            variant = self._try(module, Arguments(likes, structure, indices))
            variants.append(variant)
        return self._judge(variant, module, leaves), leaves

    def _judge(self, variant: _Variant, module: nn.Module, leaves: list[Any]) -> CapturedBlock:
        """The captured block, which does what ``module`` would. Raises Mismatch where the rest of the run matters."""
        captured = variant.captured
        if captured is None:
            raise Mismatch(variant.reason)
        slot = captured.slot
        if slot is not None and not is_free(leaves[slot.argument], self._index_of(slot, module), slot.layer):
            raise Mismatch("its slot of a cache is taken")
        held = range(captured.inputs, captured.inputs + len(captured.held))
        # where rows stand for parameters or buffers, as views of these do
        if self.recorder.path_of(module) in self.decisions and any(slot in held for slot, _ in captured.writers):
            raise Mismatch("it is called again, and reads views of what it holds that its earlier call made")
        return captured

    def _check_tensors(self, module: nn.Module) -> None:
        """Raise Mismatch where parameters are not the block's own, or are not what they were when it was described."""
        if id(module) in self._touched:
            raise Mismatch("its parameters are used outside of it")
        contents, now = self._contents[id(module)], survey(module, {})
        for found, known in ((now.list_tensors(), contents.list_tensors()),
                             (list(dict.fromkeys(now.modules)), contents.modules)):
            if len(found) != len(known) or not all(map(is_, found, known)):
                raise Mismatch("its modules or tensors were exchanged")
        for tensor in contents.list_tensors():
            if id(tensor) in self._tied:
                raise Mismatch("it shares a parameter or buffer with another module")
            if tensor.grad is not None:
                raise Mismatch("a parameter has a gradient already")
            if self._tensor_states.get(id(tensor)) != describe_tensor_state(tensor):
                raise Mismatch("a tensor's attribute, hook, storage or requires_grad was changed")

    def modules_in(self, block: nn.Module) -> list[nn.Module]:
        """The modules of a candidate, itself first, as ``modules()`` lists them."""
        return self._contents[id(block)].modules

    def _index_of(self, slot: Slot, module: nn.Module) -> int:
        return self.modules_in(module)[slot.module].__dict__[slot.attribute]  # type: ignore[no-any-return]

    def _check_backward(self, is_plain: bool) -> None:
        if not is_plain and self._replayed:
            raise Restart("a gradient is computed within the step, twice or for some tensors only")

    def _touch(self, number: int, signature: Any) -> None:
        """A parameter is read by a call that is run: all its uses are one sum, as those of what a replayed block read
        more than once are, to which autograd adds one by one. So its block must be run as well.
        """
        if number in self._views and writes_in_place(signature.op):
            raise Restart("its output, a view, is written to", self._views[number])
        if number in self._summed:
            raise Restart("its input is used after it", self._summed[number])
        for block in self._blocks_of.get(number, ()):
            if id(block) in self._replayed:
                raise Restart("its parameters are used outside of it", self._replayed[id(block)])
            self._touched.add(id(block))

    def _try(self, module: nn.Module, arguments: Arguments) -> _Variant:
        shared = StateFingerprint(self.modules_in(module), own=False)
        if shared.unreadable:
            self._unreadable[self.keys[id(module)]] = shared.unreadable
            raise Mismatch(shared.unreadable)
        captured, reason = None, ""
        capture = BlockCapture(self.recorder, module, arguments, self.borrow, None, shared.code)
        try:
            captured = capture.run()
        except Mismatch as mismatch:
            reason = str(mismatch)
        finally:
            self.recorder.skip_sequence()
        values = ReadValues(module, capture.reads)
        if captured is not None and values.outside:
            captured, reason = None, f"it reads {values.outside}, through which more than the block can be reached"
        return _Variant(values, shared, captured, reason)

    def _replay(self, captured: CapturedBlock, module: nn.Module, leaves: list[Any]) -> Any:
        recorder, is_recorded = self.recorder, torch.is_grad_enabled()
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        if is_recorded:
            self._replayed.update(dict.fromkeys(map(id, self.modules_in(module)), module))
            if any(number_of(tensor) in self._summed for tensor in (tensors if self._summed else ())):
                raise Restart("its input is used after it", module)
            for i in captured.sums:
                self._summed[number_of(leaves[i])] = module
                recorder.watched.add(number_of(leaves[i]))
        for text in captured.assumptions:
            self.assume(text, module)
        run = ReplayedBlock(self, captured, module)
        if is_recorded and captured.is_differentiable:
            with torch._C.DisableTorchFunction():
                made = list(BlockFunction.apply(run, gradient_token(), *tensors))  # type: ignore[no-untyped-call]
            run.sequence = recorder.skip_sequence()
            recorder.let_stand(run.sequence, run.locate(captured.begins_at))
        else:
            made = run.forward(tensors)
        if is_recorded:
            views = [number_of(tensor) for tensor, output in zip(made, captured.made) if output.is_view]
            self._views.update(dict.fromkeys(views, module))
            recorder.watched.update(views)
        rest = iter(made)
        outputs = [next(rest) if isinstance(o, Output) else tensors[o.index] if isinstance(o, PassedOn) else o
                   for o in captured.outputs]
        if (slot := captured.slot) is not None:
            count = captured.structure.num_leaves
            fill(leaves[slot.argument], self._index_of(slot, module), slot.layer,
                 {**slot.plain, **dict(zip(slot.tensors, outputs[count:]))})
            del outputs[count:]
        return pytree.tree_unflatten(outputs, captured.structure)

    def assume(self, text: str, module: nn.Module) -> None:
        self.recorder.mode.state.assume(text.replace(BLOCK, self.recorder.path_of(module)))


class _Variant(NamedTuple):
    """What a capture found: what the block read, the state that its code reaches, and what it does or why it is run."""

    values: ReadValues
    shared: StateFingerprint
    captured: CapturedBlock | None
    reason: str
