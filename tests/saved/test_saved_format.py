"""Saved records of the last format are read, with what they could not know unknown; others are refused in a sentence.

`saved/` holds what the last formats wrote: profiles of versions 7 and 9 to 16, a plan of version 2, a plan of
blocks of version 1.
"""
import json
import re
from pathlib import Path
from typing import Any

import pytest

from analyzer import Profile
from analyzer.errors import InputError, ProfileFormatError
from analyzer.hardware import DeviceSpec, device_spec
from analyzer.hardware.device_spec import encode_device, read_device
from analyzer.parallel import rank_table
from analyzer.parallel.rank_table import RankTable
from analyzer.report.export import json_format
from analyzer.saved_format import SavedFormat
from analyzer.tools.diffusion import diffusion_profile
from analyzer.tools.generation import GenerationProfile, generation_profile
from analyzer.tools.serving import served_profile
from analyzer.tools.solver import BlockPlan, Plan, block_plan, plan

SAVED = Path(__file__).parent
FORMATS = [json_format.FORMAT, plan._FORMAT, block_plan._FORMAT, generation_profile.FORMAT, served_profile.FORMAT,
           diffusion_profile.FORMAT, rank_table.FORMAT, device_spec.FORMAT]


#: of today's profiles, which none of those had
NEW = {"first_shortage": None, "course": None, "tf32": None}


def fields_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((SAVED / name).read_text())
    return found


@pytest.mark.parametrize("saved", FORMATS, ids=lambda saved: saved.name)
def test_each_format_reads_the_last_one(saved: SavedFormat) -> None:
    last = range(min(saved.upgrades, default=saved.version), saved.version)
    assert sorted(saved.upgrades) == list(last), "a step of the chain is missing"
    assert saved.version == 1 or last


def test_the_page_of_releases_names_each_format() -> None:
    page = (Path(__file__).parents[2] / "docs" / "releases.md").read_text()
    rows = re.findall(r"^\|.*\| `(analyzer\.\w+)` \| (\d+) \| ([\d and]+) \|$", page, re.MULTILINE)
    assert rows == [(saved.name, str(saved.version), " and ".join(map(str, sorted({*saved.upgrades, saved.version}))))
                    for saved in FORMATS]


def test_a_profile_of_version_7() -> None:
    profile = Profile.from_json(SAVED / "profile_7.json")
    assert profile.made_by is None and profile.params == 10 and profile.spans and profile.timeline[0].event is not None
    assert json.loads(profile.to_json()) == {**upgraded("profile_7.json"), "made_by": None,
                                             "peak_allocated_bytes_range": None}


def test_a_profile_of_version_9() -> None:
    """Its second estimate of the step's time, compiled, is left out: this one was made beside the eager step."""
    assert fields_of("profile_9.json")["fused"]["kernels"] == 12
    profile = Profile.from_json(SAVED / "profile_9.json")
    assert profile.compiled is None and profile.kernels is None and profile.step_seconds is not None
    assert json.loads(profile.to_json()) == upgraded("profile_9.json")


def upgraded(name: str) -> dict[str, Any]:
    """The fields of a saved profile as today's, what was not known then left out."""
    data = fields_of(name)
    del data["fused"]
    for step in ("first_step", "phases"):
        data[step] = {name: {**phase, "kernels": None} for name, phase in data[step].items()}
    return {**with_one_device(data), "version": Profile.format_version, "compiled": None}


def with_one_device(data: dict[str, Any]) -> dict[str, Any]:
    return with_operators({**data, "devices": [], "fullest_device": None, "copies": [],
                           "memory_events": [[*event, 0] for event in data["memory_events"]]})


def with_operators(data: dict[str, Any]) -> dict[str, Any]:
    return with_requested({**data, "timeline": [[*point, None] for point in data["timeline"]]})


def with_requested(data: dict[str, Any]) -> dict[str, Any]:
    return {**data, "memory_events": [[*event, None] for event in data["memory_events"]], "grad_mode": None,
            "allocator_settings": None, "cycles": [], **NEW}


def test_a_profile_of_version_10() -> None:
    """Its process had one device."""
    profile = Profile.from_json(SAVED / "profile_10.json")
    assert profile.devices == () == profile.copies and profile.verdict is not None and profile.verdict.place is None
    assert {event.device for event in profile.memory_events} == {0}
    assert json.loads(profile.to_json()) == {**with_one_device(fields_of("profile_10.json")),
                                             "version": Profile.format_version}


def test_a_profile_of_version_11() -> None:
    """Its timeline did not tell what ran: of the peak in the backward pass the forward operator is known alone."""
    profile = Profile.from_json(SAVED / "profile_11.json")
    assert {point.operator for point in profile.timeline} == {None}
    assert json.loads(profile.to_json()) == {**with_operators(fields_of("profile_11.json")),
                                             "version": Profile.format_version}


def test_a_profile_of_version_12() -> None:
    """It did not tell what an inference step ran under, and what blocks of memory were asked for."""
    profile = Profile.from_json(SAVED / "profile_12.json")
    assert profile.mode == "infer" and profile.grad_mode is None
    assert {event.requested_bytes for event in profile.memory_events} == {None}
    assert json.loads(profile.to_json()) == {**with_requested(fields_of("profile_12.json")),
                                             "version": Profile.format_version}


def test_a_profile_of_version_13() -> None:
    """It did not tell the settings of the allocator, which were those of expandable segments."""
    profile = Profile.from_json(SAVED / "profile_13.json")
    assert profile.allocator_settings is None and {event.action for event in profile.memory_events} > {"segment_map"}
    assert json.loads(profile.to_json()) == {**fields_of("profile_13.json"), "allocator_settings": None, "cycles": [],
                                             **NEW, "version": Profile.format_version}


def test_a_profile_of_version_14() -> None:
    """A script's phases were those of its steps."""
    profile = Profile.from_json(SAVED / "profile_14.json")
    assert profile.cycles == () and profile.allocator_settings is not None
    assert json.loads(profile.to_json()) == {**fields_of("profile_14.json"), "cycles": [], **NEW,
                                             "version": Profile.format_version}


def test_a_profile_of_version_15() -> None:
    """A dry run ended where memory ran out; of the host each phase of a cycle told nothing."""
    profile = Profile.from_json(SAVED / "profile_15.json")
    assert profile.first_shortage is None and len(profile.cycles) == 2 and profile.course is None
    assert {phase.host_peak_bytes for cycle in profile.cycles for phase in cycle.phases} == {None}
    fields = fields_of("profile_15.json")
    host = {"host_allocated_bytes": None, "host_peak_bytes": None}
    assert json.loads(profile.to_json()) == {**fields, **NEW, "version": Profile.format_version, "cycles": [
        {**cycle, "phases": [{**phase, **host} for phase in cycle["phases"]]} for cycle in fields["cycles"]]}


def test_a_profile_of_version_16() -> None:
    """It did not tell which operations ran in TF32."""
    profile = Profile.from_json(SAVED / "profile_16.json")
    assert profile.tf32 is None and profile.mfu() is not None
    assert json.loads(profile.to_json()) == {**fields_of("profile_16.json"), "tf32": None,
                                             "version": Profile.format_version}


def test_a_plan_of_version_2() -> None:
    found = Plan.from_json(SAVED / "plan_2.json")
    assert found.planned is not None and found.unplanned.memory is None and found.planned.memory is None
    assert found.planned.recompute_flops == 33792 and found.regions[0].nodes == ("_0_0", "_0_1", "_1_0")
    assert "1 checkpoints of operators" in found.summary() and "Plan of Sequential" in found._repr_html_()
    assert Plan.from_json(found.to_json()) == found
    unmeasured = {**fields_of("plan_2.json"), "planned": None}
    assert Plan.from_json(json.dumps(unmeasured)).planned is None


def test_a_plan_of_blocks_of_version_1() -> None:
    found = BlockPlan.from_json(SAVED / "block_plan_1.json")
    assert found.choices[0].skips == ("product#1",) and all(choice.operators is None for choice in found.choices)
    data = fields_of("block_plan_1.json")
    assert json.loads(found.to_json()) == {**data, "version": 2, "choices": [
        {**choice, "operators": None} for choice in data["choices"]]}


@pytest.mark.parametrize("made_by", [{}, {"made_by": {"target": "gpt2", "options": {}}}], ids=["7", "8"])
def test_a_generation_of_version_2(made_by: dict[str, Any]) -> None:
    """Its profiles are of version 7 or 8, which it does not say."""
    part = {k: v for k, v in fields_of("profile_7.json").items() if k not in ("format", "version", "derived")} | made_by
    data = {"format": "analyzer.generation", "version": 2, "name": "net", "device": "h100", "cache": "dynamic",
            "cache_dtype": None, "block_size": None, "batch_size": 1, "prompt_tokens": 3, "new_tokens": 1, "steps": [],
            "prefill": part, "decode": None, "out_of_memory": None, "assumptions": []}
    found = GenerationProfile.from_json(json.dumps(data))
    assert found.prefill.params == 10 and (found.prefill.made_by is None) == (not made_by)
    saved = json.loads(found.to_json())
    assert (saved["version"], saved["prefill"]["version"], saved["decode"]) == (3, Profile.format_version, None)
    assert GenerationProfile.from_json(found.to_json()) == found
    with pytest.raises(ProfileFormatError, match="format version 6, .* of a saved profile"):
        GenerationProfile.from_json(json.dumps({**saved, "prefill": {**saved["prefill"], "version": 6}}))


def test_a_table_of_ranks_without_a_number() -> None:
    table = {"size": 8, "rows": [], "timeline": None, "assumptions": ["none"]}
    data = {"format": "analyzer.ranks", "table": table, "profiles": {"0": fields_of("profile_7.json")}}
    found = RankTable.from_json(json.dumps(data))
    assert found.size == 8 and found.profiles[0].params == 10 and found.profiles[0].made_by is None
    assert json.loads(found.to_json())["version"] == 2


def test_a_device_s_file_says_its_format_and_one_by_hand_need_not(tmp_path: Path) -> None:
    path, spec = tmp_path / "card.json", DeviceSpec("card", memory_bytes=2**30)
    path.write_text(encode_device(spec))
    assert json.loads(path.read_text())["format"] == "analyzer.device" and read_device(path) == spec
    path.write_text(json.dumps(spec.to_dict()))
    assert read_device(path) == spec
    path.write_text(json.dumps({"format": "analyzer.device", "version": 2, **spec.to_dict()}))
    with pytest.raises(InputError, match=re.escape(
            "card.json': format version 2, and this analyzer reads version 1 of a saved device: read it with the "
            "analyzer that wrote it, or a newer one than this, or run `analyzer calibrate` again")):
        read_device(path)
    path.write_text(json.dumps({"version": 1, **spec.to_dict()}))
    with pytest.raises(InputError, match='not a saved device: expected an object with "format": "analyzer.device"'):
        read_device(path)


@pytest.mark.parametrize(("read", "text", "message"), [
    (Profile.from_json, '{"format": "analyzer.profile", "version": 6, "analyzer_version": "0.0.9"}',
     "from_json(text): format version 6, written by analyzer 0.0.9, and this analyzer reads version 7 and 8 and 9 and "
     "10 and 11 and 12 and 13 and 14 and 15 and 16 and 17 of a saved profile: read it with the analyzer that wrote it, "
     "or profile the model again"),
    (Profile.from_json, '{"format": "analyzer.profile"}', "format version None, and this analyzer reads version 7"),
    (Plan.from_json, '{"format": "analyzer.plan", "version": 1}',
     "Plan.from_json(text): format version 1, and this analyzer reads version 2 and 3 and 4 and 5 and 6 of a saved "
     "plan: read it with the analyzer that wrote it, or solve again"),
    (Plan.from_json, '{"format": "analyzer.plan", "version": 7}', "or a newer one than this, or solve again"),
    (Plan.from_json, '{"format": "analyzer.plan", "version": true}', "format version True, and"),
    (GenerationProfile.from_json, '{"format": "analyzer.generation", "version": 1}',
     "GenerationProfile.from_json(text): format version 1, and this analyzer reads version 2 and 3 of a saved "
     "generation"),
    (GenerationProfile.from_json, "{}", 'not a saved generation: expected an object with "format"'),
    (RankTable.from_json, '{"format": "analyzer.ranks", "version": 3}', "version 1 and 2 of a saved table of ranks"),
    (RankTable.from_json, '{"format": "analyzer.plan"}', 'not a saved table of ranks: expected an object with '
     '"format": "analyzer.ranks", got "format": \'analyzer.plan\''),
    (Profile.from_json, json.dumps({"format": "analyzer.profile", "version": "9" * 500}), "9... (502 characters), and"),
])
def test_others_are_refused(read: Any, text: str, message: str) -> None:
    with pytest.raises(ProfileFormatError, match=re.escape(message)):
        read(text)
