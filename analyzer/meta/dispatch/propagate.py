"""Propagate: what follows about the contents of storages that an operator made or wrote."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from analyzer.meta.address_space import MetaStorage
from analyzer.meta.operator_info import OperatorInfo
from analyzer.meta.spec import NUMBERS
from analyzer.meta.state import MetaState
from analyzer.meta.value import expectation
from analyzer.meta.value.contents import covers_storage, defer_call, storage_numel, worth_following
from analyzer.meta.value.known_value import Call, Known, Result, Written, Zeros, window_of
from analyzer.meta.value.nonzero_bound import NonzeroBound, bound_result

from .account import decided_condition
from .resolve import OperatorCall

Tensor = torch.Tensor
_FULL = torch.ops.aten.full.default
_PRODUCTS = {"convolution", "mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "_int_mm", "_scaled_mm"}


def propagate(state: MetaState, call: OperatorCall) -> None:
    """Tell the storages that ``call`` made or wrote what is known of their contents."""
    info, born = call.info, call.born
    is_followed = _any_known(call.storages)
    if is_followed or not call.tensors or info.mutated or info.filler and _counts(call):
        bound = _bound_nonzero(call) if is_followed and info.bounds_nonzero else None
        _propagate_known(state, call)
        if bound is not None:
            (born[0] or call.outputs[0].untyped_storage()).nonzero_bound = bound
        if born and born[0] is not None and born[0].known is None and (decided := decided_condition(call)) is not None:
            born[0].known = _decided(call.outputs[0], born[0], decided)
    if info.tests_finiteness and born and born[0] is not None and born[0].known is None:
        _assume_finite(state, call, born[0])
    if info.is_estimated:
        _estimate(state, call)


def _counts(call: OperatorCall) -> bool:
    """Whether what is filled, like another tensor, are integers: ones that are added up count."""
    return not call.outputs[0].dtype.is_floating_point


def _decided(out: Tensor, storage: MetaStorage, decided: bool) -> Known:
    return _full(out, storage_numel(storage, out.dtype), decided if out.dtype is torch.bool else int(decided))


def _any_known(storages: list[MetaStorage]) -> bool:
    for s in storages:
        if s.known is not None or s.nonzero_bound is not None:
            return True
    return False


def _bound_nonzero(call: OperatorCall) -> NonzeroBound | None:
    """How many elements of the first result can be nonzero: masks and indices; other numbers are not counted."""
    out = call.outputs[0] if call.outputs else None
    if not isinstance(out, Tensor) or out.dtype.is_floating_point or out.dtype.is_complex:
        return None
    return bound_result(call.info.name, call.args, call.kwargs, out.numel())


# -- exact contents ---------------------------------------------------------------------------------------------------


def _propagate_known(state: MetaState, call: OperatorCall) -> None:
    info = call.info
    if info.filler:
        _fill(state, call)
        return
    if info.undefined:
        return
    if info.mutated:
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
    """Whether a draw is one that code may ask for: a number, or few by weights that are known."""
    info, numel = call.info, call.outputs[0].numel()
    if call.storages:
        return info.name in _BY_WEIGHTS and numel <= _FEW and all(
            s.device.type == "cpu" and s.exact is not None for s in call.storages)
    return numel == 1 and info.name != "randperm"


def _fill(state: MetaState, call: OperatorCall) -> None:
    """A new tensor full of one number."""
    out: Any = call.outputs[0] if call.outputs else None
    storage = call.born[0] if call.born else None
    if storage is None:
        return
    if not worth_following(numel := storage_numel(storage, out.dtype)):
        if _fill_value(call.info, call.args, call.kwargs) == 0:
            storage.nonzero_bound = NonzeroBound(0)
        return
    value = _fill_value(call.info, call.args, call.kwargs)
    if isinstance(value, NUMBERS):
        window = window_of(out)
        key = type(value), repr(value), window, numel, out.dtype  # 0.0 and -0.0 are equal
        known = state.fills.get(key)
        if known is None:
            known = state.fills[key] = _full(out, numel, value)
        storage.known = known


def _fill_value(info: OperatorInfo, args: Any, kwargs: dict[str, Any]) -> Any:
    if info.name.startswith(("zeros", "new_zeros")):
        return 0
    if info.name.startswith(("ones", "new_ones")):
        return 1
    position = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0}[info.name]
    return args[position] if position < len(args) else kwargs.get("fill_value", kwargs.get("s"))


def _full(out: Tensor, numel: int, value: Any) -> Known:
    window = window_of(out)
    return Result(Call(_FULL, [window[0], value], {"dtype": out.dtype}, []), None, window, numel, out.dtype)


def _next_seed(state: MetaState) -> int:
    state.random_seed += 1
    state.assume("random scalars that decide control flow are drawn from the profiler's own seed")
    return state.random_seed


def _compute(state: MetaState, call: OperatorCall, seed: int | None) -> None:
    """Contents that follow from those of the arguments."""
    info, outputs, born = call.info, call.outputs, call.born
    if not any([b is not None and isinstance(o, Tensor) and worth_following(storage_numel(b, o.dtype))
                for o, b in zip(outputs, born)]):
        return
    expects = _expects(state, info)
    deferred, unknown = defer_call(info.op, call.args, call.kwargs, expects=expects, seed=seed)
    if unknown or expects and all(isinstance(r.known, Zeros) for r in deferred.reads) and not info.enumerator:
        return
    single = len(outputs) == 1 and not info.returns_list
    for i, (out, storage) in enumerate(zip(outputs, born)):
        if storage is not None and worth_following(numel := storage_numel(storage, out.dtype)):
            storage.known = Result(deferred, None if single else i, window_of(out), numel, out.dtype)


def _expects(state: MetaState, info: OperatorInfo) -> bool:
    """Whether unknown arguments are to be taken as zero; what products and convolutions give stays unknown."""
    return state.follows_expected and info.name not in _PRODUCTS


# -- contents that are written ----------------------------------------------------------------------------------------

Rule = Callable[["tuple[int, ...]", Tensor, MetaStorage], "Known | None"]


def _write(state: MetaState, call: OperatorCall) -> None:
    """New contents of the arguments that a call writes to."""
    info = call.info
    if info.is_foreach and not info.is_random and not _any_known(call.storages):
        return  # each element is followed alone: what was not known stays so
    targets = []
    for position, target in call.written():
        if position is None:  # out= variants: contents are not followed
            target.untyped_storage().followed = (None,) * 4  # type: ignore[attr-defined]
        else:
            targets.append((position, target))
    if not targets:
        return
    rule = _choose_rule(state, call)
    written = []
    for position, target in targets:
        storage = target.untyped_storage() if target.layout is torch.strided else None
        if isinstance(storage, MetaStorage):
            written.append((storage, None if rule is None else rule(position, target, storage)))
    for storage, new in written:
        storage.known, storage.nonzero_bound = new, None


def _choose_rule(state: MetaState, call: OperatorCall) -> Rule | None:
    """What tells the new contents of a target; None where they are not followed."""
    if call.info.is_random:
        return partial(_drawn_in_place, state, call)
    if not call.info.runs_on_host:
        return None
    if not call.info.is_foreach:
        return _written_by_call(state, call)
    # Elements of one content to which a foreach call does the same have one content after it.
    same_for_all = not any(isinstance(a, (list, tuple)) for a in (*call.args[1:], *call.kwargs.values()))
    return partial(_written_in_list, call, {} if same_for_all else None)


def _drawn_in_place(state: MetaState, call: OperatorCall, position: tuple[int, ...], target: Tensor,
                    storage: MetaStorage) -> Known | None:
    if target.numel() != 1 or not covers_storage(target, storage):
        return None
    seed = _next_seed(state)
    if any(isinstance(a, Tensor) for a in call.args[1:]):
        return None
    named = {k: v for k, v in call.kwargs.items() if k != "generator"}
    deferred = Call(call.info.op, [None, *call.args[1:]], named, [], seed)
    return Written(None, deferred, (0,), window_of(target), storage_numel(storage, target.dtype), target.dtype)


def _written_by_call(state: MetaState, call: OperatorCall) -> Rule:
    """The contents after one call that writes to its arguments."""
    expects = _expects(state, call.info)
    deferred, unknown = defer_call(call.info.op, call.args, call.kwargs, expects=expects)
    expects = expects and any(not isinstance(r.known, Zeros) for r in deferred.reads)

    def contents(position: tuple[int, ...], target: Tensor, storage: MetaStorage) -> Known | None:
        numel = storage_numel(storage, target.dtype)
        if not worth_following(numel) or any(u is not target for u in unknown):
            return None
        overwritten = call.info.overwrites and covers_storage(target, storage)
        if storage.known is None and not overwritten and not expects:
            return None
        return Written(None if overwritten else storage.known, deferred, position, window_of(target), numel,
                       target.dtype)

    return contents


def _written_in_list(call: OperatorCall, alike: dict[Any, Known | None] | None, position: tuple[int, ...],
                     target: Tensor, storage: MetaStorage) -> Known | None:
    """One element of a foreach call, followed alone, so that unknown neighbours do not matter."""
    if storage.known is None or not worth_following(storage_numel(storage, target.dtype)):
        return None
    if alike is None:
        return _written_alone(call, position, target, storage)
    key = id(storage.known), window_of(target), storage.nbytes()
    new = alike.get(key)
    if new is None:
        new = alike[key] = _written_alone(call, position, target, storage)
    return new


def _written_alone(call: OperatorCall, position: tuple[int, ...], target: Tensor, storage: MetaStorage) -> Known | None:
    i, j = position
    size = len(call.args[i])
    row = [[a[j]] if isinstance(a, (list, tuple)) and len(a) == size else a for a in call.args]
    deferred, unknown = defer_call(call.info.op, row, call.kwargs)
    if unknown:
        return None
    numel = storage_numel(storage, target.dtype)
    return Written(storage.known, deferred, (i, 0), window_of(target), numel, target.dtype)


# -- what is expected of contents that are not known ------------------------------------------------------------------


def _assume_finite(state: MetaState, call: OperatorCall, storage: MetaStorage) -> None:
    answer = expectation.finite_answer(call.info.name, call.args)
    if answer is not None:
        out = call.outputs[0]
        state.assume("floating data is taken to be finite where the model asks")
        storage.known = _full(out, storage_numel(storage, out.dtype), answer)


def _estimate(state: MetaState, call: OperatorCall) -> None:
    """Among which numbers unknown elements are, how many of them there are of each, and their mean."""
    name, born = call.info.name, call.born
    first = born[0] if born else None
    if call.storages and first is not None and first.exact is None and not call.outputs[0].dtype.is_floating_point:
        first.drawn_from = expectation.drawn_contents(name, call.storages)
    choice = expectation.CHOOSING.get(name)
    if choice is not None and (chosen := born[choice]) is not None and chosen.exact is None:
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
    if name == "histc":
        expectation.count_evenly(state, name, call.outputs[0], call.args[0].numel())
    else:
        expectation.count_marked(state, name, call.args, call.outputs[0], before)
