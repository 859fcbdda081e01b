"""``analyzer measure`` as its users run it."""
from __future__ import annotations

import pytest

from analyzer import Profile
from analyzer.cli import main
from analyzer.runtime.command import make_tensors
from analyzer.zoo.input_spec import parse_inputs


def run(capsys, *argv):
    code = main(["measure", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


SMALL = ("resnet18", "--input", "2x3x32x32")


def test_the_screen_is_printed_and_files_are_saved(capsys, tmp_path):
    code, out, err = run(capsys, *SMALL, "--optimizer", "sgd", "--steps", "2", "--json", str(tmp_path / "p.json"),
                         "--html", str(tmp_path / "p.html"))
    assert (code, err) == (0, "")
    assert "ResNet: one train step on cpu" in out and " measured, " in out and "whether it fits" not in out
    p = Profile.from_json(tmp_path / "p.json")
    assert (p.params, p.measured_steps, p.optimizer, p.mode) == (11_689_512, 2, "sgd", "train")
    assert p.optimizer_seconds > 0 and "<html" in (tmp_path / "p.html").read_text()


@pytest.mark.parametrize(("report", "text"), [
    (("deepspeed", "--convention", "deepspeed", "--no-detail"), "fwd flops per device:"),
    (("torchinfo", "--columns", "mult_adds,fwd_seconds"),
     "Total mult-adds"),
    (("tree", "--depth", "1"), "├─layer4"), (("tids",), "(conv1): Conv2d, num_params 9408"),
])
def test_reports(capsys, report, text):
    code, out, err = run(capsys, *SMALL, "--mode", "infer", "--steps", "1", "--report", *report)
    assert (code, err) == (0, "") and text in out


def test_predicted_beside_measured(capsys):
    code, out, _ = run(capsys, *SMALL, "--steps", "1", "--against", "predicted", "--predicted-device", "h200",
                       "--depth", "1")
    assert code == 0
    row = next(line.split() for line in out.splitlines() if "conv1" in line)
    assert row[:2] == ["├─conv1", "Conv2d"]
    assert row[2:6] == row[4:6] * 2 and row[6] == "1.00"  # the same FLOPs
    assert "A: ResNet: one train step on h200; seconds: models of kernels and host\n" in out
    assert "B: ResNet: one train step on cpu; seconds: measured" in out
    code, out, _ = run(capsys, *SMALL, "--steps", "1", "--mode", "infer", "--against", "predicted", "--columns",
                       "fwd_seconds")
    # the speed of this CPU is unknown
    assert code == 0 and next(line.split() for line in out.splitlines() if "conv1" in line)[2] == "-"


@pytest.mark.parametrize(("argv", "text"), [
    (("resnet19",), "resnet18"), ((*SMALL, "--device", "tpu9"), "--device tpu9"),
    ((*SMALL, "--device", "cuda:7"), "--device cuda:7"),
    ((*SMALL, "--steps", "0"), "steps=0"), ((*SMALL, "--report", "tids", "--sort", "params"), "--sort"),
    ((*SMALL, "--json", "/nowhere/x.json"), "/nowhere"),
    ((*SMALL, "--predicted-device", "h2000", "--against", "predicted", "--steps", "1"), "h200"),
])
def test_what_cannot_be_used_is_repeated(capsys, argv, text):
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "") and text in err


def test_a_model_that_fails_ends_with_1(capsys):
    code, _, err = run(capsys, "resnet18", "--input", "2x4x32x32")
    assert code == 1 and "resnet18 failed: RuntimeError" in err


def test_inputs_are_of_any_model():
    args, kwargs = make_tensors(parse_inputs(["bf16:2x3", "input_ids=int64:2x4", "attention_mask=bool:2x4"]), "cpu")
    assert [(str(t.dtype), tuple(t.shape)) for t in args] == [("torch.bfloat16", (2, 3))]
    assert not kwargs["input_ids"].any() and kwargs["attention_mask"].all()
