"""What to change so that a step fits: every figure is that of a profile, and the changes are those that help."""
import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from analyzer import Advice, Profile, advise, profile
from analyzer.cli import main
from analyzer.errors import InputError
from analyzer.hardware import DeviceSpec, find_device
from analyzer.hardware.unseen import list_unseen
from analyzer.recipe import LoraSpec, Recipe
from analyzer.results.node_info import TensorInfo
from analyzer.results.verdict import AdviceOption
from analyzer.tools.advice import search
from analyzer.tools.advice.variant import Trial, _write_inputs, list_changes

WIDTH, DEPTH = 512, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        return x + self.inner(x)


def make() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(DEPTH)), nn.Linear(WIDTH, 10))


def device(mebibytes: float) -> DeviceSpec:
    """A T4 of another size, which takes nothing outside the allocator."""
    return replace(find_device("t4"), name="small", memory_bytes=int(mebibytes * 2**20), aliases=())


X = torch.empty(8192, WIDTH, device="meta")


@pytest.fixture(scope="module")
def advice() -> Advice:
    need = profile(make, X, optimizer="adamw", device="t4").verdict.needed_bytes / 2**20
    return advise(make, X, optimizer="adamw", device=device(0.7 * need))


def test_each_option_is_a_profile(advice):
    by_name = {option.name: option for option in advice.options}
    spec = device(advice.capacity_bytes / 2**20)
    for name, recipe in [("checkpointing", Recipe(checkpointing=True, optimizer="adamw")),
                         ("8-bit AdamW", Recipe(optimizer="adamw8bit")),
                         ("LoRA r=16", Recipe(lora=LoraSpec(16), optimizer="adamw"))]:
        p = profile(partial(recipe.build, make), X, device=spec, optimizer=recipe.optimizer)
        option = by_name[name]
        fit = p.fits(spec)
        assert (option.needed_bytes, option.fits, option.step_seconds) == (
            fit.needed_bytes, fit.fits, p.step_seconds), name


def test_micro_batches_take_the_time_of_all(advice):
    option = next(option for option in advice.options if "micro-batches" in option.name)
    parts = int(option.name.split()[0])
    recipe = Recipe(optimizer="adamw", accumulate=parts)
    spec = device(advice.capacity_bytes / 2**20)
    p = profile(make, X[:len(X) // parts].clone(), device=spec, **recipe.profile_options("train"))
    # the sum of one is not divided, and a part's launches do not hide behind the part before it
    assert option.step_seconds == pytest.approx(p.step_seconds, rel=1e-3)
    assert option.peak_allocated_bytes == p.peak_allocated_bytes


def test_the_cheapest_fit_and_come_first(advice):
    assert advice.baseline.fits is False and 1 <= len(advice.cheapest) <= 3
    assert all(option.fits for option in advice.cheapest)
    fits = [bool(option.fits) for option in advice.options]
    assert fits == sorted(fits, reverse=True)
    same = [option.keeps_result for option in advice.options if option.fits]
    assert same == sorted(same, reverse=True)


def test_combinations_are_tried_until_some_fit():
    """A device that no change alone suffices for; each combination needs all of its changes."""
    alone = advise(make, X[:1024], optimizer="adamw", device=device(64), quick=True)
    least = min(option.needed_bytes for option in alone.options if len(option.changes) == 1)
    found = advise(make, X[:1024], optimizer="adamw", device=device(0.99 * least / 2**20))
    combined = [option for option in found.options if option.fits]
    assert combined and all(len(option.changes) > 1 for option in combined)
    for one in combined:
        assert not any(set(other.changes) < set(one.changes) for other in combined)


def test_what_saves_nothing_alone_is_tried_beside_what_lowers_the_highest_peak():
    """The optimizer's states are most of a step of few tokens: checkpoints save 2 %, and more beside adapters."""
    def build() -> nn.Module:
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True), 6)

    found = advise(build, torch.empty(1, 512, 512, device="meta"), optimizer="adamw", device=device(640))
    options = {option.changes: option for option in found.options}
    assert options[("checkpointing",)].needed_bytes > 0.95 * found.baseline.needed_bytes
    fitting, = [option for option in found.options if option.fits]
    assert "checkpointing" in fitting.changes and "QLoRA r=16" in fitting.changes


@pytest.mark.parametrize(("name", "precisions"), [
    ("t4", {"autocast fp16"}), ("a100", {"autocast bf16", "bf16 parameters"})])
def test_formats_are_those_of_the_device(name, precisions):
    options = advise(make, X[:64], optimizer="adamw", device=name).options
    every = {change for option in options for change in option.changes}
    assert {change for change in every if "bf16" in change or "fp16" in change} == precisions


class UNet(nn.Module):
    """In three dimensions, as small as it can be: no block is repeated, and values pass over those between."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(self.block(*sizes) for sizes in ((1, 16), (16, 32), (32, 64)))
        self.up = nn.ModuleList(self.block(*sizes) for sizes in ((96, 32), (48, 16)))

    @staticmethod
    def block(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv3d(inputs, outputs, 3, padding=1), nn.InstanceNorm3d(outputs), nn.LeakyReLU())

    def forward(self, x):
        first = self.down[0](x)
        second = self.down[1](nn.functional.max_pool3d(first, 2))
        x = nn.functional.interpolate(self.down[2](nn.functional.max_pool3d(second, 2)), scale_factor=2)
        x = nn.functional.interpolate(self.up[0](torch.cat((x, second), 1)), scale_factor=2)
        return self.up[1](torch.cat((x, first), 1))


@pytest.mark.parametrize("share", [0.65, 0.5])
def test_a_model_of_no_repeated_block_has_a_plan(share):
    volume = torch.empty(2, 1, 64, 64, 64, device="meta")
    now = profile(UNet, volume, optimizer="adamw", device="t4")
    spared = (1 - share) * now.peak_allocated_bytes
    found = advise(UNet, volume, optimizer="adamw", device=device((now.verdict.needed_bytes - spared) / 2**20))
    option = next(option for option in found.options if option.name == "planned checkpointing")
    assert option.fits and option.keeps_result and "operator" in option.flags
    assert any(name == "checkpointing" for name, _ in found.skipped)


def test_a_step_that_fits_is_not_combined():
    found = advise(make, X, optimizer="adamw", device="h200")
    assert found.baseline.fits and all(len(option.changes) == 1 for option in found.options)


def test_the_model_stays_as_it_is():
    model = make()
    before = {name: p.clone() for name, p in model.named_parameters()}
    x = torch.rand(16, WIDTH)
    state = torch.get_rng_state()
    advise(model, x, optimizer="adamw", device="t4")
    advise(lambda: model, x, optimizer="adamw", device="t4")
    assert torch.equal(torch.get_rng_state(), state)
    assert type(model[0]) is Block and model[0].inner[0].weight.requires_grad
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())
    assert model[0].forward.__func__ is Block.forward


def test_batch_norm_sees_other_batches():
    model = partial(nn.Sequential, nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    found = advise(model, torch.empty(64, 8, device="meta"), device="t4")
    option = next(option for option in found.options if "micro-batches" in option.name)
    assert option.keeps_result is False


def test_inference():
    found = advise(make, torch.empty(64, WIDTH, device="meta"), mode="infer", device="h200")
    names = [option.name for option in found.options]
    assert {"fp8 weights", "int8 weights", "2 passes of 32", "bf16 parameters"} <= set(names)
    assert not any("checkpointing" in name or "Adam" in name for name in names)


def test_what_a_model_cannot_take_is_told():
    found = advise(nn.ReLU, torch.empty(4, 4, device="meta"), mode="infer", device="t4")
    assert ("fp8 weights", "quantize='fp8': ReLU has no linear layers besides its head") in found.skipped
    assert "not tried:\n  fp8 weights: quantize='fp8'" in str(found)


def test_a_profile_advises_on_its_step():
    model = make()
    p = profile(model, X, optimizer="adamw", device="h200")
    found = p.advise("t4")
    direct = advise(model, X, optimizer="adamw", device="t4")
    assert found.device == "t4" and [o.name for o in found.options] == [o.name for o in direct.options]
    assert found.baseline == direct.baseline


@pytest.mark.parametrize("forget", [lambda p: Profile.from_json(p.to_json()), lambda p: pickle.loads(pickle.dumps(p))])
def test_a_profile_that_was_read_knows_no_model(forget):
    p = forget(profile(make, X[:4], device="t4"))
    with pytest.raises(InputError, match=r"advise\(\): Sequential: only `analyzer.profile` knows the model"):
        p.advise()


def test_a_model_that_is_gone_cannot_be_tried():
    p = profile(make(), X[:4], device="t4")
    with pytest.raises(InputError, match=r"advise\(\): Sequential: the model is gone; keep it, or call"):
        p.advise()


def test_an_own_step_is_refused():
    with pytest.raises(InputError, match="a step of your own cannot be changed"):
        profile(make, X[:4], step=lambda model, optimizer, x: model(x).sum().backward(), device="t4").advise()


def test_text():
    advice = Advice("Net: one train step", "t4", 2**34, AdviceOption((), False, 2**35, 2**35, 2.0), (
        AdviceOption(("checkpointing",), True, 2**33, 2**33, 3.0, True, "--checkpointing"),
        AdviceOption(("AdamW on the host",), True, 2**33, 2**33, None, True, "--optimizer adamw_offloaded"),
        AdviceOption(("SGD",), False, 2**34 + 1, 2**34, 1.0, False, "--optimizer sgd")))
    assert str(advice) == """\
Net: one train step
on t4 (16.00 GiB)

Change             Fits       Needed    vs now    Step    vs now  Same result
-----------------  ------  ---------  --------  ------  --------  -------------
as it is           no      32.00 GiB            2.00 s            yes
checkpointing      yes      8.00 GiB     -75 %  3.00 s     1.50x  yes
AdamW on the host  yes      8.00 GiB     -75 %       -            yes
SGD                no      16.00 GiB     -50 %  1.00 s     0.50x  no

the two cheapest changes with which it fits on t4:
1. checkpointing: 8.00 GiB needed, 3.00 s a step
   --checkpointing
2. AdamW on the host: 8.00 GiB needed, time not known
   --optimizer adamw_offloaded"""


def test_command(capsys):
    words = ["advise", "resnet18", "--input", "4x3x64x64", "--device", "t4"]
    assert main([*words, "--optimizer", "adamw"]) == 0
    out = capsys.readouterr().out
    assert "Same result" in out and "it fits on t4 as it is" in out
    assert main([*words, "--mode", "infer", "--format", "csv"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "Change,Fits,Needed,vs now,Step,vs now,Same result"


def test_a_profile_that_does_not_fit_ends_with_changes(capsys):
    assert main(["profile", "gpt2", "--input", "input_ids=int64:16x1024", "--optimizer", "adamw", "--device", "t4",
                 "--show", "summary"]) == 3
    out, err = capsys.readouterr()
    assert "does NOT fit on t4" in out and "\nto fit on t4: checkpointing: " in out.split("\n\n")[-1]
    assert out.endswith("others: `analyzer advise` with the same options\n")


def test_without_advice_a_profile_ends_with_its_verdict(capsys, monkeypatch):
    monkeypatch.setattr(search, "advise", None)  # which would fail
    assert main(["profile", "gpt2", "--input", "input_ids=int64:16x1024", "--optimizer", "adamw", "--device", "t4",
                 "--no-advice"]) == 3
    assert "to fit on" not in capsys.readouterr().out


def counted(monkeypatch):
    runs, run = [], Trial.run
    monkeypatch.setattr(Trial, "run", lambda trial, variant, **how: (
        runs.append(" + ".join(change.name for change in variant.changes)), run(trial, variant, **how))[1])
    return runs


def test_a_quick_search_ends_at_the_first_change_that_fits(monkeypatch):
    base = profile(make, X, optimizer="adamw", device="t4")
    runs = counted(monkeypatch)
    found = advise(make, X, optimizer="adamw", device=device(0.7 * base.verdict.needed_bytes / 2**20), quick=True,
                   baseline=base)
    assert runs[-1] == found.cheapest[0].name == "checkpointing" and found.cheapest[0].keeps_result
    assert "" not in runs and len(runs) <= 3  # the step as it is was profiled before


def test_a_quick_search_leaves_out_what_cannot_do(monkeypatch):
    # weights and Adam's two states alone are more: what saves activations is tried with what makes them smaller
    base = profile(make, X[:256], optimizer="adamw", device="t4")
    outside = sum(unseen.bytes or 0 for unseen in list_unseen(device(1)))
    less = (base.param_bytes + base.optimizer_bytes + outside) / 2**20 - 1
    runs = counted(monkeypatch)
    found = advise(make, X[:256], optimizer="adamw", device=device(less), quick=True, baseline=base)
    assert "checkpointing" not in runs and found.cheapest and runs[-1] == found.cheapest[0].name


def test_a_quick_search_adds_changes_up(monkeypatch):
    model = partial(Recipe(lora=LoraSpec(16)).build, make)
    base = profile(model, X, optimizer="adamw", device="t4")
    less = base.param_bytes / 2**20  # of all needed, activations are most
    runs = counted(monkeypatch)
    found = advise(make, X, optimizer="adamw", device=device(1.6 * less), quick=True, recipe=Recipe(
        lora=LoraSpec(16)), baseline=base)
    if found.cheapest:
        assert runs[-1] == found.cheapest[0].name
    assert len(runs) <= 9 and any("nf4 weights" in run for run in runs)


def test_the_largest_parts_that_fit_are_found_by_the_smallest_first(monkeypatch):
    base = profile(make, X, optimizer="sgd", device="t4")
    monkeypatch.setattr(search, "list_changes", lambda *given: [
        change for change in list_changes(*given) if change.axis == "batch"])
    runs = counted(monkeypatch)
    found = advise(make, X, optimizer="sgd", device=device(0.7 * base.verdict.needed_bytes / 2**20), quick=True,
                   baseline=base)
    assert runs[0] == "8192 micro-batches of 1" and runs[-1] == found.cheapest[0].name
    assert list(dict.fromkeys(runs)) == ["8192 micro-batches of 1", "2 micro-batches of 4096",
                                         "4 micro-batches of 2048"]
    assert runs.count("2 micro-batches of 4096") == 1  # a step that does not fit is not timed


class Detector(nn.Module):
    """Takes images and targets as lists, and lets the targets decide what it costs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.box = nn.Conv2d(3, 8, 3), nn.Linear(4, 512)

    def forward(self, images, targets=None, sizes=None):
        seen = self.conv(torch.stack(images) if isinstance(images, list) else images)
        boxes = [self.box(t if isinstance(t, torch.Tensor) else t["boxes"]).relu() for t in targets or ()]
        return seen.relu().mean() + sum(box.mean() for box in boxes)


IMAGES = [torch.empty(3, 64, 64, device="meta") for _ in range(4)]


@pytest.mark.parametrize("take", [lambda n, boxes: (IMAGES[:n], [{"boxes": b} for b in boxes[:n]]),
                                  lambda n, boxes: (torch.stack(IMAGES[:n]), tuple([{"boxes": b} for b in boxes[:n]])),
                                  lambda n, boxes: (IMAGES[:n], boxes[:n])],
                         ids=["lists", "a tuple of targets", "tensors"])
@pytest.mark.parametrize("objects", [4, 100])
def test_lists_of_samples_are_cut_with_the_batch(take, objects):
    boxes = [torch.empty(objects, 4, device="meta") for _ in range(4)]
    args = take(4, boxes)
    found = advise(Detector, args, device="t4")
    if objects == 4 and isinstance(args[1][0], torch.Tensor):  # as many boxes as images: either may be the batch
        assert "argument 2: whether a list of 4 has one item of each of the 4 samples" in dict(found.skipped)[
            "2 micro-batches of 2"]
        return
    option = next(option for option in found.options if option.name == "2 micro-batches of 2")
    part = profile(Detector, take(2, boxes), device="t4", **Recipe(accumulate=2).profile_options("train"))
    assert option.peak_allocated_bytes == part.peak_allocated_bytes
    assert profile(Detector, args).batch_size == 4


def test_a_list_that_may_be_features_says_so():
    found = advise(Detector, (IMAGES, ), device="t4")
    assert dict(found.skipped)["smaller batches"] == "it is not known how many samples the inputs hold"
    assert found.assumptions[-1].endswith(
        "whether each tensor of the list of inputs is a sample, or has a row of each, is not known (3 or 4)")
    found = advise(Detector, (IMAGES, [{"boxes": torch.empty(9, 4)}] * 4), {"sizes": [64, 64, 64, 64]}, device="t4")
    assert "sizes: whether a list of 4" in dict(found.skipped)["2 micro-batches of 2"]


def test_a_model_keeps_tensors_that_are_no_parameters():
    model = Detector()
    model.anchors = [torch.ones(3)]
    assert advise(model, (torch.stack(IMAGES), ), device="t4").baseline.fits and model.anchors[0].tolist() == [1, 1, 1]


@pytest.mark.parametrize(("inputs", "flags"), [
    ({"ids": ((8, 16), "int64"), "scale": ((16,), "float32")}, "--input ids=int64:4x16 --input scale=float32:16"),
    ({"x": ((8, 3, 9, 9), "bfloat16"), "t": ((), "int64")}, "--input x=bfloat16:4x3x9x9 --input t=int64:scalar"),
    ({"boxes[0]": ((8, 4), "float32")}, "(--input with a batch of 4)"),
])
def test_the_inputs_of_a_part_can_be_pasted(inputs, flags):
    infos = {name: TensorInfo(shape, dtype, "cpu") for name, (shape, dtype) in inputs.items()}
    assert _write_inputs(Profile(name="demo", mode="train", batch_size=8, inputs=infos), 4) == flags
