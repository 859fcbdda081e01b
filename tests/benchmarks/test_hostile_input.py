"""What comes from outside is data: a file that is damaged, or says what cannot be, is refused in words."""
import json
import sys

import pytest
import torch
from torch import nn

from analyzer import Profile, profile, symbolic_trace
from analyzer.errors import AnalyzerError, InputError, ProfileFormatError
from analyzer.hardware import find_device
from analyzer.results.info import TimelinePoint
from analyzer.saved_format import load_json
from benchmarks.fuzz.hostile_reader import list_readers, profile_net
from benchmarks.fuzz.inputs import REFUSED, list_wrong, try_reader

READERS = ("table of ranks", "plan", "device", "cluster", "configuration of DeepSpeed")


@pytest.fixture(scope="module")
def readers(tmp_path_factory):
    return {reader.name: reader for reader in list_readers(tmp_path_factory.mktemp("hostile"), READERS)}


@pytest.mark.parametrize("name", READERS)
def test_no_reader_takes_or_falls_over_what_is_damaged(readers, name, tmp_path):
    sample = [wrong for i, wrong in enumerate(list_wrong(readers[name]))  # all of them: benchmarks.fuzz.inputs
              if (i % 29 == 0 or "10^18" in wrong.name) and len(wrong.content) < 100_000]
    counts, lost = try_reader(readers[name], sample, tmp_path)
    assert lost == [] and counts[REFUSED]


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
    ("configuration of DeepSpeed", lambda data: data["flops_profiler"].update(enabled=3),
     "enabled=3: must be true or false"),
])
def test_files_that_were_taken_and_failed_later_are_refused(readers, tmp_path, reader, change, said):
    found = readers[reader]
    data = json.loads(found.sample)
    change(data)
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(data) + "\n")
    with pytest.raises(AnalyzerError, match=said):
        found.read(path)


def test_moments_before_the_step_and_what_rounding_leaves_are_saved():
    data = json.loads(profile_net().to_json())
    data["timeline"][0][TimelinePoint._fields.index("seconds")], data["step_seconds"] = -0.25, -1e-17
    found = Profile.from_json(json.dumps(data))
    assert (found.timeline[0].seconds, found.step_seconds) == (-0.25, -1e-17)
    assert Profile.from_json(found.to_json()).timeline == found.timeline
