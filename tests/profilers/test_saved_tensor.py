"""What nodes keep for backward: held to hand-derived lists, and to the bytes in the same records."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from analyzer import Profile, ProfileOptions, profile, symbolic_profile, symbolic_trace


def saved(p: Profile) -> dict[str, list[tuple[str, str, str, bool]]]:
    return {n.name: [(t.storage, t.kind, str(t), t.is_read) for t in n.saved_tensors or ()] for n in p.nodes
            if n.saved_tensors}


def assert_adds_up(p: Profile) -> None:
    storages: dict[str, int] = {}
    for node in p.nodes:
        assert node.saved_tensors is not None and node.kept_tensors is not None
        assert sum(t.storage_bytes for t in node.kept_tensors) == node.incremental_bytes, node.name
        assert len({t.storage for t in node.saved_tensors}) == len(node.saved_tensors), node.name
        for t in node.saved_tensors:
            if t.kind in ("activation", "input"):
                assert storages.setdefault(t.storage, t.storage_bytes) == t.storage_bytes
    assert sum(storages.values()) == p.nodes[-1].accumulate_bytes
    assert p.modules is not None
    assert p.modules.saved_bytes == sum(t.storage_bytes for n in p.nodes for t in n.kept_tensors or ()
                                        if t.kind == "activation")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(288, 10)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.drop(self.relu(self.norm(self.conv(x))).flatten(1)))


def test_by_hand() -> None:
    x = torch.empty(2, 3, 8, 8)
    gm = symbolic_profile(symbolic_trace(Net(), meta_args={"x": x}), x)
    p = gm.meta["profile"]
    assert saved(p) == {
        "x": [("x:0", "input", "float32[2, 3, 8, 8]", False)],
        "conv": [("conv:0", "activation", "float32[2, 8, 6, 6]", False),
                 ("x:0", "input", "float32[2, 3, 8, 8]", True),
                 ("conv.weight", "parameter", "float32[8, 3, 3, 3]", True)],
        "norm": [("norm:0", "activation", "float32[2, 8, 6, 6]", False),
                 ("norm:1", "activation", "float32[8]", True), ("norm:2", "activation", "float32[8]", True),
                 ("conv:0", "activation", "float32[2, 8, 6, 6]", True),
                 ("norm.weight", "parameter", "float32[8]", True),
                 ("norm.running_mean", "buffer", "float32[8]", True),
                 ("norm.running_var", "buffer", "float32[8]", True)],
        "relu": [("norm:0", "activation", "float32[2, 8, 6, 6]", True)],  # in place
        "drop": [("drop:0", "activation", "float32[2, 288]", True), ("drop:1", "activation", "float32[2, 288]", False)],
        "head": [("head.weight", "parameter", "float32[288, 10]", True),
                 ("drop:1", "activation", "float32[2, 288]", True)]}
    assert_adds_up(p)
    assert next(n for n in gm.graph.nodes if n.name == "relu").meta["info"].saved_tensors[0].made_by == "norm"
    again = Profile.from_json(p.to_json())
    assert [n.saved_tensors for n in again.nodes] == [n.saved_tensors for n in p.nodes]


def test_a_checkpoint_reads_what_it_is_given() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inside = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.inside, self.first(x), use_reentrant=False)

    x = torch.empty(3, 4)
    gm = symbolic_profile(symbolic_trace(Model(), meta_args={"x": x}, trace_act_ckpt=True), x)
    for p in (gm.meta["profile"], profile(Model(), args=(x,))):
        assert_adds_up(p)
        assert ("first:0", "activation", "float32[3, 4]", True) in saved(p)["inside_0"], "run again with it"
        assert [n.kept_tensors for n in p.nodes if n.module_path.startswith("inside")] == [(), ()], "recomputed"


def test_unknown_after_memory_ran_out() -> None:
    p = profile(lambda: nn.Sequential(*[nn.Linear(1 << 14, 1 << 14) for _ in range(3)]), device="t4",
                args=(torch.empty(1 << 17, 1 << 14, device="meta"),), options=ProfileOptions(limit_to_device=True))
    assert p.out_of_memory is not None and {n.saved_tensors for n in p.nodes} == {None}
