"""In a fresh interpreter: in this one conftest.py has defined the operators already."""
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchvision")
CODE = """
import importlib, sys
import torch
from analyzer.zoo import torchvision_ops
load = torch.ops.load_library
torch.ops.load_library = lambda path: print(path.name)
sys.path.insert(0, {folder!r})  # of torchvision 0.29, whose library brings them: defined twice, they abort
torchvision_ops.define_torchvision_ops()
sys.path.remove({folder!r})
importlib.invalidate_caches()
torchvision_ops.define_torchvision_ops()
print(len(torchvision_ops._definitions), hasattr(torch.ops.torchvision, "nms"))  # nothing where the library loads
torch.ops.load_library = load
torchvision_ops.define_torchvision_ops()
torchvision_ops.define_torchvision_ops()  # once is enough, twice does no harm
import torchvision
print(torch.ops.torchvision.nms.default._schema)
"""


def test_operators_are_defined_where_no_library_brings_them(tmp_path: Path) -> None:
    (tmp_path / "torchvision").mkdir()
    for name in ("__init__.py", "_C_stable.so"):
        (tmp_path / "torchvision" / name).touch()
    done = subprocess.run([sys.executable, "-c", CODE.format(folder=str(tmp_path))], capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, done.stderr
    stable, own, outcome, schema = done.stdout.splitlines()
    assert stable == "_C_stable.so" and own.startswith("_C") and outcome == "0 False"
    assert schema == "torchvision::nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
