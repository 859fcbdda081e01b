"""What an engine does that samples answers beside a step, as one operator: it holds memory and takes time, and gives
nothing. Who calls it knows both of an engine's model.
"""
from __future__ import annotations

from typing import Any

import torch

from analyzer.hardware import DeviceSpec
from analyzer.hardware.kernel_time.estimate import KernelTime
from analyzer.meta.operator_info import MemoryNeed, register_memory_impl
from analyzer.meta.spec import Signature
from analyzer.profilers.operator.registration import FlopCount, register_flop_impl, register_time_impl

_library = torch.library.Library("analyzer", "FRAGMENT")
_library.define("sample_answers(Tensor at, int samples, int tokens, int workspace, int macs, float? seconds, "
                "float spread) -> ()")
_library.impl("sample_answers", lambda *_: None, "Meta")

#: Of ``samples`` answers with ``tokens`` in all, on the device of ``at``; ``seconds`` None: not known.
sample_answers: Any = torch.ops.analyzer.sample_answers


def _time(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    given = signature.named_arguments()
    return None if given["seconds"] is None else KernelTime(given["seconds"], given["spread"], "memory")


register_time_impl(sample_answers)(_time)
register_flop_impl(sample_answers)(lambda at, samples, tokens, workspace, macs, *_, out: FlopCount(2 * macs, macs))
register_memory_impl(sample_answers)(lambda at, samples, tokens, workspace, *_, out: MemoryNeed(workspace))
