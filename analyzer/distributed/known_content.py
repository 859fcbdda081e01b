"""What a collective reduces and over which group, and known contents that follow through it."""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist

from analyzer.errors import InputError
from analyzer.meta.address_space import MetaStorage
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.intercept.replacement import Undo, answer
from analyzer.meta.operator_info import OperatorInfo
from analyzer.meta.value.contents import covers_storage, read_known, worth_following
from analyzer.meta.value.expectation import origin_of
from analyzer.meta.value.known_value import Deferred

from .world_state import current_world

# The process group of a call of torch.distributed.

def find_process_group(given: dict[str, Any]) -> Any:
    """The group among the arguments of an operator, which come by their names: itself, or what its name stands for;
    None where there is none. Raises RuntimeError, as torch does, where no group has the name.
    """
    name = given.get("group_name")
    if isinstance(name, str):
        resolve: Any = torch._C._distributed_c10d._resolve_process_group  # names have a type of their own since 2.11
        return resolve(name)
    for value in given.values():
        if isinstance(value, dist.ProcessGroup):  # `Any group_name` of the functional collectives takes both
            return value
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value)
    return None


# Which reduction a call of torch.distributed does. Since torch 2.10 the script object that an operator is given tells;
# before, it is noted by the methods of process groups that make one.

_METHODS = ("allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "_reduce_scatter_base",
            "reduce_scatter_tensor_coalesced")


class _Noted(threading.local):
    """The reduction that a method of a process group was called with, in this thread, while it runs."""

    reduction: Any = None


_noted = _Noted()


def reduction_name(given: dict[str, Any]) -> str:
    """The reduction of a call, in lower case; "unknown" where nothing tells: with torch 2.9 of calls that C++ makes."""
    op = given["reduce_op"]
    if isinstance(op, str):
        return op.lower()
    if hasattr(op, "op"):
        number = op.op()  # a script object answers with the number of the enumeration
        name = dist.ReduceOp.RedOpType(number).name if isinstance(number, int) else str(number).rpartition(".")[2]
    else:
        name = "unknown" if _noted.reduction is None else _noted.reduction.name
    return name.lower()


def script_objects_tell() -> bool:
    """Whether the script object of a reduction says which it is."""
    private: Any = torch._C
    return any(schema.name == "op" and "c10d.ReduceOp" in str(schema)
               for schema in private._jit_get_custom_class_schemas())


def _note(original: Any, *args: Any, **kwargs: Any) -> Any:
    before = _noted.reduction
    _noted.reduction = _find_reduction([*args, *kwargs.values()])
    try:
        return original(*args, **kwargs)
    finally:
        _noted.reduction = before


def _find_reduction(arguments: list[Any]) -> Any:
    """It comes as itself or in the options of its kind; else it is a sum (torch/csrc/distributed/c10d/Types.hpp)."""
    for value in arguments:
        value = getattr(value, "reduceOp", value)
        if isinstance(value, dist.ReduceOp):
            return getattr(value, "op", value)
    return dist.ReduceOp.SUM


def reduction_replacements() -> Iterator[Undo]:
    """What notes reductions; each result undoes one replacement."""
    for name in () if script_objects_tell() else _METHODS:
        yield answer(dist.ProcessGroup, name, _note, passes_original=True, where=current_world)


# Known contents through collectives: they follow from what each rank of the group is taken to hold.

Tensor = torch.Tensor
Held = list[Tensor]  # what each rank of a group holds

_REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add, "avg": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum,
    "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}


class ContentRule:
    """What follows from a collective of known contents. Each rank is taken to hold what this one holds, or rank ``i``
    of the group ``contents(kind, ranks, value)[i]``.
    """

    def __init__(self, contents: Callable[[str, list[int], Tensor], Sequence[Any]] | None) -> None:
        self._contents = contents

    def propagate(self, info: OperatorInfo, given: dict[str, Any], result: Any) -> None:
        """Give the tensors that a collective wrote or made their contents; unknown where they do not follow."""
        name, first = info.name.strip("_"), given[info.arguments[0]]
        if info.op.namespace == "c10d":
            rule_in_place: Callable[..., None] = _IN_PLACE.get(name, _forget)
            rule_in_place(self, name, given, first)
            return
        rule = _FUNCTIONAL.get(name)
        for x, out in zip(_listed(first), _listed(result)):
            value = read_known(x)
            if isinstance(out, Tensor):
                _tell(out, None if value is None or rule is None else rule(self, given, value))
                if value is None:
                    _expect(x, out, name, given)

    def held(self, kind: str, group: Any, value: Tensor) -> Held:
        """What each rank of a group holds where this one holds ``value``."""
        size = group.size()
        if self._contents is None:
            return [value] * size
        find_ranks: Any = dist.get_process_group_ranks
        ranks: list[int] = find_ranks(group)
        with without_modes():
            told = [torch.as_tensor(v, dtype=value.dtype) for v in self._contents(kind, ranks, value.clone())]
        if len(told) != size:
            raise InputError(f"contents({kind!r}, {ranks}, ...) gave {len(told)} tensors: one for each of {size} ranks "
                             f"is needed")
        return told


def _tell(out: Tensor, value: Tensor | None) -> None:
    storage = out.untyped_storage()
    if not isinstance(storage, MetaStorage):
        return
    storage.known = None
    if value is not None and worth_following(value.numel()) and covers_storage(out, storage):
        with without_modes():
            storage.known = Deferred(value.to(out.dtype).reshape(out.shape).contiguous().clone())


def _expect(x: Tensor, out: Tensor, name: str, given: dict[str, Any]) -> None:
    """What is expected of unknown contents is so in every rank: the classes that they are among, and their mean."""
    source, made = x.untyped_storage(), out.untyped_storage()
    if not isinstance(source, MetaStorage) or not isinstance(made, MetaStorage):
        return
    is_reduced = name in _REDUCED
    made.drawn_from = None if is_reduced else origin_of(source)
    reduction = reduction_name(given) if is_reduced else None
    if source.density is not None and reduction in (None, "sum", "avg"):
        made.density = source.density * (find_process_group(given).size() if reduction == "sum" else 1)


def _reduce(held: Held, given: dict[str, Any]) -> Tensor | None:
    name = reduction_name(given)
    if name not in _REDUCTIONS:
        return None
    total = reduce(_REDUCTIONS[name], held)
    return total / len(held) if name == "avg" else total


# -- the same for both families: the value of one rank's tensor in, of one rank's result out ---------------------------


def _all_reduced(rule: ContentRule, given: dict[str, Any], value: Tensor) -> Tensor | None:
    with without_modes():
        return _reduce(rule.held("all_reduce", find_process_group(given), value), given)


def _all_gathered(rule: ContentRule, given: dict[str, Any], value: Tensor) -> Tensor:
    group = find_process_group(given)
    with without_modes():
        return torch.cat([v.reshape(1) if v.dim() == 0 else v for v in rule.held("all_gather", group, value)])


def _reduce_scattered(rule: ContentRule, given: dict[str, Any], value: Tensor) -> Tensor | None:
    group = find_process_group(given)
    with without_modes():
        total = _reduce(rule.held("reduce_scatter", group, value), given)
        return None if total is None else total.chunk(group.size())[group.rank()]


def _exchanged(rule: ContentRule, given: dict[str, Any], value: Tensor) -> Tensor | None:
    """Every rank's piece for this one. Pieces are as this rank's, or even where their sizes are not known."""
    group = find_process_group(given)
    splits = given.get("input_split_sizes") or [len(value) // group.size()] * group.size()
    if not all(isinstance(s, int) for s in splits):
        return None
    with without_modes():
        return torch.cat([v.split(list(splits))[group.rank()] for v in rule.held("all_to_all", group, value)])


def _broadcast(rule: ContentRule, given: dict[str, Any], value: Tensor) -> Tensor:
    root: int = given["src"] if "src" in given else given["root_rank"]
    return rule.held("broadcast", find_process_group(given), value)[root]


def _same(rule: ContentRule, given: dict[str, Any], value: Tensor) -> Tensor:
    return value


_REDUCED = frozenset({"all_reduce", "all_reduce_coalesced", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"})
_FUNCTIONAL: dict[str, Callable[..., Tensor | None]] = {
    **dict.fromkeys(("all_reduce", "all_reduce_coalesced"), _all_reduced),
    **dict.fromkeys(("all_gather_into_tensor", "all_gather_into_tensor_coalesced", "all_gather_into_tensor_out"),
                    _all_gathered),
    **dict.fromkeys(("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"), _reduce_scattered),
    "all_to_all_single": _exchanged, "broadcast": _broadcast, "wait_tensor": _same, "wrap_tensor_autograd": _same}


# -- operators of c10d, which write to their arguments (their schemas declare no writes) -------------------------------


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _forget(rule: ContentRule, name: str, given: dict[str, Any], written: Any) -> None:
    """What came from another rank is not known."""
    for item in _listed(written):
        for tensor in _listed(item):
            if isinstance(tensor, Tensor):
                _tell(tensor, None)


def _keep(rule: ContentRule, name: str, given: dict[str, Any], written: Any) -> None:
    """Nothing is written."""


def _reduce_in_place(rule: ContentRule, name: str, given: dict[str, Any], written: Any) -> None:
    if name == "reduce" and find_process_group(given).rank() != given["root_rank"]:
        return  # nothing is written
    for tensor in _listed(written):
        value = read_known(tensor)
        _tell(tensor, None if value is None else _all_reduced(rule, given, value))


def _broadcast_in_place(rule: ContentRule, name: str, given: dict[str, Any], written: Any) -> None:
    for tensor in written:
        value = read_known(tensor)
        _tell(tensor, None if value is None else _broadcast(rule, given, value))


def _gather_whole(rule: ContentRule, name: str, given: dict[str, Any], written: Any) -> None:
    sources = given.get("input_tensor", given.get("inputs"))
    for out, x in zip(_listed(written), _listed(sources)):
        value = read_known(x)
        _tell(out, None if value is None else _all_gathered(rule, given, value))


def _gather_listed(rule: ContentRule, name: str, given: dict[str, Any], written: Any) -> None:
    sources = given.get("input_tensors", given.get("input_list"))
    for outs, x in zip(written, _listed(sources)):
        value = read_known(x)
        held = [None] * len(outs) if value is None else rule.held("all_gather", find_process_group(given), value)
        for out, part in zip(outs, held):
            _tell(out, part)


def _scatter_whole(rule: ContentRule, name: str, given: dict[str, Any], written: Any) -> None:
    for out, x in zip(_listed(written), _listed(given.get("input_tensor", given.get("inputs")))):
        value = read_known(x)
        _tell(out, None if value is None else _reduce_scattered(rule, given, value))


def _scatter_listed(rule: ContentRule, name: str, given: dict[str, Any], written: Any) -> None:
    group = find_process_group(given)
    for out, parts in zip(written, given["input_tensors"]):
        mine = read_known(parts[group.rank()]) if parts else None
        if mine is None or name == "scatter" and group.rank() != given["root_rank"]:
            _tell(out, None)
        elif name == "scatter":
            _tell(out, mine)
        else:
            with without_modes():
                total = _reduce(rule.held("reduce_scatter", group, mine), given)
            _tell(out, total)


def _exchange(rule: ContentRule, name: str, given: dict[str, Any], written: Any) -> None:
    value = read_known(given["input"])
    _tell(written, None if value is None else _exchanged(rule, given, value))


def _exchange_listed(rule: ContentRule, name: str, given: dict[str, Any], written: Any) -> None:
    group = find_process_group(given)
    mine = read_known(given["input_tensors"][group.rank()])
    held = [None] * len(written) if mine is None else rule.held("all_to_all", group, mine)
    for out, part in zip(written, held):
        _tell(out, part)


_IN_PLACE: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced", "reduce"), _reduce_in_place),
    "broadcast": _broadcast_in_place,
    **dict.fromkeys(("send", "barrier", "monitored_barrier", "check_for_nan"), _keep),
    **dict.fromkeys(("allgather_base", "allgather_into_tensor_coalesced"), _gather_whole),
    **dict.fromkeys(("allgather", "allgather_coalesced", "gather"), _gather_listed),
    **dict.fromkeys(("reduce_scatter_base", "reduce_scatter_tensor_coalesced"), _scatter_whole),
    **dict.fromkeys(("reduce_scatter", "scatter"), _scatter_listed),
    "alltoall_base": _exchange, "alltoall": _exchange_listed}
