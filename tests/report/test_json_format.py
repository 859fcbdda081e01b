"""JSON: what is written is read back the same, and what cannot be read says why."""
import dataclasses
import gzip
import json
import math
import os
import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from analyzer.api.result import Profile
from analyzer.errors import InputError, OutputError, ProfileFormatError
from analyzer.hardware.device_spec import is_device_file
from analyzer.report.export.plain_record import find_fault
from analyzer.results.info import (
    BreakInfo,
    CompiledInfo,
    CostInfo,
    CycleInfo,
    CyclePhase,
    FirstShortage,
    HolderInfo,
    MemoryEvent,
    ModuleCall,
    ModuleInfo,
    OperatorInfo,
    OutOfMemoryInfo,
    PhaseInfo,
    ReplayInfo,
    ReplayReport,
    TimelinePoint,
    UncountedInfo,
)
from analyzer.results.lane import SpanInfo
from analyzer.results.node_info import NodeInfo, SavedTensorInfo, TensorInfo
from analyzer.results.run_cost import CommInfo
from analyzer.results.world import CommandInfo, CopyInfo, DeviceInfo, GroupInfo, RankRun, WorldInfo

texts = st.text(st.characters(codec=None), max_size=6)  # lone surrogates too: they occur in file names
integers = st.integers(0, 2**70)
counts = st.none() | integers
finite = st.floats(0, 1e59)
seconds = st.none() | finite
moments = st.floats(-1e59, 1e59)
scalars = (st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | texts
           | st.integers(-(2**70), 2**70))

TENSOR = TensorInfo((2, 3), "float32", "cuda:0")
#: Records that stand in a profile or in one another, whatever their fields; a module holds no others here.
KINDS = (TensorInfo, OperatorInfo, UncountedInfo, HolderInfo, NodeInfo, PhaseInfo, CostInfo, OutOfMemoryInfo,
         FirstShortage, ReplayReport, ReplayInfo, SavedTensorInfo, CompiledInfo, BreakInfo, CommInfo, GroupInfo,
         WorldInfo, CommandInfo, DeviceInfo, CopyInfo, CycleInfo, CyclePhase)
SIMPLE = {
    "bool": st.booleans(), "str": texts, "Scalar": scalars, "int": integers, "int | None": counts,
    "tuple[int, int] | None": st.none() | st.tuples(integers, integers),
    "float": finite, "float | None": seconds, "tuple[float, float] | None": st.none() | st.tuples(finite, finite),
    "Moment": moments,
    "str | None": st.none() | texts,
    "Region": texts | st.dictionaries(texts, scalars, max_size=2), "TimelinePoint": st.builds(
        TimelinePoint, texts | integers, integers,
        st.none() | texts, counts, counts, st.none() | moments), "SpanInfo": st.builds(
            SpanInfo, *[texts] * 3, *[st.none() | texts] * 2, *[texts] * 2, finite, finite,
            st.none()), "ModuleCall": st.builds(ModuleCall, texts, st.none(), st.just((TENSOR, )), st.just(
            ()), seconds), "MemoryEvent": st.builds(
            MemoryEvent, texts, integers, integers, texts, texts, integers, st.none() | integers),
    "Option": st.booleans() | integers | texts | st.lists(texts, max_size=2).map(tuple),
    "RankRun": st.builds(RankRun, integers, integers, integers).filter(lambda run: find_fault(run) is None),
    "dict[str, tuple[str, ...]]": st.dictionaries(texts, st.lists(texts, max_size=2).map(tuple), max_size=2),
    "ModuleInfo": st.just(ModuleInfo(path="a", type="Linear", operators=(OperatorInfo("mm", 1),))),
    **{kind.__name__: st.deferred(lambda kind=kind: records(kind)) for kind in KINDS}}


def values_of(hint: str):
    """Values of a field by its written type, so that a field of a new type cannot be forgotten here."""
    if hint in SIMPLE:
        return SIMPLE[hint]
    if hint == "tuple[float, float]":
        return st.tuples(st.floats(0, 1), st.floats(1, 2))
    if hint.endswith(" | None"):
        return st.none() | values_of(hint.removesuffix(" | None"))
    kind, items = re.fullmatch(r"(tuple|dict)\[(?:str, )?(\w+)(?:, \.\.\.)?\]", hint).groups()
    if kind == "dict":
        return st.dictionaries(texts, values_of(items), max_size=2)
    return st.lists(values_of(items), max_size=2).map(tuple)


def records(kind):
    fields = {field.name: values_of(field.type) for field in dataclasses.fields(kind)}
    fields |= {"depth": st.just(0)} if kind is ModuleInfo else {}
    fields |= {"device": st.none() | texts.filter(lambda name: not is_device_file(name))} if kind is Profile else {}
    fields |= {"name": st.integers(0, 99).map("cuda:{}".format)} if kind is DeviceInfo else {}
    fields |= {"fullest_device": st.none()} if kind is Profile else {}
    if kind is WorldInfo:
        fields |= {"rank": st.just(0), "size": st.integers(1, 2**70),
                   "cluster": st.none() | texts.filter(lambda name: not is_device_file(name))}
    return st.builds(kind, **fields)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(records(Profile))
def test_round_trip(profile):
    again = Profile.from_json(profile.to_json())
    assert again == profile
    assert again.to_json() == profile.to_json()


def test_round_trip_of_a_full_profile(mlp, out_of_memory):
    full = replace(mlp, out_of_memory=out_of_memory)
    again = Profile.from_json(full.to_json())
    assert again == full
    # tuple equality does not look at the kind of tuple
    assert type(again.timeline[0]) is TimelinePoint and type(again.memory_events[0]) is MemoryEvent
    assert type(again.spans[0]) is SpanInfo
    assert type(again.nodes[0].outputs[0]) is TensorInfo and type(again.modules.own) is CostInfo


def test_files(mlp, tmp_path):
    path = tmp_path / "net.json"
    text = mlp.to_json(path)
    assert path.read_text() == text + "\n"
    assert Profile.from_json(path) == Profile.from_json(str(path)) == Profile.from_json(text) == mlp


def test_text_says_what_it_is(bare):
    data = json.loads(bare.to_json())
    assert (data["format"], data["version"]) == ("analyzer.profile", 17) and "format_version" not in data


@pytest.mark.parametrize(("damage", "words"), [
    (lambda text: text[:200], ["damaged: not valid JSON at line 1 column", "of 200", "profile the model again"]),
    (lambda text: text.replace(":", " ", 1), ["line 1 column 11", "Expecting ':'", '{"format"']),
    (lambda text: '{"a": 1}', ["not a saved profile", '"format": "analyzer.profile"', "an object with 'a'"]),
    (lambda text: text.replace("analyzer.profile", "other", 1), ["not a saved profile", "'other'"]),
    (lambda text: text.replace('"fwd_flops":10528', '"fwd_flops":NaN', 1), ["NaN", "null"]),
    (lambda text: text.replace('"fwd_seconds":5e-06', '"fwd_seconds":1e999', 1), ["fwd_seconds", "inf"]),
    (lambda text: text.replace('"params":676', '"params":676,"params":676', 1), ["'params'", "given twice"]),
    (lambda text: text.replace('"params":676', '"params":"676"', 1), ["params: expected int or null, got str '676'"]),
    (lambda text: text.replace('"params":676', '"parms":676', 1), ["unknown field 'parms'", "did you mean 'params'?"]),
    (lambda text: text.replace('"name":"fc2"', '"name":7', 1), ["nodes[3].name: expected str, got int 7"]),
    (lambda text: text.replace('"op":"placeholder",', "", 1), ["nodes[0]: missing field 'op'"]),
    (lambda text: text.replace('"shape":[8,16]', '"shape":[8,null]', 1),
     ["inputs['x'].shape[1]: expected int, got null"]),
    (lambda text: text.replace('"kind":"autocast"', '"kind":[1]', 1),
     ["nodes[2].region[1]: expected str or object, got object"]),
    (lambda text: text.replace('["fc1",4096,"forward",2097152,3,2e-06,null]', '["fc1",4096]', 1),
     ["timeline[0]: expected list of 7 (label, allocated_bytes, phase, reserved_bytes, event, seconds, "
      "operator), got list"]),
    (lambda text: text.replace('"places":[0,1]', '"places":[0,2]', 1),
     ["spans.lane.places[1]: expected a place among 2 values, got 2"]),
    (lambda text: text.replace('"places":[0,1]', '"places":[0]', 1),
     ["spans: expected columns of one length, got lane of 1, kind of 2, "]),
    (lambda text: text.replace('"spans":{"lane":', '"spans":{"lanes":', 1),
     ["spans: expected columns lane, kind, name, operator, node, module_path, phase, start_seconds, seconds, launch"]),
    (lambda text: text.replace('"start_seconds":[0.0,2e-06]', '"start_seconds":[0.0,null]', 1),
     ["spans.start_seconds[1]: expected float, got null"]),
    (lambda text: text.replace('"launch":[null,0]', '"launch":0', 1), ["spans.launch: expected list"]),
    (lambda text: text.replace('"step_seconds_range":null', '"step_seconds_range":[0.1]', 1),
     ["step_seconds_range: expected list of 2, got one of 1"]),
    (lambda text: text.replace('"params":676', '"params":' + "1" * 5000, 1), ["damaged: not valid JSON", "digits"]),
    (lambda text: "[" * 100_000, ["nested too deep"]),
])
def test_damaged_text(mlp, damage, words):
    text = mlp.to_json()
    damaged = damage(text)
    assert damaged != text
    with pytest.raises(ProfileFormatError) as caught:
        Profile.from_json(damaged)
    assert all(word in str(caught.value) for word in ["from_json(text)", *words]), caught.value


@pytest.mark.parametrize(("changes", "words"), [
    ({"fwd_seconds": math.nan}, ["fwd_seconds", "nan"]),
    ({"params": 3.0}, ["params: expected int or null, got float 3.0"]),
    ({"assumptions": ["a list"]}, None),
    ({"nodes": (NodeInfo("call_function", "f", region=({"shape": (1, 2)},)),)}, ["nodes[0].region[0]"]),
    ({"inputs": {"x": TensorInfo((1, 2), None, "cpu")}}, ["inputs['x'].dtype: expected str, got null"]),
    ({"phases": {1: PhaseInfo()}}, ["phases: key 1"]),
    ({"name": Path("x")}, ["name: expected str"]),
])
def test_what_could_not_be_read_back_is_refused(bare, changes, words, tmp_path):
    profile, path = replace(bare, **changes), tmp_path / "p.json"
    if words is None:  # a list where a tuple belongs is saved as the tuple that it should be
        assert Profile.from_json(profile.to_json(path)).assumptions == ("a list",)
        return
    with pytest.raises(InputError) as caught:
        profile.to_json(path)
    assert all(word in str(caught.value) for word in ["to_json()", *words]), caught.value
    assert not path.exists()


@pytest.mark.parametrize("source", ["nowhere.json", Path("nowhere.json"), "."])
def test_no_such_file(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    problem = "is a folder" if source == "." else "no such file"
    with pytest.raises(InputError, match=re.escape(f"from_json({str(source)!r}): {problem}") + ".*starts with '{'"):
        Profile.from_json(source)


@pytest.mark.parametrize(("content", "says"), [
    (b"import torch\n", "not valid JSON at line 1 column 1"), (b"", "there is no text in it"),
    (b" \n", "there is no text in it"), (b"<!doctype html>", "not valid JSON at line 1"),
    (b'{"traceEvents": [], "displayTimeUnit": "ms"}', "got an object with 'traceEvents', 'displayTimeUnit'"),
    (b"{}", "got an empty object"), (b"[1, 2]", "got a list"), (b"null", "got null"), (b"3", "got a number"),
    (b'{"a": 1}\n{"a": 2}\n', "not valid JSON at line 2"), (b"\xff\xfe{\0", "it is UTF-16: save it as UTF-8"),
    (gzip.compress(b"{}", mtime=0), "it is compressed by gzip: unpack it first"),
    (b"PK\x03\x04\xff", "it is a zip archive"),
    (pickle.dumps({"a": 1}), "it is a pickle"), (b"\x89PNG\xff", "not UTF-8 text (byte 0)")])
def test_a_file_of_another_kind_is_no_profile(content, says, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ProfileFormatError) as error:
        Profile.from_json(path)
    told = str(error.value)
    assert told.startswith(f"from_json({str(path)!r}): not a saved profile: ") and says in told
    assert "damaged" not in told and "again" not in told


def test_a_path_is_any_object_that_stands_for_one(mlp, tmp_path):
    class Place(os.PathLike):
        def __fspath__(self):
            return str(tmp_path / "p.json")

    mlp.to_json(Place())
    assert Profile.from_json(Place()) == mlp
    with pytest.raises(OutputError, match="must be the path of a file"):
        mlp.to_json(os.fsencode(tmp_path / "p.json"))


def test_damaged_file_is_named(mlp, tmp_path):
    path = tmp_path / "cut.json"
    path.write_text(mlp.to_json()[:-1])
    with pytest.raises(ProfileFormatError, match=re.escape(f"from_json({str(path)!r}): damaged: not valid JSON")):
        Profile.from_json(path)
