"""Exporters and reports are added from outside, by name, and those of the package are loaded when one is looked for."""
import sys

import pytest

from analyzer import Profile, register_exporter, register_report
from analyzer.cli import main, make_parser
from analyzer.errors import DuplicateRegistrationError

NET = Profile(name="Net", mode="infer", params=3)


def test_a_name_that_is_taken_is_refused_and_can_be_replaced_for_a_while():
    before = NET.report("summary")
    with pytest.raises(DuplicateRegistrationError, match="summary"):
        register_report("summary", lambda profile: "mine")
    with register_report.scope():
        register_report("summary", lambda profile: "mine")
        assert NET.report("summary") == "mine"
    assert NET.report("summary") == before


# The command takes the reports and exporters that the target's own file registers.

FILE = """
import torch
from analyzer import register_exporter, register_report

@register_exporter("parameter_lines")
def write_lines(profile, *, path):
    path.write_text(f"params {profile.params}\\n")

@register_exporter("parameter_count")
def count(profile):
    return profile.params

@register_report("own_report")
def tell(profile, *, depth=1):
    return f"params {profile.params} at depth {depth}"

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 8)

    def forward(self, x):
        return self.linear(x)
"""
PROFILE, MEASURE = ["profile", "--mode", "infer"], ["measure", "--mode", "infer", "--steps", "1"]


@pytest.fixture
def run(capsys, tmp_path):
    """The exit code and what is printed and complained of, of a command on a file of the user's own."""
    (tmp_path / "view_net.py").write_text(FILE)

    def call(command, *words):
        code = main([*command, f"{tmp_path / 'view_net.py'}:Net", "--input", "4x16", *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    path = list(sys.path)
    with register_exporter.scope(), register_report.scope():
        yield call
    sys.modules.pop("view_net", None)
    sys.path[:] = path


@pytest.mark.parametrize("command", [PROFILE, MEASURE], ids=["profile", "measure"])
def test_a_report_of_the_targets_file(run, command):
    code, out, err = run(command, "--show", "own_report")
    assert (code, err) == (0, "") and out.startswith("params 136 at depth 1\n")


def test_a_report_of_ones_own_of_a_saved_profile(capsys, tmp_path, run):
    saved = str(tmp_path / "net.json")
    assert run(PROFILE, "--show", "brief", "--json", saved)[0] == 0
    assert main(["show", saved, "--report", f"{tmp_path / 'view_net.py'}:own_report", "--depth", "3"]) == 0
    assert capsys.readouterr().out == "params 136 at depth 3\n"


def test_an_exporter_of_the_targets_file_gets_its_path_by_keyword(run, tmp_path):
    code, _, err = run(PROFILE, "--export", f"parameter_lines={tmp_path / 'lines.txt'}", "--show", "brief")
    assert (code, err) == (0, "") and (tmp_path / "lines.txt").read_text() == "params 136\n"


@pytest.mark.parametrize(("command", "words", "said"), [
    (PROFILE, ["--show", "own_reprot"], ("--show own_reprot: 'own_reprot' is no report; did you mean own_report?; "
                                         "there are ", "tree, ", "register_report in your own file adds one")),
    (PROFILE, ["--export", "lines=o.txt"], ("--export lines=o.txt: 'lines' is no kind of file; there are ",
                                            "parameter_lines, ", "; register_exporter in the TARGET's file adds one")),
    (PROFILE, ["--export", "parameter_count=o.txt"], ("'parameter_count' is no kind of file; there are",)),
])
def test_names_that_are_not_there(run, command, words, said):
    code, out, err = run(command, *words)
    assert (code, out) == (2, "") and all(text in err for text in said)


@pytest.mark.parametrize(("command", "said"), [
    ("profile", ["deepspeed", "chrome_trace", "with register_report", "with register_exporter"]),
    ("plan", ["auto, chain, exact", "with register_solver"])])
def test_the_help_lists_those_of_the_package(capsys, command, said):
    with pytest.raises(SystemExit):
        make_parser().parse_args([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert [part for part in said if part not in text] == []
