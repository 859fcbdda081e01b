"""A profiler of your own is a function from the log to an annotation.

This one counts kernel launches, forward and backward, per node: many small kernels are what makes a model slow on a
fast GPU.

    python examples/own_profiler.py
"""
from __future__ import annotations

import torch

from analyzer import profile
from analyzer.profilers.annotation import Annotation
from analyzer.profilers.traffic import traffic_bytes
from analyzer.record.log import Log
from analyzer.zoo.vit import vit_b_16


def count_launches(log: Log) -> Annotation:
    """Calls that touch memory, at the node that they belong to; views launch nothing."""
    out = Annotation()
    for call in log.calls:
        if call.step == log.steps - 1 and call.node >= 0 and traffic_bytes(call):
            out.add(out.nodes, call.node, f"{call.phase}_launches", 1)
    return out


def main() -> None:
    found = profile(vit_b_16, args=(torch.empty(8, 3, 224, 224, device="meta"),), profilers=[count_launches])
    rows = sorted(found.nodes, key=lambda n: -sum(int(v) for v in n.extra.values() if isinstance(v, int)))
    for node in rows[:5]:
        print(f"{node.name:50} {node.extra}")


if __name__ == "__main__":
    main()
