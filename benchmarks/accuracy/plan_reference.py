"""What plans are compared with: checkpointing every block, groups of √N blocks, and torch's activation_memory_budget
partitioner.
"""
from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch._functorch.config
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensorMode

from analyzer import symbolic_trace
from analyzer.fx import set_region
from analyzer.meta.mode import MetaTensorMode
from analyzer.profilers.flop_registry import count_call
from analyzer.record.eager import default_loss
from analyzer.record.memory_recorder import MemoryRecorder
from analyzer.record.module_recorder import ModuleRecorder
from analyzer.record.options import ProfileOptions
from analyzer.record.recorder import Recorder
from analyzer.tools.solver.recorded_step import measure_step, read_step
from benchmarks.page import known

SETTINGS = (0.9, 0.75, 0.6, 0.5, 0.35, 0.2, 0.1)  # of activation_memory_budget


class Way(NamedTuple):  # the peak of activations of a way of checkpointing, and FLOPs run again
    peak: int
    again: int


def measure_blocks(model: nn.Module, inputs: dict[str, Tensor], block: str, per_checkpoint: int | None) -> Way:
    """Where every block is a checkpoint, or with None every √N blocks."""
    gm = symbolic_trace(model, meta_args=inputs)
    paths = [path for path, module in model.named_modules() if type(module).__name__ == block]
    size = per_checkpoint or math.ceil(math.sqrt(len(paths)))
    nodes = [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
    for i in range(0, len(paths), size):
        inside = [j for j, n in enumerate(nodes)
                  if any(f"{n.meta['module_path']}.".startswith(f"{p}.") for p in paths[i:i + size])]
        set_region(gm, nodes[inside[0]:inside[-1] + 1], recompile=False)
    gm.recompile()
    step = measure_step(gm, (), inputs)
    return Way(step.peak_activation_bytes, known(step.recompute_flops))


def measure_partitions(build: Callable[[], nn.Module], inputs: dict[str, Tensor], flops: int) -> dict[float, Way]:
    """The partitioner's graphs by setting; ``flops`` are those of a step that runs nothing again."""
    found = {setting: measure_partition(build(), inputs, setting) for setting in SETTINGS}
    return {setting: Way(peak, max(0, whole - flops)) for setting, (peak, whole) in found.items()}


def partition(model: nn.Module, inputs: dict[str, Tensor],
              setting: float) -> dict[str, tuple[fx.GraphModule, list[Any]]]:
    """The forward and backward graphs that torch's partitioner makes for ``activation_memory_budget``, with specs of
    their inputs.
    """
    found: dict[str, tuple[fx.GraphModule, list[Any]]] = {}

    def take(name: str) -> Any:
        def compiler(gm: fx.GraphModule, examples: list[Any]) -> Any:
            found[name] = gm, [(tuple(e.shape), e.stride(), e.dtype) if isinstance(e, Tensor) else e for e in examples]
            return gm.forward
        return compiler

    def loss(parameters: Any, buffers: Any, inputs: Any) -> Tensor:
        return default_loss(torch.func.functional_call(model, {**parameters, **buffers}, (), inputs))

    with FakeTensorMode(allow_non_fake_inputs=True), torch._functorch.config.patch(activation_memory_budget=setting):
        def fake(t: Tensor) -> Tensor:
            return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu")

        parameters = {k: fake(v).requires_grad_(v.requires_grad) for k, v in model.named_parameters()}
        buffers = {k: fake(v) for k, v in model.named_buffers()}
        compiled = aot_function(
            loss, take("forward"), take("backward"), keep_inference_input_mutations=True,
            partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"))
        compiled(parameters, buffers, {k: fake(v) for k, v in inputs.items()}).backward()
    return found


class Freeing(fx.Interpreter):  # runs a graph whose inputs it alone holds, so that each is freed after its last use
    def run_on(self, values: list[Any]) -> Any:
        self.values = values[::-1]
        values.clear()
        return self.run(enable_io_processing=False)

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.values.pop()


def measure_partition(model: nn.Module, inputs: dict[str, Tensor], setting: float) -> tuple[int, int]:
    """Peak of activations and FLOPs of both graphs, run under the recorder."""
    graphs = partition(model, inputs, setting)
    (forward, forward_specs), (backward, backward_specs) = graphs["forward"], graphs["backward"]
    mode = MetaTensorMode(ProfileOptions(steps=1), adopted_device=torch.device("cpu"))

    def make(spec: Any) -> Any:
        return torch.empty_strided(spec[0], spec[1], dtype=spec[2]) if isinstance(spec, tuple) else spec

    with mode, torch.no_grad():
        recorder = Recorder(mode, ModuleRecorder(MemoryRecorder(mode.space, torch.device("cpu")), nn.Module()))
        given = [make(s) for s in forward_specs]
        with recorder.recording():
            tensors = [t for t in given if isinstance(t, Tensor)]
            recorder.memory.register_existing(tensors)
            recorder.memory.mark(tensors, "input")  # parameters, buffers and inputs alike: not activations
            recorder.start_step(0, placeholders=False)
            recorder.memory.begin("forward")
            outputs = list(Freeing(forward).run_on(list(given)))
            names = [getattr(n, "name", None) for n in next(iter(reversed(forward.graph.nodes))).args[0]]
            passed = dict(zip(names, outputs))
            outputs.clear()
            recorder.memory.begin("backward")
            placeholders = [n for n in backward.graph.nodes if n.op == "placeholder"]
            received = [passed[n.name] if n.name in passed else make(s) for n, s in zip(placeholders, backward_specs)]
            passed.clear()
            gradients = Freeing(backward).run_on(received)
            recorder.memory.mark([g for g in gradients if isinstance(g, Tensor)], "gradient")
            recorder.memory.end()
        counts = [count_call(c.signature) for c in recorder.log.calls]
        return read_step(recorder.log).peak_activation_bytes, sum(c.flops for c in counts if c is not None)
