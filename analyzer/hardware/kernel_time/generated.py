"""Time of kernels that TorchInductor generates in Triton."""
from __future__ import annotations

import math

from analyzer.hardware.device_spec import DeviceSpec

from .estimate import KernelTime, find_constants
from .pointwise import Machine, missed_fraction, read_machine

# A generated kernel streams through memory as PyTorch's own do, at the same rate, unless its instructions take longer:
# each element of its loops takes some, and more with functions that the math library computes in many. A loop over a
# row that is too long for registers goes over it again with what was reduced of it. All other rules are fitted to
# kernels that were measured: ``benchmarks/calibration/inductor.py``.

FAMILY = "inductor"
#: Threads of a row in a loop: ``num_warps`` 8 of ``reduction_split_factor`` in ``torch/_inductor/choices.py``.
ROW_THREADS = 256

#: How a kernel runs: over elements; over tiles of two dimensions; over rows that it keeps in registers; over long rows,
#: bit by bit; over what lies across rows; over rows that it keeps and at once over the columns of some rows, one row
#: after the other.
POINTWISE, TILED, PERSISTENT, INNER, OUTER, MIXED = KINDS = (
    "pointwise", "tiled", "persistent", "inner", "outer", "mixed")


def reread_bytes(nbytes: float, rows: int, machine: Machine) -> float:
    """Of ``nbytes`` that are read again, row by row, those that the last cache does not hold any longer."""
    together = min(rows, machine.multiprocessors * machine.resident_threads // ROW_THREADS)
    return nbytes * missed_fraction(nbytes / max(rows, 1) * together, machine)


def generated_time(kind: str, elements: int, reduced: int, nbytes: float, again: float, instructions: float,
                   device: DeviceSpec, scattered: int = 0) -> KernelTime | None:
    """A kernel of ``elements`` results, each of ``reduced`` elements, that moves ``nbytes`` and reads ``again`` a
    second time. ``instructions`` are those of its functions, over all elements; ``scattered`` elements are written one
    by one, each a sector of the last cache of which it fills a part.
    """
    if (machine := read_machine(device)) is None:
        return None
    constants = find_constants(FAMILY, device)
    memory = (nbytes + reread_bytes(again, elements, machine)) / machine.rate
    arithmetic = 0.0
    if device.kind == "cuda":
        row = 1 << (reduced - 1).bit_length() if kind in (PERSISTENT, MIXED) else reduced  # lanes for a power of two
        of_each = constants["element_instructions"] + (constants["mixed_instructions"] if kind == MIXED else 0.0)
        arithmetic = (elements * row * of_each + instructions) / machine.issue_rate
        memory = max(memory, scattered * constants["scattered_instructions"] / machine.issue_rate)
    work = memory + arithmetic if kind == MIXED else max(memory, arithmetic)
    seconds = math.hypot(machine.floor, work)
    if work:
        seconds += constants["start_latencies"] * machine.latency * work / (work + machine.floor)
    bound = "latency" if work < machine.floor else "memory" if memory >= arithmetic else "arithmetic"
    return KernelTime(seconds, constants["kernel_spread"], bound)
