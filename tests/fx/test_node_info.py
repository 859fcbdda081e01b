"""The schema that solvers read is the one that is written down."""
import dataclasses
import re
from pathlib import Path

import torch

from analyzer import symbolic_profile, symbolic_trace
from analyzer.api.result import Profile
from analyzer.fx import set_region, set_saved
from analyzer.results.node_info import NodeInfo

TEXT = (Path(__file__).parents[2] / "docs" / "node_info.md").read_text()


def test_every_field_is_described_in_order_under_the_present_version() -> None:
    described = re.findall(r"^\| `(\w+)` \| (.+) \|$", TEXT, re.MULTILINE)
    assert [name for name, meaning in described if meaning] == [f.name for f in dataclasses.fields(NodeInfo)]
    assert f"`NodeInfo.schema_version` is **{NodeInfo.schema_version}**" in TEXT


def test_choices_and_recomputation_are_in_it() -> None:
    x = torch.empty(64, 64, device="meta", requires_grad=True)
    gm = symbolic_trace(lambda x: (x @ x).sin().exp().sum(), meta_args={"x": x})
    set_region(gm, ["matmul", "sin", "exp"])
    set_saved(gm, ["sin"], "keep")
    exp = next(n for n in gm.graph.nodes if n.name == "exp")
    exp.meta["sharding"] = ("Shard(0)",)
    profile: Profile = symbolic_profile(gm, x, device="h100").meta["profile"]
    info = {n.name: n.meta["info"] for n in gm.graph.nodes}
    assert info["sin"].saved == "keep" and info["exp"].saved is None and info["exp"].sharding == ("Shard(0)",)
    assert info["matmul"].recompute_seconds == info["matmul"].fwd_seconds < info["matmul"].bwd_seconds
    assert info["sin"].recompute_seconds == 0 and info["sin"].fwd_seconds > 0
    graph = Profile.from_json(profile.to_json()).to_networkx()
    assert graph.graph["schema_version"] == 4 and graph.nodes["sin"]["saved"] == "keep" and graph.nodes["exp"][
        "sharding"] == ("Shard(0)", )
    assert graph.nodes["sin"]["region"][0]["kind"] == "checkpoint"
