import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from analyzer.meta.spec import Signature, TensorSpec
from analyzer.profilers.operator.registration import tensors


class SignatureLog(TorchDispatchMode):
    """The signature of every operator called."""

    def __init__(self):
        super().__init__()
        self.signatures = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        args, kwargs, result = tree_map_only(
            torch.Tensor, lambda t: TensorSpec.of(tuple(t.shape), tuple(t.stride()), t.dtype, str(t.device)),
            (args, kwargs or {}, out))
        self.signatures.append(Signature(func, args, kwargs, tuple(tensors([args, kwargs])), tuple(tensors(result))))
        return out


@pytest.fixture
def log_signatures():
    """``log_signatures(f)``: the signatures of all operators that ``f()`` calls."""
    def run(f):
        with SignatureLog() as log:
            f()
        return log.signatures

    return run
