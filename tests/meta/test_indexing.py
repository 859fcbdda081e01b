"""Brackets write as the device would: numbers and tensors of no dimensions on the host fill, others are copied."""
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from analyzer import profile
from tests.call import Call


class Net(nn.Module):
    def __init__(self, statement: str) -> None:
        super().__init__()
        self.code = compile(statement, "statement", "exec")

    def forward(self, x, y):
        x = x * 2
        exec(self.code, {"x": x, "y": y, "torch": torch})
        return x.sum()


#: a statement, and what writes on a CPU and on CUDA: THPVariable_setitem and copy_to in ATen/TensorIndexing.h
WRITES = {
    "x[0] = 1.5": ("fill_", "fill_"),
    "x[0:4, ..., -5:] = 1": ("fill_", "fill_"),
    "x[1:, ::2] = 1.5": ("fill_", "fill_"),
    "x[0, 0] = 1.5": ("copy_", "copy_"),  # of equal sizes: the number is copied from the host
    "x[0] = torch.tensor(2.)": ("fill_", "fill_"),
    "x[0] = y[0, 0]": ("fill_", "copy_"),
    "x[0] = y[1]": ("copy_", "copy_"),
    "x[0] = y[0, :1]": ("copy_", "copy_"),
    "x[y > 0] = 1.5": ("index_put_", "index_put_"),
    "x[[0, 2]] = 1.5": ("index_put_", "index_put_"),
}


class Writes(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def writing(names):
    return [name for name in names if name in ("fill_", "copy_", "index_put_")]


@pytest.mark.parametrize("statement", WRITES)
def test_what_a_statement_writes_with(statement):
    tensors, (host, device) = (torch.rand(4, 5, requires_grad=True), torch.rand(4, 5, requires_grad=True)), WRITES[
        statement]
    net = Net(statement)
    with Writes() as really:
        net(*tensors)
    told = {kind: [node.target.split(".")[1] for node in profile(net, args=tensors, device=kind, mode="infer").nodes
                   if "aten." in node.target] for kind in ("cpu", "a100")}
    assert writing(really.names) == writing(told["cpu"]) == [host]
    assert writing(told["a100"]) == [device]
    assert [n for n in told["cpu"] if n != "scalar_tensor"] == [n for n in really.names if n != "lift_fresh"]


def test_a_number_that_is_written_takes_no_memory_of_the_device():
    x = torch.empty(1024, 1024, device="meta")
    peaks = {statement: profile(Net(statement), args=(x, x), device="a100", mode="infer").peak_allocated_bytes
             for statement in ("pass", "x[:512] = 1.5", "x[0, 0] = 1.5")}
    assert len(set(peaks.values())) == 1 and peaks["pass"] > 2 * 4 * 2**20


def test_contents_that_are_known_stay_known():
    def cut(m, x):
        places = torch.zeros(4, dtype=torch.long, device=x.device)
        places[1:3] = 2
        places[0] = torch.tensor(1)
        return x[:int(places.sum())]

    nodes = profile(Call(cut), args=(torch.empty(9, 2, device="meta"),), mode="infer").nodes
    shapes = [tuple(out.shape) for node in nodes if node.target == "aten.slice.Tensor" for out in node.outputs]
    assert shapes[-1] == (5, 2)


@pytest.mark.parametrize("statement", ["x[9] = 1.5", "x[0, 0, 0] = 1.5", "x[..., 0, 0, 0] = 1.5", "x[::-1] = 1.5"])
def test_what_torch_refuses_is_refused_alike(statement):
    errors = []
    for run in (lambda: Net(statement)(torch.ones(4, 5), torch.ones(4, 5)),
                lambda: profile(Net(statement), args=(torch.ones(4, 5), torch.ones(4, 5)), mode="infer")):
        with pytest.raises((IndexError, ValueError)) as caught:
            run()
        errors.append((caught.type, str(caught.value).split(" (")[0]))
    assert errors[0] == errors[1]
