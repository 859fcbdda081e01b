"""What comes from the cache equals what the kernel gives."""
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from analyzer import MetaTensorMode
from analyzer.meta.dispatch import call as output_cache
from analyzer.meta.dispatch import kernel

CALLS = {
    "add": lambda x: x + 1, "add float": lambda x: x + 1.5, "mul self": lambda x: x * x,
    "view": lambda x: x.reshape(-1), "slice": lambda x: x[..., 1:], "expand": lambda x: x[None].expand(3, *x.shape),
    "relu_": lambda x: x.clone().relu_(), "sum": lambda x: x.sum(0), "softmax": lambda x: x.float().softmax(-1),
    "unbind": lambda x: x.unbind(0)[-1], "half": lambda x: x.half(), "cat": lambda x: torch.cat([x, x]),
    "topk": lambda x: x.topk(1).indices, "where": lambda x: torch.where(x > 0, x, 0),
    "as_strided": lambda x: x.as_strided((2, ), (1, ), 1), "permute": lambda x: x.permute(*range(x.dim() - 1, -1, -1)),
    "linear": lambda x: F.linear(x.float(), torch.ones(5, x.shape[-1], device=x.device)),
    "layer_norm": lambda x: F.layer_norm(x.float(), x.shape[-1:]), "dropout": lambda x: F.dropout(x.float()),
    "rand_like": lambda x: torch.rand_like(x.float()), "std": lambda x: torch.std_mean(x.float())[0],
}


def facts(x):
    return tuple(x.shape), x.stride(), x.dtype, x.device, x.storage_offset(), x.untyped_storage().nbytes()


@settings(max_examples=60)
@given(shape=st.lists(st.integers(2, 4), min_size=2, max_size=4),
       dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
       device=st.sampled_from(["cpu", "cuda"]), transposed=st.booleans(), offset=st.booleans(),
       name=st.sampled_from(sorted(CALLS)))
def test_the_second_call_gives_what_the_first_gave(shape, dtype, device, transposed, offset, name):
    def make(**where):
        x = torch.ones(shape, dtype=dtype, **where)
        x = x.transpose(0, 1) if transposed else x
        return x[1:] if offset else x

    def run():
        x = make(device=device)
        y = CALLS[name](x)
        shares = y.untyped_storage() is x.untyped_storage()
        return facts(y), shares

    with MetaTensorMode():
        output_cache.entries.clear()
        first = run()
        second = run()
    assert first == second
    real = CALLS[name](make())
    assert (first[0][0], first[0][2]) == (tuple(real.shape), real.dtype)
    # the stride of a dimension of one element means nothing
    significant = [i for i, n in enumerate(real.shape) if n > 1]
    assert [first[0][1][i] for i in significant] == [real.stride()[i] for i in significant]


@pytest.mark.parametrize(("a", "b"), [(1, 1.0), (1, True), (2.0, 2)])
def test_scalars_that_are_equal_but_of_other_types_promote_differently(a, b):
    with MetaTensorMode():
        x = torch.ones(2, dtype=torch.int64)
        assert (x * a).dtype == (torch.ones(2, dtype=torch.int64) * a).dtype
        expected = {int: torch.int64, float: torch.float32, bool: torch.int64}
        assert [(x * v).dtype for v in (a, b, a)] == [expected[type(v)] for v in (a, b, a)]


def test_where_a_tensor_begins_is_part_of_the_key_of_what_counts_from_its_storage():
    with MetaTensorMode():
        x = torch.ones(10)
        assert [part.as_strided((2,), (1,), 1).storage_offset() for part in (x[:5], x[5:])] == [1, 1]


def test_claims_are_part_of_the_key():
    with MetaTensorMode():
        assert [(torch.ones(2, device=d) + 1).device.type for d in ("cpu", "cuda", "cpu")] == ["cpu", "cuda", "cpu"]


def test_the_cache_is_bounded(monkeypatch):
    monkeypatch.setattr(kernel, "LARGEST", 4)
    with MetaTensorMode():
        for n in range(1, 20):
            torch.ones(n) + 1
        assert len(output_cache.entries) <= 4


FACTORIES = {
    "linear": lambda: torch.nn.Linear(8, 8).weight, "empty": lambda: torch.empty(7, 3),
    "arange": lambda: torch.arange(0.0, 3.0), "tensor": lambda: torch.tensor([1.0, 2.0]),
    "quotient": lambda: torch.ones(3, dtype=torch.int64) / 2, "full": lambda: torch.full((2, ), 1.5)}


@pytest.mark.parametrize("name", FACTORIES)
def test_what_has_no_dtype_of_its_own_has_the_default_of_the_moment(name):
    """transformers builds a model under the default dtype of its config: a second one had parameters of the first."""
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.float16, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            with MetaTensorMode():
                found.append(FACTORIES[name]().dtype is dtype)
        finally:
            torch.set_default_dtype(torch.float32)
    assert found == [True] * 5
