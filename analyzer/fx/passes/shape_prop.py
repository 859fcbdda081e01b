"""Shapes, dtypes and devices of all values of a graph, without data and without a profile."""
from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.passes.shape_prop import _extract_tensor_metadata

from analyzer.errors import AnalyzerError, InputError
from analyzer.fx.graph.interpreter import GraphInterpreter
from analyzer.fx.module_borrow import borrow_module
from analyzer.fx.surroundings import keep_surroundings
from analyzer.meta.argument import fake_arguments
from analyzer.meta.mode import MetaTensorMode
from analyzer.meta.spec import to_specs
from analyzer.meta.structure import tensors_of
from analyzer.meta.tensor import MetaTensor


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
