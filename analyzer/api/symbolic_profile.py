"""`symbolic_profile`: annotates the nodes of a traced graph with what they cost."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import fx

from analyzer.api.result import Profile
from analyzer.errors import InputError
from analyzer.fx.graph.interpreter import run_step
from analyzer.fx.module_wrapper import count_devices, exported_module, find_place
from analyzer.fx.surroundings import leaves_no_tensor
from analyzer.hardware import DeviceSpec, find_device
from analyzer.meta.argument import check_tensors
from analyzer.record.options import ProfileOptions
from analyzer.results.node_info import NodeInfo

from .argument import as_keywords, expect_values
from .build_profile import build_profile
from .run import open_run
from .session import Profilers, Session


@dataclass
class LastRun:
    """How a graph module was profiled last."""

    session: Session
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    loss_fn: Callable[[Any], torch.Tensor] | None
    repeat: Callable[[fx.GraphModule], fx.GraphModule]


last_runs: WeakKeyDictionary[fx.GraphModule, LastRun] = WeakKeyDictionary()


@leaves_no_tensor
def symbolic_profile(gm: fx.GraphModule, *args: Any, kwargs: dict[str, Any] | None = None,
                     mode: Literal["train", "infer"] = "train", loss_fn: Callable[[Any], torch.Tensor] | None = None,
                     autocast: torch.dtype | None = None, device: str | DeviceSpec | None = None,
                     profilers: Profilers = None, verbose: bool = False) -> fx.GraphModule:
    """Fill ``node.meta["info"]`` of every node of ``gm`` with a `NodeInfo`, and return the same ``gm``. ``gm`` comes
    from `symbolic_trace`, or is such a graph after a transformation. It is run node by node on ``args`` (real, meta or
    `MetaTensor`; their data is not used), forward and, for ``mode="train"``, through the loss and backward. ``device``
    is what tensors are assumed to be on; by default that of the arguments and parameters, and then seconds are unknown.
    ``profilers`` adds to the default ones, or replaces them by name (``flops memory communication latency``).
    ``verbose`` prints the node table; ``gm.meta["profile"]`` is the whole `Profile`. Raises InputError for arguments
    that do not fit the graph, and what `profile` raises.

    >>> import torch
    >>> from analyzer import symbolic_trace, symbolic_profile
    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU())
    >>> gm = symbolic_profile(symbolic_trace(model, meta_args={"input": torch.empty(8, 16)}), torch.empty(8, 16))
    >>> [(n.name, n.meta["info"].fwd_macs, n.meta["info"].incremental_bytes) for n in gm.graph.nodes]
    [('input_1', 0, 512), ('_0', 8192, 0), ('_1', 0, 2048), ('output', 0, 0)]
    """
    gm = exported_module(gm)
    if not isinstance(gm, fx.GraphModule):
        raise InputError(
            f"symbolic_profile({type(gm).__name__}): takes a GraphModule; trace the model first with symbolic_trace")
    kwargs = as_keywords(kwargs)
    check_tensors((args, kwargs))
    spec = None if device is None else find_device(device)
    options = ProfileOptions(steps=1, devices=count_devices(gm, (args, kwargs)))
    session = Session(spec, options, mode=mode, autocast=autocast, loss_fn=loss_fn,
                      profilers=profilers, place=find_place(gm, (args, kwargs)))
    names = [str(n.target).lstrip("*") for n in gm.graph.nodes if n.op == "placeholder"]
    infos: dict[fx.Node, NodeInfo] = {}

    def read_rows() -> dict[str, Any]:
        _ = found.nodes  # which fills the records of all nodes
        return {}

    def run_once(options: ProfileOptions) -> Profile:
        with open_run(session, gm, options, eager=False, given=(args, kwargs)) as run:
            with run.recording() as recorder:
                run_args, run_kwargs = run.take_inputs(args, kwargs, names)
                rows = run_step(recorder, gm, run_args, run_kwargs, mode=mode, loss_fn=loss_fn, autocast=autocast,
                                device_type=session.device.type)
            infos.clear()
            infos.update((node, _blank(node, read_rows)) for node in rows)
            return build_profile(run, is_final=True, blanks={row: infos[node] for node, row in rows.items()})

    found = expect_values(run_once, session.options)
    for node, info in infos.items():
        node.meta["info"] = info
    gm.meta["profile"] = found
    settings: dict[str, Any] = {"kwargs": kwargs, "mode": mode, "loss_fn": loss_fn, "autocast": autocast,
                                "device": device, "profilers": profilers}
    last_runs[gm] = LastRun(session, (args, kwargs), loss_fn, lambda gm: symbolic_profile(gm, *args, **settings))
    if verbose:
        print(found.table())
    return gm


def _blank(node: fx.Node, read_rows: Callable[[], dict[str, Any]]) -> NodeInfo:
    known = {"saved": node.meta.get("saved"), "sharding": node.meta.get("sharding")}
    if "module_path" in node.meta:
        known["module_path"] = node.meta["module_path"]
    return NodeInfo.blank(read_rows, **known)


def reprofile(gm: fx.GraphModule) -> fx.GraphModule:
    """Bring ``node.meta["info"]`` and ``gm.meta["profile"]`` up to date after an edit of the graph or its annotations:
    `symbolic_profile` with the arguments of last time. Raises InputError where ``gm`` (this object, not what it was
    copied from) has not been profiled, and what `symbolic_profile` raises.
    """
    last = last_runs.get(gm)
    if last is None:
        raise InputError("reprofile(): this graph module has not been profiled; call symbolic_profile(gm, ...) first "
                         "(a copy needs it too)")
    return last.repeat(gm)


def run_passes(gm: fx.GraphModule, *passes: Callable[[fx.GraphModule], object]) -> fx.GraphModule:
    """Run ``passes`` over the graph of ``gm`` in place, and `reprofile` after each, if it has been profiled."""
    for edit in passes:
        edit(gm)
        gm.graph.lint()
        gm.recompile()
        if gm in last_runs:
            reprofile(gm)
    return gm
