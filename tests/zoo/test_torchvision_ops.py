"""Each in a fresh interpreter: in this one conftest.py has defined the operators already."""
import subprocess
import sys

import pytest

pytest.importorskip("torchvision")


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_torchvision_imports_after_it() -> None:
    print_schema = "print(torch.ops.torchvision.nms.default._schema)"
    code = f"""
import torch
from analyzer.zoo.torchvision_ops import define_torchvision_ops
define_torchvision_ops()
define_torchvision_ops()  # once is enough, twice does no harm
import torchvision
{print_schema}
"""
    assert run(code).split() == "torchvision::nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor".split()


def test_defines_nothing_where_the_library_loads() -> None:
    code = """
import torch
from analyzer.zoo import torchvision_ops
torch.ops.load_library = lambda path: print(path)
torchvision_ops.define_torchvision_ops()
print(len(torchvision_ops._definitions), hasattr(torch.ops.torchvision, "nms"))
"""
    path, outcome = run(code).splitlines()
    assert "torchvision" in path and outcome == "0 False"
