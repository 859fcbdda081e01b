"""A plugin of pytest: the names of another package lead to this one, so that its own tests ask this one.

    PEER=torchinfo python -m pytest -p benchmarks.coverage.peer_names ...   # as coverage/peer_tests.py does
"""
from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import analyzer
import analyzer.fx
from analyzer.zoo.torchvision_ops import define_torchvision_ops


def _put(name: str, **names: Any) -> ModuleType:
    """Make a module of that name, and the packages that it is in."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        path = ".".join(parts[:depth])
        if path not in sys.modules:
            sys.modules[path] = ModuleType(path)
            sys.modules[path].__path__ = []
        if depth > 1:
            setattr(sys.modules[".".join(parts[:depth - 1])], parts[depth - 1], sys.modules[path])
    vars(sys.modules[name]).update(names)
    return sys.modules[name]


def _put_torchinfo() -> None:
    from analyzer.dropins import torchinfo
    from analyzer.report.compat.torchinfo_format import TITLES

    names = {name: getattr(torchinfo, name) for name in torchinfo.__all__}
    for part in ("", ".enums", ".formatting", ".layer_info", ".model_statistics", ".torchinfo"):
        _put(f"torchinfo{part}", **names, HEADER_TITLES=TITLES)
    if importlib.util.find_spec("compressai") is None:
        _put("compressai.zoo", image_models={})  # which one test takes a model of


def _put_fvcore() -> None:
    import fvcore.nn.jit_handles  # which stay theirs, as do private functions of tables
    import fvcore.nn.print_model_statistics as tables

    from analyzer.dropins import fvcore as ours
    from analyzer.dropins.fvcore_handle import FLOP_HANDLES

    for part in ("jit_analysis", "flop_count", "activation_count", "parameter_count"):
        vars(importlib.import_module(f"fvcore.nn.{part}")).update(
            {name: getattr(ours, name) for name in ours.__all__}, _DEFAULT_SUPPORTED_OPS=FLOP_HANDLES)
    for name in ours.__all__:
        setattr(fvcore.nn, name, getattr(ours, name))
        if hasattr(tables, name):
            setattr(tables, name, getattr(ours, name))


def _put_deepspeed() -> None:
    from analyzer.dropins import deepspeed as ours

    _put("deepspeed.profiling.flops_profiler", **{name: getattr(ours, name) for name in ours.__all__})
    _put("deepspeed.utils.torch", required_torch_version=lambda **_: True)
    _put("deepspeed.accelerator", get_accelerator=lambda: SimpleNamespace(supported_dtypes=lambda: [torch.half]))
    _put("unit.common", DistributedTest=object)
    _put("unit.simple_model", SimpleModel=torch.nn.Linear, random_dataloader=None)


def _count_flops(function: Callable[..., Any], *args: Any, verbose: bool = False, **kwargs: Any) -> tuple[Any, Any]:
    """What Colossal-AI's ``flop_count`` gives: FLOPs of the forward and the backward pass."""
    class Call(torch.nn.Module):
        def forward(self, *args: Any) -> Any:
            return function(*(a.clone() if kwargs.get("inplace") else a for a in args), **kwargs)  # it may write a leaf

    is_module = isinstance(function, torch.nn.Module)
    found = analyzer.profile(function if is_module else Call(), args, mode="train")
    return found.fwd_flops, found.bwd_flops


class _Record:
    """A record of a node with attributes more."""

    def __init__(self, info: Any, **more: Any) -> None:
        self._info = info
        vars(self).update(more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._info, name)


def _put_colossalai() -> None:
    def profile(graph: Any, *args: Any, **options: Any) -> Any:
        """With what all nodes save together on each, which here is told by node."""
        analyzer.symbolic_profile(graph, *args, **options)
        infos = [node.meta["info"] for node in graph.graph.nodes]
        saved = {tensor.storage: tensor for info in infos for tensor in info.saved_tensors}
        for node, info in zip(graph.graph.nodes, infos):
            node.meta["info"] = _Record(info, global_ctx=saved)
        return graph

    def trace(*args: Any, **options: Any) -> Any:
        graph = analyzer.symbolic_trace(*args, **options)
        for node in graph.graph.nodes:
            info = node.meta.get("info") or SimpleNamespace()
            path = node.meta.get("module_path", getattr(info, "module_path", ""))
            node.meta["info"] = _Record(info, mod_dir=f"self.{path}" if path else "self")
        return graph

    def propagate(graph: Any, *args: Any) -> Any:
        """With the results on records as there: a tuple, of None where a call has no result."""
        analyzer.fx.ShapeProp(graph).propagate(*args)
        for node in graph.graph.nodes:
            spec = node.meta["spec"]
            node.meta["info"] = _Record(None, inputs=node.all_input_nodes,
                                        outputs=spec if isinstance(spec, tuple) else (spec,))
        return graph

    _put("colossalai._analyzer._subclasses", MetaTensor=analyzer.MetaTensor, MetaTensorMode=analyzer.MetaTensorMode,
         flop_count=_count_flops)
    _put("colossalai._analyzer.fx.passes.shape_prop", shape_prop_pass=propagate)
    _put("colossalai._analyzer.fx.symbolic_profile", register_shape_impl=analyzer.register_shape_impl)
    _put("colossalai._analyzer.fx", symbolic_trace=trace, symbolic_profile=profile)
    testing = {"parameterize": pytest.mark.parametrize, "clear_cache_before_run": lambda: lambda function: function}
    _put("colossalai.testing", **testing)
    _put("colossalai.testing.utils", **testing)
    _put("colossalai.accelerator", get_accelerator=lambda: SimpleNamespace(empty_cache=lambda: None))


torch.set_num_threads(1)
define_torchvision_ops()
globals()[f"_put_{os.environ['PEER']}"]()
