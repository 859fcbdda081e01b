"""What changed between two profiles: trees written by hand, whose explanation is worked out, and real models."""
import csv
import io
import math
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import analyzer
from analyzer import Profile, ProfileChange, compare
from analyzer.cli import main
from analyzer.errors import InputError
from analyzer.results.comparison import QuantityChange
from analyzer.results.info import CostInfo, HolderInfo, ModuleInfo, OutOfMemoryInfo, PhaseInfo
from analyzer.results.node_info import TensorInfo

WIDTH, HEIGHT = 120, 40


def tree(path: str, type: str, *children: ModuleInfo, **own: float | None) -> ModuleInfo:
    """A module that costs what its children and it itself do; what is not given is 0."""
    costs: dict[str, Any] = {name: own.get(name, 0) for name in CostInfo.__slots__}
    total = CostInfo(**costs)
    for child in children:
        total = total + CostInfo(**{name: getattr(child, name) for name in CostInfo.__slots__})
    return ModuleInfo(path=path, type=type, depth=path.count(".") + 1 if path else 0, own=CostInfo(**costs),
                      children=children, **{name: getattr(total, name) for name in CostInfo.__slots__})


def profile_of(root: ModuleInfo | None = None, **more: Any) -> Profile:
    return Profile(name="Net", mode="train", modules=root, **more)


def net(blocks: dict[int, tuple[float | None, float]], **own: float) -> Profile:
    """A model of numbered blocks, each with so many parameters in fc and in norm."""
    return profile_of(tree("", "Net", tree("layers", "ModuleList", *[
        tree(f"layers.{i}", "Block", tree(f"layers.{i}.fc", "Linear", params=fc),
             tree(f"layers.{i}.norm", "Norm", params=norm)) for i, (fc, norm) in blocks.items()]), **own))


def explain(before: Profile, after: Profile, quantity: str = "params") -> list[tuple[Any, ...]]:
    return [(row.module, row.modules, row.before, row.after) for row in compare(before, after).modules
            if row.quantity == quantity]


FOUR = net({i: (100, 10) for i in range(4)}, params=50)


@pytest.mark.parametrize(("after", "rows"), [
    (FOUR, []),
    # the same in all blocks: one row, of the deepest module
    (net({i: (120, 10) for i in range(4)}, params=50), [("layers.*.fc", 4, 400, 480)]),
    # in two of them
    (net({0: (120, 10), 1: (120, 10), 2: (100, 10), 3: (100, 10)}, params=50), [("layers.{0-1}.fc", 2, 200, 240)]),
    (net({0: (120, 10), 1: (100, 10), 2: (100, 10), 3: (120, 10)}, params=50), [("layers.{0,3}.fc", 2, 200, 240)]),
    # all that is in a block changes by the same ratio: the block; in one block alone: that one
    (net({i: (200, 20) for i in range(4)}, params=50), [("layers.*", 4, 440, 880)]),
    (net({0: (100, 10), 1: (200, 20), 2: (100, 10), 3: (100, 10)}, params=50), [("layers.1", 1, 110, 220)]),
    # two parts of a block in opposite directions: what they add up to hides neither
    (net({i: (90, 20) for i in range(4)}, params=50), [("layers.*.fc", 4, 400, 360), ("layers.*.norm", 4, 40, 80)]),
    # outside the submodules of the root
    (net({i: (100, 10) for i in range(4)}, params=60), [("(own)", 1, 50, 60)]),
    # everything by the same ratio
    (net({i: (200, 20) for i in range(4)}, params=100), [("(model)", 1, 490, 980)]),
    # two blocks more, and one less
    (net({i: (100, 10) for i in range(6)}, params=50), [("layers.{4-5}", 2, 0, 220)]),
    (net({i: (100, 10) for i in range(3)}, params=50), [("layers.3", 1, 110, 0)]),
    # unknown in one place: what is known elsewhere is told
    (net({0: (None, 10), **{i: (100, 20) for i in range(1, 4)}}, params=50),
     [("layers.{1-3}.norm", 3, 30, 60), ("layers.0.fc", 1, 100, None)]),
])
def test_the_deepest_modules_that_explain_a_change(after: Profile, rows: list[tuple[Any, ...]]) -> None:
    assert explain(FOUR, after) == rows
    assert set(explain(after, FOUR)) == {(path, n, b, a) for path, n, a, b in rows}


def test_layers_of_one_class_among_others_are_no_blocks() -> None:
    """Both linear layers of each block have 100 parameters: they change alike, so the block does."""
    before, after = (profile_of(tree("", "Net", *[tree(f"{i}", "Sequential", tree(f"{i}.0", "Linear", params=n), tree(
        f"{i}.1", "ReLU"), tree(f"{i}.2", "Linear", params=n)) for i in range(2)])) for n in (100, 200))
    assert explain(before, after) == [("*", 2, 400, 800)]
    alone = replace(after, modules=tree("", "Net", *[tree(f"{i}", "Sequential", tree(f"{i}.0", "Linear", params=100),
                                                          tree(f"{i}.1", "ReLU"),
                                                          tree(f"{i}.2", "Linear", params=200)) for i in range(2)]))
    assert explain(before, alone) == [("*.2", 2, 200, 400)]


def test_time_that_went_from_one_part_to_another_is_the_module_s() -> None:
    """9 s more in one part, 8 s less in the other: 1 s more. Of bytes each is told."""
    def timed(first: float, second: float) -> Profile:
        return profile_of(tree("", "Net", tree("body", "Body", tree("body.a", "A", fwd_seconds=first, params=first),
                                               tree("body.b", "B", fwd_seconds=second, params=second))))

    before, after = timed(10, 20), timed(19, 12)
    assert explain(before, after, "fwd_bwd_seconds") == [("body", 1, 30, 31)]
    assert explain(before, after) == [("body.a", 1, 10, 19), ("body.b", 1, 20, 12)]


def test_what_no_module_knows_is_one_row_and_told_as_unknown() -> None:
    lost = profile_of(tree("", "Net", tree("fc", "Linear", params=None), params=None))
    known = profile_of(tree("", "Net", tree("fc", "Linear", params=3)))
    assert explain(known, lost) == [("(model)", 1, 3, None)]
    assert "of modules: Params unknown after" in compare(known, lost).render()
    change = compare(replace(known, peak_allocated_bytes=5), known)
    row = next(row for row in change.totals if row.quantity == "peak_allocated_bytes")
    assert (row.before, row.after, row.difference, row.is_changed) == (5, None, None, True)
    assert re.search(r"Peak allocated +5 B +- +unknown after", change.render())


@pytest.mark.parametrize(("before", "after", "changes"), [
    ([("a", "Linear", 5)], [("a", "Linear", 5), ("b", "ReLU", 0)], [("added", "b", "ReLU", None)]),
    ([("a", "Linear", 5), ("b", "ReLU", 0)], [("a", "Linear", 5)], [("removed", "b", "ReLU", None)]),
    ([("old", "Linear", 5)], [("new", "Linear", 5)], [("renamed", "new", "Linear", "old")]),
    ([("old", "Linear", 5)], [("new", "Linear", 6)], [("added", "new", "Linear", None),
                                                     ("removed", "old", "Linear", None)]),
    ([("act", "ReLU", 0)], [("act", "GELU", 0)], [("replaced", "act", "GELU", "ReLU")]),
    # a layer put before others renumbers them
    ([("0", "Linear", 5), ("1", "ReLU", 0)], [("0", "Norm", 2), ("1", "Linear", 5), ("2", "ReLU", 0)],
     [("added", "0", "Norm", None), ("renamed", "1", "Linear", "0"), ("renamed", "2", "ReLU", "1")]),
    ([(str(i), "Block", 5) for i in range(4)], [(str(i), "Block", 5) for i in range(9)],
     [("added", "{4-8}", "Block", None)]),
])
def test_modules_added_removed_renamed_and_replaced(before: Any, after: Any, changes: list[Any]) -> None:
    first, second = (profile_of(tree("", "Net", *[tree(path, type, params=n) for path, type, n in rows]))
                     for rows in (before, after))
    change = compare(first, second)
    assert [(row.kind, row.module, row.type, row.before) for row in change.structure] == changes
    if {kind for kind, *_ in changes} <= {"renamed", "replaced"}:
        assert explain(first, second) == []  # the same modules under other names


def test_a_module_that_is_gone_goes_by_the_path_that_it_had() -> None:
    before, after = (profile_of(tree("", "Net", tree(path, "Body", tree(f"{path}.fc", "Linear"), tree(
        f"{path}.{act.lower()}", act, params=1)))) for path, act in (("old", "ReLU"), ("new", "GELU")))
    assert [(row.kind, row.module, row.before) for row in compare(before, after).structure] == [
        ("renamed", "new", "old"), ("added", "new.gelu", None), ("removed", "old.relu", None)]
    assert explain(before, after) == [("new.gelu", 1, 0, 1), ("old.relu", 1, 1, 0)]


def test_wrappers_are_no_change_of_structure() -> None:
    inner = tree("fc", "Linear", params=5)
    wrapped = tree("", "DistributedDataParallel", tree("module", "Net", tree("module.fc", "Linear", params=7)))
    change = compare(profile_of(tree("", "Net", inner)), profile_of(wrapped))
    assert change.structure == () and explain(change.before, change.after) == [("fc", 1, 5, 7)]


def test_bytes_at_the_peak_are_explained_by_what_holds_them() -> None:
    def held(size: int, states: int) -> Profile:
        holders = (HolderInfo("fc1", "body.fc1", "activation", size), HolderInfo("fc2", "body.fc2", "activation", 7),
                   HolderInfo("(outside the model)", "", "optimizer state", states))
        root = tree("", "Net", tree("body", "Body", tree("body.fc1", "Linear"), tree("body.fc2", "Linear")))
        return profile_of(root, holders=holders, peak_allocated_bytes=size + 7 + states,
                          peak_by_category={"activation": size + 7, "optimizer state": states})

    change = compare(held(100, 20), held(150, 60))
    assert [(row.category, row.before, row.after) for row in change.categories] == [
        ("activation", 107, 157), ("optimizer state", 20, 60)]  # +50, +40
    assert explain(change.before, change.after, "peak_by_category.activation") == [("body.fc1", 1, 100, 150)]
    assert [row.share for row in change.modules] == [50 / 217, 40 / 217]  # of the larger peak
    # no submodule holds the states: the table says no more than that of categories
    assert "body.fc1" in change.render() and "(own)" not in change.render()


def test_of_a_step_that_ran_out_of_memory_the_model_alone_is_compared() -> None:
    ended = profile_of(tree("", "Net", params=5), params=5, peak_allocated_bytes=9,
                       out_of_memory=OutOfMemoryInfo("aten.mm", "forward", 8, 4))
    change = compare(ended, replace(ended, params=6, out_of_memory=None))
    known = {row.quantity: (row.before, row.after) for row in change.totals if row.is_changed}
    assert known == {"params": (5, 6), "peak_allocated_bytes": (None, 9), "saved_bytes": (None, 0)}
    assert "memory ran out before: of that step the model's own figures alone are known" in change.render()
    assert "Memory ran out before: " in change.to_markdown()


def test_seconds_that_differ_by_rounding_are_the_same() -> None:
    row = QuantityChange(quantity="step_seconds", unit="seconds", before=0.1 + 0.2, after=0.3)
    assert not row.is_changed and replace(row, unit="bytes").is_changed and replace(row, after=0.3001).is_changed


PLAIN = Profile(name="Net", mode="train", peak_allocated_bytes=10_000, step_seconds=0.020, batch_size=8,
                peak_by_category={"activation": 6000}, phases={"backward": PhaseInfo(seconds=0.010, comm_bytes=64)},
                modules=tree("", "Net", saved_bytes=500))


@pytest.mark.parametrize(("condition", "now", "bound", "verdict"), [
    # 2 % of 10,000 is 200; what equals its limit is not more
    ("peak_allocated_bytes > +2%", {"peak_allocated_bytes": 10_201}, 10_200, "failed"),
    ("peak_allocated_bytes >= +2%", {"peak_allocated_bytes": 10_200}, 10_200, "failed"),
    ("peak_allocated_bytes < -5%", {"peak_allocated_bytes": 9_499}, 9_500, "failed"),
    ("saved_bytes > +0", {"modules": tree("", "Net", saved_bytes=501)}, 500, "failed"),
    ("comm_bytes > +0", {"phases": {"backward": PhaseInfo(comm_bytes=65)}}, 64, "failed"),
    # unknown is no pass
    ("peak_allocated_bytes > +2%", {"peak_allocated_bytes": None}, 10_200, "unknown after"),
    ("fwd_flops > +2%", {"fwd_flops": 5}, None, "unknown before"),
    ("fwd_flops > 9", {"fwd_flops": 5}, 9, "ok"),  # asks for nothing of before
    ("peak_allocated_bytes < 1GB", {"out_of_memory": OutOfMemoryInfo("aten.mm", "forward", 8, 4)}, 10**9,
     "unknown after (out of memory)"),
    ("peak_allocated_bytes > 9KB", {"out_of_memory": OutOfMemoryInfo("aten.mm", "forward", 8, 4)}, 9000, "failed"),
])
def test_a_condition_and_its_verdict(condition: str, now: dict[str, Any], bound: float | None, verdict: str) -> None:
    change = compare(PLAIN, replace(PLAIN, **now), fail_if=[condition])
    row, = change.conditions
    assert (row.text, row.bound, row.verdict, row.holds) == (condition, bound, verdict, verdict == "ok")
    assert change.failed == (() if row.holds else (row,))
    assert verdict in change.render() and verdict in change.to_markdown()


@pytest.mark.parametrize(("condition", "words"), [
    ("peak_alocated_bytes > +2%", "no quantity 'peak_alocated_bytes'; did you mean peak_allocated_bytes"),
    ("peak_allocated_bytes > 2%", "2% of what? write +2%"),
    ("peak_allocated_bytes +2%", "write a condition as 'FIELD > +N%', 'FIELD > +N' or 'FIELD > N'"),
    ("peak_allocated_bytes == 5", "write a condition as"),
])
def test_a_condition_that_cannot_be_read_is_repeated_and_mended(condition: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        compare(PLAIN, PLAIN, fail_if=[condition])
    assert str(caught.value).startswith(f"--fail-if {condition!r}: ") and words in str(caught.value)


@pytest.mark.parametrize(("arguments", "message"), [
    (("a.json", PLAIN), "compare(before=str): give a Profile; Profile.from_json reads one"),
    ((PLAIN, None), "compare(after=NoneType): give a Profile"),
    ((PLAIN, PLAIN, "step_seconds > 1"), "compare(fail_if='step_seconds > 1'): give a list of conditions"),
])
def test_what_cannot_be_compared(arguments: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        compare(*arguments)
    assert str(caught.value).startswith(message)


NASTY = "a|b`c</summary><script>[x](y) @all #1 *z*\x1b[31m\n| e"


def test_names_stay_names_in_markdown_and_text() -> None:
    def named(params: int, state: int) -> Profile:
        root = tree("", NASTY, tree(NASTY, NASTY, params=params), tree("fc", "Linear", params=9))
        return Profile(name=NASTY, mode="train", modules=root, device=f"{NASTY}{params}", params=params,
                       peak_by_category={NASTY: state, "parameter": 2}, peak_allocated_bytes=state + 2,
                       inputs={NASTY: TensorInfo((params,), "float32", "cpu")},
                       holders=(HolderInfo(NASTY, NASTY, NASTY, state),))

    change = compare(named(1, 5), named(2, 7), ["params > +1"])
    text, markdown = change.render(), change.to_markdown()
    assert "\x1b" not in text + markdown and r"\x1b[31m" in text
    # every name is in a code span, whose fence is longer than its backticks, and no bar ends a cell
    spans = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", markdown)
    assert "script" in markdown and not re.search("script|@all|#1|z\\*", spans), spans
    rows = defaultdict(set)
    for block in markdown.split("\n\n"):
        for line in block.splitlines():
            if line.startswith("|"):
                rows[block].add(len(re.sub(r"\\\|", "", line).split("|")))
    assert rows and all(len(cells) == 1 for cells in rows.values())


def of_resnet(batch: int = 2, **options: Any) -> Profile:
    from torchvision.models import resnet18
    return analyzer.profile(resnet18, (torch.empty(batch, 3, 64, 64, device="meta"),), optimizer="sgd", **options)


def of_bert(layers: int = 3, checkpointing: bool = False, hidden: int = 64) -> Profile:
    from transformers import BertConfig, BertModel

    def build() -> torch.nn.Module:
        model = BertModel(BertConfig(hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=4,
                                     intermediate_size=128, vocab_size=100))
        if checkpointing:
            model.gradient_checkpointing_enable()
        return model

    return analyzer.profile(build, kwargs={"input_ids": torch.ones(2, 16, dtype=torch.int64)}, optimizer="adamw")


@pytest.fixture(scope="module")
def bert() -> Profile:
    return of_bert()


@pytest.fixture(scope="module")
def resnet() -> Profile:
    return of_resnet()


def check_sums(change: ProfileChange) -> None:
    """The rows of a quantity add up to its change in the whole model: nothing is left out, nothing told twice."""
    found: dict[str, float] = defaultdict(float)
    for row in change.modules:
        assert row.difference is not None
        found[row.quantity] += row.difference
    roots = [change.before.modules, change.after.modules]
    assert None not in roots
    for name, cost in {"params": ("params",), "saved_bytes": ("saved_bytes",),
                       "optimizer_seconds": ("optimizer_seconds",),
                       "fwd_bwd_seconds": ("fwd_seconds", "bwd_seconds", "launch_seconds"),
                       "hardware_flops": ("fwd_flops", "bwd_flops", "recompute_flops")}.items():
        totals = [sum(getattr(root, field) for field in cost) for root in roots]
        assert math.isclose(found[name], totals[1] - totals[0], rel_tol=1e-6, abs_tol=1e-9), name
    for row in change.categories:
        held = [sum(h.bytes for h in p.holders if h.category == row.category) for p in (change.before, change.after)]
        assert found[row.quantity] == held[1] - held[0]


def check_screen(change: ProfileChange) -> None:
    lines = change.render().splitlines()
    assert len(lines) <= HEIGHT and max(map(len, lines)) <= WIDTH, len(lines)


@pytest.mark.parametrize(("make", "expected"), [
    (lambda: of_bert(5), {("encoder.layer.{3-4}", 2, "params")}),
    # its attention, its feed-forward and its norms are what a layer has: all run again
    (lambda: of_bert(checkpointing=True), {("encoder.layer.*", 3, "saved_bytes"),
                                           ("encoder.layer.*", 3, "hardware_flops"),
                                           ("encoder.layer.*", 3, "fwd_bwd_seconds")}),
])
def test_a_transformer_that_changed(bert: Profile, make: Callable[[], Profile], expected: set[Any]) -> None:
    change = compare(bert, make())
    assert expected <= {(row.module, row.modules, row.quantity) for row in change.modules}
    check_sums(change)
    check_screen(change)


def test_a_larger_batch_changes_all_modules_alike(resnet: Profile) -> None:
    change = compare(resnet, of_resnet(4))
    doubled = {row.quantity: row for row in change.modules if row.module == "(model)"}
    assert doubled["hardware_flops"].relative == pytest.approx(1, abs=0.01)
    text = change.render()
    assert "not profiled alike: batch_size (2, now 4), inputs (x float32[2, 3, 64, 64], now x float32[4" in text
    assert re.search("changed throughout the model: .*Hardware FLOPs .100.0%", text)
    assert re.search("unchanged: .*Params", text)
    check_sums(change)
    check_screen(change)


def test_other_models_fill_no_more_than_a_screen(bert: Profile, resnet: Profile) -> None:
    change = compare(resnet, bert, ["peak_allocated_bytes > +2%", "step_seconds > +2%"])
    check_screen(change)
    check_sums(change)
    assert "replaced: (model): ResNet -> BertModel" in change.render()


def test_nothing_changed(bert: Profile) -> None:
    change = compare(bert, bert)
    assert not change.is_changed and not change.modules and not change.structure and not change.settings
    lines = change.render().splitlines()
    assert lines[3] == "nothing changed" and lines[4].startswith("unchanged: Peak allocated, Peak reserved, Step time,")
    assert change.to_markdown().startswith("### Cost of a step of `BertModel`: nothing changed\n\nUnchanged: ")
    assert len(list(csv.reader(io.StringIO(change.table("csv"))))) == 1


def test_nothing_known() -> None:
    bare = Profile(name="Net", mode="train")
    assert compare(bare, bare).render().splitlines()[3:] == [
        "modules: not compared, for a profile has none", "nothing is known of either step"]
    assert compare(bare, replace(bare, world_size=8)).settings == ("world_size (None, now 8)",)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["compare", *argv])
    return code, *capsys.readouterr()


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    before, after = str(tmp_path / "before.json"), str(tmp_path / "after.json")
    PLAIN.to_json(before)
    replace(PLAIN, device="t4", peak_allocated_bytes=10_201).to_json(after)
    return before, after


def test_exit_codes_and_what_is_said(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *files, "--fail-if", "peak_allocated_bytes > +3%")
    assert (code, err) == (0, "")
    assert out.startswith("before: Net: one train step\nafter: Net: one train step on t4\n"
                          "not profiled alike: device (None, now t4)\n\n")
    code, out, err = run(capsys, *files, "--fail-if", "peak_allocated_bytes > +2%", "--fail-if", "step_seconds > 1",
                         "--fail-if", "params > 1")
    assert code == 4 and "+201 B (+2.0%)" in out
    assert err == ("analyzer: --fail-if peak_allocated_bytes > +2%: failed: 9.77 KiB before, 9.96 KiB after (+2.0%), "
                   "limit 9.96 KiB\nanalyzer: --fail-if params > 1: unknown after: - before, - after, limit 1\n")
    assert run(capsys, *files, "--fail-if", "peak_alocated_bytes > 1")[0] == 2


def test_markdown_goes_to_a_file_and_to_the_terminal(files: tuple[str, str], tmp_path: Path,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "summary.md"
    code, out, _ = run(capsys, *files, "--markdown", str(path), "--fail-if", "peak_allocated_bytes > 9KB")
    written = path.read_text()
    assert code == 4 and out.startswith("before: ")
    assert written.startswith("### Cost of a step of `Net`: 1 of 1 conditions failed\n\n")
    assert "**Peak allocated 9.77 KiB → 9.96 KiB (+2.0%)**" in written and "**failed**" in written
    assert written.count("<details>") == written.count("</details>") >= 1
    code, out, _ = run(capsys, *files, "--format", "markdown", "--fail-if", "peak_allocated_bytes > 9KB")
    assert (code, out) == (4, written)


def test_all_changes_as_data(files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "changes.csv"
    assert run(capsys, *files, "--format", "csv", "--output", str(path)) == (0, "", "")
    row, = csv.DictReader(path.open())
    assert (row["quantity"], row["before"], row["after"], row["difference"]) == (
        "peak_allocated_bytes", "10000", "10201", "201")
    # what became less is a number too: no apostrophe, which makes text of what could be a formula
    assert run(capsys, files[1], files[0], "--format", "csv", "--output", str(path)) == (0, "", "")
    row, = csv.DictReader(path.open())
    assert (int(row["difference"]), float(row["relative"])) == (-201, pytest.approx(-201 / 10_201))


@pytest.mark.parametrize(("words", "text"), [
    (["--by", "model", "--fail-if", "params > 1"], "--fail-if 'params > 1': shows what changed between two profiles"),
    (["--columns", "params", "--markdown", "x.md"], "--markdown x.md: shows what changed"),
    (["--by", "change", "--columns", "params"], "--columns params: works with --by model"),
    (["--markdown", "/nowhere/x.md"], "'/nowhere/x.md': the folder /nowhere does not exist"),
])
def test_options_that_do_not_go_together(files: tuple[str, str], capsys: pytest.CaptureFixture[str], words: list[str],
                                         text: str) -> None:
    code, out, err = run(capsys, *files, *words)
    assert (code, out) == (2, "") and text in err
    code, out, err = run(capsys, *files, files[0], "--by", "change")
    assert (code, out) == (2, "") and "--by change compares two profiles, and 3 were given" in err
