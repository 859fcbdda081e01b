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
from analyzer.meta.operator_info import OperatorFacts
from analyzer.meta.value.contents import covers_storage, read_known, worth_following
from analyzer.meta.value.expectation import origin_of
from analyzer.meta.value.known_value import Deferred

from .world_state import current_world, find_process_group

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


def _note(original: Any, *args: Any, **kwargs: Any) -> Any:
    """A reduction comes as itself or in the options of its kind; else it is a sum (c10d/Types.hpp)."""
    given = [getattr(value, "reduceOp", value) for value in (*args, *kwargs.values())]
    before = _noted.reduction
    _noted.reduction = next((getattr(op, "op", op) for op in given if isinstance(op, dist.ReduceOp)), dist.ReduceOp.SUM)
    try:
        return original(*args, **kwargs)
    finally:
        _noted.reduction = before


def reduction_replacements() -> Iterator[Undo]:
    """What notes reductions, where the script object of one does not say which it is; each result undoes one."""
    private: Any = torch._C
    tells = any(schema.name == "op" and "c10d.ReduceOp" in str(schema)
                for schema in private._jit_get_custom_class_schemas())
    for name in () if tells else _METHODS:
        yield answer(dist.ProcessGroup, name, _note, passes_original=True, where=current_world)


Tensor = torch.Tensor
Held = list[Tensor]  # what each rank of a group holds
Rule = Callable[["ContentRule", dict[str, Any], Tensor], Tensor | None]

_REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add, "avg": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum,
    "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}


class ContentRule:
    """What follows from known contents: each rank holds what this one holds, or ``contents(kind, ranks, value)[i]``."""

    def __init__(self, contents: Callable[[str, list[int], Tensor], Sequence[Any]] | None) -> None:
        self._contents = contents

    def propagate(self, info: OperatorFacts, given: dict[str, Any], result: Any) -> None:
        """Give the tensors that a collective wrote or made their contents; unknown where they do not follow."""
        name, first = info.name.strip("_"), given[info.arguments[0]]
        if info.op.namespace == "c10d":
            self._propagate_in_place(name, given, first)
            return
        for x, out in zip(_listed(first), _listed(result)):
            value = read_known(x)
            if isinstance(out, Tensor):
                rule = _FUNCTIONAL.get(name)
                _tell(out, None if rule is None else self._follow(rule, given, value))
                if value is None:
                    _expect(x, out, name, given)

    def _propagate_in_place(self, name: str, given: dict[str, Any], written: Any) -> None:
        """Operators of c10d write to their arguments; their schemas declare no writes."""
        group = find_process_group(given)
        if name in _WRITES_NOTHING or name == "reduce" and group.rank() != given["root_rank"]:
            return
        if name in _IN_PLACE:
            rule, *sources = _IN_PLACE[name]
            source = next((given[name] for name in sources if name in given), written)
            for out, x in zip(_listed(written), _listed(source)):
                value = read_known(x)
                _tell(out, self._follow(rule, given, value))
                if value is None and rule is _all_gathered:
                    _expect(x, out, name, given)
        elif name in ("allgather", "allgather_coalesced", "gather", "alltoall"):
            read: Any = given.get("input_tensors", given.get("input_list"))
            gathered = zip(written, _listed(read))
            for outs, x in [(written, read[group.rank()])] if name == "alltoall" else gathered:
                value, kind = read_known(x), "all_to_all" if name == "alltoall" else "all_gather"
                for out, part in zip(outs, [None] * len(outs) if value is None else self.held(kind, group, value)):
                    _tell(out, part)
        elif name in ("reduce_scatter", "scatter"):
            is_given = name != "scatter" or group.rank() == given["root_rank"]
            for out, parts in zip(written, given["input_tensors"]):
                mine = read_known(parts[group.rank()]) if parts and is_given else None
                _tell(out, mine if name == "scatter" else self._follow(_reduced_part, given, mine))
        else:  # what came from another rank is not known
            for tensor in [t for item in _listed(written) for t in _listed(item) if isinstance(t, Tensor)]:
                _tell(tensor, None)

    def _follow(self, rule: Rule, given: dict[str, Any], value: Tensor | None) -> Tensor | None:
        if value is None:
            return None
        with without_modes():
            return rule(self, given, value)

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
    if value is None or not covers_storage(out, storage):
        return
    with without_modes():
        if worth_following(value.numel()):
            storage.known = Deferred(value.to(out.dtype).reshape(out.shape).contiguous().clone())
        else:
            storage.density = float(value.double().mean())


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


def _same(rule: ContentRule, given: dict[str, Any], value: Tensor) -> Tensor:
    return value


def _all_reduced(rule: ContentRule, given: dict[str, Any], value: Tensor) -> Tensor | None:
    return _reduce(rule.held("all_reduce", find_process_group(given), value), given)


def _all_gathered(rule: ContentRule, given: dict[str, Any], value: Tensor) -> Tensor:
    held = rule.held("all_gather", find_process_group(given), value)
    return torch.cat([v.reshape(1) if v.dim() == 0 else v for v in held])


def _reduced_part(rule: ContentRule, given: dict[str, Any], value: Tensor) -> Tensor | None:
    return _reduce(rule.held("reduce_scatter", find_process_group(given), value), given)


def _reduce_scattered(rule: ContentRule, given: dict[str, Any], value: Tensor) -> Tensor | None:
    group, total = find_process_group(given), _reduced_part(rule, given, value)
    return None if total is None else total.chunk(group.size())[group.rank()]


def _exchanged(rule: ContentRule, given: dict[str, Any], value: Tensor) -> Tensor | None:
    """Every rank's piece for this one. Pieces are as this rank's, or even where their sizes are not known."""
    group = find_process_group(given)
    splits = given.get("input_split_sizes") or [len(value) // group.size()] * group.size()
    if not all(isinstance(s, int) for s in splits):
        return None
    return torch.cat([v.split(list(splits))[group.rank()] for v in rule.held("all_to_all", group, value)])


def _broadcast(rule: ContentRule, given: dict[str, Any], value: Tensor) -> Tensor:
    root: int = given["src"] if "src" in given else given["root_rank"]
    return rule.held("broadcast", find_process_group(given), value)[root]


_REDUCED = frozenset({"all_reduce", "all_reduce_coalesced", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"})
_FUNCTIONAL: dict[str, Rule] = {
    **dict.fromkeys(("all_reduce", "all_reduce_coalesced"), _all_reduced),
    **dict.fromkeys(("all_gather_into_tensor", "all_gather_into_tensor_coalesced", "all_gather_into_tensor_out"),
                    _all_gathered),
    **dict.fromkeys(("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"), _reduce_scattered),
    "all_to_all_single": _exchanged, "broadcast": _broadcast, "wait_tensor": _same, "wrap_tensor_autograd": _same}
_WRITES_NOTHING = frozenset({"send", "barrier", "monitored_barrier", "check_for_nan"})
#: Of operators of c10d the rule, and by which names what is read is given; where there are none, what is written.
_IN_PLACE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced", "reduce"), (_all_reduced,)), "broadcast": (_broadcast,),
    **dict.fromkeys(("allgather_base", "allgather_into_tensor_coalesced"), (_all_gathered, "input_tensor", "inputs")),
    **dict.fromkeys(("reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
                    (_reduce_scattered, "input_tensor", "inputs")),
    "alltoall_base": (_exchanged, "input")}


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
