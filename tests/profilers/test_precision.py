"""Which precision PyTorch's switches give float32 products and convolutions, by the older names and the newer ones."""
import subprocess
import sys

import torch

CASES = {
    "": "False True True",
    "torch.set_float32_matmul_precision('high')": "True True True",
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'": "True True True",
    "torch.backends.cudnn.allow_tf32 = False": "False False False",
    "torch.backends.cudnn.conv.fp32_precision = 'ieee'": "False False True"}
if torch.__version__ >= (2, 13):  # before cuDNN's do not follow that of all
    CASES["torch.backends.fp32_precision = 'ieee'"] = "False False False"
# A fork for each of a process that set nothing: the switches are the process's, and mixing their names raises.
CODE = """
import os, sys, warnings, torch
from analyzer.profilers.operator.registration import uses_tf32
for setting in sys.argv[1:]:
    if os.fork() == 0:
        exec(setting)
        warnings.simplefilter("error")
        print(uses_tf32("matmul"), uses_tf32("conv"), uses_tf32("rnn"), flush=True)
        os._exit(0)
    os.wait()"""


def test_precision_follows_pytorch() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", CODE, *CASES], stdout=subprocess.PIPE, text=True,
                          check=True)
    assert dict(zip(CASES, done.stdout.splitlines(), strict=True)) == CASES
