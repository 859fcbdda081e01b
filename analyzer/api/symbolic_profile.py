"""`symbolic_profile`: annotates the nodes of a traced graph with what they cost."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import fx

from analyzer.errors import InputError
from analyzer.fx.graph.interpreter import GraphStep, RunRecord, fingerprint_nodes
from analyzer.fx.module_borrow import exported_module
from analyzer.fx.surroundings import leaves_no_tensor
from analyzer.hardware import DeviceSpec, find_device
from analyzer.record.options import ProfileOptions
from analyzer.results.node_info import NodeInfo
from analyzer.results.profile import Profile

from .argument import as_keywords, expect_values
from .session import Profilers, Session, find_place


@dataclass
class LastRun:
    """How a graph module was profiled last, and what the run said of its values."""

    session: Session
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    loss_fn: Callable[[Any], torch.Tensor] | None
    repeat: Callable[[fx.GraphModule], fx.GraphModule]
    record: RunRecord


last_runs: WeakKeyDictionary[fx.GraphModule, LastRun] = WeakKeyDictionary()


@leaves_no_tensor
def symbolic_profile(gm: fx.GraphModule, *args: Any, kwargs: dict[str, Any] | None = None,
                     mode: Literal["train", "infer"] = "train",
                     loss_fn: Callable[[Any], torch.Tensor] | None = None, autocast: torch.dtype | None = None,
                     device: str | DeviceSpec | None = None, profilers: Profilers = None,
                     verbose: bool = False) -> fx.GraphModule:
    """Fill ``node.meta["info"]`` of every node of ``gm`` with a `NodeInfo`, and return the same ``gm``.

    ``gm`` comes from `symbolic_trace`, or is such a graph after a transformation. It is run node by node on ``args``
    (real, meta or `MetaTensor`; their data is not used), forward and, for ``mode="train"``, through the loss and
    backward. ``device`` is what tensors are taken to be on; by default that of the arguments and parameters, and then
    seconds are unknown. ``profilers`` adds to the default ones, or replaces them by name (``flops memory communication
    latency``). ``verbose`` prints the node table. The whole `Profile` is kept in ``gm.meta["profile"]``. Raises
    InputError for arguments that do not fit the graph, and what `profile` raises.

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
    spec = None if device is None else find_device(device)
    session = Session(spec, ProfileOptions(steps=1), mode=mode, autocast=autocast, loss_fn=loss_fn,
                      profilers=profilers, place=find_place(gm, (args, kwargs)))
    names = [str(n.target).lstrip("*") for n in gm.graph.nodes if n.op == "placeholder"]
    infos: dict[fx.Node, NodeInfo] = {}
    records: list[RunRecord] = []

    def read_rows() -> dict[str, Any]:
        _ = found.nodes  # which fills the records of all nodes
        return {}

    def run_once(options: ProfileOptions) -> Profile:
        with session.open(gm, options, eager=False) as run:
            with run.recording() as recorder:
                run_args, run_kwargs = run.take_inputs(args, kwargs, names)
                step = GraphStep(recorder, gm, run_args, run_kwargs, mode=mode, loss_fn=loss_fn, autocast=autocast,
                                 device_type=session.device.type)
                rows = step.run()
            step.interpreter.record.log = recorder.log
            records.append(step.interpreter.record)
            infos.clear()
            infos.update((node, _blank(node, read_rows)) for node in rows)
            return run.build(is_final=True, blanks={row: infos[node] for node, row in rows.items()})

    found = expect_values(run_once, session.options)
    for node, info in infos.items():
        node.meta["info"] = info
    gm.meta["profile"] = found
    records[-1].fingerprints = fingerprint_nodes(gm.graph)
    settings: dict[str, Any] = {"kwargs": kwargs, "mode": mode, "loss_fn": loss_fn, "autocast": autocast,
                                "device": device, "profilers": profilers}
    last_runs[gm] = LastRun(session, (args, kwargs), loss_fn,
                            lambda gm: symbolic_profile(gm, *args, **settings), records[-1])
    if verbose:
        print(found.table())
    return gm


def _blank(node: fx.Node, read_rows: Callable[[], dict[str, Any]]) -> NodeInfo:
    """The record of a node, with what its annotations say."""
    known = {"saved": node.meta.get("saved"), "sharding": node.meta.get("sharding")}
    if "module_path" in node.meta:
        known["module_path"] = node.meta["module_path"]
    return NodeInfo.blank(read_rows, **known)
