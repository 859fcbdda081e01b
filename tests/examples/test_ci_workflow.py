"""The workflow in examples/ci/ does what it says: its commands are ours, and run in order they judge a pull request."""
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from analyzer import Profile
from analyzer.cli import main, make_parser
from analyzer.report.check import parse_limit
from benchmarks.coverage.matrix import PYTHONS, TORCHES

ROOT = Path(__file__).parents[2]
WORKFLOW = yaml.safe_load((ROOT / "examples" / "ci" / "cost.yml").read_text())
JOB = WORKFLOW["jobs"]["cost"]
ENV: dict[str, str] = WORKFLOW["env"]
STEPS: list[dict[str, Any]] = [step for step in JOB["steps"] if "run" in step]
NET = """
import torch

def Net():
    return torch.nn.Sequential(torch.nn.Linear(16, {hidden}), torch.nn.ReLU(), torch.nn.Linear({hidden}, 4))
"""


def commands_of(step: dict[str, Any]) -> list[list[str]]:
    script = re.sub(r'"?\$(\w+)"?', lambda match: ENV.get(match[1], match[0]), step["run"].replace("\\\n", " "))
    return [shlex.split(line) for line in script.splitlines()]


def test_its_commands_are_those_of_the_command_line() -> None:
    ours = [words for step in STEPS for words in commands_of(step) if words[0] == "analyzer"]
    parsed = [make_parser().parse_args(words[1:]) for words in ours]
    assert [arguments.command for arguments in parsed] == ["profile", "profile", "compare"]
    fields = [parse_limit(text, [], is_condition=True).quantity.field for text in parsed[2].fail_if]
    assert fields == ["peak_allocated_bytes", "step_seconds", "hardware_flops", "peak_reserved_bytes"]
    # it is triggered by pull requests (YAML 1.1 reads "on" as true), and what it checks out is where it is profiled
    assert WORKFLOW[True] == "pull_request" and WORKFLOW["permissions"] == {"contents": "read"}
    folders = {step["with"]["path"] for step in JOB["steps"] if step.get("uses", "").startswith("actions/checkout@")}
    profiled = {step["working-directory"] for step in STEPS if "working-directory" in step}
    assert folders == profiled == {"before", "after"}


def run_step(step: dict[str, Any], folder: Path, env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> int:
    """A step in a shell that expands and redirects as a runner's does. What it hands to `analyzer` runs here."""
    handed = folder / "handed"
    script = f"analyzer() {{ printf '%s\\0' \"$@\" > {shlex.quote(str(handed))}; }}\n" + step["run"]
    place = folder / step.get("working-directory", ".")
    subprocess.run(["bash", "-e", "-c", script], cwd=place, env=env, check=True)
    if not handed.exists():
        return 0
    words = handed.read_text().removesuffix("\0").split("\0")
    handed.unlink()
    with monkeypatch.context() as patch:
        patch.chdir(place)
        return main(words)


@pytest.mark.parametrize(("hidden", "code"), [(64, 0), (128, 4)])
def test_the_flow_end_to_end(tmp_path: Path, hidden: int, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step in turn: those after one that failed only if they are to run always."""
    for name, width in (("before", 64), ("after", hidden)):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"net_{hidden}_{name}.py").write_text(NET.format(hidden=width))
    summary = tmp_path / "summary.md"
    env = {**os.environ, **ENV, "OPTIONS": "--input 8x16 --optimizer adamw --device h100",
           "GITHUB_STEP_SUMMARY": str(summary)}
    failed = 0
    for step in STEPS:
        if step["name"] != "Install" and (not failed or "always()" in step.get("if", "")):
            model = f"net_{hidden}_{step.get('working-directory')}.py:Net"
            failed = run_step(step, tmp_path, {**env, "MODEL": model}, monkeypatch) or failed
    assert failed == code
    # 16 h + h of the first layer, 4 h + 4 of the second
    assert [Profile.from_json(tmp_path / f"{name}.json").params for name in ("before", "after")] == [
        21 * 64 + 4, 21 * hidden + 4]
    text = summary.read_text()
    assert text == (tmp_path / "cost.md").read_text()
    assert text.startswith("### Cost of a step of `Sequential`: " + (
        "nothing changed, all conditions hold\n" if code == 0 else "1 of 4 conditions failed\n")), text


def test_our_own_runs_the_readmes_commands_and_the_oldest_and_newest_versions() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())["jobs"]
    commands = [step["run"] for step in jobs["pinned"]["steps"] if "run" in step]
    readme = (ROOT / "README.md").read_text()
    assert commands == ["make profile", "make test"] and all(command in readme for command in commands)
    pairs = [(pair["torch"], pair["python"]) for pair in jobs["versions"]["strategy"]["matrix"]["include"]]
    assert pairs == [(TORCHES[0], PYTHONS[0]), (TORCHES[-1], PYTHONS[-1])]
    assert jobs["versions"]["steps"][-1]["run"] == "make test TORCH=${{ matrix.torch }}"
    settings = (ROOT / "pyproject.toml").read_text()
    assert f'requires-python = ">={PYTHONS[0]}"' in settings and f'"torch>={TORCHES[0].rpartition(".")[0]}"' in settings
