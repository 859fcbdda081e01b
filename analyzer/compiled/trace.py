"""The call of a compiled function under the mode, for the sake of the joint graph that is made of it."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from analyzer.meta.address_space import AddressSpace
from analyzer.meta.state import MetaState

from .joint_graph import GraphTape, place_of

Tensor = torch.Tensor


@dataclass
class JointGraph:
    """A functional graph of ``primals`` and ``tangents``, whose outputs are results, then gradients of the primals.

    ``written`` are the primals that the function writes to, in the graph by a last ``copy_``.
    """

    module: fx.GraphModule
    primals: list[Tensor]
    given: int                 #: how many primals are arguments; others are parameters, buffers, tensors of closures
    written: list[int]         #: indices of primals
    results: int               #: how many outputs belong to the forward pass
    structure: Any             #: of what the function returns
    outputs: list[Any]         #: what it returns, flattened: tensors of the trace, and constants
    places: list[int | None]   #: of each tensor in ``outputs`` its index among the results, None: a view of a primal
    differentiated: list[int]  #: results whose gradients are the tangents
    fake_mode: FakeTensorMode


@contextmanager
def _apart(state: MetaState, tape: GraphTape) -> Iterator[None]:
    """A block whose operators are in no log and whose tensors are in another memory."""
    before = state.space, state.graph
    state.space, state.graph = AddressSpace(), tape
    try:
        yield
    finally:
        state.space, state.graph = before


@contextmanager
def _unheard(state: MetaState) -> Iterator[None]:
    before, state.recorder = state.recorder, None
    try:
        yield
    finally:
        state.recorder = before


def trace_joint(state: MetaState, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
                decompositions: Mapping[Any, Callable[..., Any]]) -> JointGraph:
    """The joint graph of a call of ``function`` under the mode of ``state``.

    Where gradients are off, or no result needs one, the graph has no backward half. Tensors that the function reads and
    was not given (parameters, buffers) are primals in the order in which it meets them, behind those that it was given.
    """
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = state.recorder
    tape = GraphTape(fake_mode, decompositions, (lambda: 0) if recorder is None else recorder._running)
    with _apart(state, tape):
        originals = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        args, kwargs = tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), (args, kwargs))
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                tape.value(tensor)
        flat, structure = tree_flatten(function(*args, **kwargs))
        with torch._C.DisableTorchFunction(), _unheard(state):
            given = len(tape.primals)
            tensors = [t for t in flat if isinstance(t, Tensor)]
            forward: list[fx.Node] = []
            places: list[int | None] = []
            differentiable: list[int] = []
            for tensor in tensors:
                node, number = tape.value(tensor), place_of(tensor)[0]
                if number in tape.primal_of and tape.primal_of[number] < given:
                    places.append(None)
                    continue
                if tensor.requires_grad:
                    differentiable.append(len(forward))
                places.append(len(forward))
                forward.append(node)
            given = len(tape.primals)
            made = [t for t, place in zip(tensors, places) if place is not None]
            for i in tape.written:  # the graph writes them itself, as AOTAutograd lets it (keep_input_mutations)
                tape.write_back(i)
            wanted = [t for t in tape.primals if t.requires_grad]
            differentiated = differentiable if torch.is_grad_enabled() and wanted else []
            gradients: list[fx.Node | None] = [None] * given
            if differentiated:
                tangents = []
                for number, i in enumerate(differentiated, 1):
                    with torch._C._EnableTorchFunction():
                        tangents.append(torch.empty_like(made[i]))
                    tape.placeholder(tangents[-1], f"tangents_{number}")
                tape.in_backward = True
                found = torch.autograd.grad([made[i] for i in differentiated], wanted, tangents, allow_unused=True)
                values = iter([None if g is None else tape.value(g) for g in found])
                gradients = [next(values) if t.requires_grad else None for t in tape.primals[:given]]
    primals = [*originals, *tape.primals[len(originals):]]
    tape.graph.output((*forward, *gradients))
    module = fx.GraphModule(nn.Module(), tape.graph)
    module.graph.eliminate_dead_code()
    return JointGraph(module, primals, len(originals), tape.written, len(forward), structure, flat, places,
                      differentiated, fake_mode)
