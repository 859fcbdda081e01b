"""symbolic_trace + symbolic_profile: the annotated graph, against published figures and against the eager profile."""
import gc

import pytest
import torch
from torch import nn

from analyzer import MetaTensorMode, profile, symbolic_profile, symbolic_trace
from analyzer.errors import InputError, UnknownDeviceError
from analyzer.meta.address_space import MetaStorage
from analyzer.profilers.annotation import Annotation
from analyzer.results.node_info import NodeInfo
from analyzer.zoo import MODELS
from analyzer.zoo.vit import vit_b_16

COLUMNS = ["Op type", "Op", "Accumulate size", "Incremental size", "Output size", "Temp size", "Param size",
           "Backward size", "Fwd FLOPs", "Bwd FLOPs"]


@pytest.fixture(scope="module")
def vit():
    with MetaTensorMode():
        model = vit_b_16().cuda()
        sample = torch.rand(8, 3, 224, 224).cuda()
    return symbolic_profile(symbolic_trace(model, meta_args={"x": sample}), sample)


def row_of(text, name):
    line = next(line for line in text.splitlines() if line.split()[1:2] == [name])
    return dict(zip(COLUMNS[2:], __import__("re").findall(r"[\d.]+ (?:[KMGT]?i?B|[KMGT])|\b0\b", line)))


def test_vit_at_batch_8_prints_the_published_figures(vit):
    text = vit.meta["profile"].table(columns=("fwd_macs", "bwd_macs"), fmt="simple")
    assert [c.strip() for c in __import__("re").split(r"\s{2,}", text.splitlines()[0])][:10] == COLUMNS
    assert row_of(text, "x")["Output size"] == "4.59 MiB"
    assert row_of(text, "conv_proj")["Param size"] == "2.25 MiB"
    assert row_of(text, "heads_head")["Param size"] == "2.93 MiB"
    for i in range(12):
        layer = f"encoder_layers_encoder_layer_{i}"
        assert row_of(text, f"{layer}_ln_2")["Incremental size"] == "4.63 MiB"
        assert row_of(text, f"{layer}_mlp_0")["Incremental size"] == "18.47 MiB"
        assert row_of(text, f"{layer}_mlp_0")["Param size"] == "9.01 MiB"
        assert row_of(text, f"{layer}_mlp_1")["Incremental size"] == "18.47 MiB"
    infos = {n.name: n.meta["info"] for n in vit.graph.nodes}
    layer = "encoder_layers_encoder_layer_3"
    together = infos[f"{layer}_ln_2"].incremental_bytes + infos[f"{layer}_mlp_0"].incremental_bytes
    # 8 x 197 tokens: normalised (768) and widened (3072) activations, mean and deviation, float32
    assert together == 8 * 197 * (768 + 3072 + 2) * 4
    assert f"{together / 2**20:.2f}" == "23.10"
    assert f"{infos['conv_proj'].fwd_macs / 1e6:.2f}" == "924.84"
    assert {f"{infos[f'{layer}_mlp_{i}'].fwd_macs / 1e9:.2f}" for i in (0, 3)} == {"3.72"}


def test_every_node_is_annotated_and_accumulate_is_the_running_sum(vit):
    total = 0
    for node in vit.graph.nodes:
        info = node.meta["info"]
        assert isinstance(info, NodeInfo)
        assert (info.op, info.name) == (node.op, node.name)
        assert set(info.inputs) == {n.name for n in node.all_input_nodes}
        total += info.incremental_bytes
        assert info.accumulate_bytes == total
    assert sum(n.meta["info"].param_bytes for n in vit.graph.nodes) == 86_567_656 * 4


@pytest.mark.parametrize("name", ["resnet18", "gpt2"])
def test_the_graph_costs_what_the_eager_model_costs(name):
    shipped = MODELS[name]
    x = torch.ones(2, 32, dtype=torch.int64) if name == "gpt2" else torch.empty(2, 3, 224, 224)
    with MetaTensorMode():
        model = shipped.factory()
    argument = "input_ids" if name == "gpt2" else "x"
    graph = symbolic_profile(symbolic_trace(model, meta_args={argument: x}), x, device="h200").meta["profile"]
    eager = profile(model, args=(x,), device="h200")
    for quantity in ("fwd_flops", "bwd_flops", "fwd_macs", "bwd_macs", "param_bytes"):
        assert getattr(graph, quantity) == getattr(eager, quantity), quantity
    assert graph.nodes[-2].accumulate_bytes == eager.nodes[-2].accumulate_bytes


def test_inference_saves_nothing():
    x = torch.empty(2, 8)
    gm = symbolic_profile(symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), meta_args={"input": x}), x,
                          mode="infer")
    infos = [n.meta["info"] for n in gm.graph.nodes]
    assert sum(i.incremental_bytes for i in infos) == 0
    assert [i.backward_bytes for i in infos] == [None] * len(infos)
    assert sum(i.bwd_flops for i in infos) == 0


def test_aliases_name_the_node_that_holds_the_storage():
    class Views(nn.Module):
        def forward(self, x):
            y = x.exp()
            return y.view(-1).t()

    gm = symbolic_profile(symbolic_trace(Views(), meta_args={"x": torch.empty(2, 3)}), torch.empty(2, 3), mode="infer")
    assert {n.name: n.meta["info"].aliases for n in gm.graph.nodes
            if n.op == "call_method"} == {"exp": (), "view": ("exp", ), "t": ("exp", )}
    assert [n.meta["info"].temp_bytes for n in gm.graph.nodes if n.op == "call_method"] == [24, 0, 0]


def test_profilers_replace_by_name_and_add():
    def stars(log):
        out = Annotation()
        for i in range(len(log.nodes)):
            out.nodes[i]["stars"] = 5
        return out

    x = torch.empty(2, 3)
    gm = symbolic_trace(nn.Linear(3, 4), meta_args={"input": x})
    symbolic_profile(gm, x, profilers={"flops": lambda log: Annotation(), "stars": stars})
    assert all(n.meta["info"].fwd_flops is None and n.meta["info"].extra == {"stars": 5} for n in gm.graph.nodes)


def test_verbose_prints_the_table(capsys):
    x = torch.empty(2, 3)
    symbolic_profile(symbolic_trace(nn.Linear(3, 4), meta_args={"input": x}), x, verbose=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("Op type") and max(map(len, lines)) <= 120


@pytest.mark.parametrize(("call", "error", "text"), [
    (lambda gm, x: symbolic_profile(nn.Linear(2, 2), x), InputError, "symbolic_trace"),
    (lambda gm, x: symbolic_profile(gm, x, mode="fit"), InputError, "mode='fit'"),
    (lambda gm, x: symbolic_profile(gm, x, device="tpu"), UnknownDeviceError, "tpu"),
])
def test_bad_arguments_are_named(call, error, text):
    x = torch.empty(2, 3)
    gm = symbolic_trace(nn.Linear(3, 4), meta_args={"input": x})
    with pytest.raises(error, match=text):
        call(gm, x)


def test_parameters_gradients_and_generators_are_as_they_were():
    model, x = nn.Linear(3, 4), torch.randn(2, 3)
    model(x).sum().backward()
    before, rng = [(p, p.grad, p.grad.clone()) for p in model.parameters()], torch.get_rng_state()
    symbolic_profile(symbolic_trace(model, meta_args={"input": x}), x)
    assert torch.equal(rng, torch.get_rng_state())
    for p, (old, grad, value) in zip(model.parameters(), before):
        assert p is old
        assert p.grad is grad
        assert torch.equal(grad, value)


def test_arguments_are_bound_as_forward_takes_them():
    class Model(nn.Module):
        def forward(self, x, scale=2.0, *rest, bias=None, **more):
            y = x * scale + sum(rest) + sum(more.values())
            return y if bias is None else y + bias

    x = torch.empty(2, 3)
    gm = symbolic_trace(Model(), meta_args={"x": x, "bias": x})
    infos = [n.meta["info"] for n in symbolic_profile(gm, x, kwargs={"bias": x}, mode="infer").graph.nodes]
    assert sum(i.fwd_flops for i in infos if i.op != "output") >= 2 * 6
    with pytest.raises(InputError, match="needs x too; give it"):
        symbolic_profile(gm, kwargs={"bias": x}, mode="infer")


def test_no_tensor_of_a_run_is_left_in_a_cycle():
    """Ctrl-C was lost in one of thirty tries: Python's collector called a storage's finaliser, which swallows it."""
    def run():
        x = torch.empty(4, 8)
        return symbolic_profile(symbolic_trace(nn.Linear(8, 8), meta_args={"input": x}), x)

    def count():
        return sum(type(x) is MetaStorage for x in gc.get_objects())

    run()  # what is cached at first
    gc.collect()
    gc.disable()
    try:
        before = count()
        run()
        assert count() == before
    finally:
        gc.enable()
