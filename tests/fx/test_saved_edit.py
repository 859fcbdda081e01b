"""Results that are kept, recomputed or offloaded node by node: equal results, and what runs and stays as chosen."""
import copy
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from analyzer import symbolic_profile, symbolic_trace
from analyzer.errors import InputError
from analyzer.fx import CheckpointRegion, GraphModule, set_region, set_saved
from analyzer.fx.graph.kept import KeptResults
from analyzer.fx.graph.offload import OffloadedTensors

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Count(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def step(module: nn.Module, x: Tensor = X,
         retain: bool = False) -> tuple[dict[str, Tensor | None], Counter[str], Counter[str]]:
    """Outputs, gradients and buffers of a step from one random state; the operators of both its passes."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    x = x.detach().clone().requires_grad_(x.is_floating_point())
    module.zero_grad()
    torch.manual_seed(0)
    with Count() as forward:
        output = module(x)
    with Count() as backward:
        (output * torch.linspace(1, 2, output.numel()).reshape(output.shape)).sum().backward(retain_graph=retain)
    if retain:
        output.sum().backward()
    found = {"output": output, "x": x.grad, "random": torch.rand(1),
             **{n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()},
             **{n: b.clone() for n, b in module.named_buffers()}}
    for name, buffer in module.named_buffers():
        with torch.no_grad():
            buffer.copy_(buffers[name])
    return found, forward.calls, backward.calls


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=(name + ": {}").format)


def calls_in(gm: GraphModule) -> list[str]:
    return [n.name for n in gm.graph.nodes if n.op.startswith("call")]


class Dropouts(nn.Module):
    """Random numbers are drawn by each of several calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.a(x)).tanh()
        x = self.drop(self.b(x)).tanh()
        return self.drop(self.c(x)).tanh()


class InPlace(nn.Module):
    """As in a ResNet: normalised, added to and rectified in place; counters that a second run would raise again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.relu = nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4), nn.ReLU(inplace=True)
        self.after = nn.Conv1d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x[None].transpose(1, 2).sin()
        y = self.norm(self.conv(x))
        y += x
        y = self.relu(y)
        y = self.after(y).flatten(1)
        return self.relu(y).exp()


class Casts(nn.Module):
    """One autocast block: the first region finds the weight's cast in the cache that the second run of it does not
    have.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.fc(x)
            x = self.drop(self.fc(x.tanh()))
            x = x.float().softmax(-1)
        return x


class Writes(nn.Module):
    """A part without gradients, writes into a clone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y = (x * self.weight).exp()
        with torch.no_grad():
            mean = y.mean(0)
        z = y.clone()
        z[0] = 1
        z.mul_(2)
        return (z - mean).sigmoid() * y


MODELS: list[Callable[[], nn.Module]] = [Dropouts, InPlace, Casts, Writes]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("make", MODELS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_choice_gives_the_same_results(make: Callable[[], nn.Module], data: st.DataObject) -> None:
    """Regions cut at random, choices at random; a second backward pass and a copy of the module agree as well."""
    model = make()
    expected, *_ = step(model, retain=True)
    gm = symbolic_trace(model, meta_args={"x": X.requires_grad_(False)})
    names = calls_in(gm)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(names)), min_size=2, max_size=5, unique=True), label="cuts"))
    made = 0
    for first, last in zip(cuts, cuts[1:]):
        try:
            set_region(gm, names[first:last], recompile=False)
        except InputError:  # in-place pairs and autocast blocks
            continue
        made += 1
    for name in data.draw(st.lists(st.sampled_from(names), unique=True), label="chosen"):
        try:
            set_saved(gm, [name], data.draw(st.sampled_from(["keep", "offload", "recompute"]), label=name),
                      recompile=False)
        except InputError:
            continue
    gm.recompile()
    found, *_ = step(gm, retain=True)
    assert_same(found, expected)
    assert_same(step(copy.deepcopy(gm), retain=True)[0], expected)


def test_kept_nodes_do_not_run_again_and_random_numbers_stay_in_step() -> None:
    model = Dropouts()
    expected, forward, backward = step(model)
    gm = symbolic_trace(model, meta_args={"x": X})
    set_region(gm, calls_in(gm), CheckpointRegion(0, early_stop=False))
    found, again, recomputed = step(gm)
    assert_same(found, expected)
    x = X.clone().requires_grad_()
    with Count() as own:  # what torch's checkpoint itself makes: before 2.12 two tensors without elements
        checkpoint(lambda x: x, x, use_reentrant=False)
    assert own.calls == (Counter(empty=2) if torch.__version__ < (2, 12) else Counter())
    assert again - own.calls - Counter(detach=9) == forward - Counter(
        detach=9) and recomputed["addmm"] == 3 and recomputed["bernoulli_"] == 3 and recomputed["tanh"] == 3
    set_saved(gm, ["a", "drop", "tanh_1"], "keep")
    found, again, recomputed = step(gm)
    assert_same(found, expected)
    assert recomputed["addmm"] == 2 and recomputed["bernoulli_"] == 2 and recomputed["tanh"] == 2
    set_saved(gm, calls_in(gm), "keep")
    found, again, recomputed = step(gm)
    assert_same(found, expected)
    assert not {"addmm", "bernoulli_", "tanh"} & set(recomputed)
    set_saved(gm, calls_in(gm), "recompute")
    assert "kept" not in gm.code and not any("saved" in n.meta for n in gm.graph.nodes)


def test_what_is_written_in_place_is_chosen_together() -> None:
    model = InPlace()
    expected, *_ = step(model)
    gm = symbolic_trace(model, meta_args={"x": X})
    set_region(gm, calls_in(gm), CheckpointRegion(0, early_stop=False))
    assert [n.name for n in set_saved(gm, ["relu"], "keep")] == ["norm", "iadd", "relu"]
    assert [n.name for n in set_saved(gm, ["after"], "keep")] == ["after", "flatten", "relu_1"]
    found, _, recomputed = step(gm)
    assert_same(found, expected)  # the buffers of the normalisation too, as it runs once
    assert recomputed[
        "convolution"] == 1 and recomputed["native_batch_norm"] == recomputed["relu_"] == recomputed["add_"] == 0
    set_saved(gm, ["conv"], "keep")
    found, _, recomputed = step(gm)
    assert_same(found, expected)
    assert recomputed["convolution"] == 0
    set_saved(gm, ["norm", "relu_1"], "recompute")
    assert [n.name for n in gm.graph.nodes if "saved" in n.meta] == ["conv"]
    assert_same(step(gm)[0], expected)


def test_a_cast_that_is_a_node_is_kept_and_casts_of_autocast_are_not() -> None:
    gm = symbolic_trace(Casts(), meta_args={"x": X})
    names = calls_in(gm)
    set_region(gm, names[names.index("fc_1"):names.index("softmax") + 1], CheckpointRegion(0, early_stop=False))
    set_saved(gm, ["fc_1", "float_1"], "keep")
    _, forward, backward = step(gm)
    assert forward["_to_copy"] == 4 and forward[
        "addmm"] == 2, "x, weight and bias; float; the second layer finds its casts"
    assert backward["addmm"] == 0
    plain = step(Casts())[2]["_to_copy"]
    assert backward["_to_copy"] == plain + 2, "weight and bias again, as the cache is gone; float is not"


OFFLOADED = """
def forward(self, x):
    offloaded = OffloadedTensors()
    a = self.a(x);  x = None
    drop = self.drop(a);  a = None
    with offloaded:
        tanh = drop.tanh();  drop = None
        offloaded.add(tanh)
    with offloaded:
        b = self.b(tanh);  tanh = None
    kept_0 = KeptResults()
    def checkpoint_0(b):
        with kept_0:
            drop_1 = self.drop(b);  b = None
        with kept_0.on_host:
            tanh_1 = drop_1.tanh();  drop_1 = None
        c = self.c(tanh_1);  tanh_1 = None
        return c
    c = torch.utils.checkpoint.checkpoint(checkpoint_0, b, use_reentrant = False, context_fn = kept_0.contexts);\
  b = checkpoint_0 = None
    drop_2 = self.drop(c);  c = None
    tanh_2 = drop_2.tanh();  drop_2 = None
    return tanh_2"""


def test_the_generated_code() -> None:
    gm = symbolic_trace(Dropouts(), meta_args={"x": X})
    set_region(gm, ["drop_1", "tanh_1", "c"])
    set_saved(gm, ["drop_1"], "keep")
    set_saved(gm, ["tanh", "tanh_1"], "offload")
    assert gm.code[gm.code.index("def forward"):].rstrip() == OFFLOADED.lstrip()
    assert_same(step(gm)[0], step(Dropouts())[0])


def test_copies_keep_the_choices(duplicate: Callable[[GraphModule], GraphModule]) -> None:
    gm = symbolic_trace(Dropouts(), meta_args={"x": X})
    set_region(gm, ["drop_1", "tanh_1", "c"])
    set_saved(gm, ["drop_1"], "keep")
    set_saved(gm, ["tanh", "tanh_1"], "offload")
    again = duplicate(gm)
    assert again.code == gm.code and "on_host" in again.code
    assert_same(step(again)[0], step(gm)[0])
    set_saved(again, ["tanh_1"], "recompute")
    assert "on_host" in gm.code and "on_host" not in again.code


# nodes of a region, choices, and: what the step keeps on the device of exp (saved by itself and sin), sin, cos; FLOPs
# that run again
PLANS: dict[str, tuple[list[str], dict[str, str], dict[str, int], int]] = {
    "as it is": ([], {}, {"exp": 4096, "sin": 4096, "cos": 4096}, 0),
    "offload": ([], {"exp": "offload", "cos": "offload"}, {"exp": 0, "sin": 4096, "cos": 0}, 0),
    "recompute": (["exp", "sin", "cos", "mul"], {}, {"exp": 0, "sin": 0, "cos": 0}, 4),
    "keep exp": (["exp", "sin", "cos", "mul"], {"exp": "keep"}, {"exp": 4096, "sin": 0, "cos": 0}, 3),
    "offload exp": (["exp", "sin", "cos", "mul"], {"exp": "offload"}, {"exp": 0, "sin": 0, "cos": 0}, 3),
}


def fan(x: Tensor) -> Tensor:
    y = x.exp()
    z = y.sin()
    return (z.cos() * z).sum()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", PLANS)
def test_a_profile_sees_the_choice(name: str) -> None:
    region, choices, saved, again = PLANS[name]
    x = torch.empty(32, 32, device="meta", requires_grad=True)
    gm = symbolic_trace(fan, meta_args={"x": x})
    if region:
        set_region(gm, region, CheckpointRegion(0, early_stop=False))
    for node, choice in choices.items():
        set_saved(gm, [node], choice)
    symbolic_profile(gm, x, device="h100")
    info = {n.name: n.meta["info"] for n in gm.graph.nodes}
    assert {n: info[n].incremental_bytes for n in saved} == saved
    assert sum(i.recompute_flops > 0 for i in info.values()) == again


def test_offloaded_memory_is_free_between_the_passes() -> None:
    """The storage that the node made dies, although a later layer saved it."""
    alive: list[weakref.ref[Any]] = []

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        alive.append(weakref.ref(output.untyped_storage()))

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].register_forward_hook(note)
    gm = symbolic_trace(model, meta_args={"input": X})
    for choice, lives in (("keep", True), ("offload", False)):
        set_saved(gm, ["_0"], choice)
        output = gm(X)
        assert (alive[-1]() is not None) == lives
        model.zero_grad()
        output.sum().backward()
        assert model[0].weight.grad is not None


def wrong(x: Tensor) -> Tensor:
    y = x.exp()
    z = y.sin()
    y.mul_(2)
    return y * z


WRONG: dict[str, tuple[dict[str, Any], list[str], str, str]] = {
    "choice": ({}, ["exp"], "drop", "set_saved(..., 'drop'): choose one of keep, recompute, offload"),
    "no node": ({}, ["cos"], "keep",
                "cos is no node of this graph; take one of gm.graph.nodes, or its name (set_saved(..., 'keep'))"),
    "output": ({}, ["output"], "keep", "set_saved(..., 'keep'): output is the output, which is held anyway"),
    "no region": ({}, ["sin"], "recompute",
                  "set_saved(..., 'recompute'): sin is in no checkpoint region, so nothing would run it again; "
                  "set_region first"),
    "debug": ({"debug": True}, ["sin"], "offload",
              "offload sin: checkpoint 0, which it is in, has debug=True; results of single nodes "
              "can be kept in a checkpoint with use_reentrant=False, no context_fn and no debug"),
    "read before": ({"use_reentrant": False}, ["exp"], "keep",
                    "exp cannot be kept: mul_ writes to it in place after sin, which would run again, has "
                    "read it; keep sin as well, or recompute exp"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be(name: str) -> None:
    options, nodes, choice, message = WRONG[name]
    gm = symbolic_trace(wrong, meta_args={"x": X})
    if options:
        set_region(gm, ["exp", "sin", "mul_"], CheckpointRegion(0, **options))
    code = gm.code
    with pytest.raises(InputError) as caught:
        set_saved(gm, nodes, choice)
    assert message in str(caught.value)
    gm.recompile()
    assert gm.code == code and not any("saved" in n.meta for n in gm.graph.nodes)


def test_a_kept_result_that_the_caller_changes() -> None:
    kept, x = KeptResults(), torch.ones(2, requires_grad=True)
    held: list[Tensor] = []

    def g(x: Tensor) -> Tensor:
        with kept:
            y = x.sin()
        held.append(y)
        return y.exp()

    out = checkpoint(g, x, use_reentrant=False, context_fn=kept.contexts)
    with torch.no_grad():
        held[0].mul_(2)
    with pytest.raises(RuntimeError,
                       match=r"a result of shape \(2,\) that a checkpoint keeps was changed in place after"):
        out.sum().backward()


def test_a_block_that_fails_leaves_nothing_behind() -> None:
    offloaded, kept = OffloadedTensors(), KeptResults()
    x = torch.ones(2, requires_grad=True)

    def f(x: Tensor) -> Tensor:
        with kept:
            raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"), offloaded:
        checkpoint(f, x, use_reentrant=False, context_fn=kept.contexts)
    with Count() as count:
        x.sin()
    assert count.calls == {"sin": 1}
    y = x.exp()
    assert y.grad_fn._saved_result.data_ptr() == y.data_ptr(), "no hooks are left"  # type: ignore[union-attr]


def test_a_checkpoint_that_leaves_the_generator_alone_does() -> None:
    gm = symbolic_trace(lambda x: F.dropout(x.sin()).exp().sum(), meta_args={"x": X})
    set_region(gm, ["sin", "dropout", "exp"], CheckpointRegion(0, preserve_rng_state=False))
    set_saved(gm, ["dropout"], "keep")
    y = gm(X.clone().requires_grad_())
    torch.rand(3)
    state = torch.get_rng_state()
    y.backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_conjugates_and_imaginary_parts_come_back_from_the_host() -> None:
    def f(x: Tensor) -> Tensor:
        y = x * 2
        z = y.conj()
        return ((z * y).abs() * z.imag.exp() * z.real).sum()

    x = torch.complex(X, X.flip(0)).requires_grad_()
    gm = symbolic_trace(f, meta_args={"x": x})
    expected, = torch.autograd.grad(gm(x), x)
    set_saved(gm, ["mul"], "offload")
    found, = torch.autograd.grad(gm(x), x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
