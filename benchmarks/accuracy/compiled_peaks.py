"""The peak of a compiled step on the host beside PyTorch's own.

    python -m benchmarks.accuracy.compiled_peaks [MODEL ...]

The reference is ``torch.compile`` for the host, with the storages that it allocates and frees as its allocator tells
the profiler. What a call of an operator allocates and frees again is none of them: so oneDNN's convolutions lay out
their operands anew. The program's C++ kernels are not compiled: what a kernel computes does not change what its program
allocates, so a function that does nothing takes the place of each.
"""
from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from torch._C._profiler import _EventType
from torch._inductor.async_compile import AsyncCompile
from torch.profiler import ProfilerActivity
from torch.utils._pytree import tree_leaves

from analyzer import profile
from benchmarks.accuracy.compiled_saved import Make, list_models
from benchmarks.page import describe_run, is_named, map_apart, markdown, parse_parts, percent, publish

KIB = 2**10


class Peak(NamedTuple):
    """Bytes of a forward and a backward pass: of weights, buffers and inputs, and what comes on top at the peak."""

    name: str
    given: int
    measured: int
    predicted: int

    @property
    def error(self) -> float:
        return (self.given + self.predicted) / (self.given + self.measured) - 1


@contextmanager
def kernels_left_out() -> Iterator[None]:
    """A block in which the kernels that Inductor generates for the host do nothing."""
    def compile_nothing(self: Any, *args: Any, **kwargs: Any) -> Any:
        return lambda *args, **kwargs: None

    with (mock.patch.object(AsyncCompile, "cpp_pybinding", compile_nothing),
          torch._inductor.config.patch(fx_graph_cache=False)):
        yield


def scalar(result: Any) -> torch.Tensor:
    return sum((t.float().sum() for t in tree_leaves(result) if t.is_floating_point()), torch.zeros(()))


def measure(make: Make, make_args: Make) -> tuple[int, int]:
    """Bytes that are there before the step, and those that it adds at its peak."""
    model, args = make(), make_args()
    given = sum(t.untyped_storage().nbytes() for t in
                {t.untyped_storage()._cdata: t for t in (*model.parameters(), *model.buffers(), *args)}.values())
    torch._dynamo.reset()
    compiled: Any = torch.compile(Loss(model))

    def step() -> None:
        compiled(*args).backward()

    with kernels_left_out():
        step()
        model.zero_grad(set_to_none=True)
        gc.collect()
        with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as traced:
            step()
    profiler: Any = traced.profiler
    live = most = 0
    for nbytes in storage_bytes(profiler.kineto_results.experimental_event_tree()):
        live += nbytes
        most = max(most, live)
    return given, most


def storage_bytes(roots: Sequence[Any]) -> list[int]:
    """What the allocator gave, and took back as less than nothing, in order, without what one operator had for itself.
    """
    found: list[tuple[int, int]] = []  # when, and bytes
    held: dict[int, tuple[int, int, int | None]] = {}  # of each address: when it was given, bytes, and the operator
    for event, operator in sorted(list_allocations(roots), key=lambda one: one[0].start_time_ns):
        fields = event.extra_fields
        if fields.alloc_size > 0:
            held[fields.ptr] = event.start_time_ns, fields.alloc_size, operator
        elif fields.ptr in held:
            given, nbytes, owner = held.pop(fields.ptr)
            if owner is None or owner != operator:
                found += [(given, nbytes), (event.start_time_ns, -nbytes)]
    return [nbytes for _, nbytes in sorted((*found, *[one[:2] for one in held.values()]))]


def list_allocations(events: Sequence[Any], operator: int | None = None) -> Iterator[tuple[Any, int | None]]:
    """The allocator's events below ``events``, each with the number of the outermost operator that runs then."""
    for event in events:
        if event.tag == _EventType.Allocation:
            yield event, operator
        is_operator = event.tag == _EventType.TorchOp and event.name.startswith("aten::")
        yield from list_allocations(event.children, event.id if operator is None and is_operator else operator)


class Loss(nn.Module):
    """The sum of what a model gives."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any) -> torch.Tensor:
        return scalar(self.model(*args))


def predict(make: Make, make_args: Make) -> int:
    """The peak that a profile for the host tells."""
    args = make_args()
    p = profile(torch.compile(Loss(make())), args, device="cpu", optimizer=None, loss_fn=lambda loss: loss)
    return max(phase.peak_allocated_bytes or 0 for phase in p.phases.values())


def judge(name: str) -> Peak:
    torch.set_num_threads(1)
    make, make_args = list_models()[name]
    torch.manual_seed(0)
    given, measured = measure(make, make_args)
    return Peak(name, given, measured, predict(make, make_args) - given)


def section(peaks: list[Peak], seconds: float) -> str:
    rows = [[peak.name, f"{peak.given / KIB:,.0f}", f"{peak.measured / KIB:,.1f}", f"{peak.predicted / KIB:,.1f}",
             percent(peak.error, 2, signed=True)] for peak in peaks]
    within = sum(abs(peak.error) <= 0.02 for peak in peaks)
    return (f"{describe_run(seconds)}.\n\n"
            + markdown(["model", "weights and inputs, KiB", "on top at the peak, measured", "predicted",
                        "error of the whole"], rows, cases="accuracy/compiled_peaks")
            + f"\n\n{within} of {len(peaks)} within 2 %.")


def main() -> int:
    options = parse_parts(__doc__)
    began = time.perf_counter()
    names = [name for name in list_models() if is_named(name, options.parts)]
    peaks = map_apart(judge, names, options.processes, tasks=1)
    publish("accuracy.md", {"accuracy.compiled_peaks": section(peaks, time.perf_counter() - began)}, not options.parts)
    return 0 if all(abs(peak.error) <= 0.02 for peak in peaks) else 1


if __name__ == "__main__":
    sys.exit(main())
