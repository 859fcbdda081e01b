"""The allocator's settings are those of the environment, as PyTorch reads them."""
import pytest
import torch
from torch import nn

from analyzer import MetaTensorMode, Profile, ProfileOptions, profile
from analyzer.cli import main
from analyzer.errors import InputError
from analyzer.memory.allocator import AllocatorOptions

NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"


@pytest.fixture(autouse=True)
def without_settings(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("settings", "expandable", "said"), [
    ({}, False, None),
    ({NAMES[0]: EXPANDABLE}, True, f"the allocator's settings are those of {NAMES[0]}: {EXPANDABLE}"),
    ({NAMES[2]: EXPANDABLE}, True, f"the allocator's settings are those of {NAMES[2]}: {EXPANDABLE}"),
    ({NAMES[0]: "expandable_segments:False", NAMES[2]: EXPANDABLE}, False,
     f"the allocator's settings are those of {NAMES[0]}: expandable_segments:False"),
    ({NAMES[0]: "", NAMES[2]: EXPANDABLE}, False, None),  # one that is empty is one that is there
    ({NAMES[1]: EXPANDABLE, NAMES[2]: "expandable_segments:False"}, True,
     f"the allocator's settings are those of {NAMES[1]}: {EXPANDABLE}"),
    ({NAMES[0]: "backend:cudaMallocAsync"}, False,
     f"{NAMES[0]}=backend:cudaMallocAsync: the CUDA driver would pool the memory, by rules that are not public; it is "
     "told as of PyTorch's own allocator")], ids=lambda value: None)
def test_the_first_variable_that_is_there_counts(monkeypatch, settings, expandable, said):
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert AllocatorOptions.from_environment((2, 13)) == (AllocatorOptions(expandable_segments=expandable), said)


def test_the_first_version_with_one_name_for_all_is_2_10(monkeypatch):
    monkeypatch.setenv(NAMES[2], EXPANDABLE)
    assert AllocatorOptions.from_environment((2, 9)) == (AllocatorOptions(), (
        f"PYTORCH_ALLOC_CONF={EXPANDABLE}: torch 2.9 reads PYTORCH_CUDA_ALLOC_CONF alone, so the allocator's settings "
        "are its defaults"))
    assert AllocatorOptions.from_environment((2, 10))[0].expandable_segments
    monkeypatch.setenv(NAMES[0], "max_split_size_mb:100")
    assert AllocatorOptions.from_environment((2, 9))[0] == AllocatorOptions(max_split_size_mb=100)


@pytest.mark.parametrize(("key", "value", "since"), [
    ("per_process_memory_fraction", "0.5", (2, 10)), ("large_segment_size_mb", "32", (2, 11)),
    ("throw_on_cudamalloc_oom", "True", (2, 12)), ("pinned_max_cached_size_mb", "64", (2, 13))])
def test_a_key_that_the_version_has_not_yet_is_unknown(monkeypatch, key, value, since):
    monkeypatch.setenv(NAMES[0], f"{key}:{value}")
    before = since[0], since[1] - 1
    with pytest.raises(InputError, match=rf"torch 2\.{before[1]} has no key '{key}' and raises: it came with "
                                         rf"2\.{since[1]}"):
        AllocatorOptions.from_environment(before)
    AllocatorOptions.from_environment(since)


def take() -> Profile:
    return profile(nn.Linear(1000, 1000), torch.rand(8, 1000), device="h100")


def test_a_profile_has_them_and_says_so(monkeypatch):
    usual = take()
    wanted = profile(nn.Linear(1000, 1000), torch.rand(8, 1000), device="h100",
                     options=ProfileOptions(allocator=AllocatorOptions(expandable_segments=True)))
    monkeypatch.setenv(NAMES[0], EXPANDABLE)
    found = take()
    assert found.peak_reserved_bytes == wanted.peak_reserved_bytes != usual.peak_reserved_bytes
    assert f"the allocator's settings are those of {NAMES[0]}: {EXPANDABLE}" in found.assumptions
    said = profile(nn.Linear(1000, 1000), torch.rand(8, 1000), device="h100",
                   options=ProfileOptions(allocator=AllocatorOptions()))  # what is given goes before
    assert said.peak_reserved_bytes == usual.peak_reserved_bytes


def test_they_are_read_where_the_device_is_used_first(monkeypatch):
    """As in PyTorch, whose scripts set them before."""
    with MetaTensorMode() as mode:
        monkeypatch.setenv(NAMES[0], EXPANDABLE)
        kept = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
        monkeypatch.delenv(NAMES[0])
        assert torch.cuda.memory_reserved() == 20 << 20 and mode.space.options.expandable_segments
        assert torch.cuda.memory_snapshot()[0]["is_expandable"]
        del kept


def test_a_share_of_the_memory_is_one_of_the_device(monkeypatch):
    monkeypatch.setenv(NAMES[0], "per_process_memory_fraction:0.5")
    with MetaTensorMode(), pytest.raises(torch.OutOfMemoryError):  # an H200 has 139.8 GiB
        torch.empty(100 << 30, dtype=torch.uint8, device="cuda")


def test_settings_that_pytorch_refuses_are_named(monkeypatch):
    monkeypatch.setenv(NAMES[0], "expandable:True")
    with pytest.raises(InputError, match=r"PYTORCH_CUDA_ALLOC_CONF: allocator settings 'expandable:True': unknown key"):
        take()


def test_the_command_line_gives_them(capsys, tmp_path):
    command = ["profile", "resnet18", "--input", "1x3x64x64", "--json"]
    files = [str(tmp_path / name) for name in ("usual.json", "expandable.json")]
    assert main([*command, files[0]]) == main([*command, files[1], "--alloc-conf", EXPANDABLE]) == 0
    usual, found = map(Profile.from_json, files)
    assert found.peak_allocated_bytes != usual.peak_allocated_bytes  # blocks of segments that grow are cut to size
    assert found.made_by is not None and found.made_by.options["alloc_conf"] == EXPANDABLE
    capsys.readouterr()
    assert main([*command, files[0], "--alloc-conf", "expandable:True"]) == 2
    assert "--alloc-conf: allocator settings 'expandable:True': unknown key" in capsys.readouterr().err
