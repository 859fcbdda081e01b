"""The verdict at the end of the commands, and their exit codes."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# two Linears of 2**30 parameters in float32: 8 GiB of weights, and as many of gradients
LARGE = """
from torch import nn

def build():
    return nn.Sequential(nn.Linear(2**15, 2**15, bias=False), nn.Linear(2**15, 2**15, bias=False))
"""


@pytest.fixture
def large(tmp_path, monkeypatch):
    (tmp_path / "large_models.py").write_text(LARGE)
    monkeypatch.chdir(tmp_path)
    return ["large_models:build", "--input", "8x32768"]


def test_exit_code_of_the_process(large, run):
    words = ["profile", *large, "--show", "summary", "--quiet", "--device"]
    done = subprocess.run([sys.executable, "-m", "analyzer", *words, "t4"], capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout.split("\n\n")[-1].startswith("does NOT fit on t4: ")
    code, out, _ = run(*words, "h200")
    assert code == 0 and out.split("\n\n")[-1].startswith("fits on h200: ")


def test_what_cannot_be_told_is_no_failure(run, large):
    code, out, _ = run("profile", *large, "--show", "summary", "--device", "cpu")
    assert code == 0 and "not known whether it fits on cpu: " in out.split("\n\n")[-1]


def test_several_models_have_a_line_each(run, large):
    words = ["profile", large[0], "large_models:build", *large[1:], "--device", "t4"]
    code, out, _ = run(*words)
    assert code == 3
    assert [line.split(": ")[0] for line in out.split("\n\n")[-1].split("large_models:build ")[1:]] == [
        "does NOT fit on t4"] * 2


def test_generation(run, tmp_path):
    from analyzer.tools.generation.generation_profile import GenerationProfile

    words = ["generate", "gpt2", "--prompt", "8", "--new-tokens", "4", "--json", str(tmp_path / "g.json")]
    code, out, _ = run(*words)
    last = out.split("\n\n")[-1].splitlines()
    verdict = GenerationProfile.from_json(tmp_path / "g.json").verdict
    assert code == 0 and last == str(verdict).splitlines() and last[0].startswith("fits on h200: ")
    # GPT-2 keeps more with every token, but the logits of the prompt are the largest output
    assert verdict.phase in ("prefill", "token 4") and last[1].startswith(f"peak in {verdict.phase}, at ")


def test_dry_run(run, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("""
import torch
model = torch.nn.Linear(2**15, 2**15, bias=False, device="cuda")
for _ in range(2):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.empty(8, 2**15, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
""")
    words = ["dryrun", str(script), "--device", "l4", "--steps", "1", "--no-advice", "--stop-at-oom",
             "--show", "summary"]
    code, out, _ = run(*words)
    assert code == 0 and out.split("\n\n")[-1].startswith("fits on l4: ")
    script.write_text(script.read_text().replace("2**15, 2**15", "2**16, 2**16").replace("8, 2**15", "8, 2**16"))
    code, out, _ = run(*words)  # 16 GiB, and as many again
    last = out.split("\n\n")[-1].splitlines()
    assert code == 3 and last[0].startswith("does NOT fit on l4: at least ") and "memory ran out in backward" in last[1]
    code, out, _ = run(*words[:-2])  # what is printed where nothing is asked for: the verdict is told once
    assert code == 3 and out.count("does NOT fit on l4: at least ") == out.count("Memory ran out: ") == 1
    assert len(out.split("--- dry run of ")[1].splitlines()) <= 40
    code, out, _ = run(*[word for word in words[:-2] if word != "--stop-at-oom"])
    assert code == 3 and out.count("does NOT fit on l4: ") == 1
    assert out.count("would fail first at train.py:6, in backward") == 1
    assert len(out.split("--- dry run of ")[1].splitlines()) <= 40


def test_largest_batch(run, large):
    words = ["fit", large[0], "--input", "{batch}x32768", "--multiple-of", "1024", "--mode", "infer"]
    code, out, _ = run(*words, "--device", "t4")
    size = out.split("batch size that fits is ")[1].split()[0]
    assert code == 0 and out.splitlines()[-1].startswith(f"batch size {size} fits, but barely, on t4: ")
    code, out, _ = run(*words, "--memory", "1GiB")
    assert code == 3 and out.splitlines()[-1].startswith("batch size 1,024 does NOT fit on h200: at least 8.00 GiB")


def test_all_devices(run, large):
    code, out, err = run("fit", *large, "--device", "t4", "--device", "h200")
    assert (code, err) == (0, "") and out.splitlines()[-1] == "fits on h200"
    rows = [line.split() for line in out.splitlines() if line.startswith(("t4", "h200"))]
    assert [(row[0], row[8]) for row in rows] == [("h200", "yes"), ("t4", "no")]
    assert run("fit", *large, "--device", "t4", "--device", "rtx_3060_laptop")[0] == 3
    assert run("fit", *large, "--device", "h2000")[0] == 2
