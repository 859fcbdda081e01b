"""What comes from outside is data: a file that is damaged, or says what cannot be, is refused in words."""
import json
import re
import sys
from collections import Counter
from contextlib import suppress
from functools import cache, reduce
from operator import getitem

import pytest
import torch
from torch import nn

from analyzer import Profile, profile, symbolic_trace
from analyzer.dropins.deepspeed import profile_with_config
from analyzer.errors import AnalyzerError, InputError, ProfileFormatError
from analyzer.hardware import find_cluster, find_device
from analyzer.hardware.device_spec import read_device
from analyzer.parallel import list_actions
from analyzer.parallel.pipeline_timeline import join_timeline
from analyzer.parallel.rank_row import StageCost, describe_rank
from analyzer.parallel.rank_table import RankTable
from analyzer.results.info import TimelinePoint
from analyzer.saved_format import load_json
from analyzer.tools.solver import Plan, Planner

DEEPSPEED = {"train_batch_size": 8, "wall_clock_breakdown": False, "flops_profiler": {
    "enabled": True, "profile_step": 1, "module_depth": -1, "top_modules": 1, "detailed": True}}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.act = nn.Linear(8, 16), nn.ReLU()

    def forward(self, x):
        return self.act(self.first(x))


@cache
def profile_net() -> Profile:
    return profile(Net(), args=(torch.ones(4, 8),), optimizer="sgd", device="h100")


def make_ranks() -> str:
    timeline = join_timeline(list_actions("1F1B", ranks=2, micro_batches=2), [StageCost(1.0, 2.0)] * 2)
    rows = tuple(describe_rank(profile_net(), rank, (rank,), f"stage {rank + 1} of 2") for rank in range(2))
    return RankTable(2, rows, timeline, ("none",), {}).to_json()


def make_plan() -> str:
    model = nn.Sequential(*[Net() if i % 2 else nn.Linear(16 if i else 8, 8) for i in range(4)])
    x = torch.ones(4, 8)
    return Planner(symbolic_trace(model, meta_args={"input": x}), (x,)).solve(0.9).to_json()


#: Each with what makes a file, what reads it, and what looks at what was read.
READERS = {
    "profile": (lambda: profile_net().to_json(), Profile.from_json, lambda p: (p.summary(), p.table(), p.to_json())),
    "ranks": (make_ranks, RankTable.from_json, lambda table: (table.render(), table.to_json())),
    "plan": (make_plan, Plan.from_json, str),
    "device": (lambda: json.dumps(find_device("a100_40gb").to_dict()), read_device,
               lambda device: profile(Net(), args=(torch.ones(4, 8),), mode="infer", device=device).summary()),
    "cluster": (lambda: json.dumps(find_cluster("dgx_h100").to_dict()), lambda path: find_cluster(str(path)),
                lambda cluster: list(cluster.figures())),
    "DeepSpeed": (lambda: json.dumps(DEEPSPEED), lambda path: profile_with_config(Net(), path), repr)}
#: What stands in the place of a value; a word in JSON that `json.dumps` would write none like is put in by its mark.
WRONG = (-1, -1e30, 10**18, 10**300, 0.5, True, None, "x", "3", "\ud800", "\x00\x1b[2J", "../../etc/passwd", [], {},
         ["x"], {"a": 1}, *(f"<{word}>" for word in ("NaN", "Infinity", "1e400", "1" + "0" * 5000)))
MARKED = re.compile(r'"<(NaN|Infinity|1e400|10{5000})>"')


def list_places(value, path=()):
    """A path to each kind of place: all items of a list are one kind."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, item in inner:
        yield from list_places(item, (*path, key))


def mutate(text: str):
    """The record with one thing changed, or left out."""
    for path in list(list_places(json.loads(text)))[1:]:
        for wrong in (*WRONG, "left out"):
            data = json.loads(text)
            holder = reduce(getitem, path[:-1], data)
            if wrong == "left out":
                del holder[path[-1]]
            else:
                holder[path[-1]] = wrong
            yield f"{path}: {wrong!r:.20}", MARKED.sub(r"\1", json.dumps(data)).encode()


def damage(text: str):
    """What is no text of a record at all, or only a part of it."""
    whole = text.encode()
    yield from {"empty": b"", "cut": whole[:len(whole) // 2], "twice": whole + whole, "UTF-16": text.encode("utf-16"),
                "a lone byte": whole[:-2] + b"\xff" + whole[-2:], "zeros": bytes(64), "ELF": b"\x7fELF" + bytes(200),
                "a pickle": b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93\x94.", "a number": b"9" * 10_000,
                "lists": b"[" * 100_000 + b"]" * 100_000, "objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
                **{f"only {word}": word for word in (b"null", b"3", b'"x"', b"[1, 2]", b"<html>")}}.items()


@pytest.fixture(scope="module")
def samples():
    return {name: make() for name, (make, _, _) in READERS.items()}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", READERS)
def test_a_file_that_is_changed_is_refused_in_words_or_looked_at_in_every_way(samples, name, tmp_path):
    _, read, look = READERS[name]
    path, refused = tmp_path / "hostile.json", Counter()
    changes = list(mutate(samples[name]))
    for what, content in (*damage(samples[name]), *changes[::max(1, len(changes) // 120)]):
        path.write_bytes(content)
        try:
            found = read(path)
        except AnalyzerError as error:
            refused[what.startswith("(")] += 1
            assert name == "DeepSpeed" or "hostile" in str(error), what  # an error repeats what it is of
            continue
        assert what.startswith("(") or name == "DeepSpeed", f"{what} was taken"
        with suppress(AnalyzerError):
            look(found)
    assert refused[False] > 10 and refused[True] > 20


@pytest.mark.parametrize(("place", "value", "words"), [
    (("params",), -1, "params: -1 is no quantity"), (("step_seconds",), -0.5, "step_seconds: -0.5 is no quantity"),
    (("params",), 10**300, r"params: 10{79}... \(301 characters\) is no quantity"),
    (("timeline", 0, 1), -4, r"timeline\[0\].allocated_bytes: -4 is no quantity"),
    (("modules", "depth"), 10**18, "modules: '' is at depth 1000000000000000000 of 3 modules"),
    (("device",), "../../etc/passwd", "device '../../etc/passwd': the name of a file, not of a device")])
def test_a_saved_profile_holds_quantities_and_places_that_are_there(place, value, words):
    data = holder = json.loads(profile_net().to_json())
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    with pytest.raises(ProfileFormatError, match=words):
        Profile.from_json(json.dumps(data))


def test_a_file_with_a_mark_of_its_encoding_is_read_and_utf_16_is_named(tmp_path):
    path, text = tmp_path / "card.json", json.dumps(find_device("l4").to_dict())
    path.write_text(text, encoding="utf-8-sig")  # as editors of Windows do
    assert find_device(str(path)) == find_device("l4")
    path.write_text(text, encoding="utf-16")
    with pytest.raises(InputError, match="card.json': not UTF-8 text .it is UTF-16: save it as UTF-8"):
        find_device(str(path))


def test_a_file_without_an_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("analyzer.saved_format.MOST_BYTES", 1000)
    with pytest.raises(InputError, match="longer than 1,000 bytes"):
        load_json("/dev/zero")
    (tmp_path / "long.json").write_text("[" + " " * 1000 + "]")
    with pytest.raises(InputError, match="longer than 1,000 bytes"):
        load_json(tmp_path / "long.json")


@pytest.mark.parametrize("name", ["\ud800", "=1+1|<b>\n\\input{x}\x1b[2J\u202e", "$^{$\\frac"])
@pytest.mark.filterwarnings("ignore:Glyph")
def test_files_can_be_written_whatever_names_are(tmp_path, name):
    """Half a surrogate pair, as `os.fsdecode` gives for a byte of another encoding, is no UTF-8."""
    found = Profile.from_json(profile_net().to_json().replace('"first"', json.dumps(name)))
    for kind, ending in (("json", "json"), ("html", "html"), ("chrome_trace", "json"),
                         ("memory_snapshot", "pickle"), ("table", "csv"), ("table", "tex")):
        path = tmp_path / f"found.{ending}"
        found.export(kind, path)
        assert path.stat().st_size
        if ending != "pickle":
            path.read_text(encoding="utf-8")


@pytest.fixture
def default_recursion_limit():
    """Python's own: libraries that other tests import raise it and leave it so."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.usefixtures("default_recursion_limit")
def test_modules_nested_deeper_than_python_allows_are_told_so():
    model: nn.Module = nn.Linear(4, 4)
    for _ in range(300):
        model = nn.Sequential(model)
    with pytest.raises(RecursionError, match="a module that is profiled takes four.*sys.setrecursionlimit"):
        profile(model, args=(torch.ones(2, 4),))
    with pytest.raises((RecursionError, InputError)) as caught:
        symbolic_trace(model, meta_args={"input": torch.ones(2, 4)})
    assert "sys.setrecursionlimit" in str(caught.value) or "forward failed in module" in str(caught.value)


def test_a_petabyte_is_refused_and_terabytes_are_counted():
    def run(width):
        return profile(lambda: nn.Linear(width, width, bias=False), args=(torch.empty(8, width, device="meta"),))

    found = run(2**20)
    assert (found.params, found.fwd_flops) == (2**40, 16 * 2**40 + 8 * 2**20)  # and the sum of the outputs
    with pytest.raises(InputError, match="1,125,899,906,842,624 bytes more at once than a device has addresses for"):
        run(2**24)
    with pytest.raises(InputError, match="70,368,744,177,664 bytes more at once than a device has addresses for"):
        run(2**22)  # the weight has addresses, its gradient has none


@pytest.mark.parametrize(("reader", "change", "said"), [
    ("plan", lambda data: data["regions"][0].update(nodes=[]), r"nodes=\(\): a checkpoint runs one node or more"),
    ("DeepSpeed", lambda data: data["flops_profiler"].update(enabled=3), "enabled=3: must be true or false"),
])
def test_files_that_were_taken_and_failed_later_are_refused(samples, tmp_path, reader, change, said):
    data, path = json.loads(samples[reader]), tmp_path / "changed.json"
    change(data)
    path.write_text(json.dumps(data) + "\n")
    with pytest.raises(AnalyzerError, match=said):
        READERS[reader][1](path)


def test_moments_before_the_step_and_what_rounding_leaves_are_saved():
    data = json.loads(profile_net().to_json())
    data["timeline"][0][TimelinePoint._fields.index("seconds")], data["step_seconds"] = -0.25, -1e-17
    found = Profile.from_json(json.dumps(data))
    assert (found.timeline[0].seconds, found.step_seconds) == (-0.25, -1e-17)
    assert Profile.from_json(found.to_json()).timeline == found.timeline
