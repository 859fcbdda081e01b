"""What a newcomer adds, each once, from outside: a script of its own that imports the package."""
from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import dataclasses
import torch
from analyzer import profile, register_flop_impl, register_memory_impl, register_shape_impl
from analyzer.cuda.workspaces.kernel_temporary import is_contiguous
from analyzer.hardware import find_device, register_device
from analyzer.meta import MemoryNeed, Stage
from analyzer.profilers.annotation import Annotation
aten = torch.ops.aten
library = torch.library.Library("outside", "DEF")
library.define("swirl(Tensor x) -> Tensor")
library.define("fused(Tensor x) -> (Tensor, Tensor)")
swirl, fused = torch.ops.outside.swirl, torch.ops.outside.fused


class Calls(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


# a formula
register_shape_impl(swirl, lambda x: x.new_empty(x.shape))
x = torch.empty(8, 4)
before = profile(Calls(swirl), args=(x,), mode="infer")
register_flop_impl(swirl, lambda x, out: 3 * x.numel)
after = profile(Calls(swirl), args=(x,), mode="infer")
print([row.operator for row in before.uncounted], before.fwd_flops, list(after.uncounted), after.fwd_flops)


# the memory of a fused kernel: copies before the outputs, blocks that stay, outputs allocated in another order
def peak():
    return profile(Calls(fused), args=(torch.empty(1 << 20),), mode="infer").peak_allocated_bytes


register_shape_impl(fused, lambda x: (x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.bool)))
plain = peak()
register_memory_impl(fused, lambda x, out: MemoryNeed(
    stages=(Stage((x.nbytes, x.nbytes), before=0, kept=True), Stage((512,), before=1), Stage((1024, 1024))),
    output_order=(1, 0)))
print(peak() - plain)


# layer norm on CUDA and its dropout, whose mask comes first: the same bytes from the public registry
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc = torch.nn.LayerNorm(300), torch.nn.Linear(300, 300)

    def forward(self, x):
        for _ in range(3):
            x = torch.nn.functional.dropout(self.fc(self.norm(x.transpose(0, 1)).relu()), 0.1, self.training)
        return x


def costs():
    found = profile(Model(), args=(torch.empty(300, 200, 300),), device="h200", optimizer="adam", reuse=False)
    return found.peak_allocated_bytes, found.peak_reserved_bytes, found.timeline


def copies(*tensors):
    return tuple(t.nbytes for t in tensors if not is_contiguous(t))


own = costs()
with register_memory_impl.scope():
    for op in (aten.native_layer_norm, aten.native_dropout):
        register_memory_impl(op, lambda *args, out, **kwargs: MemoryNeed())
    without = costs()
with register_memory_impl.scope():
    register_memory_impl(aten.native_dropout, lambda *args, out: MemoryNeed(output_order=(1, 0)))
    register_memory_impl(aten.native_layer_norm, lambda x, *args, out: MemoryNeed(
        stages=(Stage(copies(x), before=0, kept=True),) if copies(x) else ()))
    print(costs() == own, without == own)

# a device
register_device(dataclasses.replace(find_device("h200"), name="h200_half", aliases=(),
                                    memory_bytes=find_device("h200").memory_bytes // 2))
found = profile(torch.nn.Linear(8, 8), args=(torch.empty(2, 8),), device="h200_half")
print(found.device, bool(found.fits("h200_half")))


# a profiler
def count_calls(log):
    out = Annotation()
    for call in log.calls:
        if call.node >= 0:
            out.add(out.nodes, call.node, "calls", 1)
    return out


found = profile(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()), args=(torch.empty(2, 8),), mode="infer",
                profilers=[count_calls])
print([node.extra["calls"] for node in found.nodes if node.op == "call_module"])
"""


def test_formula_memory_device_and_profiler_of_ones_own():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["['outside.swirl.default'] 0 [] 96", str(2 * (4 << 20) + 2048), "True False",
                                        "h200_half True", "[2, 1]"]
