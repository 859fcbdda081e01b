"""Operators whose result depends on data: from known contents where there are any, else by a stated policy."""
from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import torch

from analyzer.errors import DataDependentError
from analyzer.meta.address_space import MetaStorage
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.operator_info import OperatorFacts
from analyzer.meta.refusal.check import check_call
from analyzer.meta.source_line import asked_by, user_frame
from analyzer.meta.spec import Signature, spec_of
from analyzer.meta.state import MetaState
from analyzer.meta.tensor import META, kernel, new_tensor

from .contents import defer_call, going_on, passing_value, read_known, searching_answer
from .expectation import Marks, count_classes, distinct_count, origin_of
from .known_value import MOST_CLASSES, Deferred, Positions, Result, small_enough
from .nonzero_bound import bound_of
from .sample import read_count, read_sample

Tensor = torch.Tensor
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_OPTIMIZERS = os.path.join(_TORCH, "optim") + os.sep
# These check that data is valid before they use it.
_CHECKS = (os.path.join(_TORCH, "distributions") + os.sep, os.path.join(_TORCH, "nn", "utils", "parametrizations.py"))
_BOOLEAN = (torch.bool, torch.uint8)
_ENGINE = os.path.join("", "deepspeed", "runtime", "")
with without_modes():  # that may be active where this is imported
    _CONDITION = torch.empty((), dtype=torch.bool, device=META)  # whose value is not known
STAND_IN = "an unknown scalar"  #: how an assumption begins that says what it was taken as
_MOST_PLACEHOLDERS = 100_000  # a loop that data would end does not end with them; a trace gives it up


def depends_on_data(info: OperatorFacts, args: Any) -> bool:
    """Whether contents decide what an operator that is data-dependent gives for these arguments."""
    return info.name != "index" or any(isinstance(i, Tensor) and i.dtype in _BOOLEAN for i in args[1])


def answer_data_dependent(state: MetaState, info: OperatorFacts, args: Any, kwargs: dict[str, Any],
                          tensors: list[Tensor]) -> Any:
    """The result of a data-dependent operator, or NotImplemented where its result depends on specs only."""
    name = info.name
    if name == "_local_scalar_dense":
        return _scalar(state, tensors[0])
    if name in ("equal", "allclose"):
        return _compare(state, info, args, kwargs)
    if not depends_on_data(info, args):
        return NotImplemented
    check_call(info.op, name, tensors[0].untyped_storage().device.type, args, kwargs)
    storages = [t.untyped_storage() for t in tensors]
    if all(isinstance(s, MetaStorage) and s.exact is not None for s in storages):
        return _exact(state, info, args, kwargs, tensors)
    rule = _RULES.get(name)
    return NotImplemented if rule is None else rule(state, info, args, kwargs)


def _unknown(state: MetaState, operator: str, remedy: str) -> DataDependentError:
    return DataDependentError(
        f"{operator} needs the contents of a tensor that has no data. {state.where()}\nWay out: {remedy}.")


_REMEDY = ("compute the value from shapes or Python numbers, pass the tensor with its values (a small integer or "
           "boolean tensor keeps them), or choose ProfileOptions(unknown_value='placeholder') or, for a condition, "
           "unknown_condition='false'")


def _scalar(state: MetaState, tensor: Tensor, operator: str = "aten.item (also bool(), int(), float(), if tensor:)",
            remedy: str = _REMEDY) -> Any:
    value = read_known(tensor)
    if value is not None:
        return value.item()
    if tensor.dtype is torch.bool and any(map(asked_by, _CHECKS)):
        state.assume(f"data is assumed to be valid where torch checks it {state.where()}")
        return True
    if tensor.dtype is torch.bool and (passing := passing_value()) is not None:
        state.assume(f"data is assumed to pass the model's own check {state.where()}")
        return passing
    if (asked := searching_answer(state, tensor)) is not None:
        return asked
    if (answer := going_on(state, tensor)) is not None:
        return answer
    value = read_known(tensor, assumed=True) if state.expects_contents and not state.repeats else None
    if value is not None and (not tensor.dtype.is_floating_point or bool(value.isfinite())):
        number = value.item()
        state.assume(
            f"{STAND_IN} ({tensor.dtype}) was taken as {number:.4g}, its value where what the layers compute is "
            f"zero {state.where()}")
        state.unknown_sizes += 1
        return number
    frame = user_frame()
    if frame is not None and _ENGINE in frame.f_code.co_filename:  # norms, which scale an update, or if it is left out
        state.assume("DeepSpeed is assumed to find gradients finite")
        return float(state.placeholder) if tensor.dtype.is_floating_point else False  # or 0
    if (expected := _expected_scalar(state, tensor)) is not None:
        return expected
    # What an optimizer of torch asks for only scales its update: no size and no path depends on it.
    if state.options.unknown_value == "placeholder" or asked_by(_OPTIMIZERS) or _is_asked_outside(state, tensor):
        state.assume(f"{STAND_IN} ({tensor.dtype}) was taken as {state.placeholder} {state.where()}")
        state.unknown_sizes += 1
        if state.unknown_sizes < _MOST_PLACEHOLDERS or state.tape is None:
            return float(state.placeholder) if tensor.dtype.is_floating_point else bool(
                state.placeholder) if tensor.dtype is torch.bool else state.placeholder
    raise _unknown(state, operator, remedy)


def _expected_scalar(state: MetaState, tensor: Tensor) -> Any:
    """What ``unknown_size`` and ``unknown_condition`` say that an unknown scalar is, or what it is in a sample of
    choices; None where nothing tells.
    """
    if state.tape is not None:
        return None
    density, policy = getattr(tensor.untyped_storage(), "density", None), state.options.unknown_size
    is_condition, condition = tensor.dtype is torch.bool, state.options.unknown_condition
    if is_condition and density in (0.0, 1.0):  # a comparison of expected counts
        state.assume(f"a condition that depends on data is {bool(density)} for the expected counts (balanced) "
                     f"{state.where()}")
        return bool(density)
    if is_condition and condition == "error":
        return None
    if density is None and not state.repeats and (sample := read_count(tensor)) is not None:
        value = sample.item()
        what = f"condition that depends on data is {value}" if is_condition else (
            f"number that depends on data was taken as {value:.4g}")
        state.assume(f"a {what} for choices that fall evenly (balanced) {state.where()}")
        return value
    if is_condition:
        state.assume(f"a condition that depends on data was taken as {condition} (unknown_condition={condition!r}) "
                     f"{state.where()}")
        return condition == "true"
    if density is None or policy in ("worst", "error"):  # nothing bounds such a number
        return None
    if isinstance(policy, int):
        state.assume(f"a number that depends on data was taken as {policy} (the bound given) {state.where()}")
        return policy if not tensor.dtype.is_floating_point else float(policy)
    number = density if tensor.dtype.is_floating_point else round(density)
    state.assume(
        f"a number that depends on data was taken as {number:g}: counts are 1 per element (balanced) {state.where()}")
    return number


def _is_asked_outside(state: MetaState, tensor: Tensor) -> bool:
    """Whether a step of the caller's own reads a number outside of modules, such as the loss that it tells. An integer
    may be a size, so contents are expected first.
    """
    return (state.answers_numbers and state.tape is None and not state.recorder.modules.runs_module()
            and (tensor.dtype.is_floating_point or state.follows_expected))


def _compare(state: MetaState, info: OperatorFacts, args: Any, kwargs: dict[str, Any]) -> bool:
    values = [read_known(t) for t in args[:2]]
    if values[0] is None or values[1] is None:
        if args[0] is args[1]:
            return True
        if args[0].shape != args[1].shape:
            return False
        return bool(_scalar(state, _CONDITION, f"aten.{info.name}",
                            "compare shapes instead, keep the comparison out of the model, or choose "
                            "ProfileOptions(unknown_condition='false')"))
    return bool(info.op(*values, *args[2:], **kwargs))


def _bounded(state: MetaState, operator: str, total: int, what: str) -> int | None:
    policy = state.options.unknown_size
    state.unknown_sizes += 1
    if policy == "error":
        raise _unknown(state, f"aten.{operator}", "choose MetaOptions(unknown_size='balanced'), 'worst' or a number")
    if not isinstance(policy, int):
        return None
    state.assume(f"{operator}: at most {policy} {what} (the bound given) {state.where()}")
    return min(total, policy)


def _count(state: MetaState, operator: str, mask: Tensor) -> int:
    total = mask.numel()
    known = read_known(mask)
    if known is not None:
        return int(torch.count_nonzero(known))
    bound = bound_of(mask)
    most = total if bound is None else min(total, bound.count())
    if (count := _bounded(state, operator, most, "rows")) is not None:
        return count
    storage = mask.untyped_storage()
    density = storage.density if isinstance(storage, MetaStorage) else None
    if state.options.unknown_size == "balanced" and density is not None:
        share = density.within(mask) if isinstance(density, Marks) else density
        count = min(most, round(total * min(1.0, abs(share))))
        state.assume(f"{operator}: {count} of {total} elements taken as nonzero (balanced) {state.where()}")
        return count
    if (sample := read_sample(mask, by_sign=True)) is not None:
        count = min(most, int(torch.count_nonzero(sample)))
        state.assume(f"{operator}: {count} of {total} elements taken as nonzero, for choices that fall evenly "
                     f"(balanced) {state.where()}")
        return count
    told = f"all {total} elements taken as nonzero (worst case)" if most == total else (
        f"{most} of {total} elements taken as nonzero (no more are set)")
    state.assume(f"{operator}: {told} {state.where()}")
    return most


def _expected_sum(state: MetaState, repeats: Tensor) -> int | None:
    """What unknown counts, such as durations, add up to (`expectation.expected_density`); a number given bounds it."""
    storage, policy = repeats.untyped_storage(), state.options.unknown_size
    if state.options.unknown_value == "placeholder":  # as their sum would be, if it were asked for
        state.unknown_sizes += 1
        state.assume(f"repeat_interleave: {state.placeholder} rows {state.where()}")
        return state.placeholder
    if policy == "error" or state.tape is not None or not isinstance(storage, MetaStorage) or storage.density is None:
        return None
    total = round(storage.density * repeats.numel())
    state.assume(f"repeat_interleave: {total} rows, 1 per element {state.where()}")
    return min(total, policy) if isinstance(policy, int) else total


def _new(state: MetaState, like: Tensor, shape: tuple[int, ...], dtype: torch.dtype,
         stride: tuple[int, ...] | None = None) -> Tensor:
    with without_modes():
        return new_tensor(shape, stride, dtype, like.untyped_storage().device, state.space)[0]


def _rows_of(state: MetaState, mask: Tensor) -> list[Tensor]:
    count = _count(state, "index with a mask", mask)
    rows = [_new(state, mask, (count,), torch.int64) for _ in range(mask.dim())]
    if state.recorder is not None:
        signature = Signature(torch.ops.aten.nonzero.default, (spec_of(mask),), {}, (spec_of(mask),),
                              tuple(map(spec_of, rows)))
        storages: list[Any] = [t.untyped_storage() for t in (mask, *rows)]
        state.recorder.calls.called(signature, storages[:1], storages[1:])
    return rows


def _first(state: MetaState, indices: Tensor, shape: tuple[int, ...], in_order: bool = False) -> Tensor:
    """``indices`` into ``shape``, which are assumed to be the first ones where contents are expected. Those that are
    ``in_order`` are known where all there can be are taken: a loop over the classes that were chosen goes by each.
    """
    are_all = (in_order and indices.shape[0] == math.prod(shape) <= MOST_CLASSES and state.expects_contents
               and not state.repeats)
    if state.follows_expected or are_all:
        with without_modes():
            found = torch.unravel_index(torch.arange(indices.shape[0]), shape) if shape else ()
            # as they lie in memory, where nonzero's are transposed
            value = torch.stack(found).reshape(-1) if found else torch.zeros(indices.numel(), dtype=torch.int64)
            storage: Any = indices.untyped_storage()
            storage.known = Deferred(value, assumed=not are_all)
    return indices


def _exact(state: MetaState, info: OperatorFacts, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
    call, _ = defer_call(info.op, args, kwargs)
    with without_modes():
        call.results = call.run()
    single = isinstance(call.results, Tensor)
    outs = []
    for i, value in enumerate([call.results] if single else call.results):
        transposed = value.stride() if info.op.overloadpacket is torch.ops.aten.nonzero else None
        out = _new(state, tensors[0], tuple(value.shape), value.dtype, transposed)
        storage = out.untyped_storage()
        if small_enough(value.numel(), value.dtype) and isinstance(storage, MetaStorage):
            storage.known = Result(call, None if single else i, (tuple(out.shape), out.stride(), 0), value.numel(),
                                   value.dtype)
        outs.append(out)
    return outs[0] if single else tuple(outs)


def _index_with_mask(state: MetaState, x: Tensor, indices: list[Any]) -> Tensor:
    """``x[mask]``: each mask becomes the rows of its nonzero, as expandTensors of ATen's IndexingUtils.h does."""
    rows: list[Any] = []
    for index in indices:
        is_mask = isinstance(index, Tensor) and index.dtype in _BOOLEAN
        rows += _rows_of(state, index) if is_mask else [index]
    with kernel, torch._C.DisableTorchFunction():
        shape = tuple(torch.ops.aten.index.Tensor(x, rows).shape)
    return _keep_origin(_new(state, x, shape, x.dtype), x)


def _keep_origin(picked: Tensor, source: Tensor) -> Tensor:
    known, storage = source.untyped_storage(), picked.untyped_storage()
    if isinstance(known, MetaStorage) and isinstance(storage, MetaStorage) and not source.is_floating_point():
        storage.drawn_from = origin_of(known)
    return picked


def _unique(state: MetaState, info: OperatorFacts, args: Any, kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    x = args[0]
    origin = x.untyped_storage().drawn_from
    if origin is None and (sample := read_sample(x)) is not None:
        with without_modes():
            origin = Deferred(sample.unique(), assumed=True)
    n = _distinct(state, x.numel() if origin is None else min(x.numel(), distinct_count(origin)), "elements")
    flat = _keep_origin(_new(state, x, (n,), x.dtype), x)
    are_all = origin is not None and n == distinct_count(origin) and (isinstance(origin, Positions) or origin.assumed)
    if origin is not None and are_all and state.expects_contents and not state.repeats:
        with without_modes():  # a loop over the classes that were chosen goes by each, in order
            flat.untyped_storage().known = Deferred(origin.flat().to(x.dtype))  # type: ignore[attr-defined]
    inverse = _new(state, x, tuple(x.shape), torch.int64)
    if info.name == "_unique":
        return flat, inverse
    counts = _new(state, x, (n,), torch.int64)
    if isinstance(origin, Positions) and n == distinct_count(origin):
        count_classes(state, info.name, counts, x.numel())
    return flat, inverse, counts


def _distinct(state: MetaState, total: int, what: str) -> int:
    if (count := _bounded(state, "unique", total, f"distinct {what}")) is not None:
        return count
    state.assume(f"unique: {total} {what} are assumed to be distinct, the most there can be {state.where()}")
    return total


def _repeat_interleave(state: MetaState, info: OperatorFacts, args: Any, kwargs: dict[str, Any]) -> Tensor:
    total = kwargs.get("output_size")
    if total is None:
        total = _expected_sum(state, args[0])
    if total is None:
        raise _unknown(state, "aten.repeat_interleave", "pass output_size=")
    return _new(state, args[0], (total,), torch.int64)


def _masked_select(state: MetaState, info: OperatorFacts, args: Any, kwargs: dict[str, Any]) -> Tensor:
    x, mask = args[:2]
    count = _count(state, "masked_select", mask)
    count *= math.prod(torch.broadcast_shapes(x.shape, mask.shape)) // max(1, mask.numel())  # each as often as repeated
    return _keep_origin(_new(state, args[0], (count,), args[0].dtype), args[0])


def _nms(state: MetaState, info: OperatorFacts, args: Any, kwargs: dict[str, Any]) -> Tensor:
    count = _count(state, "nms", args[1])  # boxes that do not overlap are all kept
    return _first(state, _new(state, args[0], (count,), torch.int64), (args[1].numel(),))


def _nonzero(state: MetaState, info: OperatorFacts, args: Any, kwargs: dict[str, Any]) -> Tensor:
    # a transposed matrix on CUDA and on the CPU alike: aten/src/ATen/native/cuda/Nonzero.cu, nonzero_cuda_out_impl
    count = _count(state, "nonzero", args[0])
    found = _new(state, args[0], (count, args[0].dim()), torch.int64, (1, max(count, 1)))
    return _first(state, found, tuple(args[0].shape), in_order=True)


def _unique_dim(state: MetaState, info: OperatorFacts, args: Any, kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    x, dim = args[0], args[1]
    n = _distinct(state, x.shape[dim], "slices")
    shape = tuple(n if d == dim % x.dim() else size for d, size in enumerate(x.shape))
    return (_new(state, x, shape, x.dtype), _new(state, x, (x.shape[dim],), torch.int64),
            _new(state, x, (n,), torch.int64))


def _bincount(state: MetaState, info: OperatorFacts, args: Any, kwargs: dict[str, Any]) -> Any:
    raise _unknown(state, "aten.bincount", "use torch.zeros(n).scatter_add_ with a size that is known")


_RULES: dict[str, Callable[[MetaState, OperatorFacts, Any, dict[str, Any]], Any]] = {
    "index": lambda state, info, args, kwargs: _index_with_mask(state, args[0], args[1]),
    "repeat_interleave": _repeat_interleave, "masked_select": _masked_select, "nms": _nms, "nonzero": _nonzero,
    **dict.fromkeys(("_unique", "_unique2", "unique_consecutive"), _unique), "unique_dim": _unique_dim,
    "bincount": _bincount,
}
"""What operators give whose size or contents would follow from data that is not there."""
