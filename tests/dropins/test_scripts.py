"""Scripts of other tools run with their import changed as docs/dropins.md says, beside the packages and run dry."""
from __future__ import annotations

import importlib
import logging
import re
import warnings
from pathlib import Path

import pytest
import torch

from analyzer.tools.dryrun.script import dry_run

PAGE = (Path(__file__).parents[2] / "docs" / "dropins.md").read_text()
MODEL = """
import torch
from torch import nn

model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
                      nn.Flatten(), nn.Linear(128, 10)).eval()
"""
# as the pages of the packages have them
SCRIPTS = {
    "fvcore.nn": """
from fvcore.nn import FlopCountAnalysis, flop_count_table, parameter_count

flops = FlopCountAnalysis(model, torch.randn(1, 3, 32, 32))
print(flops.total(), flops.by_operator(), flops.by_module(), flops.by_module_and_operator())
print(flop_count_table(flops), parameter_count(model)[""])
""",
    "torchinfo": """
from torchinfo import summary

summary(model, input_size=(2, 3, 32, 32), col_names=("input_size", "output_size", "num_params", "kernel_size"))
""",
}


def change_import(script, package):
    """What the table of docs/dropins.md says: another module, the same names."""
    new = next(row.split("|")[2].strip().strip("`") for row in PAGE.splitlines() if row.startswith(f"| `{package}`"))
    changed, count = re.subn(rf"^from {re.escape(package)} import", f"from {new} import", script, flags=re.M)
    assert count == 1
    return changed


def run(script, capsys):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(MODEL + script, "script", "exec"), {"__name__": "script"})
    printed = capsys.readouterr().out
    return printed.replace("Units.MEGABYTES", "M")  # torchinfo: the name of an enumeration since Python 3.11


@pytest.mark.parametrize("package", SCRIPTS)
def test_a_script_prints_the_same_with_its_import_changed(package, capsys):
    pytest.importorskip(package, exc_type=ImportError)
    logging.getLogger("fvcore").setLevel(logging.ERROR)
    assert run(SCRIPTS[package], capsys) == run(change_import(SCRIPTS[package], package), capsys) != ""


def test_scripts_run_dry(tmp_path, capsys):
    script = tmp_path / "counts.py"
    on_gpu = MODEL.replace(".eval()", ".eval().cuda()")
    script.write_text(on_gpu + "".join(
        change_import(text, package).replace("randn(1, 3, 32, 32)", "randn(1, 3, 32, 32, device='cuda')")
        for package, text in SCRIPTS.items()))
    found = dry_run(script, device="h100")
    printed = capsys.readouterr().out
    assert found.format_error() == ""
    plainly = "".join(run(change_import(text, package), capsys) for package, text in SCRIPTS.items())
    assert printed == plainly != ""


def test_the_table_names_what_is_there():
    rows = [row.split("|")[1:3] for row in PAGE.splitlines() if row.startswith("| `")]
    assert len(rows) == 4
    for old, new in rows:
        module = importlib.import_module(re.search(r"analyzer\.[\w.]+", new.split(" of ")[-1]).group())
        names = re.findall(r"`(\w+)`", old.partition(":")[2])
        assert [name for name in names if not hasattr(module, name)] == []
        assert set(names) <= set(module.__all__)
