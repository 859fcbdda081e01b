"""Where operators and modules stand under the roofline: hand-derived ceilings, and the files."""
import csv
import io
from dataclasses import replace

import pytest
import torch
from torch import nn

from analyzer import profile
from analyzer.api.result import Profile
from analyzer.errors import InputError
from analyzer.hardware import find_device
from analyzer.results.info import ModuleInfo, OperatorInfo
from analyzer.results.node_info import TensorInfo

H100 = find_device("h100")
RATES, BANDWIDTH = H100.flops_per_second, H100.memory_bandwidth


def stands(*operators, **modules):
    p = Profile(name="p", mode="train", device="h100", autocast="bfloat16", operators=operators, **modules)
    return p.roofline()


def test_a_product_of_many_flops_to_a_byte_is_bound_by_arithmetic():
    row, = stands(OperatorInfo("aten.mm.default", 1, flops=2 * 10**12, macs=10**12, seconds=4e-3, read_bytes=10**9,
                               written_bytes=10**9))
    assert (row.kind, row.part, row.bytes, row.intensity) == ("operator", "forward", 2 * 10**9, 1000.0)
    assert row.flops_per_second == 5e14
    assert row.bound == "arithmetic" and row.ceiling == pytest.approx(RATES.bf16)


def test_one_of_few_is_bound_by_memory():
    row, = stands(OperatorInfo("aten.mm.default", 1, flops=2 * 10**10, macs=10**10, read_bytes=10**9, written_bytes=0))
    assert row.bound == "memory" and row.ceiling == pytest.approx(20 * BANDWIDTH)
    assert row.seconds is row.flops_per_second is None


@pytest.mark.parametrize("lack", [{"flops": None}, {"macs": None}, {"read_bytes": None}])
def test_unknown_figures_have_no_ceiling(lack):
    row, = stands(replace(OperatorInfo("mylib.scan", 1, flops=8, macs=4, read_bytes=4, written_bytes=4), **lack))
    assert row.ceiling is row.bound is None


def test_modules_have_all_that_is_below_and_what_runs_again():
    leaf = ModuleInfo(path="fc", type="Linear", fwd_flops=100, bwd_flops=200, recompute_flops=100, fwd_macs=50,
                      bwd_macs=100, fwd_read_bytes=10, fwd_written_bytes=10, bwd_read_bytes=15, bwd_written_bytes=5,
                      fwd_seconds=1.0, bwd_seconds=3.0,
                      operators=(OperatorInfo("aten.mm", 1, macs=50, phase="recompute"),))
    row, = stands(modules=leaf)
    assert (row.name, row.type, row.part, row.flops, row.bytes, row.seconds) == ("fc", "Linear", "step", 400, 40, 4.0)
    assert (row.intensity, row.flops_per_second, row.bound) == (10.0, 100.0, "memory")
    shared = replace(leaf, path="again", shared_with="fc")
    assert [r.name for r in stands(modules=replace(leaf, path="", children=(leaf, shared)))] == ["", "fc"]


def test_float32_convolutions_and_products_have_peaks_of_their_own():
    weight = ModuleInfo(path="", type="Net", parameters={"w": TensorInfo((2,), "float32", "cuda:0")})
    conv = OperatorInfo("aten.convolution.default", 1, flops=2 * 10**12, macs=10**12, read_bytes=1, written_bytes=1)
    found = Profile(name="p", mode="train", device="h100", modules=weight,
                    operators=(conv, replace(conv, operator="aten.mm.default"))).roofline()
    assert [row.ceiling for row in found if row.kind == "operator"] == pytest.approx([RATES.tf32, RATES.fp32])
    assert [peak.name for peak in found.peaks] == [f"float32 {name}" for name in ("convolutions", "products",
                                                                                  "other operators")]
    assert [peak.flops_per_second for peak in found.peaks] == [RATES.tf32, RATES.fp32, RATES.fp32]


def test_a_profile():
    p = profile(nn.Linear(512, 512), torch.empty(64, 512), device="h100", autocast=torch.bfloat16)
    found = p.roofline()
    product = next(row for row in found if row.part == "forward" and "mm" in row.name)
    assert product.flops >= 2 * 64 * 512 * 512 and product.bound == "memory" and product.seconds > 0
    assert found.device == "h100_sxm" and found.memory_bandwidth == BANDWIDTH
    linear = [row for row in found if row.kind == "module"]
    assert [row.type for row in linear] == ["Linear"] and linear[0].flops == p.fwd_flops + p.bwd_flops


def test_a_table_has_every_row():
    found = profile(nn.Linear(512, 512), torch.empty(64, 512), device="h100")
    rows = list(csv.DictReader(io.StringIO(found.export("table", what="roofline"))))
    assert [(row["name"], row["intensity"]) for row in rows] == [
        (row.name, "" if row.intensity is None else str(row.intensity)) for row in found.roofline()]
    with pytest.raises(InputError, match="names no device"):
        Profile(name="p", mode="infer").roofline()


SMALL = ("profile", "gpt2", "--input", "input_ids=int64:2x64", "--device", "h100", "--show", "brief")


def test_the_command_saves_the_roofline_and_prints_the_cost(run, tmp_path):
    saved = str(tmp_path / "p.json")
    code, out, err = run(*SMALL, "--export", f"roofline={tmp_path / 'r.csv'}", "--json", saved)
    assert (code, err) == (0, "") and (tmp_path / "r.csv").read_text().startswith("name,kind,part")
    assert "  speed: " in out and " tokens a second, " in out and " % MFU" in out
    code, out, err = run("show", saved, "--tokens", "1.28M", "--price", "2.5", "--gpus", "2", "--power", "350")
    assert (code, err) == (0, "") and out.startswith("Cost of 1,280,000 tokens on 2 devices\n")
    rows = {line.split()[0]: line.split()[1] for line in out.splitlines() if len(line.split()) == 2}
    assert rows["steps"] == "5,000"  # 1,280,000 / (2 x 64 x 2 copies)
    assert "  - kWh are 350 W for each device-hour, as given" in out
    code, both, _ = run("show", saved, "--report", "brief,cost", "--tokens", "1.28M", "--price", "2.5",
                        "--gpus", "2", "--power", "350")
    assert code == 0 and both.startswith("Profile of GPT2") and both.endswith("\n\n" + out)


@pytest.mark.parametrize(("argv", "words"), [
    (("--price", "2"), "--report cost: cost of what run? `analyzer show FILE --tokens N`"),
    (("--tokens", "1e9", "--report", "table", "--format", "csv"), "--tokens: --report table has no such option"),
    (("--tokens", "1e9"), "Net is given no tokens"),
])
def test_what_the_command_refuses(run, argv, words, tmp_path):
    Profile(name="Net", mode="infer", device="t4", batch_size=2).to_json(tmp_path / "p.json")
    code, out, err = run("show", str(tmp_path / "p.json"), *argv)
    assert code == 2 and out == "" and words in err
