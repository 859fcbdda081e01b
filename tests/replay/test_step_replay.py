"""The second step, played from the first one's events, equals a second run of the model's code."""
import pytest
import torch
from torch import nn

from analyzer import profile
from analyzer.meta.simulated_device import is_simulating
from analyzer.record.options import ProfileOptions
from analyzer.zoo import MODELS


def image(batch, size=64):
    return torch.empty(batch, 3, size, size, device="meta")


IDS = torch.ones(2, 16, dtype=torch.int64)


@pytest.mark.parametrize(("name", "kwargs", "optimizer"), [
    ("resnet18", {"x": image(2)}, None), ("resnet18", {"x": image(2)}, "adamw_fused"),
    ("gpt2", {"input_ids": IDS, "labels": IDS}, "adamw")])
def test_a_played_step_is_a_run_step_to_the_byte(name, kwargs, optimizer):
    played, run = (profile(MODELS[name].factory, kwargs=kwargs, optimizer=optimizer, reuse=reuse)
                   for reuse in (True, False))
    assert played == run


class Failing(nn.Module):
    """Its code reaches the state of the run, as what replaces functions of torchvision does; then it fails."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64 + 8 * i, 72 + 8 * i) for i in range(12))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x @ x if is_simulating() is not None else x


def test_what_dies_after_a_failed_step_is_given_back(monkeypatch):
    """The state that is put back is the model's: tables of the simulated allocator were emptied with it."""
    unraisable = []
    monkeypatch.setattr("sys.unraisablehook", unraisable.append)
    with pytest.raises(RuntimeError, match="must have same reduction dim"):
        profile(Failing(), torch.empty(8, 64))
    assert unraisable == []


@pytest.mark.parametrize(("mode", "autocast"), [("train", torch.bfloat16), ("infer", None)])
def test_inference_autocast_and_more_steps(mode, autocast):
    played, run = (profile(MODELS["resnet18"].factory, args=(image(2), ), mode=mode, autocast=autocast,
                           options=ProfileOptions(steps=4), optimizer="momentum" if mode == "train" else None,
                           reuse=reuse)
                   for reuse in (True, False))
    assert played == run


class Keeping(nn.Module):
    """Keeps a tensor from one step to the next."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(4, 4), None

    def forward(self, x):
        y = self.layer(x)
        if self.last is not None:
            y = y + self.last
        self.last = y.detach()
        return y


class Remembering(Keeping):
    """Keeps a count where no attribute changes."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(1)
        return self.layer(x) if len(self.seen) == 1 else self.layer(self.layer(x))


class Drawing(Keeping):
    """Decides by a random scalar."""

    def forward(self, x):
        return self.layer(x) if torch.rand([]) < 0.5 else self.layer(self.layer(x))


def test_random_control_flow_takes_one_path_in_every_step():
    played, run = (profile(Drawing(), args=(torch.empty(2, 4), ), optimizer="sgd", reuse=reuse)
                   for reuse in (True, False))
    assert played == run
    assert "seed" in run.assumptions[0]
    assert run.first_step["forward"].flops == run.phases["forward"].flops


@pytest.mark.parametrize("model", [Keeping, Remembering])
def test_a_model_that_may_differ_is_run_again(model):
    played = profile(model(), args=(torch.empty(2, 4),), optimizer="sgd")
    step = next(row for row in played.replay if row.kind == "step")
    assert not step.replayed and step.reason
    assert played == profile(model(), args=(torch.empty(2, 4),), optimizer="sgd", reuse=False)


class Asking(nn.Module):
    """Asks which tensors are leaves, of its parameters as adapters do, and of its input."""

    def __init__(self, starts_at_input=False):
        super().__init__()
        self.blocks = nn.ModuleList(AskingBlock() for _ in range(6))
        self.starts_at_input = starts_at_input

    def forward(self, x):
        x = x.detach().requires_grad_(self.starts_at_input)
        for block in self.blocks:
            x = block(x)
        return x


class AskingBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        for p in self.parameters():
            if p.is_leaf:
                p.requires_grad_(True)
        return self.down(self.up(x)) if x.is_leaf else self.down(self.up(x).relu())


@pytest.mark.parametrize("starts_at_input", [False, True])
def test_which_tensors_are_leaves_is_the_same_in_each_step(starts_at_input):
    """One block has no relu: its input is a leaf, where those of others have a history."""
    played, run = (profile(Asking(starts_at_input), args=(torch.empty(2, 4),), optimizer="sgd", reuse=reuse)
                   for reuse in (True, False))
    assert next(row for row in played.replay if row.kind == "step").replayed, played.replay.explain()
    assert played == run and sum(node.target == "aten.relu.default" for node in run.nodes) == 5


class Growing(nn.Module):
    """Has a buffer that is a leaf in the first step, and none in the second."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x):
        y = self.layer(x)
        if not self.total.is_leaf:
            self.total.detach_()
            y = y.relu()
        self.total += y.sum(0)
        return y


def test_a_buffer_that_gets_a_history_is_a_change():
    played, run = (profile(Growing(), args=(torch.empty(2, 4),), optimizer="sgd", reuse=reuse)
                   for reuse in (True, False))
    assert played == run and not next(row for row in played.replay if row.kind == "step").replayed


def test_gradients_that_are_kept_are_added_to_and_not_played(monkeypatch):
    options = ProfileOptions(set_to_none=False)
    played, run = (profile(nn.Linear(4, 4), args=(torch.empty(2, 4), ), optimizer="sgd", options=options, reuse=r)
                   for r in (True, False))
    assert played == run


class TrainsItself(nn.Module):
    """Its forward pass runs a backward pass, whose gradients stay."""

    def __init__(self, of_input=False):
        super().__init__()
        self.a, self.b, self.of_input = nn.Linear(6, 6), nn.Linear(6, 6), of_input

    def forward(self, x):
        with torch.enable_grad():
            (x if self.of_input else self.a(x.detach())).pow(2).sum().backward()
        return self.b(x.detach())


@pytest.mark.parametrize("of_input", [False, True])
@pytest.mark.parametrize("steps", [1, 3])
def test_gradients_that_a_forward_pass_leaves_are_added_to_by_the_next(steps, of_input):
    """The second backward pass of a module adds to the 36 + 6 gradients of its layer, or to those of the input."""
    model, x = nn.Sequential(TrainsItself(of_input)), torch.rand(3, 6, requires_grad=of_input)
    found, run = [profile(model, x, mode="infer", device="cpu", reuse=reuse, options=ProfileOptions(steps=steps))
                  for reuse in (True, False)]
    assert found == run
    first = profile(model, x, mode="infer", device="cpu", options=ProfileOptions(steps=1))
    assert found.bwd_flops - first.bwd_flops == (0 if steps == 1 else 18 if of_input else 42)


class UsedOnAnotherStream(nn.Module):
    """A tensor may be in use on a stream that never becomes the current one, so its memory stays taken."""

    def __init__(self, count):
        super().__init__()
        self.side = torch.cuda.Stream()
        self.blocks = nn.Sequential(*(nn.Linear(64, 64) for _ in range(count)))

    def forward(self, x):
        scaled = self.blocks(x) * 3
        scaled.record_stream(self.side)
        return scaled.sum()


@pytest.mark.parametrize("count", [2, 12])  # without blocks that need not run, and with some
def test_a_step_that_uses_a_tensor_on_another_stream_is_run(count):
    found, run = (profile(lambda: UsedOnAnotherStream(count), torch.ones(512, 64), device="h100", optimizer="adamw",
                          reuse=reuse) for reuse in (True, False))
    assert found == run
    assert "uses streams" in found.replay.explain()
