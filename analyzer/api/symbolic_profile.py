"""`symbolic_profile`: annotates the nodes of a traced graph with what they cost."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from analyzer.cuda.current_spec import claimed_spec, claiming
from analyzer.errors import InputError
from analyzer.fx.graph.graph_step import GraphStep
from analyzer.fx.graph.run_record import RunRecord, fingerprint_nodes
from analyzer.fx.module_borrow import borrow_module
from analyzer.hardware import DeviceSpec, find_device
from analyzer.meta.argument import stand_in_arguments
from analyzer.meta.mode import MetaTensorMode
from analyzer.meta.tensor import claim_of
from analyzer.record.collector import rare_collections
from analyzer.record.options import ProfileOptions
from analyzer.record.recorder import Recorder, tensors_in
from analyzer.replay.played_twice import PlayedTwice
from analyzer.results.build import build_profile
from analyzer.results.node_info import NodeInfo
from analyzer.results.profile import Profile

from .profile import Profilers, check_arguments, choose_profilers, expect_values, register_inputs


@dataclass
class LastRun:
    """How a graph module was profiled last, and what the run said of its values."""

    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    loss_fn: Callable[[Any], torch.Tensor] | None
    repeat: Callable[[fx.GraphModule], fx.GraphModule]
    mode: str
    autocast: torch.dtype | None
    device: DeviceSpec | None
    claim: torch.device
    profilers: Profilers
    record: RunRecord


last_runs: WeakKeyDictionary[fx.GraphModule, LastRun] = WeakKeyDictionary()


def symbolic_profile(gm: fx.GraphModule, *args: Any, kwargs: dict[str, Any] | None = None, mode: str = "train",
                     loss_fn: Callable[[Any], torch.Tensor] | None = None, autocast: torch.dtype | None = None,
                     device: str | DeviceSpec | None = None, profilers: Profilers = None, verbose: bool = False,
                     reuse: bool = True) -> fx.GraphModule:
    """Fill ``node.meta["info"]`` of every node of ``gm`` with a `NodeInfo`, and return the same ``gm``.

    ``gm`` comes from `symbolic_trace`, or is such a graph after a transformation. It is run node by node on ``args``
    (real, meta or `MetaTensor`; their data is not used), forward and, for ``mode="train"``, through the loss and
    backward. ``device`` is what tensors are taken to be on; by default what the arguments and parameters claim, and
    then seconds are unknown. ``profilers`` adds to the default ones, or replaces them by name (``flops memory
    communication latency``). ``verbose`` prints the node table. With ``reuse``, stretches of the graph that repeat are
    run once; the result is the same. The whole `Profile` is kept in ``gm.meta["profile"]``.

    Raises InputError for arguments that do not fit the graph, and what `profile` raises.

    >>> import torch
    >>> from analyzer import symbolic_trace, symbolic_profile
    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU())
    >>> gm = symbolic_profile(symbolic_trace(model, meta_args={"input": torch.empty(8, 16)}), torch.empty(8, 16))
    >>> [(n.name, n.meta["info"].fwd_macs, n.meta["info"].incremental_bytes) for n in gm.graph.nodes]
    [('input_1', 0, 512), ('_0', 8192, 0), ('_1', 0, 2048), ('output', 0, 0)]
    """
    if not isinstance(gm, fx.GraphModule):
        raise InputError(
            f"symbolic_profile({type(gm).__name__}): takes a GraphModule; trace the model first with symbolic_trace")
    check_arguments(mode, autocast, ProfileOptions(steps=1))
    spec = None if device is None else find_device(device)
    claim = _claim(gm, (args, kwargs), spec)
    rows: dict[fx.Node, int] = {}
    records: list[RunRecord] = []

    infos: dict[fx.Node, NodeInfo] = {}
    plays = reuse

    def read_rows() -> dict[str, Any]:
        found.nodes  # fills the records of all nodes
        return {}

    def run(options: ProfileOptions) -> Profile:
        meta_mode = MetaTensorMode(options, adopted_claim=claim)
        with rare_collections(), meta_mode, claiming(spec or claimed_spec()), borrow_module(gm, claim) as borrowed:
            recorder = Recorder(meta_mode, gm, claim)
            with recorder.recording():
                run_args, run_kwargs = stand_in_arguments(meta_mode.state, (args, dict(kwargs or {})), claim)
                names = [str(n.target).lstrip("*") for n in gm.graph.nodes if n.op == "placeholder"]
                register_inputs(recorder, gm, borrowed, run_args, run_kwargs, names)
                step = GraphStep(recorder, gm, run_args, run_kwargs, mode=mode, loss_fn=loss_fn, autocast=autocast,
                                 device_type=claim.type, reuse=plays)
                rows.clear()
                rows.update(step.run())
            step.interpreter.record.log = recorder.log
            records.append(step.interpreter.record)
            annotations = [f(recorder.log) for f in choose_profilers(profilers, spec).values()]
            infos.clear()
            infos.update((node, _blank(node, read_rows)) for node in rows)
            return build_profile(recorder.log, gm, annotations, is_final=True, blanks={
                row: infos[node] for node, row in rows.items()
            }, name=type(gm).__name__, mode=mode, device=None if spec is None else spec.name,
                                 autocast=None if autocast is None else str(autocast).removeprefix("torch."))

    try:
        found = expect_values(run, ProfileOptions(steps=1))
    except PlayedTwice:
        plays = False
        found = expect_values(run, ProfileOptions(steps=1))
    for node, info in infos.items():
        node.meta["info"] = info
    gm.meta["profile"] = found
    records[-1].fingerprints = fingerprint_nodes(gm.graph)
    last_runs[gm] = LastRun((args, dict(kwargs or {})), loss_fn,
                            lambda gm: symbolic_profile(gm, *args, kwargs=kwargs, mode=mode, loss_fn=loss_fn, autocast=
                                                        autocast, device=device, profilers=profilers, reuse=reuse),
                            mode, autocast, spec, claim, profilers, records[-1])
    if verbose:
        print(found.table())
    return gm


def _blank(node: fx.Node, read_rows: Callable[[], dict[str, Any]]) -> NodeInfo:
    """The record of a node, with what its annotations say."""
    known = {"saved": node.meta.get("saved"), "sharding": node.meta.get("sharding")}
    if "module_path" in node.meta:
        known["module_path"] = node.meta["module_path"]
    return NodeInfo.blank(read_rows, **known)


def _claim(gm: fx.GraphModule, arguments: Any, spec: DeviceSpec | None) -> torch.device:
    """The device asked for, else the first accelerator that an argument or parameter claims, else the host."""
    if spec is not None:
        return torch.device("cpu") if spec.kind == "cpu" else torch.device(spec.kind, 0)
    for tensor in (*tensors_in(arguments), *gm.parameters(), *gm.buffers()):
        claim = claim_of(tensor)
        if claim.type not in ("cpu", "meta"):
            return claim
    return torch.device("cpu")
