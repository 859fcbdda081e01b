"""Which precision PyTorch's switches give float32 products and convolutions, by the older names and the newer ones."""
import multiprocessing
import warnings

import pytest
import torch

from analyzer.profilers.operator.registration import uses_tf32

NEWER = pytest.mark.skipif(torch.__version__ < (2, 13), reason="before 2.13 cuDNN's do not follow that of all")


def set_and_ask(setting: str) -> "list[bool]":
    # which torch's own tests take away
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
    exec(setting, {"torch": torch})
    warnings.simplefilter("error")
    return [uses_tf32(kind) for kind in ("matmul", "conv", "rnn")]


@pytest.mark.parametrize("setting,expected", [
    ("", [False, True, True]),
    ("torch.set_float32_matmul_precision('high')", [True, True, True]),
    ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", [True, True, True]),
    ("torch.backends.cudnn.allow_tf32 = False", [False, False, False]),
    ("torch.backends.cudnn.conv.fp32_precision = 'ieee'", [False, False, True]),
    pytest.param("torch.backends.fp32_precision = 'ieee'", [False, False, False], marks=NEWER)])
def test_precision_follows_pytorch(setting: str, expected: "list[bool]") -> None:
    """A forked process for each: the switches are the process's, and mixing their names raises."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(set_and_ask, (setting,)) == expected
