"""What adds up over nodes, as docs/node_info.md promises it, and what nodes keep for backward, by hand."""
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from analyzer import NodeInfo, Profile, ProfileOptions, profile, symbolic_profile, symbolic_trace
from analyzer.api.argument import argument_names
from tests.report.test_sums import IDS, MODELS, SMALL, image, text, torchvision_model, transformers_model

SUMMED = ("flops", "macs", "read_bytes", "written_bytes", "comm_bytes", "seconds")
KERNEL = 1.019e-6  # seconds of one that fills a few elements, on an H100
SEED = {"written_bytes": 4, "seconds": KERNEL}  # the gradient of the loss itself, a one


def assert_row_holds(node: NodeInfo, by_name: dict[str, NodeInfo], is_traced: bool) -> None:
    assert node.saved_tensors is not None and node.kept_tensors is not None
    assert {*node.inputs, *node.aliases} <= set(by_name) - {node.name}
    assert sum(t.storage_bytes for t in node.kept_tensors) == node.incremental_bytes >= node.output_bytes
    assert len({t.storage for t in node.saved_tensors}) == len(node.saved_tensors)
    for t in node.saved_tensors:
        assert t.is_read or t.made_by == node.name
        if t.kind in ("activation", "input"):
            assert (by_name[t.made_by].op == "placeholder") == (t.kind == "input")
    made = node.output_bytes + node.temp_bytes
    if node.op not in ("get_attr", "output"):
        if node.aliases:
            assert not made or len(node.outputs) > 1
        elif made or is_traced:  # where a model is run, no node stands for a parameter that is shared
            assert made == sum(t.nbytes for t in node.outputs)
    assert node.bwd_seconds >= node.recompute_seconds
    assert node.fwd_flops >= 2 * node.fwd_macs and node.bwd_flops >= 2 * node.bwd_macs


def assert_nodes_add_up(p: Profile, is_traced: bool, apart: dict[str, float], unused_bytes: int = 0,
                        passes: int = 1) -> None:
    by_name = {node.name: node for node in p.nodes}
    assert len(by_name) == len(p.nodes)
    saved: dict[str, int] = {}
    accumulated, begun = 0, 1
    for node in p.nodes:
        assert_row_holds(node, by_name, is_traced)
        saved.update({t.storage: t.storage_bytes for t in node.saved_tensors if t.kind in ("activation", "input")})
        if node.accumulate_bytes != accumulated + node.incremental_bytes:
            begun += 1  # with what passes before it saved
            assert node.accumulate_bytes - node.incremental_bytes <= accumulated
        accumulated = node.accumulate_bytes
    assert begun == passes and (passes > 1 or sum(saved.values()) == accumulated)
    assert sum(node.recompute_flops for node in p.nodes) == p.recompute_flops
    for what in SUMMED:
        for way in ("fwd", "bwd"):
            sums = [math.fsum(getattr(node, f"{way}_{what}") for node in p.nodes), getattr(p.modules, f"{way}_{what}")]
            beside = apart.get(what, 0) if way == "bwd" else 0
            assert sums[0] + beside == pytest.approx(sums[1], rel=1e-9, abs=1e-12), (way, what)
    assert sum(node.param_bytes for node in p.nodes) == p.param_bytes - (0 if is_traced else unused_bytes)


def run(model: nn.Module, args: Any, kwargs: Any, mode: Any, is_traced: bool, **options: Any) -> Profile:
    if not is_traced:
        return profile(model, args, kwargs, mode=mode, device="h100", **options)
    named = {**dict(zip(argument_names(model, args, kwargs), args)), **kwargs}
    gm = symbolic_trace(model, meta_args=named)
    found: Profile = symbolic_profile(gm, kwargs=named, mode=mode, device="h100", **options).meta["profile"]
    return found


REAL = {"resnet18": (torchvision_model("resnet18"), image(32)), "mixtral": MODELS["mixtral"],
        "convnext_tiny": (torchvision_model("convnext_tiny"), image(32)),
        "bert": (transformers_model("Bert", **SMALL), text())}
REAL["t5"] = MODELS["t5, with tied embeddings"][0], ((), {"input_ids": IDS, "labels": IDS.clone()})


@pytest.mark.sweep(5)
@pytest.mark.parametrize(("mode", "is_traced"), [("train", False), ("train", True), ("infer", True)])
@pytest.mark.parametrize("name", REAL)
def test_real_models(name: str, mode: str, is_traced: bool) -> None:
    build, (args, kwargs) = REAL[name]
    with torch.device("meta"):
        model = build()
    p = run(model, args, kwargs, mode, is_traced)
    apart: dict[str, float] = dict(SEED) if mode == "train" else {}
    if name == "convnext_tiny" and mode == "train":  # gradients of the convolutions between stages, in their layout
        copied = 4 * sum(p.numel() for path, p in model.named_parameters() if p.ndim == 4 and p.shape[-1] == 2)
        spent = p.modules.bwd_seconds - math.fsum(node.bwd_seconds for node in p.nodes)
        assert spent > 4 * KERNEL
        apart = {"read_bytes": copied, "written_bytes": copied + 4, "seconds": spent}
    assert_nodes_add_up(p, is_traced, apart)


class Net(nn.Module):
    """Constants made in forward and kept in a list, a buffer, a parameter that is not used, views of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.unused, self.held = nn.Linear(8, 10, bias=False), nn.Linear(3, 3), [torch.ones(10)]
        self.register_buffer("mask", torch.ones(2, 10))
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Any:
        h = checkpoint(self.inner, x, use_reentrant=False)
        y = h @ self.fc.weight.float().t() * torch.arange(10.0, device=x.device) * self.mask[:1] * self.held[0]
        return (y + 1).mul_(2), h.detach().view(-1)[:3]


class Inner(Net):
    def forward(self, x: Tensor) -> Any:
        x = x if x.requires_grad else x.detach().requires_grad_()
        y = self.fc(self.inner(x).tanh())
        return y + torch.autograd.grad(y.sum(), x, create_graph=True)[0].sum(), x


CONSTANT = torch.rand(4, 10)


def mean_square(y: Any) -> Tensor:
    return ((y[0] - CONSTANT.to(y[0].device) * torch.ones_like(y[0]))**2).mean()


@pytest.mark.parametrize("is_traced", [False, True], ids=["run", "traced"])
@pytest.mark.parametrize("loss", [None, mean_square])
@pytest.mark.parametrize("make", [Net, Inner])
def test_constants_and_passes_of_their_own(make: Any, loss: Any, is_traced: bool) -> None:
    passes = 2 if make is Inner else 1
    apart = {name: passes * value for name, value in SEED.items()}
    x = torch.rand(4, 8)
    unused = 4 * (9 + 3)
    assert_nodes_add_up(run(make(), (x,), {}, "train", is_traced, loss_fn=loss), is_traced, apart, unused, passes)


def test_the_gradient_of_an_input_is_of_no_node() -> None:
    # the second step adds to what the first left: 32 sums, of 128 bytes twice
    p = profile(Net(), torch.rand(4, 8).requires_grad_(), device="h100")
    apart = {"flops": 32, "read_bytes": 256, "written_bytes": 128 + 4, "seconds": 2 * KERNEL}
    assert_nodes_add_up(p, False, apart, 4 * (9 + 3))


# What nodes keep for backward: held to hand-derived lists, and to the bytes in the same records.

def saved(p: Profile) -> dict[str, list[tuple[str, str, str, bool]]]:
    return {n.name: [(t.storage, t.kind, str(t), t.is_read) for t in n.saved_tensors or ()] for n in p.nodes
            if n.saved_tensors}


def assert_adds_up(p: Profile) -> None:
    assert p.modules is not None
    assert p.modules.saved_bytes == sum(t.storage_bytes for n in p.nodes for t in n.kept_tensors or ()
                                        if t.kind == "activation")


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(288, 10)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.drop(self.relu(self.norm(self.conv(x))).flatten(1)))


def test_by_hand() -> None:
    x = torch.empty(2, 3, 8, 8)
    gm = symbolic_profile(symbolic_trace(Convolved(), meta_args={"x": x}), x)
    p = gm.meta["profile"]
    assert saved(p) == {
        "x": [("x:0", "input", "float32[2, 3, 8, 8]", False)],
        "conv": [("conv:0", "activation", "float32[2, 8, 6, 6]", False), ("x:0", "input", "float32[2, 3, 8, 8]", True),
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
