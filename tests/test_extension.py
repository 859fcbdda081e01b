"""What a newcomer adds, each once, from outside: a script of its own that imports the package."""
from __future__ import annotations

import subprocess
import sys
import textwrap

PRELUDE = """
import torch
from analyzer import profile, register_flop_impl, register_memory_impl, register_shape_impl
from analyzer.meta import MemoryNeed, Stage
aten = torch.ops.aten
"""


def run(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", PRELUDE + textwrap.dedent(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_formula():
    assert run("""
        library = torch.library.Library("outside", "DEF")
        library.define("swirl(Tensor x) -> Tensor")
        swirl = torch.ops.outside.swirl
        register_shape_impl(swirl, lambda x: x.new_empty(x.shape))

        class Model(torch.nn.Module):
            def forward(self, x):
                return swirl(x)

        x = torch.empty(8, 4)
        before = profile(Model(), args=(x,), mode="infer")
        register_flop_impl(swirl, lambda x, out: 3 * x.numel)
        after = profile(Model(), args=(x,), mode="infer")
        print([row.operator for row in before.uncounted], before.fwd_flops, list(after.uncounted), after.fwd_flops)
    """) == "['outside.swirl.default'] 0 [] 96\n"


def test_the_memory_of_a_fused_kernel():
    """Copies made before the outputs, blocks that stay to the end, and outputs allocated in another order."""
    assert run("""
        library = torch.library.Library("outside", "DEF")
        library.define("fused(Tensor x) -> (Tensor, Tensor)")
        fused = torch.ops.outside.fused
        register_shape_impl(fused, lambda x: (x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.bool)))

        class Model(torch.nn.Module):
            def forward(self, x):
                return fused(x)

        def peak():
            return profile(Model(), args=(torch.empty(1 << 20),), mode="infer").peak_allocated_bytes

        plain = peak()
        register_memory_impl(fused, lambda x, out: MemoryNeed(
            stages=(Stage((x.nbytes, x.nbytes), before=0, kept=True), Stage((512,), before=1), Stage((1024, 1024))),
            output_order=(1, 0)))
        print(peak() - plain)
    """) == f"{2 * (4 << 20) + 2048}\n"


def test_a_rule_of_the_package_can_be_written_with_what_is_public():
    """Layer norm on CUDA and its dropout, whose mask comes first: the same bytes from the public registry."""
    assert run("""
        from analyzer.cuda.workspaces.kernel_temporary import is_contiguous

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
            public = costs()
        print(public == own, without == own)
    """) == "True False\n"


def test_a_device():
    assert run("""
        from analyzer.hardware import DeviceSpec, find_device, register_device
        import dataclasses
        register_device(dataclasses.replace(find_device("h200"), name="h200_half", aliases=(),
                                            memory_bytes=find_device("h200").memory_bytes // 2))
        found = profile(torch.nn.Linear(8, 8), args=(torch.empty(2, 8),), device="h200_half")
        print(found.device, bool(found.fits("h200_half")))
    """) == "h200_half True\n"


def test_a_profiler():
    assert run("""
        from analyzer.profilers.annotation import Annotation

        def count_calls(log):
            out = Annotation()
            for call in log.calls:
                if call.node >= 0:
                    out.add(out.nodes, call.node, "calls", 1)
            return out

        found = profile(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()), args=(torch.empty(2, 8),),
                        mode="infer", profilers=[count_calls])
        print([node.extra["calls"] for node in found.nodes if node.op == "call_module"])
    """) == "[2, 1]\n"
