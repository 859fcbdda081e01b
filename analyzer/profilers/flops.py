"""FLOPs and MACs per node, module, operator and phase."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from analyzer.record.log import Log

from .annotation import Annotation, part_of
from .flop_convention import Convention, find_convention
from .traffic import traffic_bytes

_COLUMNS = ("fwd_flops", "bwd_flops", "fwd_macs", "bwd_macs")


def profile_flops(log: Log) -> Annotation:
    """Count every call of the last step where it happened, under the project's own convention.

    One multiply-add is 2 FLOPs and 1 MAC. What autograd runs for a forward node counts as that node's backward; operators run
    again under activation checkpointing count in ``recompute_flops`` and in the backward phase, not in ``bwd_flops``.
    Operators without a formula are listed in ``uncounted`` as (operator, calls, bytes), never taken as zero.
    """
    return _Count(log, find_convention("own")).run()


def make_flops_profiler(convention: str = "own") -> Callable[[Log], Annotation]:
    """A profiler that counts as ``convention`` says: ``own``, ``deepspeed`` or ``fvcore`` (see `flop_convention`).

    The last two count the forward pass alone: what they say nothing of is None. Raises InputError for another name.

    >>> import torch
    >>> from analyzer import profile
    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU())
    >>> own, theirs = (profile(model, args=(torch.empty(8, 16),), mode="infer", profilers={"flops": make_flops_profiler(name)})
    ...                for name in ("own", "deepspeed"))
    >>> own.fwd_flops - 2 * own.fwd_macs, theirs.fwd_flops - 2 * theirs.fwd_macs  # GELU: five operations an element, or one
    (1280, 256)
    """
    chosen = find_convention(convention)

    def profile_flops(log: Log) -> Annotation:
        return _Count(log, chosen).run()

    return profile_flops


class _Count:
    """One walk over a log."""

    def __init__(self, log: Log, convention: Convention) -> None:
        self.log, self.convention, self.last = log, convention, log.steps - 1
        self.out = Annotation()
        self.uncounted: dict[str, list[int]] = {}
        self.totals: dict[str, Any] = dict.fromkeys((*_COLUMNS, "recompute_flops", "recompute_macs", "executed_flops", "optimizer_flops"), 0)

    def run(self) -> Annotation:
        log, out = self.log, self.out
        for i, node in enumerate(log.nodes):
            if node.step == self.last:
                out.nodes[i].update(dict.fromkeys((*_COLUMNS, "recompute_flops"), 0))
        for i in range(len(log.modules)):
            out.modules[i].update(dict.fromkeys((*_COLUMNS, "recompute_flops"), 0))
        for record in log.phases:
            out.phases[record.step, record.phase].update(flops=0, macs=0)
        self._count_calls()
        if self.convention.forward_only:
            self._forget_all_but_forward()
        listed = [(op, n, nbytes) for op, (n, nbytes) in sorted(self.uncounted.items())]
        out.totals = {**self.totals, "uncounted": listed, "flop_convention": self.convention.name}
        return out

    def _count_calls(self) -> None:
        out, last, totals, log = self.out, self.last, self.totals, self.log
        count_of = self.convention.count
        forward_only = self.convention.forward_only
        for call in log.calls:
            phase = call.phase
            if forward_only and phase != "forward":
                continue
            count = count_of(call, log)
            if count is None:
                if call.step == last:
                    self._leave_out(call)
                continue
            flops, macs = count.flops, count.macs
            if call.step == last:
                row = out.operators[call.module, part_of(call), str(call.signature.op)]
                if row.get("flops", 0) is not None:
                    row["flops"], row["macs"] = row.get("flops", 0) + flops, row.get("macs", 0) + macs
            if not flops:
                continue
            row = out.phases[call.step, phase]
            row["flops"] += flops
            row["macs"] += macs
            if call.step != last:
                continue
            if phase not in ("forward", "backward"):
                totals["optimizer_flops"] += flops
                continue
            totals["executed_flops"] += count.executed
            if call.recomputed:
                costs = {"recompute_flops": flops}
                totals["recompute_macs"] += macs
            else:
                way = "fwd" if phase == "forward" else "bwd"
                costs = {f"{way}_flops": flops, f"{way}_macs": macs}
            for name, value in costs.items():
                totals[name] += value
                out.modules[call.module][name] += value
                if call.node >= 0:
                    out.nodes[call.node][name] += value

    def _leave_out(self, call: Any) -> None:
        row = self.uncounted.setdefault(str(call.signature.op), [0, 0])
        row[0] += 1
        row[1] += traffic_bytes(call, self.log.storages)
        self.out.operators[call.module, part_of(call), str(call.signature.op)].update(flops=None, macs=None)

    def _forget_all_but_forward(self) -> None:
        """What the convention says nothing of is unknown, not zero."""
        unknown = ("bwd_flops", "bwd_macs", "recompute_flops")
        for rows in (self.out.nodes, self.out.modules):
            for row in rows.values():
                row.update(dict.fromkeys(unknown))
        for (_, phase), row in self.out.phases.items():
            if phase != "forward":
                row.update(flops=None, macs=None)
        self.totals.update(dict.fromkeys((*unknown, "recompute_macs", "executed_flops", "optimizer_flops")))
