"""Which precision PyTorch's switches give float32 products and convolutions, by the older names and the newer ones."""
import subprocess
import sys

import pytest
import torch

NEWER = pytest.mark.skipif(torch.__version__ < (2, 13), reason="before 2.13 cuDNN's do not follow that of all")
CASES = [
    ("", "False True True"),
    ("torch.set_float32_matmul_precision('high')", "True True True"),
    ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", "True True True"),
    ("torch.backends.cudnn.allow_tf32 = False", "False False False"),
    ("torch.backends.cudnn.conv.fp32_precision = 'ieee'", "False False True"),
    pytest.param("torch.backends.fp32_precision = 'ieee'", "False False False", marks=NEWER),
]


@pytest.mark.parametrize("setting,expected", CASES)
def test_precision_follows_pytorch(setting: str, expected: str) -> None:
    """A process of its own for each: the switches are the process's, and mixing their names raises."""
    code = f"""
import warnings, torch
{setting}
warnings.simplefilter("error")
from analyzer.profilers.operator.registration import uses_tf32
print(uses_tf32("matmul"), uses_tf32("conv"), uses_tf32("rnn"))"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected
