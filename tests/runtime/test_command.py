"""``analyzer measure`` as its users run it."""
import pytest

from analyzer import Profile
from analyzer.cli import main
from analyzer.tools.runtime.measure import make_tensors
from analyzer.zoo.input_spec import parse_inputs


def run(capsys, *argv):
    code = main(["measure", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


SMALL = ("resnet18", "--input", "2x3x32x32")


def test_the_screen_is_printed_and_files_are_saved(capsys, tmp_path):
    code, out, err = run(capsys, *SMALL, "--optimizer", "sgd", "--steps", "2", "--warm-up", "0", "--json",
                         str(tmp_path / "p.json"), "--html", str(tmp_path / "p.html"))
    assert (code, err) == (0, "")
    assert "ResNet: one train step on cpu" in out and " measured, " in out and "whether it fits" not in out
    p = Profile.from_json(tmp_path / "p.json")
    assert (p.params, p.measured_steps, p.optimizer, p.mode) == (11_689_512, 2, "sgd", "train")
    assert p.optimizer_seconds > 0 and "<html" in (tmp_path / "p.html").read_text()


def test_predicted_beside_measured(capsys, tmp_path):
    predicted, measured = (str(tmp_path / name) for name in ("predicted.json", "measured.json"))
    assert run(capsys, *SMALL, "--steps", "1", "--json", measured)[0] == 0
    assert main(["profile", *SMALL, "--device", "h200", "--json", predicted]) == 0
    capsys.readouterr()
    code = main(["compare", predicted, measured])
    out = capsys.readouterr().out
    assert code == 0 and "before: ResNet: one train step on h200\nafter: ResNet: one train step on cpu\n" in out
    assert "Step time" in out and "unchanged: " in out and "Hardware FLOPs" in out.partition("unchanged: ")[2]


@pytest.mark.parametrize(("argv", "text"), [
    (("resnet19",), "resnet18"), ((*SMALL, "--device", "tpu9"), "--device tpu9"),
    ((*SMALL, "--device", "cuda:7"), "--device cuda:7"),
    ((*SMALL, "--steps", "0"), "steps=0"), ((*SMALL, "--sort", "params"), "--sort"),
    ((*SMALL, "--json", "/nowhere/x.json"), "/nowhere"),
])
def test_what_cannot_be_used_is_repeated(capsys, argv, text):
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "") and text in err


def test_inputs_are_of_any_model():
    args, kwargs = make_tensors(parse_inputs(["bf16:2x3", "input_ids=int64:2x4", "attention_mask=bool:2x4"]), "cpu")
    assert [(str(t.dtype), tuple(t.shape)) for t in args] == [("torch.bfloat16", (2, 3))]
    assert not kwargs["input_ids"].any() and kwargs["attention_mask"].all()
