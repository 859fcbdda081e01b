"""Passes that change few nodes: dead code, checkpoints around modules, shapes of all values."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx
from torch.fx.passes.shape_prop import _extract_tensor_metadata

from analyzer.errors import AnalyzerError, InputError
from analyzer.fx.graph.alias import is_pure
from analyzer.fx.graph.interpreter import GraphInterpreter
from analyzer.fx.graph.region_edit import set_region
from analyzer.fx.graph.statement import CheckpointRegion
from analyzer.fx.module_borrow import borrow_module
from analyzer.fx.surroundings import keep_surroundings
from analyzer.meta.argument import fake_arguments
from analyzer.meta.mode import MetaTensorMode
from analyzer.meta.spec import to_specs
from analyzer.meta.structure import tensors_of
from analyzer.meta.tensor import MetaTensor

# Checkpoints around modules.

def checkpoint_modules(*paths: str, **options: object) -> Callable[[fx.GraphModule], None]:
    """A pass that puts a checkpoint around each call of the modules at ``paths``; ``options`` are those of
    `CheckpointRegion`.

    The pass raises InputError for a path where no node runs, and what `set_region` raises.

    >>> import torch
    >>> from analyzer import symbolic_trace
    >>> block = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    >>> gm = symbolic_trace(torch.nn.Sequential(block), meta_args={"input": torch.ones(2, 4)})
    >>> checkpoint_modules("0")(gm)
    >>> gm.code.count("checkpoint.checkpoint(")
    1
    """
    def checkpoint(gm: fx.GraphModule) -> None:
        for path in paths:
            runs = list(_runs(gm.graph.nodes, path))
            if not runs:
                known = sorted({str(n.meta.get("module_path", "")) for n in gm.graph.nodes} - {""})
                raise InputError(f"checkpoint_modules({path!r}): no node runs in that module; nodes run in "
                                 f"{', '.join(known[:8])}, ...")
            for run in runs:
                set_region(gm, run, CheckpointRegion(0, **options), recompile=False)  # type: ignore[arg-type]
        gm.recompile()

    return checkpoint


def _runs(nodes: Iterable[fx.Node], path: str) -> Iterable[list[fx.Node]]:
    """The nodes of each call of a module, as far as other nodes lie between them."""
    run: list[fx.Node] = []
    for node in nodes:
        if f"{node.meta.get('module_path', '')}.".startswith(f"{path}."):
            run.append(node)
        elif run and node.op != "get_attr":
            yield run
            run = []


# Shapes, dtypes and devices of all values of a graph, without data and without a profile.

class ShapeProp(GraphInterpreter):
    """Runs a graph under `MetaTensorMode` and notes what every node gives, as torch.fx's pass of this name does.

    ``node.meta["tensor_meta"]`` is torch's ``TensorMetadata`` of a tensor, or a container of them, and ``"type"`` the
    class of the result; ``node.meta["spec"]`` tells the device too. Nothing need be profiled before.

    >>> import torch
    >>> from analyzer import symbolic_trace
    >>> from analyzer.fx import ShapeProp
    >>> gm = symbolic_trace(torch.nn.Sequential(torch.nn.Linear(4, 2)), meta_args={"input": torch.empty(3, 4)})
    >>> _ = ShapeProp(gm).propagate(torch.empty(3, 4))
    >>> [(n.name, n.meta["spec"]) for n in gm.graph.nodes][1]
    ('_0', float32[3, 2]@cpu)
    >>> [(n.name, n.meta["tensor_meta"].dtype) for n in gm.graph.nodes if n.meta["tensor_meta"].requires_grad]
    [('_0', torch.float32), ('output', torch.float32)]
    """

    def propagate(self, *args: Any, **kwargs: Any) -> Any:
        """Run on arguments with or without data; the result has none."""
        mode = MetaTensorMode()
        with mode, keep_surroundings(self.module, values=(args, kwargs)), borrow_module(self.module):
            claims = [t.device for t in tensors_of((args, kwargs))]
            claim = next((c for c in claims if c.type not in ("cpu", "meta")), torch.device("cpu"))
            run_args, run_kwargs = fake_arguments(mode.state, (args, kwargs), claim)
            return self.run(*run_args, **run_kwargs)

    def run_node(self, n: fx.Node) -> Any:
        """Run one node, and note what it gave."""
        try:
            result = super().run_node(n)
        except AnalyzerError:
            raise
        except Exception as error:
            raise InputError(f"node {n.name} ({n.op} {n.target}) of module {n.meta.get('module_path', '')!r} at "
                             f"{n.meta.get('source')}: {type(error).__name__}: {error}") from error
        n.meta["spec"] = to_specs(result)
        tensors: list[torch.Tensor] = []

        def describe(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            tensors.append(value)
            return _extract_tensor_metadata(value)

        described = fx.node.map_aggregate(result, describe)
        if tensors:
            n.meta["tensor_meta"] = described
        n.meta["type"] = torch.Tensor if type(result) is MetaTensor else type(result)
        return result


# Takes away what nothing reads.

def eliminate_dead_code(gm: fx.GraphModule) -> None:
    """Erase nodes whose results are not read and that do nothing else; regions and annotations of the others stay.

    It leaves what writes in place, registers hooks, draws random numbers (those drawn later would change), updates
    buffers or communicates, and functions and modules that are not PyTorch's own, of which nothing is known.

    >>> import torch
    >>> from analyzer import symbolic_trace
    >>> def f(x):
    ...     x.sin().exp()
    ...     y = x.cos()
    ...     y.add_(1)
    ...     return y
    >>> gm = symbolic_trace(f, meta_args={"x": torch.empty(2)})
    >>> eliminate_dead_code(gm)
    >>> [n.name for n in gm.graph.nodes]
    ['x', 'cos', 'add_', 'output']
    """
    gm.graph.eliminate_dead_code(lambda node: not is_pure(node))
    gm.recompile()
