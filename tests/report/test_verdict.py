"""The verdict: whether it fits, where the peak is, which devices would hold it, and its few lines."""
from dataclasses import replace

import pytest
import torch
from torch import nn

import analyzer
from analyzer import Profile, ProfileOptions, profile
from analyzer.errors import InputError, UnknownDeviceError
from analyzer.hardware import DeviceSpec, find_device, register_device
from analyzer.report.holder_group import group_holders
from analyzer.report.verdict import find_peak
from analyzer.results.info import TimelinePoint

GIB, MIB = 2**30, 2**20


@pytest.fixture
def card():
    """A device of 8 GiB in the catalogue, of which nothing outside the allocator is known."""
    with register_device.scope():
        yield register_device(DeviceSpec("card", memory_bytes=8 * GIB))


def test_the_smallest_devices_come_first(bare):
    assert bare.verdict is None and "fits" not in repr(bare)
    v = replace(bare, device="t4", peak_reserved_bytes=20 * GIB).verdict
    sizes = [find_device(name).memory_bytes for name in v.devices]
    others = sorted(spec.memory_bytes for spec in register_device
                    if replace(bare, peak_reserved_bytes=20 * GIB).fits(spec).fits)
    assert len(v.devices) == 3 and sizes == others[:3]
    assert replace(bare, device="t4", peak_reserved_bytes=10**6 * GIB).verdict.devices == ()


def test_where_the_peak_is(mlp):
    # the highest point of the timeline, 12,288 bytes, is that of "backward of fc2", which is no node of the table
    v = mlp.verdict
    assert (v.phase, v.operator, v.node, v.module_path) == ("backward", "backward of fc2", None, None)
    timeline = (*mlp.timeline, TimelinePoint("fc1", 20000, "forward", 2097152, operator="aten.addmm"))
    v = replace(mlp, timeline=timeline, peak_allocated_bytes=20000).verdict
    assert (v.phase, v.operator, v.node, v.module_path) == ("forward", "aten.addmm", "fc1", "body.0")
    # without points: the phase whose peak is the whole step's
    assert (replace(mlp, timeline=()).verdict.phase, replace(mlp, timeline=()).verdict.operator) == ("backward", None)


@pytest.mark.parametrize(("reserved", "text"), [
    (3 * GIB, "fits on card: at least 3.00 GiB needed, 8.00 GiB there, 5.00 GiB left\n"
              "smallest devices with enough memory: rtx_3060_laptop, p4, rtx_4060"),
    (8 * GIB - 2**20, "fits, but barely, on card: at least 8.00 GiB needed, 8.00 GiB there, 1.00 MiB left\n"
                      "smallest devices with enough memory: card, rtx_3080, rtx_5070"),
    (20 * GIB, "does NOT fit on card: at least 20.00 GiB needed, 8.00 GiB there, at least 12.00 GiB short\n"
               "smallest devices with enough memory: l4, a10g, a10"),
    (None, "not known whether it fits on card: what it needs is not known, 8.00 GiB there"),
])
def test_text(bare, card, reserved, text):
    v = replace(bare, device="card", peak_reserved_bytes=reserved).verdict
    assert str(v) == text and max(map(len, text.splitlines())) <= 120


def test_golden(mlp, check_golden):
    check_golden("verdict_mlp.txt", f"{mlp.verdict}\n\n{mlp!r}\n\n{replace(mlp, device='t4')}")


def test_memory_that_ran_out(bare, card, out_of_memory):
    # 78 GiB were reserved of 80 and the allocation would have reserved 2.5: at least 80.5 GiB
    v = replace(bare, device="card", out_of_memory=out_of_memory).verdict
    assert (v.fits, v.needed_bytes, v.free_bytes, v.is_least) == (False, 80 * GIB + GIB // 2, -145 * GIB // 2, True)
    assert (v.phase, v.operator, v.node, v.module_path) == ("backward", "aten.mm", "fc1", "body.0")
    assert v.devices == () and str(v).splitlines()[1:] == [
        "memory ran out in backward, at aten.mm (node fc1, module body.0)",
        "where it would fit is not known: it ended before its peak"]


def test_a_device_that_the_catalogue_does_not_hold(bare, out_of_memory):
    lab = replace(bare, device="lab_card", peak_reserved_bytes=GIB)
    assert (lab.verdict.fits, lab.verdict.needed_bytes, lab.verdict.capacity_bytes) == (None, GIB, None)
    assert "the device's memory is not known" in str(lab.verdict) and "lab_card" in repr(lab)
    short = replace(lab, out_of_memory=out_of_memory).verdict
    assert (short.fits, short.capacity_bytes) == (False, 80 * GIB)


def linear(rows, **more):
    return profile(nn.Linear(2048, 2048, bias=False), args=(torch.empty(rows, 2048),), mode="infer", **more)


def test_a_linear_layer_by_hand():
    # 16 MiB each of weight, input and output in segments of their own size, and 32 of cuBLAS
    p = linear(2048, device="h200")
    outside = sum(line.bytes for line in p.fits().needs[1:])
    v = p.verdict
    assert p.peak_allocated_bytes == p.peak_reserved_bytes == (16 + 16 + 16 + 32) * MIB
    assert v.needed_bytes == 80 * MIB + outside
    assert v.free_bytes == find_device("h200").memory_bytes - v.needed_bytes and v.fits is True
    assert (v.phase, v.operator) == ("forward", "aten.mm.default")
    assert v.devices[0] == min(register_device, key=lambda spec: spec.memory_bytes or 10**18).name


def test_the_need_is_what_the_allocator_would_have_reserved():
    # 16 MiB of weight; the 5 of the input ask for a segment of 20: 36, though 16 + 5 would be within the 30
    card = DeviceSpec("card", memory_bytes=30 * MIB)
    p = linear(640, device=card, options=ProfileOptions(limit_to_device=True))
    oom = p.out_of_memory
    assert p.fits(card).fits is False and p.verdict.fits is False
    assert (oom.reserved_bytes, oom.requested_bytes, p.verdict.needed_bytes) == (16 * MIB, 5 * MIB, 36 * MIB)


def test_a_model_that_cannot_be_placed_needs_all_of_its_parameters():
    p = profile(lambda: nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8))),
                args=(torch.empty(1, 2048),), device=DeviceSpec("card", memory_bytes=40 * MIB),
                options=ProfileOptions(limit_to_device=True))
    assert p.out_of_memory.phase == "setup"
    assert p.verdict.needed_bytes == 8 * 16 * MIB and "at least 128.00 MiB" in p.summary()


def test_holders_by_module_class():
    def blocks():
        return nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048, bias=False), nn.Sigmoid()) for _ in range(60)))

    # 60 weights of 16 MiB, then each sigmoid keeps 16 MiB until memory runs out in the 41st of them
    p = profile(blocks, args=(torch.empty(2048, 2048),),
                options=ProfileOptions(capacity_bytes=(60 * 16 + 16 + 33 + 40 * 16 + 25) * MIB))
    groups = {(g.type, g.category): g for g in group_holders(p)}
    assert sum(g.bytes for g in groups.values()) == p.out_of_memory.allocated_bytes
    weights = groups["Linear", "parameter"]
    assert (weights.modules, weights.bytes) == (60, 60 * 16 * MIB)
    assert "60 Linears: 960.00 MiB (parameter)" in p.summary()
    assert any(g.type == "Sigmoid" and g.modules >= 40 and g.bytes == g.modules * 16 * MIB for g in groups.values())


def test_fits_only_where_it_fits(card):
    # two weights of 2 GiB and their gradients: 8 GiB, and the input
    table = analyzer.fits(lambda: nn.Sequential(*(nn.Linear(2**15, 2**14, bias=False),
                                                  nn.Linear(2**14, 2**15, bias=False))),
                          torch.empty(8, 2**15), devices=["card", "t4"])
    assert [(row.device, row.fits) for row in table] == [("card", False), ("t4", True)]
    assert table.fitting == ("t4",) == table["card"].devices
    text = str(table).splitlines()
    assert text[0].startswith("Sequential: one train step") and text[-1] == "fits on t4"
    assert table.table("csv").splitlines()[0] == "Device,Memory,Needed,Free,Headroom,Fits,Step,Samples/s"


@pytest.mark.parametrize(("more", "error", "text"), [
    (dict(device="t4"), InputError, "give devices="), (dict(devices=[]), InputError, "at least one device"),
    (dict(devices=["h2000"]), UnknownDeviceError, "h2000"), (dict(world_size=0), InputError, "world_size=0"),
])
def test_what_fits_refuses(more, error, text):
    with pytest.raises(error, match=text):
        analyzer.fits(nn.Linear(4, 4), torch.empty(2, 4), mode="infer", **more)


@pytest.mark.parametrize("replays", [True, False])
def test_a_peak_in_the_optimizer_is_not_told_of_the_forward_pass_after_it(replays):
    # parameters, gradients, two states and the square roots of one: the fifth copy is there in the optimizer alone, and
    # given back only before the next step begins
    p = profile(nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))), torch.empty(1, 1024), optimizer="adamw",
                reuse=replays)
    assert p.phases["optimizer"].peak_allocated_bytes == p.peak_allocated_bytes
    assert p.phases["forward"].peak_allocated_bytes < p.peak_allocated_bytes
    assert (p.verdict.phase, p.verdict.operator) == ("optimizer", "aten._foreach_sqrt.default")


def test_a_peak_in_backward_is_at_the_operator_that_runs():
    """Its forward operator and node stand beside it; a leaf module has many operators, of which one runs."""
    class Loss(nn.Module):
        def forward(self, x):
            return torch.log_softmax(x, 1).sum()

    p = profile(Loss(), (torch.rand(512, 4096, requires_grad=True),), device="h100")
    v = p.verdict
    assert (v.phase, v.operator, v.forward_operator) == (
        "backward", "aten._log_softmax_backward_data.default", "aten._log_softmax.default")
    assert str(v).splitlines()[1] == ("peak in backward, at aten._log_softmax_backward_data.default (gradient of "
                                      "aten._log_softmax.default, node _log_softmax)")
    layer = nn.Sequential(nn.TransformerEncoderLayer(64, 4, 4, 0.0, batch_first=True))
    v = profile(layer, (torch.rand(8, 256, 64),), device="h100").verdict
    assert (v.phase, v.operator, v.forward_operator, v.module_path) == (
        "backward", "aten._scaled_dot_product_efficient_attention_backward.default", None, "0")
    assert Profile.from_json(p.to_json()).verdict == p.verdict


@pytest.mark.parametrize(("build", "settings"), [
    (lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)), dict(optimizer="adamw")),
    (lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)), dict(mode="infer")),
    (lambda: nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(9))),
     dict(optimizer="sgd", device="l4")),
    (lambda: nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 8)), dict(device="cpu"))])
def test_the_place_of_the_peak_is_that_of_the_rows(build, settings, monkeypatch):
    found = analyzer.profile(build, torch.empty(512, 64), **settings)
    quick = find_peak(found)
    assert (found.find_peak_node() is None) == (settings.get("device") == "cpu")
    monkeypatch.setattr(type(found), "find_peak_node", lambda self: None)
    assert find_peak(found) == quick and quick.operator is not None
    assert find_peak(type(found).from_json(found.to_json())) == quick  # which has rows alone
