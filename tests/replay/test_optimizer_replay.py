"""Steps of an optimizer that are played equal steps that are run, to the byte, and what could differ is run."""
from __future__ import annotations

import gc
import inspect
import re
import weakref

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from analyzer import ProfileOptions, profile
from analyzer.recipe.optimizer import REPLAYED as OPTIMIZERS
from analyzer.replay.block_replay import BlockReplay
from analyzer.replay.optimizer.replay import OptimizerReplay
from analyzer.zoo import MODELS
from analyzer.zoo.llama import llama_1b


@pytest.fixture
def updates(monkeypatch):
    """The number of steps of optimizers that were played, in a list."""
    seen: list[int] = []
    original = OptimizerReplay.replay

    def count(self, unmaterialized):
        seen.append(self.recorder.step)
        original(self, unmaterialized)

    monkeypatch.setattr(OptimizerReplay, "replay", count)
    monkeypatch.setattr("analyzer.replay.optimizer.replay.FEWEST_TIMES", 0)  # the models here have few parameters
    monkeypatch.setattr("analyzer.replay.block_replay.LEAST_LEAVES_SAVED", 0)  # and small blocks
    return seen


@pytest.fixture(scope="module", autouse=True)
def _first_run():
    """The first profile of a process makes host memory for what later ones have, so its host addresses are others."""
    profile(Mixed(), args=(X,), device="cpu")


def assert_same(model, updates, *, steps, **call):
    run, played = (profile(model, reuse=reuse, **call) for reuse in (False, True))
    assert played == run
    assert updates == list(range(steps))
    return played


class Block(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, dtype=dtype), nn.Linear(16, 8, dtype=dtype)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Mixed(nn.Module):
    """Repeated blocks of two dtypes; parameters of no dimension, in two layouts, transposed, frozen, and without a
    gradient.
    """

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(torch.float32) for _ in range(4))
        self.blocks[2].up.weight.requires_grad_(False)
        self.halves = nn.ModuleList(Block(torch.bfloat16) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(()))
        self.conv, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.turned, self.unused = nn.Linear(8, 8), nn.Linear(3, 3)
        self.turned.weight = nn.Parameter(torch.empty(8, 8).t())

    def forward(self, x):
        image = torch.zeros(1, 3, 4, 4, device=x.device)
        x = x + self.conv(image).mean() + self.last(image).mean()
        for block in self.blocks:
            x = block(x)
        x = (self.turned(x) * self.scale).bfloat16()
        for block in self.halves:
            x = block(x)
        return x


CLASSES = [
    torch.optim.Adadelta, torch.optim.Adam, torch.optim.Adamax, torch.optim.AdamW, torch.optim.ASGD, torch.optim.NAdam,
    torch.optim.RAdam, torch.optim.RMSprop, torch.optim.SGD
]
SETTINGS = {
    "as it is": {},
    "one by one": {"foreach": False},
    "fused": {"fused": True},
    "maximize": {"maximize": True},
    "capturable": {"capturable": True},
    "decay": {"weight_decay": 0.1},
    "amsgrad": {"amsgrad": True},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "centered": {"centered": True, "momentum": 0.5},
}
X = torch.empty(4, 8)


def cases():
    for cls in CLASSES:
        for name, settings in SETTINGS.items():
            if set(settings) <= set(inspect.signature(cls).parameters):
                for device in ("h200", "cpu") if name != "capturable" else ("h200",):  # which needs an accelerator
                    yield pytest.param(cls, name, device, id=f"{cls.__name__} {name} {device}")


@pytest.mark.parametrize(("cls", "name", "device"), list(cases()))
def test_every_optimizer_of_torch(cls, name, device, updates):
    call = {
        "args": (X, ), "device": device, "optimizer": lambda parameters: cls(parameters, **SETTINGS[name]),
        "options": ProfileOptions(steps=3)
    }
    assert_same(Mixed(), updates, steps=3, **call)


@pytest.mark.parametrize("steps", [1, 2, 7])  # from the sixth step on RAdam does something else
@pytest.mark.parametrize("name", ["AdamW", "SGD", "RAdam"])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_groups_have_settings_of_their_own(name, one_by_one, steps, updates):
    def make(parameters):
        half = len(parameters) // 2
        groups = [{"params": parameters[:half], "lr": 1e-2}, {"params": parameters[half:], "weight_decay": 0.25}]
        return getattr(torch.optim, name)(groups, foreach=False if one_by_one else None)

    assert_same(Mixed(), updates, steps=steps, args=(X, ), optimizer=make, device="cpu",
                options=ProfileOptions(steps=steps))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("device", ["h200", "cpu"])
def test_built_in_optimizers_are_played(optimizer, device, updates, monkeypatch):
    monkeypatch.undo()
    model = nn.Sequential(*(Block(torch.float32) for _ in range(16)))
    seen: list[int] = []
    original = OptimizerReplay.replay
    monkeypatch.setattr(OptimizerReplay, "replay", lambda self, unmaterialized:
                        (seen.append(self.recorder.step), original(self, unmaterialized))[1])
    assert_same(model, seen, steps=2, args=(X,), optimizer=optimizer, device=device)


IDS = torch.ones(2, 32, dtype=torch.int64)


@pytest.mark.parametrize(("factory", "kwargs"), [
    (MODELS["resnet50"].factory, {"x": torch.empty(2, 3, 64, 64, device="meta")}),
    (llama_1b, {"input_ids": IDS, "labels": IDS}),
])
def test_models_of_equal_blocks(factory, kwargs, updates):
    assert_same(factory, updates, steps=2, kwargs=kwargs, optimizer="adamw")


def test_an_opt(updates):
    transformers = pytest.importorskip("transformers")
    config = transformers.OPTConfig(hidden_size=32, ffn_dim=64, num_hidden_layers=5, num_attention_heads=4,
                                    vocab_size=100, word_embed_proj_dim=32, max_position_embeddings=64,
                                    attn_implementation="eager")
    with torch.device("meta"):
        model = transformers.OPTForCausalLM(config).train()
    run = assert_same(model, updates, steps=2, kwargs={"input_ids": IDS, "labels": IDS}, optimizer="adamw")
    # two moments of each parameter, and the number of steps on the host
    assert run.optimizer_bytes == sum(2 * 4 * p.numel() + 4 for p in model.parameters())


def chain(*layers):
    return nn.Sequential(*(layers or (Block(torch.float32) for _ in range(4))))


class Own(torch.optim.SGD):
    """Somebody else's."""


def hooked(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def patched(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    step = optimizer.step
    optimizer.step = lambda: step()
    return optimizer


def scheduled(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


def with_states(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    optimizer.state[parameters[0]]["momentum_buffer"] = torch.zeros_like(parameters[0])
    return optimizer


@pytest.mark.parametrize("make", [
    lambda p: Own(p, lr=0.1), hooked, patched, scheduled, with_states,
    lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1)),
    lambda p: torch.optim.Adagrad(p), lambda p: torch.optim.Rprop(p), lambda p: torch.optim.SGD(p[1:], lr=0.1),
], ids=["subclass", "hook", "patched step", "scheduler", "states", "tensor", "states from the start",
        "a round like no other", "not every parameter"])
def test_what_could_differ_is_run(make, updates):
    assert_same(chain(), updates, steps=0, args=(X,), optimizer=make)


@pytest.mark.parametrize(("make", "reason"), [
    (lambda p: torch.optim.AdamW(p), None),
    (lambda p: Own(p, lr=0.1), "no optimizer of torch.optim"),
    (hooked, "hooks run with its step"),
    (patched, "its step is replaced"),
    (with_states, "states before its first step"),
    (scheduled, "held outside|its step is replaced"),
    (lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1)), "no plain value"),
    (lambda p: torch.optim.Rprop(p), "more than loops over parameters"),
    (lambda p: torch.optim.SGD(p[1:], lr=0.1), "leave other gradients"),
])
def test_no_optimizer_is_run_without_a_reason(make, reason, updates):
    off, on = (next(row.reason for row in profile(chain(), args=(X,), optimizer=make, reuse=reuse).replay
                    if row.kind == "optimizer") for reuse in (False, True))
    assert "reuse=False" in off
    assert on is None if reason is None else re.search(reason, on)


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adam])
def test_parameters_with_hooks(cls, monkeypatch):
    """An optimizer that steps in the backward pass is run, and so is the one that steps after it."""
    def make(parameters):
        for parameter in parameters[:4]:
            own = cls([parameter], lr=0.1)
            parameter.register_post_accumulate_grad_hook(lambda _, own=own: (own.step(), own.zero_grad(), None)[2])
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    monkeypatch.setattr("analyzer.replay.optimizer.replay.FEWEST_TIMES", 0)
    found = assert_same(chain(), [], steps=0, args=(X, ), optimizer=make, options=ProfileOptions(steps=3))
    assert all(row.reason for row in found.replay if row.kind == "optimizer")


@pytest.mark.parametrize("device", ["h200", "cpu"])
def test_fused_adagrad(device, updates):
    if device != "cpu" and torch.__version__.startswith("2.9."):
        pytest.skip("torch 2.9 has no fused Adagrad on CUDA")
    model = chain()
    run = assert_same(model, updates, steps=0, args=(X, ), device=device,
                      optimizer=lambda parameters: torch.optim.Adagrad(parameters, fused=True))
    elements, count = sum(p.numel() for p in model.parameters()), len(list(model.parameters()))
    assert run.optimizer_bytes == 4 * elements + 4 * count  # the sum of squares, and the number of steps
    # sum + g g; p - rate g / (√sum + ε); and a step more of each
    assert run.phases["optimizer"].flops == 7 * elements + count


def test_gradients_that_are_not_dropped_are_summed_up(updates):
    assert_same(chain(), updates, steps=0, args=(X,), optimizer="adamw", options=ProfileOptions(set_to_none=False))


def test_an_optimizer_that_somebody_holds_has_its_states(updates):
    held = []

    def make(parameters):
        held.append(torch.optim.AdamW(parameters))
        return held[-1]

    run = assert_same(chain(), updates, steps=0, args=(X,), optimizer=make)
    assert sum(t.numel() * t.element_size() for state in held[-1].state.values()
               for t in state.values()) == run.optimizer_bytes
    assert [len(optimizer.state) for optimizer in held] == [16, 16]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.rest = chain()

    def forward(self, x):
        return self.rest(self.second(self.first(x)))


class Views(nn.Module):
    """Two parameters in one storage."""

    def __init__(self):
        super().__init__()
        both = torch.empty(2, 8, 8)
        self.a, self.b, self.rest = nn.Parameter(both[0]), nn.Parameter(both[1]), chain()

    def forward(self, x):
        return self.rest(x @ self.a @ self.b)


SPARSE = pytest.mark.skipif(torch.__version__.startswith("2.9."), reason="torch 2.9 adds no sparse gradients on meta")


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.rest = nn.Embedding(9, 8, sparse=True), chain()

    def forward(self, ids):
        return self.rest(self.rows(ids))


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.turn, self.rest = nn.Parameter(torch.empty(8, dtype=torch.complex64)), chain()

    def forward(self, x):
        return self.rest((x * self.turn).abs())


class OnTheHost(nn.Module):
    """One parameter stays there."""

    def __init__(self):
        super().__init__()
        self.scale, self.rest = nn.Parameter(torch.ones(8, device="cpu")), chain().cuda()

    def forward(self, x):
        return self.rest(x.cuda() * self.scale.cuda())


class Counting(nn.Module):
    """A second step is another than the first."""

    def __init__(self):
        super().__init__()
        self.steps, self.rest = 0, chain()

    def forward(self, x):
        self.steps += 1
        return self.rest(x if self.steps == 1 else x.relu())


@pytest.mark.parametrize(("model", "args", "steps"), [
    (Tied, (X,), 2), (Views, (X,), 0), (Complex, (X,), 0),
    pytest.param(Sparse, (torch.ones(4, dtype=torch.int64),), 0, marks=SPARSE),
    (OnTheHost, (X,), 0), (Counting, (X,), 0),
])
def test_parameters_and_models(model, args, steps, updates):
    assert_same(model, updates, steps=steps, args=args, optimizer="sgd")


@pytest.fixture
def lent(monkeypatch):
    """Blocks that were given tensors when it turned out that somebody needs them."""
    seen: list[nn.Module] = []
    original = BlockReplay.materialize

    def materialize(self, module):
        if self.find_lazy(module) is not None:
            seen.append(type(module).__name__)
        original(self, module)

    monkeypatch.setattr(BlockReplay, "materialize", materialize)
    return seen


def test_parameters_of_alike_blocks_need_no_tensors(updates, lent):
    assert_same(chain(), updates, steps=2, args=(X,), optimizer="adamw")
    assert lent == []


class Frozen(nn.Module):
    """Every block has one parameter without a gradient."""

    def __init__(self):
        super().__init__()
        self.blocks = chain()
        for block in self.blocks:
            block.up.weight.requires_grad_(False)

    def forward(self, x):
        return self.blocks(x)


def test_frozen_parameters_of_alike_blocks(updates, lent):
    run = assert_same(Frozen(), updates, steps=2, args=(X,), optimizer="adamw")
    assert lent == [] and run.optimizer_bytes == 4 * (2 * 4 * (16 + 16 * 8 + 8) + 3 * 4)


@pytest.mark.parametrize("steps", [1, 2])
def test_an_optimizer_that_has_to_run_gets_them(steps, updates, lent):
    seen = []
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: seen.append(len(optimizer.state)))
    try:
        assert_same(chain(), updates, steps=0, args=(X, ), optimizer="adamw", device="cpu",
                    options=ProfileOptions(steps=steps))
    finally:
        handle.remove()
    assert lent == ["Block"] * 3 and seen == [16] * 2 * steps
    lent.clear()
    # which is known after the first backward pass
    assert_same(Counting(), updates, steps=0, args=(X,), optimizer="adamw")
    assert lent == ["Block"] * 3


def test_errors_are_those_of_a_run(updates):
    """What the optimizer itself refuses is raised from its own step, and what it warns of is not said twice."""
    call = {"args": (X,), "optimizer": lambda parameters: torch.optim.AdamW(parameters, differentiable=True)}
    texts = []
    for reuse in (False, True):
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad") as caught:
            profile(chain(), reuse=reuse, **call)
        texts.append(str(caught.value))
    assert texts[0] == texts[1] and updates == []


def test_parameters_with_names(updates):
    assert_same(chain(), updates, steps=2, args=(X, ),
                optimizer=lambda p: torch.optim.AdamW([(str(i), x) for i, x in enumerate(p)]))


def test_a_profile_that_nobody_reads_keeps_no_model_alive(updates):
    model = chain()
    alive = weakref.ref(model)
    found = profile(model, args=(X,), optimizer="adamw")
    del model
    gc.collect()
    assert alive() is None and updates == [0, 1]
    assert len(found.timeline) > 0


def test_signatures_of_other_runs_may_be_forgotten(updates, monkeypatch):
    """Between the sums of a profile and its rows."""
    monkeypatch.setattr("analyzer.replay.optimizer.list_call._MOST_DERIVED", 0)
    assert_same(chain(), updates, steps=2, args=(X,), optimizer="adamw")
