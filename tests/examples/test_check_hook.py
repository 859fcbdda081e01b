"""The hook of pre-commit and the action: both files say what runs, and that judges a commit of a small repository."""
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from analyzer import Profile
from analyzer.cli import main

ROOT = Path(__file__).parents[2]
HOOK, = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
NET = """
import torch

def Net():
    return torch.nn.Sequential(torch.nn.Linear(16, {hidden}), torch.nn.ReLU(), torch.nn.Linear({hidden}, 4))
"""
MADE = "analyzer profile mynet.py:Net --show brief --input 8x16 --optimizer adamw --device h100 --json baseline.json"


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `analyzer`, as where the package is installed, and the baseline of the model."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "analyzer").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m analyzer "$@"\n')
    (folder / "analyzer").chmod(0o755)
    (folder / "mynet.py").write_text(NET.format(hidden=64))
    subprocess.run([folder / "analyzer", *shlex.split(MADE)[1:]], check=True, capture_output=True, cwd=folder,
                   env={**os.environ, "PYTHONPATH": str(ROOT)})
    return folder


@pytest.fixture
def repository(tmp_path: Path, tools: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a model and the baseline of it."""
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    for name in ("mynet.py", "baseline.json"):
        shutil.copyfile(tools / name, tmp_path / name)
    return tmp_path


def run_hook(folder: Path, *args: str) -> "subprocess.CompletedProcess[str]":
    """As pre-commit runs it: the entry's words, the user's args, no file names, in the repository's root."""
    assert (HOOK["language"], HOOK["pass_filenames"]) == ("system", False)
    return subprocess.run([*shlex.split(HOOK["entry"]), *args], cwd=folder, capture_output=True, text=True)


def told(run: "subprocess.CompletedProcess[str]") -> str:
    """What is on the error stream, in one line, without how far a slow machine is."""
    return " ".join(re.sub(r"^analyzer: check, \d+ s$", "", run.stderr, flags=re.MULTILINE).split())


def test_the_hook_has_what_pre_commit_asks_for() -> None:
    assert {"id", "name", "entry", "language"} <= HOOK.keys()  # of a manifest, by its documentation
    assert HOOK["id"] == "analyzer-check" and HOOK["types_or"] == ["python", "json"]


def test_a_commit_passes_until_the_model_grows(repository: Path) -> None:
    args = ("--against", "baseline.json", "--max", "optimizer_bytes +2%", "--max", "params +0%")
    unchanged = run_hook(repository, *args)
    assert (unchanged.returncode, told(unchanged)) == (0, "")
    assert "not profiled alike" not in unchanged.stdout and unchanged.stdout.count(" ok") == 2
    (repository / "mynet.py").write_text(NET.format(hidden=128))
    grown = run_hook(repository, *args)
    # 16 h + h of the first layer, 4 h + 4 of the second
    assert grown.returncode == 4 and "1.35 K" in grown.stdout and "2.69 K" in grown.stdout
    assert told(grown) == "analyzer: 2 of 2 limits do not hold: optimizer_bytes +2%, params +0%"
    assert sorted(path.name for path in repository.iterdir() if path.is_file()) == ["baseline.json", "mynet.py"]


def test_what_cannot_be_profiled_again_is_told(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / "mynet.py").write_text("import torch\n")
    missing = run_hook(repository, "--against", "baseline.json")
    assert missing.returncode == 2 and "mynet.py" in told(missing) and "Net" in told(missing)
    Profile(name="Net", mode="infer").to_json(repository / "baseline.json")
    for words, message in (
            (["--against", "baseline.json"],
             "analyzer: check --against baseline.json: was not made by `analyzer profile --json`, so no command is "
             "known that makes it again; give the profile: analyzer check FILE --against baseline.json"),
            ([], "analyzer: check: give FILE, a profile saved with --json, or --against BASELINE, whose command is run "
             "again")):
        assert main(["check", *words]) == 2
        assert " ".join(capsys.readouterr().err.split()) == message


def run_action(folder: Path, **inputs: str) -> "subprocess.CompletedProcess[str]":
    """The last step in the shell of a runner: what is not given has its default."""
    step = ACTION["runs"]["steps"][-1]
    given = {name: str(value["default"]) for name, value in ACTION["inputs"].items()} | inputs
    env = {name: given[text.removeprefix("${{ inputs.").removesuffix(" }}")] for name, text in step["env"].items()}
    assert step["shell"] == "bash"  # which GitHub runs so
    return subprocess.run([shutil.which("bash") or "bash", "--noprofile", "--norc", "-eo", "pipefail", "-c",
                           step["run"]], cwd=folder, capture_output=True, text=True,
                          env={**os.environ, **env, "GITHUB_STEP_SUMMARY": str(folder / "summary.md")})


def test_the_action_has_what_github_asks_for() -> None:
    assert {"name", "description", "runs"} <= ACTION.keys() and ACTION["runs"]["using"] == "composite"
    steps: list[dict[str, Any]] = ACTION["runs"]["steps"]
    assert all("shell" in step for step in steps if "run" in step)  # a composite action's steps must say it
    assert steps[0]["uses"].startswith("actions/setup-python@")
    assert "pip install torch --index-url https://download.pytorch.org/whl/cpu" in steps[1]["run"]
    # what a user gives reaches no script but as a variable
    assert not any("${{" in step.get("run", "") for step in steps)
    used = {text for step in steps for text in [*step.get("env", {}).values(), *step.get("with", {}).values()]}
    assert used == {f"${{{{ inputs.{name} }}}}" for name in ACTION["inputs"]} | {"${{ github.action_path }}"}


def test_the_action_writes_the_table_and_fails_where_a_limit_is_passed(repository: Path) -> None:
    passed = run_action(repository, max="peak_allocated_bytes +2%\nparams 2k\n")
    text = (repository / "summary.md").read_text()
    assert passed.returncode == 0 and text == passed.stdout and text.startswith("| Field") and text.count("| ok") == 2
    failed = run_action(repository, max="params 1k", profile="baseline.json")
    assert failed.returncode == 4 and "analyzer: 1 of 1 limits do not hold: params 1k" in told(failed)
    assert "over the limit" in (repository / "summary.md").read_text().removeprefix(text)
