"""Seconds by a plain roofline: the longer of arithmetic at peak rate and memory at peak bandwidth. Not calibrated."""
from __future__ import annotations

import functools
import math
from collections.abc import Callable

from analyzer.hardware import DeviceSpec, collective_seconds, roofline_seconds
from analyzer.meta.signature import Signature
from analyzer.record.log import Log
from analyzer.record.op_call import OpCall

from .annotation import WAYS, Annotation, operator_key, sum_seconds
from .communication import collective_of, message_bytes
from .flop_registry import count_call
from .traffic import traffic_bytes


def call_seconds(call: OpCall, device: DeviceSpec, world_size: int = 1) -> float | None:
    """Seconds of one call on ``device``; 0.0 for a view, None where the device's figures are unknown."""
    kind = collective_of(call)
    if kind is not None and world_size > 1:
        return collective_seconds(_RING.get(kind, kind), message_bytes(call), world_size, device)
    nbytes = traffic_bytes(call)
    count = count_call(call.signature)
    flops, macs = (0, 0) if count is None else (count.flops, count.macs)
    if not nbytes and not flops:
        return 0.0
    # an index (argmax) is computed in the dtype of what is compared, complex arithmetic is that of its parts
    tensors = (*call.signature.outputs, *call.signature.inputs)
    dtype = next((s.dtype for s in tensors if s.dtype.is_floating_point or s.dtype.is_complex),
                 tensors[0].dtype).to_real() if tensors else None  # complex arithmetic is that of its parts
    if macs and call.signature.inputs and call.signature.inputs[0].dtype.itemsize == 1:
        dtype = call.signature.inputs[0].dtype  # 8-bit factors are multiplied as such, whatever they are summed in
    # cuDNN may use TF32 by default, cuBLAS may not: torch.backends.cudnn.allow_tf32,
    # torch.backends.cuda.matmul.allow_tf32
    convolution = "convolution" in call.signature.op.__name__
    return roofline_seconds(flops, nbytes, dtype, device, uses_tensor_cores=macs > 0, allow_tf32=convolution)


_RING = {
    "allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all", "gather": "all_gather",
    "scatter": "broadcast", "recv": "send"}


def make_latency_profiler(device: DeviceSpec, world_size: int = 1) -> Callable[[Log], Annotation]:
    """A profiler of seconds on ``device``: per node, module and phase of the last step."""

    def profile_latency(log: Log) -> Annotation:
        last = log.steps - 1
        alike: dict[Signature, float] = {}  # calls of one signature take the same time
        parts: dict[tuple[int, str], dict[float, int]] = {(record.step, record.phase): {} for record in log.phases}
        for step, call, _, number in log.tallies():
            seconds = alike.get(call.signature)
            if seconds is None:
                seconds = call_seconds(call, device, world_size)
                if seconds is None:
                    return Annotation()  # nothing is better than a part: unknown stays None
                alike[call.signature] = seconds
            times = parts.setdefault((step, call.phase), {})
            times[seconds] = times.get(seconds, 0) + number
        out = Annotation(functools.partial(_fill_rows, log, alike))
        for key, times in parts.items():  # a sum that does not depend on the order of calls
            total = math.fsum(number * seconds for seconds, number in times.items())
            out.phases[key].update(seconds=total, kernel_seconds=total)
        steady = {phase: row["seconds"] for (step, phase), row in out.phases.items() if step == last}
        out.totals = {**sum_seconds(steady), "kernel_seconds": sum(steady.values())}
        return out

    return profile_latency


def _fill_rows(log: Log, alike: dict[Signature, float], out: Annotation) -> None:
    out.start_rows(log, {"fwd_seconds": 0.0, "bwd_seconds": 0.0, "recompute_seconds": 0.0})
    for call in log.calls:
        if call.step != log.steps - 1:
            continue
        seconds = alike[call.signature]
        out.add(out.operators, operator_key(call), "seconds", seconds)
        if seconds and call.phase in WAYS:
            out.add_where(call, f"{WAYS[call.phase]}_seconds", seconds)
            if call.recomputed:
                out.add_where(call, "recompute_seconds", seconds)
