"""Private torch API: the joint graph's two halves, as TorchInductor's passes and AOTAutograd's partitioner make them.

The order is that of ``torch/_inductor/compile_fx.py``: passes over the joint graph (attention patterns, random numbers
from seeds, padding), then the partition at the least cost of saved bytes. What the partitioner reads of
``torch._functorch.config``, such as ``activation_memory_budget``, is as the user set it.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._functorch import partitioners
from torch._functorch._aot_autograd.graph_compile import collect_fw_donated_buffer_idxs
from torch._guards import TracingContext, tracing
from torch._inductor import compile_fx
from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from .joint_graph import JointGraph


def partition(joint: JointGraph) -> list[fx.GraphModule]:
    """The forward half of a joint graph, and its backward one if it has one. Call it in `lowering.compiling_for`."""
    inputs = _fake_inputs(joint.module)
    with (V.set_fake_mode(joint.fake_mode), tracing(TracingContext(joint.fake_mode)), _folding_on_host(),
          mock.patch.object(partitioners, "functionalize_rng_ops", _leave_random)):
        if not joint.differentiated:
            halves = [compile_fx._recursive_joint_graph_passes(joint.module)]
        else:
            halves = [*compile_fx.partition_fn(
                joint.module, inputs, num_fwd_outputs=joint.results,
                static_lifetime_input_indices=list(range(joint.given, len(joint.primals))))]
        for graph in halves:  # what passes put in has no strides yet, and views share no storage
            compile_fx.fake_tensor_prop(graph, _fake_inputs(graph))
    if joint.differentiated:
        _mark_donated(halves[0], halves[1], joint.results)
    return halves


def _mark_donated(forward: fx.GraphModule, backward: fx.GraphModule, results: int) -> None:
    """The backward half may write to what was saved for it alone: no alias of an input, a result or a gradient
    (``collect_bw_donated_buffer_idxs`` in AOTAutograd's ``graph_compile.py``). Such inputs of it are marked.
    """
    if not torch._functorch.config.donated_buffer:
        return

    def values(nodes: Iterable[Any]) -> list[Any]:
        return [node.meta.get("val") if isinstance(node, fx.Node) else None for node in nodes]

    outputs: Any = forward.graph.output_node().args[0]
    gradients: Any = backward.graph.output_node().args[0]
    saved = backward.graph.find_nodes(op="placeholder")[:len(outputs) - results]
    unseen = collect_fw_donated_buffer_idxs(
        _fake_inputs(forward), values(outputs[:results]), [], values(outputs[results:]))
    for i in set(unseen).intersection(collect_fw_donated_buffer_idxs([], [], values(gradients), values(saved))):
        saved[i].meta["donated"] = True


def partition_plainly(joint: JointGraph, saves_all: bool) -> list[fx.GraphModule]:
    """The halves without Inductor's passes; where it ``saves_all``, nothing is recomputed."""
    if not joint.differentiated:
        return [joint.module]
    cut = partitioners.default_partition if saves_all else partitioners.min_cut_rematerialization_partition
    return [*cut(joint.module, _fake_inputs(joint.module), num_fwd_outputs=joint.results)]


def _leave_random(joint: Any, forward: Any, backward: Any, symbols: int) -> tuple[Any, Any]:
    """Random operators that run again in backward stay as they are: the generators that torch gives an accelerator's
    (``graphsafe_run_with_rng_state``) are no tensors, and the operators are the same.
    """
    return forward, backward


def _fake_inputs(graph: fx.GraphModule) -> list[Any]:
    return [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]


@contextmanager
def _folding_on_host() -> Iterator[None]:
    """A block in which constants are folded on the host: the pass computes with one element of each, on its device."""
    deduce, find = UniformValueConstantFolder._deduce_value, UniformValueConstantFolder._add_peephole_patterns
    full, host = torch.full, torch.device("cpu")

    def deduce_on_host(self: Any, node: fx.Node) -> Any:
        before = node.args, node.kwargs
        node.args, node.kwargs = tree_map_only(torch.device, lambda device: host, before)
        try:
            return deduce(self, node)
        finally:
            node.args, node.kwargs = before

    def find_on_host(self: Any) -> None:
        with mock.patch.object(torch, "full", lambda *args, **kwargs: full(*args, **{**kwargs, "device": host})):
            find(self)

    with (mock.patch.object(UniformValueConstantFolder, "_deduce_value", deduce_on_host),
          mock.patch.object(UniformValueConstantFolder, "_add_peephole_patterns", find_on_host)):
        yield


def _index(tensor: FakeTensor, key: Any) -> Any:
    """``tensor[key]`` where ``key`` is made of integers, slices, None and an ellipsis."""
    keys = list(key) if isinstance(key, tuple) else [key]
    if Ellipsis in keys:
        at = keys.index(Ellipsis)
        keys[at:at + 1] = [slice(None)] * (tensor.dim() - sum(k is not None for k in keys) + 1)
    dim = 0
    found: Any = tensor
    for one in keys:
        if isinstance(one, int):
            found = found.select(dim, one)
            continue
        if one is None:
            found = found.unsqueeze(dim)
        elif one != slice(None):
            found = torch.ops.aten.slice.Tensor(found, dim, one.start, one.stop, one.step or 1)
        dim += 1
    return found


#: (owner, name, what takes its place): Python's operators on tensors that claim a device which this build of torch
#: lacks. The bindings of ``x[...]`` and ``~x`` switch to the device of ``x`` (``OptionalDeviceGuard`` in
#: ``python_variable_indexing.cpp`` and ``python_variable_methods.cpp`` of ``torch/csrc/autograd``); operators do not.
BINDINGS = (FakeTensor, "__getitem__", _index), (FakeTensor, "__invert__", lambda tensor: torch.bitwise_not(tensor))
