"""The catalogue: its figures against the clocks they come from, its names, its registry."""
import dataclasses
import json

import pytest
import torch

from analyzer import profile
from analyzer.errors import DuplicateRegistrationError, InputError, UnknownDeviceError
from analyzer.hardware import DeviceSpec, find_device, register_device
from analyzer.hardware.catalogue import knowing, split_devices
from analyzer.hardware.kernel_time.estimate import find_constants

NAMES = [spec.name for spec in register_device]


def test_stands_by_vendor_newest_generation_and_largest_memory() -> None:
    some = ["rtx_pro_6000_server", "rtx_5090", "b300", "b200", "h200", "h100_sxm", "l4", "rtx_4060", "a10", "a100_80gb",
            "a100_40gb", "t4", "v100_sxm2_32gb", "p4", "p100_sxm2_16gb", "mi325x", "mi250x", "m1", "m4_pro", "cpu"]
    assert sorted(some, key=NAMES.index) == some and len(NAMES) > 75


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_has_a_source(name: str) -> None:
    assert [f.name for f in find_device(name).figures() if f.value is not None and not f.source] == []


# No document gives the launch; of these no more was found.
_UNFOUND = {"h20": {"clock_hertz"}, "rtx_pro_6000_server": {"clock_hertz"}, "rtx_pro_6000_max_q": {"clock_hertz"}}


@pytest.mark.parametrize("name", [spec.name for spec in register_device if spec.kind == "cuda"])
def test_only_the_launch_is_unknown_of_a_gpu(name: str) -> None:
    """What a GPU lacks says why; the host is unknown altogether."""
    unexplained = {f.name for f in find_device(name).figures() if f.value is None and not f.source}
    assert unexplained == {"launch_seconds", *_UNFOUND.get(name, ())}


def test_the_host_is_unknown_altogether() -> None:
    assert [f for f in find_device("cpu").figures() if f.value is not None or f.source] == []


@pytest.mark.parametrize("name", NAMES)
def test_kind_is_the_type_of_its_tensors_device(name: str) -> None:
    spec = find_device(name)
    vendors = {"NVIDIA": "cuda", "AMD": "cuda", "Apple": "mps"}
    assert spec.kind == vendors.get(spec.vendor or "", "cpu")
    assert (spec.compute_capability is not None) == (spec.kind == "cuda")


# Operations per multiprocessor and clock: the architecture whitepapers' tables of CUDA and tensor cores, dense, 2 per
# multiply-add, with float32 accumulation. Twice as much would be the figure with sparsity.
# name: boost MHz of the CUDA cores and of the tensor cores, multiprocessors, operations of fp32, fp16, fp8 and int8
_CLOCKS = {"b200": (1965, 1860, 148, 256, 8192, 16384, 16384), "b300": (2032, 1860, 148, 256, 8192, 16384, None),
           "rtx_5090": (2407, 2407, 170, 256, 512, 1024, 2048),
           "rtx_pro_6000_workstation": (2617, 2617, 188, 256, 1024, 2048, 2048),
           "h100_pcie": (1755, 1620, 114, 256, 4096, 8192, 8192), "h100_nvl": (1785, 1545, 132, 256, 4096, 8192, 8192),
           "gh200_96gb": (1980, 1830, 132, 256, 4096, 8192, 8192), "h100_sxm": (1980, 1830, 132, 256, 4096, 8192, 8192),
           "h200": (1980, 1830, 132, 256, 4096, 8192, 8192), "a100_40gb": (1410, 1410, 108, 128, 2048, None, 4096),
           "a100_80gb": (1410, 1410, 108, 128, 2048, None, 4096),
           "a100_pcie_40gb": (1410, 1410, 108, 128, 2048, None, 4096),
           "a100_80gb_pcie": (1410, 1410, 108, 128, 2048, None, 4096), "a30": (1440, 1440, 56, 128, 2048, None, 4096),
           "a10": (1695, 1695, 72, 256, 1024, None, 2048), "a40": (1740, 1740, 84, 256, 1024, None, 2048),
           "rtx_a6000": (1800, 1800, 84, 256, 1024, None, 2048), "rtx_3090": (1695, 1695, 82, 256, 512, None, 2048),
           "rtx_6000_ada": (2505, 2505, 142, 256, 1024, 2048, 2048), "mi300x": (2100, 2100, 304, 256, 2048, 4096, 4096),
           "mi250x": (1700, 1700, 110, 128, 1024, None, 1024), "l40s": (2520, 2500, 142, 256, 1024, 2048, 2048),
           "l4": (2040, 2040, 58, 256, 1024, 2048, 2048), "t4": (1590, 1590, 40, 128, 1024, None, 2048),
           "rtx_4090": (2520, 2520, 128, 256, 512, 1024, 2048)}


@pytest.mark.parametrize("name", _CLOCKS)
def test_rates_are_dense_and_follow_from_the_clock(name: str) -> None:
    vector_mhz, tensor_mhz, multiprocessors, fp32, fp16, fp8, int8 = _CLOCKS[name]
    spec = find_device(name)
    rates = spec.flops_per_second
    assert spec.multiprocessors == multiprocessors
    # data sheets round to two or three digits: the T4's 65 stands for 65.1, the L4's 120 for 121.2
    digits = 0.011 if name != "b300" else 0.03
    assert rates.fp32 == pytest.approx(multiprocessors * vector_mhz * 1e6 * fp32, rel=digits)
    assert rates.fp16 == pytest.approx(multiprocessors * tensor_mhz * 1e6 * fp16, rel=digits)
    if int8 is not None:
        assert rates.int8 == pytest.approx(multiprocessors * tensor_mhz * 1e6 * int8, rel=digits)
    if fp8 is None:
        assert rates.fp8 is None
    else:
        assert rates.fp8 == pytest.approx(multiprocessors * tensor_mhz * 1e6 * fp8, rel=digits)
    if spec.compute_capability is not None and spec.compute_capability < (8, 0):
        assert (rates.tf32, rates.bf16) == (None, None)
    else:
        assert rates.bf16 == rates.fp16
        if spec.vendor == "NVIDIA":
            assert rates.tf32 == pytest.approx(multiprocessors * tensor_mhz * 1e6 * fp16 / 2, rel=digits)


# CUDA cores, boost MHz, bus bits, Gbit/s a pin and GB, as data sheets of GeForce cards list them; laptops at most.
_GEFORCE = {"rtx_3060": (3584, 1777, 192, 15, 12), "rtx_3060_ti": (4864, 1665, 256, 14, 8),
            "rtx_3070": (5888, 1725, 256, 14, 8), "rtx_3080": (8704, 1710, 320, 19, 10),
            "rtx_4060": (3072, 2460, 128, 17, 8), "rtx_4060_ti": (4352, 2535, 128, 18, 8),
            "rtx_4060_ti_16gb": (4352, 2535, 128, 18, 16), "rtx_4070": (5888, 2475, 192, 21, 12),
            "rtx_4070_super": (7168, 2475, 192, 21, 12), "rtx_4070_ti": (7680, 2610, 192, 21, 12),
            "rtx_4070_ti_super": (8448, 2610, 256, 21, 16), "rtx_4080": (9728, 2505, 256, 22.4, 16),
            "rtx_4080_super": (10240, 2550, 256, 23, 16), "rtx_5060_ti": (4608, 2572, 128, 28, 16),
            "rtx_5070": (6144, 2512, 192, 28, 12), "rtx_5070_ti": (8960, 2452, 256, 28, 16),
            "rtx_5080": (10752, 2617, 256, 30, 16), "rtx_3060_laptop": (3840, 1703, 192, 14, 6),
            "rtx_3070_laptop": (5120, 1620, 256, 14, 8), "rtx_3080_laptop": (6144, 1710, 256, 14, 8),
            "rtx_3080_laptop_16gb": (6144, 1710, 256, 14, 16), "rtx_4060_laptop": (3072, 2370, 128, 16, 8),
            "rtx_4070_laptop": (4608, 2175, 128, 16, 8), "rtx_4080_laptop": (7424, 2280, 192, 18, 12),
            "rtx_4090_laptop": (9728, 2040, 256, 18, 16), "rtx_5090_laptop": (10496, 2160, 256, 28, 24)}


@pytest.mark.parametrize("name", _GEFORCE)
def test_geforce_cards_follow_from_what_data_sheets_list(name: str) -> None:
    cores, mhz, bus_bits, gigabits, printed_gib = _GEFORCE[name]
    spec = find_device(name)
    rates = spec.flops_per_second
    assert spec.multiprocessors == cores / 128 and spec.clock_hertz == pytest.approx(mhz * 1e6)
    assert spec.memory_bandwidth == pytest.approx(bus_bits / 8 * gigabits * 1e9, rel=1e-3)
    # half the rate of tensor cores with float32 accumulation, dense
    fp32 = cores * 2 * mhz * 1e6
    assert [rates.fp32, rates.tf32, rates.bf16, rates.fp16, rates.int8] == pytest.approx(
        [fp32, fp32, 2 * fp32, 2 * fp32, 8 * fp32], rel=2e-3)
    assert rates.fp8 == (None if spec.compute_capability == (8, 6) else pytest.approx(4 * fp32, rel=2e-3))
    assert spec.memory_bytes is not None and 0.94 * printed_gib * 2**30 < spec.memory_bytes < printed_gib * 2**30
    card = name.removesuffix("_16gb").removeprefix("rtx_").replace("_laptop", "").replace("_", " ").title()
    if not name.endswith("_16gb"):
        laptop = " Laptop GPU" if "laptop" in name else ""
        assert find_device(f"NVIDIA GeForce RTX {card}{laptop}") is spec


@pytest.mark.parametrize(("name", "bus_bits", "memory_mhz"), [
    # as deviceQuery prints them; two transfers per clock
    ("h100_sxm", 5120, 2619), ("a100_40gb", 5120, 1215), ("a100_80gb", 5120, 1593), ("a100_pcie_40gb", 5120, 1215),
    ("a100_80gb_pcie", 5120, 1512), ("l40s", 384, 9001), ("h100_pcie", 5120, 1593), ("a10", 384, 6251),
    ("a40", 384, 7251), ("rtx_a6000", 384, 8001), ("rtx_3090", 384, 9751), ("rtx_5090", 512, 14001),
    ("rtx_6000_ada", 384, 10001), ("l4", 192, 6251), ("t4", 256, 5001), ("rtx_4090", 384, 10501)])
def test_memory_bandwidth_follows_from_the_clock(name: str, bus_bits: int, memory_mhz: int) -> None:
    assert find_device(name).memory_bandwidth == pytest.approx(bus_bits / 8 * memory_mhz * 2e6, rel=3e-4)


@pytest.mark.parametrize(("name", "printed_gib"), [
    ("h200", 141), ("h100_sxm", 80), ("a100_40gb", 40), ("a100_80gb", 80), ("l4", 24), ("t4", 16), ("rtx_4090", 24),
    ("v100_pcie_32gb", 32), ("p4", 8), ("a100_pcie_40gb", 40), ("a100_80gb_pcie", 80), ("l40s", 48),
    ("v100_sxm2_16gb", 16), ("v100_sxm2_32gb", 32), ("v100_pcie_16gb", 16), ("p100_pcie_16gb", 16), ("a30", 24),
    ("a10", 24), ("a10g", 24), ("a40", 48), ("rtx_a6000", 48), ("rtx_6000_ada", 48), ("rtx_3090", 24), ("rtx_5090", 32),
    ("rtx_pro_6000", 96), ("rtx_pro_6000_workstation", 96), ("h100_pcie", 80), ("h100_nvl", 94), ("h20", 96),
    ("gh200", 96), ("b200", 180), ("b300", 288), ("gb200", 192), ("gb300", 288), ("mi250x", 64), ("mi300x", 192),
    ("mi325x", 256)])
def test_memory_is_what_the_driver_leaves_of_the_printed_size(name: str, printed_gib: int) -> None:
    memory_bytes = find_device(name).memory_bytes
    assert memory_bytes is not None
    assert 0.91 * printed_gib * 2**30 < memory_bytes < printed_gib * 2**30


@pytest.mark.parametrize(("name", "nvlink", "pcie"), [
    ("h200", 450e9, 64e9), ("h100", 450e9, 64e9), ("a100", 300e9, 32e9), ("l4", None, 32e9), ("t4", None, 16e9),
    ("4090", None, 32e9), ("b200", 900e9, 64e9), ("l40s", None, 32e9), ("p4", None, 16e9)])
def test_links_count_one_direction(name: str, nvlink: float | None, pcie: float) -> None:
    spec = find_device(name)
    assert (spec.nvlink_bandwidth, spec.pcie_bandwidth) == (nvlink, pcie)


# What users write, and torch.cuda.get_device_name() says.
_KNOWN_AS = {
    "h200": ("H200", "NVIDIA H200"), "h100_sxm": (" h100 ", "H100-SXM", "NVIDIA H100 80GB HBM3"),
    "a100_80gb": ("a100", "NVIDIA A100-SXM4-80GB"), "a100_40gb": ("A100 40GB", "NVIDIA A100-SXM4-40GB"),
    "rtx_4090": ("RTX 4090", "NVIDIA GeForce RTX 4090"), "cpu": ("CPU",),
    "v100_sxm2_32gb": ("v100", "Tesla V100-SXM2-32GB"), "p100_sxm2_16gb": ("p100", "Tesla P100-SXM2-16GB"),
    "rtx_a6000": ("A6000", "NVIDIA RTX A6000"),
    "rtx_pro_6000_server": ("RTX PRO 6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition"),
    "gh200_96gb": ("GH200", "NVIDIA GH200 480GB", "NVIDIA GH200 120GB"), "h100_pcie": ("NVIDIA H100 PCIe",),
    "a100_80gb_pcie": ("NVIDIA A100 80GB PCIe",), "rtx_6000_ada": ("NVIDIA RTX 6000 Ada Generation",),
    "t4": ("Tesla T4",), "rtx_5090": ("NVIDIA GeForce RTX 5090",),
    "mi250x": ("AMD Instinct MI250X", "AMD Instinct MI250X/MI250"),
    "mi300x": ("AMD Instinct MI300X VF", "AMD Instinct MI300X"), "mi325x": ("AMD Instinct MI325X",),
    "m1_max": ("Apple M1 Max",)}


@pytest.mark.parametrize(("found", "name"), [(found, name) for found, names in _KNOWN_AS.items() for name in names])
def test_finds_names_aliases_and_the_driver_s_names(found: str, name: str) -> None:
    assert find_device(name).name == found


def test_a_spec_is_its_own_device_registered_or_not() -> None:
    spec = DeviceSpec("not_registered")
    assert find_device(spec) is spec


@pytest.mark.parametrize(("name", "hint"), [
    ("h21", "did you mean 'h20' or 'h200'"), ("a100_sxm4_80", "did you mean 'a100_80gb' or "),
    ("NVIDIA A100-PCIe-80GB HBM2e", "did you mean 'a100_80gb_pcie' or 'a100_pcie_40gb'"),
    ("rtx 4091", "did you mean 'rtx_4090'"), ("zzzz", "The catalogue holds")])
def test_unknown_names_are_answered_with_near_ones(name: str, hint: str) -> None:
    with pytest.raises(UnknownDeviceError) as error:
        find_device(name)
    assert str(error.value).startswith(f"unknown device {name!r}: {hint}")
    assert str(error.value).endswith(
        f"The catalogue holds {', '.join(NAMES)}; describe another one with DeviceSpec and pass it, or add it with "
        "register_device"
    )


def test_what_is_no_name_is_refused() -> None:
    with pytest.raises(InputError, match=r"^find_device\(0\): takes a name, for example 'h200', the path of a file, "
                                         r"or a DeviceSpec$"):
        find_device(0)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"^register_device\('h200'\): takes a DeviceSpec"):
        register_device("h200")  # type: ignore[arg-type]


def test_a_registered_device_is_found_until_its_scope_ends() -> None:
    spec = DeviceSpec("lab_card", aliases=("Bench One",))
    with register_device.scope():
        assert register_device(spec) is spec
        assert find_device("LAB-CARD") is spec
        assert find_device("bench_one") is spec
    with pytest.raises(UnknownDeviceError):
        find_device("lab_card")


def test_a_taken_name_is_refused_in_any_spelling() -> None:
    with pytest.raises(DuplicateRegistrationError) as error:
        register_device(DeviceSpec("RTX-4090"))
    assert str(error.value) == (
        "register_device('rtx_4090'): already registered as DeviceSpec('rtx_4090', cuda, 23.65 GiB); pass "
        "override=True, or register inside `with register_device.scope():` to replace it for a while")
    assert find_device("rtx_4090").vendor == "NVIDIA"


@pytest.mark.parametrize("spec", [DeviceSpec("h100"), DeviceSpec("mine", aliases=("H100",))])
def test_another_device_s_alias_is_refused_even_in_a_scope(spec: DeviceSpec) -> None:
    for override in (False, True):
        with register_device.scope(), pytest.raises(DuplicateRegistrationError) as error:
            register_device(spec, override=override)
        text = "already stands for DeviceSpec('h100_sxm', cuda, 79.19 GiB); give this device another name or alias"
        assert text in str(error.value)
    assert find_device("h100").name == "h100_sxm"


def test_a_scope_or_an_override_replaces_and_gives_back() -> None:
    original = find_device("l4")
    replacement = DeviceSpec("L4", memory_bytes=1)
    with register_device.scope():
        register_device(replacement)
        assert find_device("l4") is replacement
        with pytest.raises(DuplicateRegistrationError):
            register_device(DeviceSpec("l4"))  # a second time in the same scope
        other = register_device(DeviceSpec("l4"), override=True)
        assert find_device("l4") is other
    assert find_device("l4") is original
    assert [spec.name for spec in register_device] == NAMES


def test_a_device_of_a_file_is_known_by_its_name_for_a_block(tmp_path):
    """A profile keeps the name alone: its verdict, its utilization and its roofline ask for the figures again."""
    path = tmp_path / "card.json"
    spec = dataclasses.replace(find_device("a10"), name="bench_card")
    path.write_text(json.dumps(spec.to_dict()))
    model = torch.nn.Linear(256, 256)
    with knowing(str(path)):
        p = profile(model, args=(torch.empty(64, 256),), device=str(path), mode="infer")
        assert p.mfu() is not None and p.roofline().memory_bandwidth == spec.memory_bandwidth
        assert p.fits().capacity.bytes == spec.memory_bytes
    with pytest.raises(UnknownDeviceError):
        find_device("bench_card")
    with knowing("h200"), knowing(None):
        assert [device.name for device in register_device] == NAMES


@pytest.mark.parametrize(("name", "figures", "chip"), [
    ("h100_sxm,power=500,bandwidth=2.4e12,memory=96GB",
     {"power_watts": 500.0, "memory_bandwidth": 2.4e12, "memory_bytes": 96 * 10**9}, "h100_sxm"),
    ("H100, power = 350", {"power_watts": 350.0}, "h100_sxm"),
    ("a100,memory=64e9", {"memory_bytes": 64 * 10**9}, "a100_80gb"),
    ("h800,nvlink=1e11,pcie=32e9", {"nvlink_bandwidth": 1e11, "pcie_bandwidth": 32e9, "power_watts": 700.0},
     "h100_sxm"), ("h100_96gb_hbm2e", {"power_watts": 500.0, "memory_bandwidth": 2.4e12}, "h100_sxm")])
def test_figures_of_a_board_may_follow_the_name(name: str, figures: dict[str, float], chip: str) -> None:
    """All else, and what was fitted to kernels, is as on the chip; the board's own name finds it again."""
    board, of = find_device(name), find_device(chip)
    assert {figure: getattr(board, figure) for figure in figures} == figures
    assert board.chip == chip and find_device(board.name) == board
    assert find_constants("matmul", board) == find_constants("matmul", of)
    assert board.flops_per_second.bf16 == of.flops_per_second.bf16
    assert [f.name for f in board.figures() if f.value is not None and not f.source] == []


def test_rates_follow_a_clock_that_is_told() -> None:
    board, chip = find_device("h100_sxm,clock=0.99e9"), find_device("h100_sxm")
    assert chip.clock_hertz == 1.98e9 and chip.flops_per_second.bf16 is not None
    assert board.flops_per_second.bf16 == pytest.approx(chip.flops_per_second.bf16 / 2)


@pytest.mark.parametrize(("name", "said"), [
    ("h100_sxm,powr=500",
     "device 'h100_sxm,powr=500': 'powr' is no figure of a board, did you mean 'power'?; those are power (W), "
     "bandwidth (B/s), memory (bytes), clock (Hz), nvlink (B/s), pcie (B/s)"),
    ("h100_sxm,power=full", "device 'h100_sxm,power=full': power=full must be a number, in W"),
    ("h100_sxm,memory=many", "parse_bytes('many'): not a size"),
    ("h100_sxm,power=-1", "power_watts=-1.0): must be a positive number, in W"),
    ("h20,clock=1e9", "device 'h20,clock=1e9': the boost clock of 'h20' is not known"),
    ("h1000,power=500", "unknown device 'h1000': did you mean 'h100_sxm'")])
def test_a_board_that_cannot_be_says_why(name: str, said: str) -> None:
    with pytest.raises((InputError, UnknownDeviceError)) as error:
        find_device(name)
    assert said in str(error.value)


def test_a_list_of_devices_keeps_figures_with_their_names() -> None:
    assert split_devices("h100_sxm,power=500,memory=96GB, l4,") == ["h100_sxm,power=500,memory=96GB", "l4"]
