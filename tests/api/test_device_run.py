"""A step on several devices takes one run for all that it is the same for, with the figures of each alone."""
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import analyzer
import analyzer.api.model_run as one
from analyzer.api.device_run import profile_each
from analyzer.hardware import find_device
from analyzer.hardware.catalogue import Alike, asked, simulated_spec, simulating
from analyzer.meta.operator_info import Held, _join_memory

DEVICES = ("h100_sxm", "h100_pcie", "h200", "a100_80gb", "a100_40gb", "rtx_4090", "t4", "v100_sxm2_16gb", "mi300x",
           "m2_max", "cpu")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(256, 768), nn.Linear(256, 256), nn.LayerNorm(256)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, 64)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(1000, 256), nn.Sequential(*(Block() for _ in range(9)))

    def forward(self, ids):
        return F.cross_entropy(self.blocks(self.embedding(ids)).flatten(0, 1).float() @ self.embedding.weight.T,
                               ids.flatten())


def images():
    return nn.Sequential(nn.Conv2d(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 256, 3),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


class AsksCapability(nn.Linear):
    def forward(self, x):
        return super().forward(torch.cat([x, x]) if torch.cuda.get_device_capability() >= (9, 0) else x)


class AsksMemory(nn.Linear):
    def forward(self, x):
        return super().forward(x[: torch.cuda.mem_get_info()[1] >> 33])


IDS = torch.empty(4, 512, dtype=torch.int64, device="meta")
ROWS = torch.empty(8192, 256, device="meta")
STEPS = {
    "decoder": (Decoder, IDS, dict(optimizer="adamw")),
    "decoder in bfloat16": (Decoder, IDS, dict(optimizer="adamw", autocast=torch.bfloat16)),
    "images": (images, torch.empty(16, 3, 96, 96, device="meta"), dict(optimizer="sgd")),
    "inference": (images, torch.empty(16, 3, 96, 96, device="meta"), dict(mode="infer")),
    "recurrent": (lambda: nn.LSTM(64, 64, 2, dropout=0.1), torch.empty(32, 8, 64, device="meta"), {}),
}


def counted_runs(monkeypatch):
    runs, run = [], one.run_repeating
    monkeypatch.setattr(one, "run_repeating", lambda session, *rest: (runs.append(session.spec.name),
                                                                     run(session, *rest))[1])
    return runs


def read(profile):
    return json.loads(profile.to_json())


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", STEPS)
def test_each_device_has_the_figures_that_it_has_alone(name, monkeypatch):
    build, inputs, settings = STEPS[name]
    specs, model = [find_device(device) for device in DEVICES], build()
    runs = counted_runs(monkeypatch)
    found = dict(profile_each(specs, model, inputs, **settings))
    assert len(runs) < len(specs)
    for i, spec in enumerate(specs):
        assert read(found[i].profile) == read(analyzer.profile(model, inputs, device=spec, **settings)), spec.name


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name, settings, runs", [
    ("images", {}, ["h100_sxm", "mi300x", "m2_max", "cpu"]),  # with other products, and other devices
    ("inference", {}, ["h100_sxm", "mi300x", "m2_max", "cpu"]),
    ("images", dict(step=lambda model, optimizer, x: (model(x).sum().backward(), optimizer.step())),
     ["h100_sxm", "mi300x", "m2_max", "cpu"]),
    ("images", dict(reuse=False), ["h100_sxm", "h100_pcie", "a100_80gb", "rtx_4090", "t4", "mi300x", "m2_max", "cpu"])])
def test_devices_whose_workspaces_alone_differ_share_a_run(name, settings, runs, monkeypatch):
    build, inputs, usual = STEPS[name]
    specs, model, settings = [find_device(device) for device in DEVICES], build(), {**usual, **settings}
    taken = counted_runs(monkeypatch)
    found = dict(profile_each(specs, model, inputs, **settings))
    assert list(dict.fromkeys(taken)) == runs
    firsts = {found[i].first.device for i in range(5)}
    assert len(firsts) > 1  # a log for each kind of workspaces
    for i, spec in enumerate(specs[:8]):
        assert read(found[i].profile) == read(analyzer.profile(model, inputs, device=spec, **settings)), spec.name


def test_what_a_device_holds_is_told_at_its_place_among_what_another_holds():
    mine = (Held((64,), 0, True), Held((8, 8), 0), Held((4,))), None
    none = (Held((64,), 0, True),), None
    one_more = (Held((64,), 0, True), Held((16,), 0), Held((2,), 1), Held((4,))), None
    kept, two, order = ((Held((32,), 0, True),), None), ((Held((1,)), Held((1,))), None), (mine[0], (1, 0))
    joined, refused = _join_memory(mine, {"none": none, "one more": one_more, "kept": kept, "two": two, "order": order})
    assert refused == ["kept", "two", "order"]  # what is kept, which is which, what comes first
    assert joined == ((
        Held((64,), 0, True), Held((8, 8), 0, False, (("none", ()), ("one more", (16,)))),
        Held((), 1, False, (("one more", (2,)),)), Held((4,), None, False, (("none", ()),))), None)


@pytest.mark.parametrize("build", [AsksCapability, AsksMemory])
def test_code_that_asks_for_the_device_runs_for_each_answer(build, monkeypatch):
    model, specs = build(256, 256), [find_device(d) for d in ("h100_sxm", "h200", "a100_80gb", "a100_80gb_pcie")]
    runs = counted_runs(monkeypatch)
    found = dict(profile_each(specs, model, ROWS, mode="infer"))
    assert runs == (["h100_sxm", "a100_80gb"] if build is AsksCapability else [s.name for s in specs])
    for i, spec in enumerate(specs):
        alone = analyzer.profile(model, ROWS, mode="infer", device=spec)
        assert read(found[i].profile) == read(alone)


def test_a_device_with_too_little_for_the_cache_has_the_events_placed_again(monkeypatch):
    class Grows(nn.Module):
        def forward(self, x):  # what a smaller block leaves behind is cached
            for n in range(8, 20):
                y = x.new_empty((n << 28,), dtype=torch.uint8)
                del y
            return x

    model, specs = Grows(), [find_device(d) for d in ("l4", "a10", "a30", "h100_sxm", "h200")]
    runs = counted_runs(monkeypatch)
    found = dict(profile_each(specs, model, ROWS, mode="infer"))
    assert runs[0] == "l4" and runs.count("h200") == runs.count("a30") == 0
    for i, spec in enumerate(specs):
        assert read(found[i].profile) == read(analyzer.profile(model, ROWS, mode="infer", device=spec))
    assert "the allocator may take" in "".join(found[2].profile.assumptions)


def test_devices_are_alike_while_they_answer_alike():
    class_of = asked(lambda: simulated_spec().compute_capability[0])
    h100, h200, a100 = map(find_device, ("h100_sxm", "h200", "a100_80gb"))
    alike = Alike([h200, a100])
    with simulating(h100, alike):
        assert class_of() == 9
    assert alike.specs == [h200]
    with simulating(h100, alike):
        assert simulated_spec() == h100  # of which any figure may be read
    assert alike.specs == []


def test_compiled_code_is_compiled_for_each_device(monkeypatch):
    runs = counted_runs(monkeypatch)
    specs = [find_device(d) for d in ("h100_sxm", "h800")]
    found = dict(profile_each(specs, torch.compile(nn.Linear(256, 256)), ROWS, mode="infer"))
    assert runs == ["h100_sxm", "h800"] and found[1].profile.device == "h800"
