"""A few of alike blocks are run for all: every field is that of a run of all blocks, or the reason why not is told."""
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from analyzer import Profile, ProfileOptions, profile
from analyzer.hardware import DeviceSpec
from analyzer.replay.repeated_step import RepeatedStep
from tests.replay.block_model import CHECKPOINTED, Block, PostNorm, Recurrent, Stack, list_replayed

COUNT = 9  # blocks, of which five are not run
X = torch.ones(4, 16)


def accumulate(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """Two micro-batches, clipped gradients, one update."""
    for _ in range(2):
        model(x).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def clip(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    model(x).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def test_what_blocks_are_asked_is_no_part_of_the_step() -> None:
    found, run = profile_both(lambda: Stack(Recurrent(index) for index in range(COUNT)), step=None)
    assert not list_replayed(found)
    assert found == run


def profile_both(build: Callable[[], nn.Module], **settings: Any) -> tuple[Profile, Profile]:
    settings = {"args": (X,), "device": "h100", "optimizer": "adamw", "step": accumulate} | settings
    found, run = (profile(build(), reuse=reuse, **settings) for reuse in (True, False))
    return found, run


class Checkpointed(Stack):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__(Block() for _ in range(COUNT))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant, preserve_rng_state=False)
        return x


class Dropping(Block):
    """Its mask is drawn: dropout saves it for backward."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5)


class Two(nn.Module):
    """Two chains, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Stack(Block() for _ in range(COUNT)), Stack(Dropping() for _ in range(COUNT + 1))
        self.gate = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x) * self.gate(x)


@pytest.mark.sweep(7)
@pytest.mark.parametrize(("build", "skipped", "settings"), [
    (lambda: Stack(Block() for _ in range(COUNT)), 5, {}),
    (lambda: Stack(Block() for _ in range(COUNT)), 5, {"step": clip, "autocast": torch.bfloat16}),
    (lambda: Stack(Block(index) for index in range(COUNT)), 5, {}),  # in which nothing reads the index
    (lambda: Stack([*(Block() for _ in range(COUNT)), nn.Linear(16, 7)]), 5, {}),
    # blocks that take turns: nine groups of two, and eight of three with two blocks behind them
    (lambda: Stack(Block(factor=2 + index % 2) for index in range(2 * COUNT)), 10, {}),
    (lambda: Stack(Dropping() if index % 3 else Block() for index in range(26)), 12, {"mode": "infer", "step": None,
                                                                                      "optimizer": None}),
    (lambda: Stack(Dropping() if index % 3 else Block() for index in range(26)), 12, {"autocast": torch.bfloat16,
                                                                                      "step": clip}),
    (lambda: Stack(Dropping() for _ in range(COUNT)), 5, {"optimizer": "adamw_fused"}),
    (lambda: Checkpointed(False), CHECKPOINTED, {}),
    (lambda: nn.Sequential(nn.Linear(16, 16), Checkpointed(True)), 5, {}),
    (Two, 11, {}),
    (lambda: Stack(Block() for _ in range(COUNT)), 5,
     {"step": None, "options": ProfileOptions(capacity_bytes=1 << 30)}),
    (lambda: Stack(Block() for _ in range(COUNT)), 5,
     {"step": None, "mode": "infer", "optimizer": None, "options": ProfileOptions(capacity_bytes=1 << 30)}),
    (lambda: Stack(Block() for _ in range(COUNT)), 5,
     {"step": None, "options": ProfileOptions(set_to_none=False)}),
])
def test_all_blocks_are_told_by_a_few(build, skipped, settings):
    found, run = profile_both(build, **settings)
    assert len(list_replayed(found)) == skipped, found.replay.explain()
    assert not list_replayed(run) and found == run


def test_a_second_step_is_repeated_though_blocks_differ_in_what_none_reads():
    """Attributes in which they differ are watched while a few blocks run: no change that the step makes."""
    found, run = profile_both(lambda: Stack(Block(index) for index in range(COUNT)), step=None,
                              options=ProfileOptions(capacity_bytes=1 << 30))
    assert list_replayed(found, "step") and found == run


class Reading(Block):
    """Reads in what it differs."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.index < 5 else super().forward(x).relu()


class Collecting(Stack):
    """Keeps what each block gives."""

    def forward(self, x: Tensor) -> Tensor:
        outputs = [x]
        for block in self.blocks:
            outputs.append(block(outputs[-1]))
        return torch.stack(outputs[1:]).sum(0)


class Between(Stack):
    """Does something between the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).sigmoid()
        return x


class Drawing(Stack):
    """Draws a number before each block, as models with LayerDrop do."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            drawn = torch.rand([])
            if drawn >= 0.0:
                x = block(x)
        return x


class Noting(Stack):
    """Looks at what some of the blocks give."""

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == 4:
                x.detach().mean()
        return x


class Penalized(Stack):
    """Collects a loss of each block."""

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor | float = 0.0
        for block in self.blocks:
            x = block(x)
            loss = loss + x.square().mean()
        return x.sum() + loss


class Calling(Block):
    """Calls a layer of the model beside its own."""

    shared: tuple[nn.Module, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.shared[0](x))


class Sharing(Stack):
    """Has one frozen layer that all blocks call."""

    def __init__(self, recomputes: bool = False) -> None:
        blocks = [Calling() for _ in range(COUNT)]
        super().__init__(blocks)
        self.recomputes, self.layer = recomputes, nn.Linear(16, 16).requires_grad_(False)
        for block in blocks:
            block.shared = (self.layer,)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return x


class Backwards(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


class Skipping(Stack):
    """Does not call its last blocks."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[:5]:
            x = block(x)
        return x


class Told(Block):
    """Does what it is told."""

    def forward(self, x: Tensor, rectifies: bool = False) -> Tensor:
        return super().forward(x).relu() if rectifies else super().forward(x)


class Telling(Stack):
    """Calls one block in the middle otherwise, with a flag or with a mask of another shape."""

    def __init__(self, told: str) -> None:
        super().__init__((Told if told == "flag" else Shared)() for _ in range(COUNT))
        self.told = told
        self.masks = nn.ParameterList(torch.ones(shape) for shape in ((4, 16), (16,)))

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x, i == 4) if self.told == "flag" else block(x, self.masks[i == 4])[0]
        return x


@pytest.mark.parametrize(("build", "reason"), [
    (lambda: Telling("flag"), "its blocks are called with other arguments"),
    (lambda: Telling("mask"), "its blocks are called with other arguments"),
    (lambda: Stack(Reading(index) for index in range(COUNT)), "its blocks read index, in which they differ"),
    (lambda: Collecting(Block() for _ in range(COUNT)), "its blocks differ in the operators that they call"),
    (lambda: Between(Block() for _ in range(COUNT)), "a block is not given what the one before it gave"),
    (lambda: Backwards(Block() for _ in range(COUNT)), "its blocks are not called in order"),
    (lambda: PostNorm(Block() for _ in range(COUNT)), "a block is not given what the one before it gave"),
    (lambda: Skipping(Block() for _ in range(COUNT)), "something else runs between blocks that are skipped"),
    (lambda: Sharing(recomputes=True), "its blocks call layer, which is outside of them, more than in forward"),
    (lambda: Noting(Block() for _ in range(COUNT)), "something else runs between blocks that are skipped"),
    (lambda: Penalized(Block() for _ in range(COUNT)), "something with a gradient is made between blocks that are "
                                                       "skipped"),
])
def test_blocks_that_do_not_tell_the_others_are_run_aloud(build, reason):
    found, run = profile_both(build)
    assert not list_replayed(found) and found == run
    assert reason in [row.reason for row in found.replay], found.replay.explain()


def test_a_layer_that_all_blocks_call_is_called_by_each():
    """Each call of a module takes the host some time."""
    found, run = profile_both(Sharing, step=None)
    assert found == run and len(list_replayed(found)) == COUNT - 4
    assert next(row for row in found.modules.walk() if row.path == "layer").calls == COUNT  # of the described step


def test_what_is_drawn_between_blocks_is_drawn_for_each():
    """Nothing is drawn behind the last block, whose lap ends with it."""
    found, run = profile_both(lambda: Drawing(Block() for _ in range(COUNT)))
    assert found == run and len(list_replayed(found)) == COUNT - 4


class Choosing(Block):
    """One in the middle of others does something else, where they read in what they differ."""

    def __init__(self, index: int, reads: bool) -> None:
        super().__init__(index)
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x.relu() if self.reads and self.index == 4 else x


def test_a_chain_that_reads_in_what_its_blocks_differ_runs_and_others_are_repeated():
    """Both chains are of one class. Reads are met before a block is skipped, so nothing runs a second time."""
    found, run = profile_both(lambda: nn.Sequential(
        Stack(Choosing(index, reads=False) for index in range(COUNT)),
        Stack(Choosing(index, reads=True) for index in range(COUNT))))
    assert found == run
    assert [row.path for row in list_replayed(found)] == [f"0.blocks.{i}" for i in range(2, COUNT - 2)]
    assert [row.path for row in found.replay if row.reason == "its blocks read index, in which they differ"] == [
        f"1.blocks.{i}" for i in range(COUNT)]


def test_why_a_chain_is_run_is_told_where_another_makes_the_run_begin_again():
    """The blocks of the second differ in what they hold, so more of them are run at each end, in a second run."""
    found, run = profile_both(lambda: nn.Sequential(
        Stack(Choosing(index, reads=True) for index in range(COUNT)), Keeping(Block() for _ in range(COUNT))),
        step=None, mode="infer", optimizer=None)
    assert found == run
    assert [row.path for row in list_replayed(found)] == [f"1.blocks.{i}" for i in range(3, COUNT - 4)]
    assert [row.path for row in found.replay if row.reason == "its blocks read index, in which they differ"] == [
        f"0.blocks.{i}" for i in range(COUNT)]


class Freezing(Block):
    """Freezes one of its layers where it runs."""

    def forward(self, x: Tensor) -> Tensor:
        self.up.requires_grad_(False)
        return super().forward(x)


def test_blocks_that_freeze_themselves_are_run():
    found, run = profile_both(lambda: Stack(Freezing() for _ in range(COUNT)), step=None, mode="infer", optimizer=None)
    assert found == run and not list_replayed(found)
    assert "its blocks change requires_grad of a parameter" in [row.reason for row in found.replay]


class Keeping(Stack):
    """Holds what its first block gives until the end."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        x = first
        for block in self.blocks[1:]:
            x = block(x)
        return x * first


class Shared(Block):
    """The first of them makes a mask, which all read, and more than the others do."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if mask is None:
            mask = (x.exp() > 0.5).float()
        return super().forward(x) * mask, mask


class Handing(Stack):
    def forward(self, x: Tensor) -> Tensor:
        mask = None
        for block in self.blocks:
            x, mask = block(x, mask)
        return x


class Biased(Stack):
    """All blocks read what was made before them."""

    def forward(self, x: Tensor) -> Tensor:
        mask = (x.exp() > 0.5).float()
        for block in self.blocks:
            x, _ = block(x, mask)
        return x


class Turns(Stack):
    """Its blocks take turns, by what no block has."""

    def __init__(self, period: int) -> None:
        super().__init__(Block() for _ in range(12))
        self.period = period

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x) if i % self.period == 1 else block(x.reshape(2, 2, 16)).reshape(4, 16)
        return x


@pytest.mark.parametrize("period", [2, 3, 9])
def test_blocks_that_take_turns_are_run(period):
    found, run = profile_both(lambda: Turns(period), step=None)
    assert found == run and not list_replayed(found)


class Frozen(Stack):
    """Its input has no gradient: the backward pass of the first block makes less."""

    def __init__(self) -> None:
        super().__init__(Block() for _ in range(COUNT))
        for block in self.blocks:
            block.up.requires_grad_(False)


@pytest.mark.parametrize(("build", "run_at_ends", "settings"), [
    (lambda: Handing(Shared() for _ in range(COUNT)), 5, {}),
    (lambda: Handing(Shared() for _ in range(COUNT)), 5, {"step": None}),
    (lambda: Biased(Shared() for _ in range(COUNT)), 4, {}),
    (Frozen, 4, {}),
    (lambda: Keeping(Block() for _ in range(COUNT)), 7, {"step": None, "mode": "infer", "optimizer": None}),
])
def test_blocks_at_the_ends_may_do_otherwise(build, run_at_ends, settings):
    """Of what a first block makes the others see their own, or all see one thing. Where the second block calls other
    operators than the first, the third is run too; where they differ in what they hold, three are run before and four
    behind.
    """
    found, run = profile_both(build, **settings)
    assert found == run and len(list_replayed(found)) == COUNT - run_at_ends, found.replay.explain()


def test_memory_that_runs_out_is_found_where_it_runs_out():
    """The five blocks that are not run are what is too much."""
    options = ProfileOptions(capacity_bytes=23 << 20)
    x = torch.ones(1 << 14, 16)
    found, run = (profile(Stack(Block() for _ in range(30)), x, device="h100", options=options, reuse=reuse)
                  for reuse in (True, False))
    assert run.out_of_memory is not None and found == run


class Wide(Stack):
    """Of which the allocator caches more than it needs."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)) for _ in range(COUNT))
        self.head = nn.Linear(256, 5000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(super().forward(x)).double().log_softmax(-1)


def test_a_step_that_reserves_too_much_is_placed_again_and_not_run_again(monkeypatch):
    settings: dict[str, Any] = {"args": (torch.empty(20_000, 256),), "optimizer": "adamw"}
    runs: list[str] = []

    def count(self: RepeatedStep) -> None:
        runs.append(self.recorder.log.device)
        run(self)

    run = RepeatedStep.run
    monkeypatch.setattr(RepeatedStep, "run", count)
    unlimited = profile(Wide, device=DeviceSpec("large", memory_bytes=10**12), **settings)
    assert unlimited.peak_allocated_bytes is not None and unlimited.peak_reserved_bytes is not None
    enough = unlimited.peak_reserved_bytes - (32 << 20)
    card = DeviceSpec("card", memory_bytes=enough)
    found, whole = (profile(Wide, device=card, reuse=reuse, **settings) for reuse in (True, False))
    assert len(runs) == 2  # of the large device and of the card
    assert found == whole and found.peak_allocated_bytes == unlimited.peak_allocated_bytes
    assert found.peak_reserved_bytes is not None and found.peak_reserved_bytes <= enough
    assert "the allocator may take" in " ".join(found.assumptions) and list_replayed(found)
    few = DeviceSpec("few", memory_bytes=enough - (64 << 20))  # what is free lies in pieces
    assert few.memory_bytes is not None and few.memory_bytes > unlimited.peak_allocated_bytes
    found, whole = (profile(Wide, device=few, reuse=reuse, **settings) for reuse in (True, False))
    assert found == whole and found.peak_reserved_bytes == unlimited.peak_reserved_bytes


def test_the_model_is_as_it_was():
    model = Stack(Block(index) for index in range(COUNT))
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    attributes = set(vars(Block))
    profile_both(lambda: model)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert set(vars(Block)) == attributes and all(p.grad is None for p in model.parameters())


def test_an_error_of_the_model_is_its_own():
    class Failing(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) @ x

    with pytest.raises(RuntimeError, match="must have same reduction dim"):
        profile(Failing(Block() for _ in range(COUNT)), X, step=accumulate, optimizer="sgd")


class Count(torch.autograd.Function):
    """Counts its backward passes in what it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: SimpleNamespace) -> Tensor:
        ctx.kept = kept
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.kept.count += 1
        return gradient, None


class Held(Block):
    """Keeps what all blocks and the model have, and does with it what its name says."""

    def __init__(self, kept: SimpleNamespace, index: int) -> None:
        super().__init__(index)
        self.kept = kept

    def forward(self, x: Tensor) -> Tensor:
        if self.kept.by == "block":
            self.kept.count += 1
        x = Count.apply(x, self.kept) if self.kept.by == "backward" else x
        return super().forward(x).relu() if self.kept.problem else super().forward(x)


class Labelled(Stack):
    """Notes in its first call which loss it takes, as classifiers of transformers do in their config."""

    def __init__(self, by: str) -> None:
        self.kept = SimpleNamespace(by=by, count=0, problem=None)
        super().__init__(Held(self.kept, index) for index in range(COUNT))
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            self.kept.count += self.kept.by == "between"
        self.kept.problem = "regression"
        return self.norm(x)


_calls = {"counted": 0}


class Counting(Block):
    """Counts its calls where no module holds the number; every ninth of them does something else."""

    def forward(self, x: Tensor) -> Tensor:
        _calls["counted"] += 1
        return super().forward(x).relu() if _calls["counted"] % COUNT == 5 else super().forward(x)


class Choice(Block):
    """Draws whether it does something else from Python's own generator."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu() if random.random() < 0.1 else super().forward(x)


@pytest.mark.parametrize(("block", "reason"), [
    (Counting, "its blocks change an attribute of a module or an item of a dictionary"),
    (Choice, "its blocks change the host's generators of random numbers")])
def test_blocks_that_change_what_others_find_are_run(block, reason):
    random.seed(1)
    found, run = profile_both(lambda: Stack(block() for _ in range(COUNT)), step=None, mode="infer", optimizer=None)
    assert not list_replayed(found) and reason in [row.reason for row in found.replay]
    assert block is Choice or found == run


@pytest.mark.parametrize("step", [None, accumulate])
@pytest.mark.parametrize(("by", "skipped"), [("model", COUNT - 4), ("between", 0), ("block", 0), ("backward", 0)])
def test_what_the_model_changes_behind_its_blocks_lets_them_be_repeated(by, skipped, step):
    """A second pass finds it changed; blocks that change it run, also where they do so in their backward pass."""
    found, run = profile_both(lambda: Labelled(by), step=step)
    assert found == run and len(list_replayed(found)) == skipped, found.replay.explain()


class Optional(nn.Module):
    """Has a layer that runs, or none, and one that does not run."""

    def __init__(self, has_layer):
        super().__init__()
        self.unused, self.layer = nn.Linear(16, 16), nn.Linear(16, 16) if has_layer else None

    def forward(self, x):
        return x if self.layer is None else self.layer(x)


class Grouped(nn.Module):
    """Blocks of which one of three has less, checkpointed two by two: every second group of three is called alike."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Optional(i % 3) for i in range(27))

    def forward(self, x):
        def run(first, x):
            for block in self.blocks[first:first + 2]:
                x = block(x)
            return x

        for first in range(0, 27, 2):
            x = checkpoint(run, first, x, use_reentrant=False)
        return x


def test_neighbours_that_are_called_in_turns_are_not_alike():
    found, run = (profile(Grouped(), args=(torch.rand(2, 4, 16),), optimizer="sgd", autocast=torch.bfloat16,
                          reuse=reuse) for reuse in (True, False))
    assert found == run


BACKWARDS = [0]


class CountsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        BACKWARDS[0] += 1
        return grad * 2 if BACKWARDS[0] % 2 else grad.relu() * 2


count_backward = CountsBackward.apply


class Counting(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))

    def forward(self, x):
        for block in self.blocks:
            x = count_backward(block(x))
        return x


@pytest.mark.parametrize("count", [1, 2, 9])
def test_what_a_custom_function_counts_in_its_backward_is_met(count):
    """Of an odd count every second step does otherwise; the function is reached by its ``apply`` alone."""
    found = []
    for reuse in (True, False):
        BACKWARDS[0] = 0
        found.append(profile(Counting(count), args=(torch.rand(4, 8),), optimizer="sgd", reuse=reuse))
    assert found[0] == found[1]


class StepsBetween(Counting):
    """Runs a backward pass of its own after the third of its layers."""

    def forward(self, x):
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 2:
                x.sum().backward()
                x = x.detach()
        return x


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_backward_pass_between_blocks_is_run(autocast):
    found, run = (profile(StepsBetween(COUNT), args=(torch.rand(4, 8),), optimizer="sgd", autocast=autocast,
                          reuse=reuse) for reuse in (True, False))
    assert found == run and not list_replayed(found)
