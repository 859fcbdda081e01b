"""Inputs in objects: dataclasses, namespaces, mappings and others, counted and traced as tensors given alone."""
import dataclasses
from collections import UserDict, deque, namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import BatchEncoding, BatchFeature

from analyzer import profile, symbolic_profile, symbolic_trace


class Net(nn.Module):
    """Reads its inputs by ``get``."""

    def __init__(self, get=None):
        super().__init__()
        self.get, self.a = get, nn.Linear(8, 8)

    def forward(self, batch, more=None):
        x, y = (batch, more) if self.get is None else self.get(batch)
        return self.a(x) * 2 + y


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor
    k: int = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    y: torch.Tensor


class Own:
    def __init__(self, x, y):
        self.x, self.y, self.itself, self.same = x, y, self, [x]


class Slotted:
    __slots__ = ("x", "y", "missing")

    def __init__(self, x, y):
        self.x, self.y = x, y


Pair = namedtuple("Pair", "x y")


def by_name(batch):
    return batch.x, batch.y


def by_key(batch):
    return batch["x"], batch["y"]


def inside(batch):
    return batch["rows"][0].x, batch["rows"][1][0].y


#: how it is made of x and y, how its tensors are read, and the names of the inputs in a profile
HOLDERS = {"dataclass": (Batch, by_name, ["batch_x", "batch_y"]), "frozen": (Frozen, by_name, ["batch_x", "batch_y"]),
           "object": (Own, by_name, ["batch_x", "batch_y"]), "slots": (Slotted, by_name, ["batch_x", "batch_y"]),
           "namespace": (lambda x, y: SimpleNamespace(x=x, y=y), by_name, ["batch_x", "batch_y"]),
           "user dictionary": (lambda x, y: UserDict(x=x, y=y), by_key, ["batch_x", "batch_y"]),
           "batch encoding": (lambda x, y: BatchEncoding({"x": x, "y": y}), by_key, ["batch_x", "batch_y"]),
           "batch feature": (lambda x, y: BatchFeature({"x": x, "y": y}), by_name, ["batch_x", "batch_y"]),
           "named tuple": (Pair, by_name, ["batch_0", "batch_1"]),
           "deque": (lambda x, y: deque([x, y]), lambda batch: (batch[0], batch[1]), ["batch_0", "batch_1"]),
           "nested": (lambda x, y: {"rows": [SimpleNamespace(x=x), (Batch(None, y),)]}, inside,
                      ["batch_rows_0_x", "batch_rows_1_0_y"])}
HELD = pytest.mark.parametrize("name", HOLDERS)


@HELD
@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("mode", ["train", "infer"])
def test_what_an_object_holds_is_an_input(name, mode, needs_gradient, reuse):
    make, get, names = HOLDERS[name]
    x, y = torch.rand(64, 8, requires_grad=needs_gradient), torch.rand(64, 8)
    plain = profile(Net(), (x, y), mode=mode, device="h100", reuse=reuse)
    batch = make(x, y)
    found = profile(Net(get), (batch,), mode=mode, device="h100", reuse=reuse)
    assert list(found.inputs) == names and [t.shape for t in found.inputs.values()] == [(64, 8)] * 2
    assert found.batch_size == 64 and found.peak_by_category["input"] == 2 * 64 * 8 * 4
    for figure in ("peak_allocated_bytes", "peak_by_category", "fwd_flops", "bwd_flops", "step_seconds"):
        assert getattr(found, figure) == getattr(plain, figure), figure
    assert all(a is b for a, b in zip(get(batch), (x, y))) and x.grad is None


def test_an_argument_that_leads_to_itself_and_holds_a_tensor_twice():
    x, y = torch.rand(4, 8), torch.rand(4, 8)
    own = Own(x, y)

    def get(batch):
        assert batch.itself is batch and batch.same[0] is batch.x
        return batch.x, batch.y

    assert profile(Net(get), (own,), device="cpu").peak_by_category["input"] == 2 * 4 * 8 * 4
    gm = symbolic_trace(Net(by_name), meta_args={"batch": own})
    torch.testing.assert_close(gm(own), x.mm(gm.a.weight.T) * 2 + gm.a.bias * 2 + y)


@HELD
def test_what_an_object_holds_is_traced(name):
    make, get, _ = HOLDERS[name]
    model, batch = Net(get), make(torch.rand(64, 8), torch.rand(64, 8))
    gm = symbolic_trace(model, meta_args={"batch": batch})
    other = make(torch.rand(64, 8), torch.rand(64, 8))
    torch.testing.assert_close(gm(other), model(other))
    profiled = symbolic_profile(gm, other, device="h100").meta["profile"]
    assert profiled.peak_by_category["input"] == 2 * 64 * 8 * 4 and profiled.batch_size == 64


def test_tokens_of_a_batch_are_counted_by_the_names_in_it():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Embedding(100, 8)

        def forward(self, batch):
            return self.a(batch["input_ids"]) * batch["attention_mask"][..., None]

    ids = torch.zeros(2, 7, dtype=torch.int64)
    found = profile(Reader(), (BatchEncoding({"attention_mask": ids + 1, "input_ids": ids}),), device="h100")
    assert (found.tokens, found.batch_size) == (14, 2)
    assert list(found.inputs) == ["batch_attention_mask", "batch_input_ids"]


def test_an_output_that_is_an_object_is_the_loss():
    class Out(Net):
        def forward(self, x):
            return SimpleNamespace(logits=self.a(x))

    found, plain = profile(Out(), torch.rand(4, 8)), profile(nn.Linear(8, 8), torch.rand(4, 8))
    assert (found.fwd_flops, found.bwd_flops) == (plain.fwd_flops, plain.bwd_flops)
