"""FLOPs and MACs per node, module and phase."""
from __future__ import annotations

from analyzer.record.log import Log

from .annotation import Annotation
from .flop_registry import count_call
from .traffic import traffic_bytes


def profile_flops(log: Log) -> Annotation:
    """Count every call of the last step where it happened.

    One multiply-add is 2 FLOPs and 1 MAC. What autograd runs for a forward node counts as that node's backward; operators run
    again under activation checkpointing count in ``recompute_flops`` and in the backward phase, not in ``bwd_flops``.
    Operators without a formula are listed in ``uncounted`` as (operator, calls, bytes), never taken as zero.
    """
    out = Annotation()
    last = log.steps - 1
    totals = dict.fromkeys(("fwd_flops", "bwd_flops", "fwd_macs", "bwd_macs", "recompute_flops", "optimizer_flops"), 0)
    uncounted: dict[str, list[int]] = {}
    for i, node in enumerate(log.nodes):
        if node.step == last:
            out.nodes[i].update(fwd_flops=0, bwd_flops=0, fwd_macs=0, bwd_macs=0)
    for i in range(len(log.modules)):
        out.modules[i].update(fwd_flops=0, bwd_flops=0, fwd_macs=0, bwd_macs=0)
    for record in log.phases:
        out.phases[record.step, record.phase].update(flops=0, macs=0)
    for call in log.calls:
        count = count_call(call.signature)
        if count is None:
            if call.step == last:
                row = uncounted.setdefault(str(call.signature.op), [0, 0])
                row[0] += 1
                row[1] += traffic_bytes(call)
            continue
        if not count.flops:
            continue
        phase = out.phases[call.step, call.phase]
        phase["flops"] = phase.get("flops", 0) + count.flops
        phase["macs"] = phase.get("macs", 0) + count.macs
        if call.step != last:
            continue
        if call.recomputed:
            totals["recompute_flops"] += count.flops
        elif call.phase in ("forward", "backward"):
            way = "fwd" if call.phase == "forward" else "bwd"
            totals[f"{way}_flops"] += count.flops
            totals[f"{way}_macs"] += count.macs
            for rows, key in ((out.modules, call.module), (out.nodes, call.node)):
                if key >= 0:
                    row_ = rows[key]
                    row_[f"{way}_flops"] += count.flops
                    row_[f"{way}_macs"] += count.macs
        else:
            totals["optimizer_flops"] += count.flops
    out.totals = {**totals, "uncounted": [(op, n, b) for op, (n, b) in sorted(uncounted.items())]}
    return out
