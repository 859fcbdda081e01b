"""The catalogue: its figures against the clocks they come from, its names, its registry."""
from __future__ import annotations

import pytest

from analyzer.errors import DuplicateRegistrationError, InputError, UnknownDeviceError
from analyzer.hardware import DeviceSpec, find_device, register_device

# By vendor, newest generation, largest memory.
NAMES = ["b200", "h200", "h100_sxm", "l40s", "rtx_4090", "l4", "a100_80gb", "a100_80gb_pcie", "a100_40gb",
         "a100_pcie_40gb", "t4", "v100_pcie_32gb", "p4", "cpu"]


def test_holds_these_devices() -> None:
    assert [spec.name for spec in register_device] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_has_a_source(name: str) -> None:
    assert [f.name for f in find_device(name).figures() if f.value is not None and not f.source] == []


@pytest.mark.parametrize("name", NAMES)
def test_only_the_launch_is_unknown_of_a_gpu(name: str) -> None:
    """What a GPU lacks says why; the host is unknown altogether."""
    spec = find_device(name)
    unexplained = [f.name for f in spec.figures() if f.value is None and not f.source]
    assert unexplained == (["launch_seconds"] if spec.kind == "cuda" else [f.name for f in spec.figures()])


# Operations per multiprocessor and clock: the architecture whitepapers' tables of CUDA and tensor cores, dense, 2 per
# multiply-add, with float32 accumulation. Twice as much would be the figure with sparsity.
# name: boost MHz of the CUDA cores and of the tensor cores, multiprocessors, operations of fp32, fp16, fp8 and int8
_CLOCKS = {
    "b200": (1965, 1860, 148, 256, 8192, 16384, 16384),
    "h100_sxm": (1980, 1830, 132, 256, 4096, 8192, 8192),
    "h200": (1980, 1830, 132, 256, 4096, 8192, 8192),
    "a100_40gb": (1410, 1410, 108, 128, 2048, None, 4096),
    "a100_80gb": (1410, 1410, 108, 128, 2048, None, 4096),
    "a100_pcie_40gb": (1410, 1410, 108, 128, 2048, None, 4096),
    "a100_80gb_pcie": (1410, 1410, 108, 128, 2048, None, 4096),
    "l40s": (2520, 2500, 142, 256, 1024, 2048, 2048),
    "l4": (2040, 2040, 58, 256, 1024, 2048, 2048),
    "t4": (1590, 1590, 40, 128, 1024, None, 2048),
    "rtx_4090": (2520, 2520, 128, 256, 512, 1024, 2048),
}


@pytest.mark.parametrize("name", _CLOCKS)
def test_rates_are_dense_and_follow_from_the_clock(name: str) -> None:
    vector_mhz, tensor_mhz, multiprocessors, fp32, fp16, fp8, int8 = _CLOCKS[name]
    spec = find_device(name)
    rates = spec.flops_per_second
    assert spec.multiprocessors == multiprocessors
    # data sheets round to two or three digits: the T4's 65 stands for 65.1, the L4's 120 for 121.2
    digits = 0.011
    assert rates.fp32 == pytest.approx(multiprocessors * vector_mhz * 1e6 * fp32, rel=digits)
    assert rates.fp16 == pytest.approx(multiprocessors * tensor_mhz * 1e6 * fp16, rel=digits)
    assert rates.int8 == pytest.approx(multiprocessors * tensor_mhz * 1e6 * int8, rel=digits)
    if fp8 is None:
        assert rates.fp8 is None
    else:
        assert rates.fp8 == pytest.approx(multiprocessors * tensor_mhz * 1e6 * fp8, rel=digits)
    if spec.compute_capability is not None and spec.compute_capability < (8, 0):
        assert (rates.tf32, rates.bf16) == (None, None)
    else:
        assert rates.bf16 == rates.fp16
        assert rates.tf32 == pytest.approx(multiprocessors * tensor_mhz * 1e6 * fp16 / 2, rel=digits)


@pytest.mark.parametrize(
    ("name", "bus_bits", "memory_mhz"),  # as deviceQuery prints them; two transfers per clock
    [
        ("h100_sxm", 5120, 2619),
        ("a100_40gb", 5120, 1215),
        ("a100_80gb", 5120, 1593),
        ("a100_pcie_40gb", 5120, 1215),
        ("a100_80gb_pcie", 5120, 1512),
        ("l40s", 384, 9001),
        ("l4", 192, 6251),
        ("t4", 256, 5001),
        ("rtx_4090", 384, 10501),
    ],
)
def test_memory_bandwidth_follows_from_the_clock(name: str, bus_bits: int, memory_mhz: int) -> None:
    assert find_device(name).memory_bandwidth == pytest.approx(bus_bits / 8 * memory_mhz * 2e6, rel=3e-4)


@pytest.mark.parametrize(
    ("name", "printed_gib"),
    [("h200", 141), ("h100_sxm", 80), ("a100_40gb", 40), ("a100_80gb", 80), ("l4", 24), ("t4", 16), ("rtx_4090", 24),
     ("v100_pcie_32gb", 32), ("p4", 8), ("a100_pcie_40gb", 40), ("a100_80gb_pcie", 80), ("l40s", 48)],
)
def test_memory_is_what_the_driver_leaves_of_the_printed_size(name: str, printed_gib: int) -> None:
    memory_bytes = find_device(name).memory_bytes
    assert memory_bytes is not None
    assert 0.91 * printed_gib * 2**30 < memory_bytes < printed_gib * 2**30


@pytest.mark.parametrize(
    ("name", "nvlink", "pcie"),
    [("h200", 450e9, 64e9), ("h100", 450e9, 64e9), ("a100", 300e9, 32e9), ("l4", None, 32e9), ("t4", None, 16e9),
     ("4090", None, 32e9), ("b200", 900e9, 64e9), ("l40s", None, 32e9), ("p4", None, 16e9)],
)
def test_links_count_one_direction(name: str, nvlink: float | None, pcie: float) -> None:
    spec = find_device(name)
    assert (spec.nvlink_bandwidth, spec.pcie_bandwidth) == (nvlink, pcie)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("H200", "h200"),
        (" h100 ", "h100_sxm"),
        ("H100-SXM", "h100_sxm"),
        ("a100", "a100_80gb"),
        ("A100 40GB", "a100_40gb"),
        ("RTX 4090", "rtx_4090"),
        ("CPU", "cpu"),
        # torch.cuda.get_device_name()
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100_sxm"),
        ("NVIDIA A100-SXM4-40GB", "a100_40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100_80gb"),
        ("NVIDIA L4", "l4"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4090", "rtx_4090"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A100-PCIE-40GB", "a100_pcie_40gb"),
        ("NVIDIA A100 80GB PCIe", "a100_80gb_pcie"),
        ("Tesla V100-PCIE-32GB", "v100_pcie_32gb"),
        ("Tesla P4", "p4"),
    ],
)
def test_finds_names_aliases_and_the_driver_s_names(name: str, found: str) -> None:
    assert find_device(name).name == found


def test_a_spec_is_its_own_device_registered_or_not() -> None:
    spec = DeviceSpec("not_registered")
    assert find_device(spec) is spec


@pytest.mark.parametrize(
    ("name", "hint"),
    [("h20", "did you mean 'h200' or 'h100_sxm' or "), ("a100_sxm4_80", "did you mean 'a100_80gb'"),
     ("zzzz", "The catalogue holds")],
)
def test_unknown_names_are_answered_with_near_ones(name: str, hint: str) -> None:
    with pytest.raises(UnknownDeviceError) as error:
        find_device(name)
    assert str(error.value).startswith(f"unknown device {name!r}: {hint}")
    assert str(error.value).endswith(
        f"The catalogue holds {', '.join(NAMES)}; describe another one with DeviceSpec and pass it, or add it with "
        "register_device"
    )


def test_what_is_no_name_is_refused() -> None:
    with pytest.raises(InputError, match=r"^find_device\(0\): takes a name, for example 'h200', or a DeviceSpec$"):
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
