"""A model that cannot run with its inputs is told by the cause first, with the module where it came up."""
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from analyzer import profile
from analyzer.cli import main
from analyzer.record.failure import describe_defect, find_failure, own_traceback

NET = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.conv(x).relu()

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(Block(), nn.Flatten(), nn.Linear(144, 2))

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 4)

    def forward(self, ids, mask=None):
        return self.table(ids)

class Labelled(Words):
    def forward(self, ids, labels):
        return self.table(ids).sum() + labels.sum()

class Own(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)

    def forward(self, x):
        raise RuntimeError("no licence\\nask for one")
"""
BAD = [
    ("Net", "8x8", "RuntimeError: Expected 3D (unbatched) or 4D (batched) input to conv2d",
     "in 0.conv, Conv2d(3, 4, kernel_size=(3, 3), stride=(1, 1)), given float32[8, 8], at "),
    ("Net", "2x1x8x8", "RuntimeError: ", "in 0.conv, Conv2d(3, 4, "),
    ("Net", "2x3x9x9", "RuntimeError: ", "in 2, Linear(in_features=144, out_features=2, bias=True), given float32"),
    ("Words", "2x8", "Expected tensor for argument #1 'indices'", "in table, Embedding(10, 4), given float32[2, 8]"),
    ("Own", "2x8", "RuntimeError: no licence", "in the model itself, Own(in_features=8, out_features=8, "),
]


@pytest.fixture()
def net(tmp_path: Path) -> str:
    (path := tmp_path / "net.py").write_text(NET)
    return str(path)


@pytest.mark.parametrize(("command", "model", "shape", "cause", "place"), [
    *(("profile", *bad) for bad in BAD), ("fit of devices", *BAD[0]), ("measure", *BAD[0]), ("fit", *BAD[4])])
def test_the_cause_is_the_first_line(net: str, capsys: Any, command: str, model: str, shape: str, cause: str,
                                     place: str) -> None:
    if command == "fit":
        assert main([command, f"{net}:{model}", "--input", shape, "--device", "t4", "--at-most", "2"]) == 1
    else:
        assert main([command.split()[0], f"{net}:{model}", "--input", shape]) == 1
    out, err = capsys.readouterr()
    first, second, *rest = err.splitlines()
    assert out == "" and first.startswith(f"analyzer: {net}:{model} failed: ")
    if command in ("profile", "fit of devices"):  # torch has other words for data; fit changes the batch
        assert cause in first and place in second
    assert second.startswith("  in ") and "command_option" not in second
    assert len(rest) < 20
    if " 2, Linear" not in second:  # that of torch's own container has no frames of the model's
        assert "net.py:" in second and any("Traceback" in line for line in rest)
    assert not any("torch/nn/modules" in line or "analyzer/api" in line for line in rest), "the model's own frames only"


@pytest.mark.parametrize("given", ["nosuch=2x8", "ids=int64:2x8,nosuch=2x8"])
def test_a_wrong_name_is_one_line(net: str, capsys: Any, given: str) -> None:
    assert main(["profile", f"{net}:Words", *[word for spec in given.split(",") for word in ("--input", spec)]]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith("analyzer: Words.forward(ids, mask=None) cannot be called with ")


@pytest.mark.parametrize(("model", "inputs", "code", "text"), [
    ("Words", ["2x8"], 1, "\n  integers are written --input NAME=int64:2x8; a SHAPE alone is of float32\n"),
    ("Labelled", ["int64:32x256"], 2, "Labelled.forward(ids, labels) needs labels too; give it, e.g. --input "
     "labels=int64:32 on the command line\n"),
    ("Labelled", ["labels=int64:32"], 2, "needs ids too; give it, e.g. --input ids=int64:32 on"),
    ("Labelled", ["int64:2x8", "int64:2", "int64:2"], 2, "cannot be called with 3 by position: too many positional"),
])
def test_an_input_that_lacks_or_is_of_another_kind(net: str, capsys: Any, model: str, inputs: list[str], code: int,
                                                   text: str) -> None:
    assert main(["profile", f"{net}:{model}", *[word for spec in inputs for word in ("--input", spec)]]) == code
    assert text in capsys.readouterr().err


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.Linear(3, 3)(x)  # a module without a path


def test_a_module_that_forward_makes_is_told_by_its_maker() -> None:
    with pytest.raises(RuntimeError) as caught:
        nn.Sequential(Inner())(torch.ones(2, 4))
    found = find_failure(caught.value)
    assert (found.module_path, found.module, found.given) == ("0", "Inner()", ("float32[2, 4]",))
    assert found.source is not None and found.source.startswith(__file__)


def test_an_error_outside_of_any_module_has_a_line_only() -> None:
    try:
        raise ValueError("loss")
    except ValueError as error:
        assert str(find_failure(error)).startswith(f"at {__file__}:")
        assert "loss" in own_traceback(error)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_profile_notes_the_module_and_raises_what_the_model_raised() -> None:
    with pytest.raises(RuntimeError) as caught:
        profile(nn.Sequential(Raises()), args=(torch.empty(2, 4),))
    assert str(caught.value) == "no data"
    notes = caught.value.__notes__
    assert len(notes) == 1 and notes[0].startswith("analyzer: the model failed in 0, Raises(), given float32[2, 4]")


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("no data")


def test_a_defect_of_this_package_shows_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("analyzer.record.failure.is_outside", lambda filename: False)
    try:
        raise KeyError("inside")
    except KeyError as error:
        assert own_traceback(error).startswith("Traceback (most recent call last):\n")
        assert str(describe_defect(error)).startswith(
            f"a defect of analyzer, please report it: KeyError: 'inside', at {__file__}:")
