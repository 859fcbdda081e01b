"""The summary: every section, and sums that are sums."""
from dataclasses import replace

from analyzer.results.info import HolderInfo
from analyzer.results.profile import Profile


def test_golden(mlp, check_golden):
    check_golden("summary_mlp.txt", mlp.summary())


def test_unknown_profile(bare, check_golden):
    check_golden("summary_bare.txt", bare.summary())


def section(text, title):
    lines = text.split(f"\n{title}", 1)[1].split("\n\n", 1)[0].splitlines()[1:]
    return [line.strip() for line in lines]


def test_categories_add_up_to_the_peak(mlp, add_up):
    rows = [row.rsplit(maxsplit=3) for row in section(mlp.summary(), "At the peak, by category")[2:]]
    *parts, total = [(name, f"{number} {unit}", share) for name, number, unit, share in rows]
    add_up([size for _, size, _ in parts], total[1])
    assert total == ("total", "12.00 KiB", "100.0%")
    assert [name for name, _, _ in parts] == ["optimizer states", "parameters", "gradients", "activations"]
    assert abs(sum(float(share.rstrip("%")) for _, _, share in parts) - 100) <= 0.05 * len(parts)
    assert sum(mlp.peak_by_category.values()) == mlp.peak_allocated_bytes


def test_seconds_say_how_they_were_found(mlp):
    assert "Time (predicted for h200: models of kernels and host)" in mlp.summary()
    assert "Time (measured on cpu)" in replace(mlp, seconds_method="measured on cpu", measured_steps=3).summary()


def test_out_of_memory_comes_first(mlp, out_of_memory):
    lines = section(replace(mlp, out_of_memory=out_of_memory).summary(), "OUT OF MEMORY")
    assert lines == ["aten.mm in backward, node fc1, module body.0 asks for 2.00 GiB, 512.00 MiB more than there is: "
                     "70.00 GiB allocated, 78.00 GiB reserved, 80.00 GiB on the device"]
    assert "OUT OF MEMORY" not in mlp.summary()


def test_only_the_largest_holders_are_printed():
    holders = tuple(HolderInfo(f"n{i}", "m", "activations", 100 - i) for i in range(13))
    text = Profile(name="many", mode="infer", holders=holders).summary()
    assert "At the peak, largest holders (3 more)" in text and "n9 " in text and "n10 " not in text


def test_empty_peak_has_no_shares(bare):
    lines = section(replace(bare, peak_by_category={"inputs": 0}).summary(), "At the peak, by category")
    assert [line.split() for line in lines[2:]] == [["inputs", "0", "B"], ["total", "0", "B"]]
