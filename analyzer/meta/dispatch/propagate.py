"""Propagate: what follows about the contents of storages that an operator made or wrote."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

import torch

from analyzer.meta.address_space import UNFOLLOWED, MetaStorage
from analyzer.meta.spec import NUMBERS
from analyzer.meta.state import MetaState
from analyzer.meta.value import expectation
from analyzer.meta.value.contents import (
    covers_storage,
    defer_call,
    known_contents,
    known_or_zeros,
    read_known,
    storage_numel,
    worth_following,
)
from analyzer.meta.value.known_value import DeferredCall, Known, Result, Written, Zeros, window_of
from analyzer.meta.value.nonzero_bound import NonzeroBound, bound_result
from analyzer.meta.value.sample import UNSAMPLED, is_told_by_sample, sample_call

from .call import OperatorCall

Tensor = torch.Tensor
_LARGEST_TESTED = 1 << 26  # elements, a bool each, made only if it is read
_NEVER = frozenset({"isnan", "isinf", "isposinf", "isneginf"})  # true of what is finite
_FULL = torch.ops.aten.full.default
# unknown arguments of others are to be taken as zero where contents are expected; what these give stays unknown
_PRODUCTS = {"convolution", "mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "_int_mm", "_scaled_mm"}


def propagate(state: MetaState, call: OperatorCall) -> None:
    info, born = call.info, call.born
    new = born[0] if born else None
    if info.undefined and new is not None and not call.outputs[0].dtype.is_floating_point:
        new.is_blank = True
    sampled = sample_call(call) if state.options.unknown_size == "balanced" and not state.options.skew else None
    is_known = _any_known(call.storages)
    if is_known or not call.tensors or info.mutated or info.filler:
        bound = _bound_nonzero(call) if is_known and info.bounds_nonzero else None
        _propagate_known(state, call)
        if bound is not None:
            (new or call.outputs[0].untyped_storage()).nonzero_bound = bound
        if new is not None and new.known is None and (decided := _decided_condition(call)) is not None:
            out = call.outputs[0]
            new.known = _full(out, storage_numel(new, out.dtype), decided if out.dtype is torch.bool else int(decided))
    if info.tests_finiteness and new is not None and new.known is None:
        answer = finite_answer(info.name, call.args)
        if answer is not None:
            state.assume("floating data is assumed to be finite where the model asks")
            new.known = _full(call.outputs[0], storage_numel(new, call.outputs[0].dtype), answer)
    if info.is_estimated:
        _estimate(state, call)
    if sampled is not None:
        sampled.tell(call)


def _any_known(storages: list[MetaStorage]) -> bool:
    return any([s.known is not None or s.nonzero_bound is not None for s in storages])


def _bound_nonzero(call: OperatorCall) -> NonzeroBound | None:
    out = call.outputs[0] if call.outputs else None
    if not isinstance(out, Tensor) or out.dtype.is_floating_point or out.dtype.is_complex:
        return None  # only masks and indices are counted
    return bound_result(call.info.name, call.args, call.kwargs, out.numel())


# Conditions that one known side decides: anything or true is true, anything and false (or bits that are 0) is so.
_OR, _AND = ("bitwise_or", "logical_or", "__or__"), ("bitwise_and", "logical_and", "__and__")
_DECIDING = {**dict.fromkeys(_OR, True), **dict.fromkeys(_AND, False)}
_MOST_ELEMENTS = 1024  # conditions of sequences in a batch, not masks


def _decided_condition(call: OperatorCall) -> bool | None:
    """What every element of the new result is, where one operand alone says so."""
    deciding = _DECIDING.get(call.info.name)
    if deciding is None or not call.born or call.born[0] is None:
        return None
    out: Any = call.outputs[0]
    if deciding and out.dtype is not torch.bool or out.dtype.is_floating_point or not 0 < out.numel() <= _MOST_ELEMENTS:
        return None  # of bits, only none decides
    for tensor in call.tensors:
        if tensor.shape == out.shape and not tensor.dtype.is_floating_point:
            value = read_known(tensor)
            if value is not None and bool((value == deciding).all()):
                return deciding
    return None


def _propagate_known(state: MetaState, call: OperatorCall) -> None:
    info = call.info
    if info.filler:
        _fill(state, call)
    if info.filler or info.undefined:
        return
    if info.mutated and info.name != "set_":  # which takes a storage as it is
        _write(state, call)
    if not info.runs_on_host or all([b is None for b in call.born]):
        return
    if info.is_random:  # scalars decide control flow (layer drop, stochastic depth): they get a value from a seed
        if call.born[0] is not None and _decides(call):
            _compute(state, call, _next_seed(state))
    elif call.storages or info.enumerator:
        _compute(state, call, None)


# Draws by weights that are numbers of the code: which transform of several is taken, what is mixed with what.
_BY_WEIGHTS = {"multinomial", "_sample_dirichlet", "_standard_gamma", "bernoulli"}
_FEW = 16


def _decides(call: OperatorCall) -> bool:
    info, numel = call.info, call.outputs[0].numel()
    if call.storages:
        return info.name in _BY_WEIGHTS and numel <= _FEW and all(
            s.device.type == "cpu" and s.exact is not None for s in call.storages)
    return numel == 1 and info.name != "randperm"


def _fill(state: MetaState, call: OperatorCall) -> None:
    out: Any = call.outputs[0] if call.outputs else None
    storage = call.born[0] if call.born else None
    if storage is None:
        return
    name, numel = call.info.name, storage_numel(storage, out.dtype)
    if name.startswith(("zeros", "new_zeros", "ones", "new_ones")):
        value: Any = int("ones" in name)
    else:
        position = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0}[name]
        named = call.kwargs.get("fill_value", call.kwargs.get("s"))
        value = call.args[position] if position < len(call.args) else named
    # of what is filled like a tensor of unknown contents, integers: ones that are added up count
    is_like_unknown = call.tensors and not _any_known(call.storages)
    if not worth_following(numel) or is_like_unknown and out.dtype.is_floating_point:
        if isinstance(value, NUMBERS) and value == 0:
            storage.nonzero_bound = NonzeroBound(0)
        else:
            storage.sample = UNSAMPLED
    elif isinstance(value, NUMBERS):
        window = window_of(out)
        key = type(value), repr(value), window, numel, out.dtype  # 0.0 and -0.0 are equal
        if key not in state.fills:
            state.fills[key] = _full(out, numel, value)
        storage.known = state.fills[key]


def _full(out: Tensor, numel: int, value: Any) -> Known:
    window = window_of(out)
    return Result(DeferredCall(_FULL, [window[0], value], {"dtype": out.dtype}, []), None, window, numel, out.dtype)


def _next_seed(state: MetaState) -> int:
    state.random_seed += 1
    state.assume("random scalars that decide control flow are drawn from the profiler's own seed")
    return state.random_seed


def _compute(state: MetaState, call: OperatorCall, seed: int | None) -> None:
    info, outputs, born = call.info, call.outputs, call.born
    if not any([b is not None and isinstance(o, Tensor) and worth_following(storage_numel(b, o.dtype))
                for o, b in zip(outputs, born)]):
        return
    expects = state.follows_expected and info.name not in _PRODUCTS
    deferred, unknown = defer_call(info.op, call.args, call.kwargs, seed=seed,
                                   contents_of=known_or_zeros if expects else known_contents)
    if unknown or expects and all(isinstance(r.known, Zeros) for r in deferred.reads) and not info.enumerator:
        return
    single = len(outputs) == 1 and not info.returns_list
    for i, (out, storage) in enumerate(zip(outputs, born)):
        if storage is not None and worth_following(numel := storage_numel(storage, out.dtype)):
            storage.known = Result(deferred, None if single else i, window_of(out), numel, out.dtype)


Rule = Callable[["tuple[int, ...]", Tensor, MetaStorage], "Known | None"]


def _write(state: MetaState, call: OperatorCall) -> None:
    info = call.info
    if info.is_foreach and not info.is_random and not _any_known(call.storages):
        return  # each element is followed alone: what was not known stays so
    targets = []
    for position, target in call.written():
        if position is None:  # out= variants: contents are not followed
            target.untyped_storage().followed = UNFOLLOWED  # type: ignore[attr-defined]
        else:
            targets.append((position, target))
    if not targets:
        return
    rule: Rule | None = None  # tells the new contents of a target; None where they are not followed
    if info.is_random:
        rule = partial(_drawn_in_place, state, call)
    elif info.runs_on_host and not info.is_foreach:
        rule = _written_by_call(state, call)
    elif info.runs_on_host:  # elements of one content to which a foreach call does the same have one content after it
        same_for_all = not any(isinstance(a, (list, tuple)) for a in (*call.args[1:], *call.kwargs.values()))
        rule = partial(_written_in_list, call, {} if same_for_all else None)
    written = []
    for position, target in targets:
        storage = target.untyped_storage() if target.layout is torch.strided else None
        if isinstance(storage, MetaStorage):
            written.append((storage, None if rule is None else rule(position, target, storage)))
    for storage, new in written:
        if storage.drawn_from is not None or storage.density is not None:
            storage.drawn_from, storage.density = expectation.after_write(info.name, call.args, call.storages)
        storage.known, storage.nonzero_bound, storage.sample, storage.is_blank = new, None, None, False
        if not info.bars:
            storage.barred = None


def _drawn_in_place(state: MetaState, call: OperatorCall, position: tuple[int, ...], target: Tensor,
                    storage: MetaStorage) -> Known | None:
    if target.numel() != 1 or not covers_storage(target, storage):
        return None
    seed = _next_seed(state)
    if any(isinstance(a, Tensor) for a in call.args[1:]):
        return None
    named = {k: v for k, v in call.kwargs.items() if k != "generator"}
    deferred = DeferredCall(call.info.op, [None, *call.args[1:]], named, [], seed)
    return Written(None, deferred, (0,), window_of(target), storage_numel(storage, target.dtype), target.dtype)


# They put contents in their places without reading those that were there: what nothing was written to is undefined.
_PLACING = {"copy_", "fill_", "zero_", "scatter_", "index_put_", "index_copy_", "index_fill_"}


def _written_by_call(state: MetaState, call: OperatorCall) -> Rule:
    expects = state.follows_expected and call.info.name not in _PRODUCTS
    deferred, unknown = defer_call(call.info.op, call.args, call.kwargs,
                                   contents_of=known_or_zeros if expects else known_contents)
    expects = expects and any(not isinstance(r.known, Zeros) for r in deferred.reads)
    def contents(position: tuple[int, ...], target: Tensor, storage: MetaStorage) -> Known | None:
        numel = storage_numel(storage, target.dtype)
        if not worth_following(numel) or any(u is not target for u in unknown) or len(unknown) > 1:
            return None  # what is not known is read, if only from the target itself
        overwritten = call.info.overwrites and covers_storage(target, storage)
        if storage.known is None and not (overwritten or expects or storage.is_blank and call.info.name in _PLACING):
            return None
        return Written(None if overwritten else storage.known, deferred, position, window_of(target), numel,
                       target.dtype)
    return contents


def _written_in_list(call: OperatorCall, alike: dict[Any, Known | None] | None, position: tuple[int, ...],
                     target: Tensor, storage: MetaStorage) -> Known | None:
    """One element of a foreach call, followed alone; ``alike`` has those that there are of one content."""
    numel = storage_numel(storage, target.dtype)
    if storage.known is None or not worth_following(numel):
        return None
    key = id(storage.known), window_of(target), storage.nbytes()
    new = None if alike is None else alike.get(key)
    if new is None:
        i, j = position
        size = len(call.args[i])
        row = [[a[j]] if isinstance(a, (list, tuple)) and len(a) == size else a for a in call.args]
        deferred, unknown = defer_call(call.info.op, row, call.kwargs)
        new = None if unknown else Written(storage.known, deferred, (i, 0), window_of(target), numel, target.dtype)
        if alike is not None:
            alike[key] = new
    return new


def _estimate(state: MetaState, call: OperatorCall) -> None:
    name, born = call.info.name, call.born
    first = born[0] if born else None
    if call.storages and first is not None and first.exact is None and (
            name == "_to_copy" or not call.outputs[0].dtype.is_floating_point):
        first.drawn_from = expectation.drawn_contents(name, call.args, call.storages)
    choice = expectation.CHOOSING.get(name)
    if choice is not None and choice < len(born) and (chosen := born[choice]) is not None and chosen.exact is None:
        chosen.drawn_from = expectation.chosen_among(name, call.args, call.kwargs)
    if first is None and call.info.mutated:
        first = call.storages[0]
    if state.options.unknown_size == "error" or first is None:
        return
    before = call.storages[0].density if call.storages else None
    density = expectation.expected_density(name, call.args, call.storages)
    if density is not None:
        first.density = density
    if first.exact is not None:
        return
    if name == "histc" and not is_told_by_sample(call.storages[0]):
        expectation.count_classes(state, name, call.outputs[0], call.args[0].numel(),
                                  expectation.bins_left_out(call.args[0], call.outputs[0].numel()))
    elif name != "histc":
        expectation.count_marked(state, name, call.args, call.outputs[0], before)


def finite_answer(name: str, args: Any) -> bool | None:
    """What an operator gives for every element if its floating argument is finite; None where that does not follow.
    `torch.isfinite` arrives here as ``x == x`` and ``x.abs() != inf`` (aten/src/ATen/native/TensorCompare.cpp).
    """
    x = args[0]
    if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.numel() > _LARGEST_TESTED:
        return None
    if name in _NEVER:
        return False
    if name == "isfinite":
        return True
    other = args[1]
    if isinstance(other, torch.Tensor):
        return name == "eq" if other is x else None
    return name == "ne" if other == inf else None
