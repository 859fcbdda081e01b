"""Inputs in objects: dataclasses, namespaces, mappings and others, counted and traced as tensors given alone."""
import dataclasses
from collections import UserDict, deque, namedtuple
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from transformers import BatchEncoding, BatchFeature

from analyzer import profile, symbolic_profile, symbolic_trace
from analyzer.errors import InputError
from analyzer.meta.intercept.mode_stack import attributes_of
from tests.call import Call


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


LENGTHS = [2, 5, 3]
PACKED = pack_padded_sequence(torch.rand(3, 5, 6), LENGTHS, batch_first=True, enforce_sorted=False)


def encode(m, packed):
    """Layers between packed sequences, which one makes anew."""
    out, _ = m.cell(packed)
    out = PackedSequence(m.linear(out.data), out.batch_sizes, out.sorted_indices, out.unsorted_indices)
    return pad_packed_sequence(m.cell(out)[0], batch_first=True)[0]


@pytest.mark.parametrize("device", ["cpu", "h100"])
@pytest.mark.parametrize("args", [(PACKED,), PACKED, ({"x": [PACKED]},)], ids=["alone", "the only one", "nested"])
def test_packed_sequences_are_inputs(device, args):
    get = (lambda packed: packed) if args is PACKED or args == (PACKED,) else lambda batch: batch["x"][0]
    net = Call(lambda m, batch: encode(m, get(batch)), cell=nn.GRU(6, 4, batch_first=True), linear=nn.Linear(4, 6))
    found = profile(net, args, device=device)
    assert {tuple(t.shape) for n in found.nodes if n.module_path == "linear" for t in n.outputs} == {(10, 6)}
    assert found.inputs and found.peak_by_category["input"] >= PACKED.data.nbytes
    # as_eager runs again with what it knows of the lengths
    assert found.as_eager().fwd_flops == found.fwd_flops


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_a_model_holds_packed_sequences(device):
    net = Call(lambda m, x: encode(m, m.kept[0]).sum() + encode(m, m.packed).sum() + x.sum(), linear=nn.Linear(4, 6),
               cell=nn.GRU(6, 4, batch_first=True))
    net.packed, net.kept = PACKED, [PACKED]
    found = profile(net, torch.rand(2), device=device)
    rows = [t.shape[0] for n in found.nodes if n.module_path == "linear" for t in n.outputs]
    assert rows == [10, 10] and net.packed is PACKED and net.kept[0].batch_sizes is PACKED.batch_sizes


def test_packed_sequences_are_traced():
    net = Call(encode, cell=nn.GRU(6, 4, batch_first=True), linear=nn.Linear(4, 6))
    gm = symbolic_trace(net, meta_args={"args": (PACKED,)})
    other = pack_padded_sequence(torch.rand(3, 5, 6), LENGTHS, batch_first=True, enforce_sorted=False)
    torch.testing.assert_close(gm(other), net(other))
    assert symbolic_profile(gm, PACKED, device="h100").meta["profile"].fwd_flops


class Tagged(torch.Tensor):
    pass


def tag(x):
    tagged = x.as_subclass(Tagged)
    tagged.scale = 3
    return tagged


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_tensors_keep_their_class_and_attributes(device):
    def attend(m, x, bias):
        assert type(x) is Tagged and type(bias) is CausalBias and type(m.bias) is CausalBias
        made = Tagged([1.0, 2.0])
        assert type(made) is Tagged and made.tolist() == [1.0, 2.0]
        q = m.linear(torch.Tensor(x)) * x.scale
        for mask in (bias, m.bias):
            q = nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        return q

    net = Call(attend, linear=nn.Linear(8, 8))
    net.bias = causal_lower_right(4, 4)
    x, bias = tag(torch.rand(2, 3, 4, 8)), causal_lower_right(4, 4)
    def attend_plainly(m, x):
        q = m.linear(x) * 3
        for _ in range(2):
            q = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        return q

    plain = profile(Call(attend_plainly, linear=nn.Linear(8, 8)), torch.rand(2, 3, 4, 8), device=device)
    found = profile(net, (x, bias), device=device)
    assert (found.fwd_flops, found.bwd_flops) == (plain.fwd_flops, plain.bwd_flops)
    gm = symbolic_trace(net, meta_args={"args": (x, bias)})
    torch.testing.assert_close(gm(x, bias), net(x, bias))


def test_each_step_is_given_a_new_iterator():
    def total(m, rows, named):
        return sum(m.linear(x).sum() for x in rows) + sum(m.linear(x).sum() * n for x, n in named)

    net, rows = Call(total, linear=nn.Linear(6, 2)), [torch.rand(4, 6), torch.rand(3, 6)]
    listed = profile(net, (rows, list(zip(rows, [1, 2]))), device="h100")
    found = profile(net, ((x for x in rows), zip(rows, [1, 2])), device="h100")
    assert (found.fwd_flops, found.peak_by_category["input"]) == (listed.fwd_flops, listed.peak_by_category["input"])
    assert found.phases["forward"].flops == listed.phases["forward"].flops


#: what cannot be without its data, and the way out
REFUSED = {"nested": (lambda: torch.nested.nested_tensor([torch.rand(2), torch.rand(3)]), "layout=torch.jagged"),
           "quantized": (lambda: torch.quantize_per_tensor(torch.rand(2), 0.1, 0, torch.quint8), "pass it dequantized"),
           "symbolic": (lambda: FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False).from_tensor(torch.rand(2, 3)),
                        r"FakeTensor of shape \(s\d+, s\d+\), in which sizes are symbols.*make it from numbers"),
           "masked": (lambda: torch.masked.masked_tensor(torch.rand(2), torch.ones(2).bool()), "MaskedTensor.*made of")}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_its_data_is_refused_with_the_way_out(name):
    make, message = REFUSED[name]
    for run in (lambda x: profile(nn.Identity(), ([x],), device="cpu"),
                lambda x: symbolic_trace(nn.Identity(), meta_args={"input": [x]}),
                lambda x: symbolic_profile(torch.fx.symbolic_trace(nn.Identity()), x)):
        with pytest.raises(InputError, match=message):
            run(make())


def images():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, 5))


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("kind", ["fake", "meta", "data"])
def test_a_model_made_under_torchs_fake_mode_is_the_same(kind, inside):
    """The mode around the call does nothing, whatever the model is made of, and works as before after it."""
    x, other = torch.rand(2, 3, 8, 8), FakeTensorMode(allow_non_fake_inputs=True)
    with {"fake": other, "meta": torch.device("meta"), "data": nullcontext()}[kind]:
        model, given = images(), torch.rand(2, 3, 8, 8)
        model[0].weight.mark = kind
    for settings in ({"device": "h100", "optimizer": "adamw"}, {"device": "cpu", "mode": "infer"}):
        wanted = profile(images(), x, **settings)
        with other if inside else nullcontext():
            assert profile(model, given, **settings) == profile(model, x, **settings) == wanted
    with other if inside else nullcontext():
        graph = symbolic_profile(symbolic_trace(model, meta_args={"input": given}), given)
    assert graph.code == symbolic_trace(images(), meta_args={"input": x}).code
    assert (type(model[0].weight) is FakeTensor) == (kind == "fake") and model[0].weight.mark == kind
    with other:
        assert isinstance(model(given.to("cpu") if kind == "data" else given), torch.Tensor)


def test_what_torchs_fake_tensors_have_is_told_from_what_is_set_on_them():
    with FakeTensorMode():
        tensor = torch.rand(4)
    assert attributes_of(tensor) == {}
    tensor.in_memory, tensor.nonzero_memo_of_mine = True, 3
    assert attributes_of(tensor) == {"in_memory": True, "nonzero_memo_of_mine": 3}


def test_a_fake_tensor_of_torchs_that_is_met_stands_for_a_tensor():
    def run(met):
        return profile(Call(lambda m, x: m.linear(x) + met[0], linear=nn.Linear(4, 4)), torch.rand(2, 4), device="h100")

    with FakeTensorMode():
        met = [torch.rand(4)]
    assert run(met) == run([torch.rand(4)])
