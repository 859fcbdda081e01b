"""Each in a fresh interpreter: in this one conftest.py has defined the operators already."""
import subprocess
import sys
from pathlib import Path

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


def test_the_library_that_torchvision_has_had_since_0_29_brings_the_operators(tmp_path: Path) -> None:
    """Defined twice, they abort the process."""
    (tmp_path / "torchvision").mkdir()
    for name in ("__init__.py", "_C_stable.so"):
        (tmp_path / "torchvision" / name).touch()
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import torch
from analyzer.zoo import torchvision_ops
torch.ops.load_library = lambda path: print(path.name)
torchvision_ops.define_torchvision_ops()
print(len(torchvision_ops._definitions))
"""
    assert run(code).split() == ["_C_stable.so", "0"]
