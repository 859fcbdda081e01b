"""FLOPs and MACs per node, module, operator and phase."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from analyzer.meta.signature import Signature
from analyzer.profilers.flop_formula.registration import FlopCount
from analyzer.record.log import Log, Tally
from analyzer.record.op_call import OpCall

from .annotation import WAYS, Annotation, operator_key
from .flop_convention import Convention, find_convention
from .traffic import traffic_bytes

_COLUMNS = ("fwd_flops", "bwd_flops", "fwd_macs", "bwd_macs")


def profile_flops(log: Log) -> Annotation:
    """Count every call of the last step where it happened, under the project's own convention.

    One multiply-add is 2 FLOPs and 1 MAC. What autograd runs for a forward node counts as that node's backward;
    operators run again under activation checkpointing count in ``recompute_flops`` and in the backward phase, not in
    ``bwd_flops``. Operators without a formula are in ``uncounted`` (operator, calls, bytes), never taken as zero.
    """
    return _Count(log, find_convention("own")).run()


def make_flops_profiler(convention: str = "own") -> Callable[[Log], Annotation]:
    """A profiler that counts as ``convention`` says: ``own``, ``deepspeed`` or ``fvcore`` (see `flop_convention`).

    The last two count the forward pass alone: what they say nothing of is None. Raises InputError for another name.

    >>> import torch
    >>> from analyzer import profile
    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU())
    >>> own, theirs = (profile(model, args=(torch.empty(8, 16),), mode="infer",
    ...                        profilers={"flops": make_flops_profiler(name)}) for name in ("own", "deepspeed"))
    >>> own.fwd_flops - 2 * own.fwd_macs, theirs.fwd_flops - 2 * theirs.fwd_macs  # GELU: five an element, or one
    (1280, 256)
    """
    chosen = find_convention(convention)
    return lambda log: _Count(log, chosen).run()


class _Count:
    """What the calls of a log count, by the formulas that are registered now."""

    def __init__(self, log: Log, convention: Convention) -> None:
        self.log, self.convention, self.last = log, convention, log.steps - 1
        self.counts: dict[Any, FlopCount | None] = {}

    def run(self) -> Annotation:
        log, out, last = self.log, Annotation(self._fill), self.last
        totals: dict[str, Any] = dict.fromkeys(
            (*_COLUMNS, "recompute_flops", "recompute_macs", "executed_flops", "optimizer_flops"), 0)
        uncounted: dict[str, list[int]] = {}
        products: Counter[str | None] = Counter()  # multiply-adds, by what they are computed in
        for record in log.phases:
            out.phases[record.step, record.phase].update(flops=0, macs=0)
        # Where the module decides what is seen, calls are alike only in modules of one class.
        tallies = log.tallies() if not self.convention.hidden else (Tally(call.step, call, log.storages, 1)
                                                                    for call in log.calls)
        for step, call, storages, number in tallies:
            phase = call.phase
            if self.convention.forward_only and phase != "forward":
                continue
            count = self._count(call)
            if count is None:
                if step == last:
                    row = uncounted.setdefault(str(call.signature.op), [0, 0])
                    row[0] += number
                    row[1] += number * traffic_bytes(call, storages)
                continue
            if not count.flops:
                continue
            flops, macs = number * count.flops, number * count.macs
            row_of_phase = out.phases[step, phase]
            row_of_phase["flops"] += flops
            row_of_phase["macs"] += macs
            if step != last:
                continue
            if phase not in WAYS:
                totals["optimizer_flops"] += flops
                continue
            totals["executed_flops"] += number * count.executed
            way = "recompute" if call.recomputed else WAYS[phase]
            totals[f"{way}_flops"] += flops
            totals[f"{way}_macs"] += macs
            products[_product_dtype(call.signature)] += macs
        if self.convention.forward_only:
            for (_, phase), row_of_phase in out.phases.items():
                if phase != "forward":
                    row_of_phase.update(flops=None, macs=None)
            totals.update(dict.fromkeys(
                ("bwd_flops", "bwd_macs", "recompute_flops", "recompute_macs", "executed_flops", "optimizer_flops")))
        listed = [(op, n, nbytes) for op, (n, nbytes) in sorted(uncounted.items())]
        out.totals = {**totals, "uncounted": listed, "flop_convention": self.convention.name,
                      "product_dtype": products.most_common(1)[0][0] if products.total() else None}
        return out

    def _count(self, call: OpCall) -> FlopCount | None:
        key = (call.signature, self.log.modules[call.module].type) if self.convention.hidden else call.signature
        if key not in self.counts:
            self.counts[key] = self.convention.count(call, self.log)
        return self.counts[key]

    def _fill(self, out: Annotation) -> None:
        """The rows of nodes, modules and operators."""
        forward_only = self.convention.forward_only
        out.start_rows(self.log, dict.fromkeys((*_COLUMNS, "recompute_flops"), 0))
        for call in self.log.calls:
            if call.step != self.last or forward_only and call.phase != "forward":
                continue
            count = self._count(call)
            row = out.operators[operator_key(call)]
            if count is None:
                row.update(flops=None, macs=None)
                continue
            if row.get("flops", 0) is not None:
                row["flops"], row["macs"] = row.get("flops", 0) + count.flops, row.get("macs", 0) + count.macs
            if not count.flops or call.phase not in WAYS:
                continue
            if call.recomputed:
                out.add_where(call, "recompute_flops", count.flops)
            else:
                out.add_where(call, f"{WAYS[call.phase]}_flops", count.flops)
                out.add_where(call, f"{WAYS[call.phase]}_macs", count.macs)
        if forward_only:  # what the convention says nothing of is unknown, not zero
            for rows in (out.nodes, out.modules):
                for row in rows.values():
                    row.update(dict.fromkeys(("bwd_flops", "bwd_macs", "recompute_flops")))


def _product_dtype(signature: Signature) -> str | None:
    """The dtype of the largest floating tensor that is multiplied; None where there is none."""
    floating = [spec for spec in signature.inputs if spec.dtype.is_floating_point or spec.dtype.is_complex]
    if not floating:
        return None
    return str(max(floating, key=lambda spec: spec.numel).dtype).removeprefix("torch.")
