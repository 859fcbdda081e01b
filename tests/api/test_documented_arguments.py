"""Containers and kinds of tensors that ``torch.nn`` and ``torch.nn.functional`` document as arguments: a walk."""
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.utils.rnn import (
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
    pad_sequence,
    unpack_sequence,
    unpad_sequence,
)

from analyzer import profile, symbolic_trace
from analyzer.errors import AnalyzerError, InputError


class Call(nn.Module):
    """Runs a function of a layer and of arguments, by whose names its inputs are known."""

    def __init__(self, function):
        super().__init__()
        self.function, self.layer = function, nn.Linear(8, 8)

    def forward(self, *args):
        return self.function(self.layer, *args)


def call(function):
    """A module whose ``forward`` has the arguments of a function but its layer."""
    names = list(inspect.signature(function).parameters)[1:]
    made = Call(function)
    scope: dict = {}
    exec(f"def forward(self, {', '.join(names)}): return self.function(self.layer, {', '.join(names)})", scope)
    made.__class__ = type("Call", (Call,), {"forward": scope["forward"]})
    return made


def jagged(*lengths, dtype=None):
    rows = [torch.rand(n, 8) if dtype is None else torch.arange(n) for n in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def attend(layer, x):
    heads = layer(x).unflatten(-1, [2, 4]).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads)


X, LABELS = (5, 2, 8), [[1, 2, 3], [1, 2, 0]]
#: a module and its arguments, made anew for each run
ARGUMENTS = {
    "a packed sequence": lambda: (nn.GRU(8, 8), pack_padded_sequence(torch.rand(X), torch.tensor([5, 3]))),
    "a packed sequence of lengths in a list": lambda: (nn.LSTM(8, 8), pack_padded_sequence(torch.rand(X), [5, 3])),
    "a packed sequence out of order": lambda: (
        nn.LSTM(8, 8, bidirectional=True), pack_padded_sequence(torch.rand(X), [3, 5], enforce_sorted=False)),
    "packed rows": lambda: (nn.RNN(8, 8), pack_sequence([torch.rand(5, 8), torch.rand(3, 8)])),
    "states in a tuple": lambda: (nn.LSTM(8, 8), torch.rand(X), (torch.rand(1, 2, 8), torch.rand(1, 2, 8))),
    "states of a cell": lambda: (nn.LSTMCell(8, 8), torch.rand(2, 8), (torch.rand(2, 8), torch.rand(2, 8))),
    "packed within the model": lambda: (
        call(lambda layer, x, n: pad_packed_sequence(pack_padded_sequence(layer(x), n), total_length=7)[0]),
        torch.rand(X), torch.tensor([5, 3])),
    "packed by a list within the model": lambda: (
        call(lambda layer, x, n: pad_packed_sequence(pack_padded_sequence(layer(x), n))[0]), torch.rand(X), [5, 3]),
    "a list of sequences": lambda: (
        call(lambda layer, rows: layer(pad_sequence(rows))), [torch.rand(3, 8), torch.rand(5, 8)]),
    "lengths to cut by": lambda: (
        call(lambda layer, x, n: unpad_sequence(layer(x), n)[0]), torch.rand(X), torch.tensor([5, 3])),
    "a packed sequence that is cut": lambda: (
        call(lambda layer, x: layer(unpack_sequence(x)[0])), pack_sequence([torch.rand(5, 8), torch.rand(3, 8)])),
    "bags by offsets": lambda: (nn.EmbeddingBag(9, 8), torch.tensor([1, 2, 3, 4]), torch.tensor([0, 2])),
    "weighted bags": lambda: (
        nn.EmbeddingBag(9, 8, mode="sum"), torch.tensor([1, 2, 3, 4]), torch.tensor([0, 2]), torch.rand(4)),
    "nested bags": lambda: (nn.EmbeddingBag(9, 8), jagged(2, 3, dtype=torch.int64)),
    "lengths of CTC in tuples": lambda: (
        call(lambda layer, x, t, n, m: F.ctc_loss(layer(x).log_softmax(-1), t, n, m)),
        torch.rand(9, 2, 8), torch.tensor(LABELS), (9, 9), (3, 2)),
    "lengths of CTC in lists": lambda: (
        call(lambda layer, x, t, n, m: F.ctc_loss(layer(x).log_softmax(-1), t, n, m)),
        torch.rand(9, 2, 8), torch.tensor([1, 2, 3, 1, 2]), [9, 9], [3, 2]),
    "lengths of CTC in tensors": lambda: (
        call(lambda layer, x, t, n, m: F.ctc_loss(layer(x).log_softmax(-1), t, n, m)),
        torch.rand(9, 2, 8), torch.tensor([1, 2, 3, 1, 2]), torch.tensor([9, 9]), torch.tensor([3, 2])),
    "a causal mask to the lower right": lambda: (
        call(lambda layer, x, y, mask: F.scaled_dot_product_attention(layer(x), y, y, attn_mask=mask)),
        torch.rand(1, 2, 4, 8), torch.rand(1, 2, 6, 8), causal_lower_right(4, 6)),
    "a causal mask to the upper left": lambda: (
        call(lambda layer, x, mask: F.scaled_dot_product_attention(layer(x), x, x, attn_mask=mask)),
        torch.rand(1, 2, 4, 8), causal_upper_left(4, 4)),
    "a boolean mask": lambda: (
        call(lambda layer, x, mask: F.scaled_dot_product_attention(layer(x), x, x, attn_mask=mask)),
        torch.rand(1, 2, 4, 8), torch.ones(4, 4, dtype=torch.bool)),
    "a nested tensor": lambda: (nn.Linear(8, 8), jagged(3, 5)),
    "a normalized nested tensor": lambda: (nn.LayerNorm(8), jagged(3, 5)),
    "nested attention": lambda: (call(attend), jagged(3, 5)),
    "a sparse matrix": lambda: (
        call(lambda layer, a, x: torch.sparse.mm(a, layer(x))), torch.eye(4).to_sparse(), torch.rand(4, 8)),
    "a sparse matrix by rows": lambda: (
        call(lambda layer, a, x: a @ layer(x)), torch.eye(4).to_sparse_csr(), torch.rand(4, 8)),
    "labels of an adaptive softmax": lambda: (
        nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5, 10]), torch.rand(6, 8), torch.arange(6)),
    "indices of a pool": lambda: (
        call(lambda layer, x, size: F.max_unpool2d(*F.max_pool2d(layer(x), 2, return_indices=True), 2,
                                                   output_size=size)), torch.rand(1, 2, 8, 8), torch.Size([8, 8])),
    "a size of an output": lambda: (
        nn.ConvTranspose2d(2, 2, 3, stride=2), torch.rand(1, 2, 8, 8), [17, 17]),
    "two inputs": lambda: (nn.Bilinear(8, 4, 3), torch.rand(2, 8), torch.rand(2, 4)),
    "a variance that is a number": lambda: (
        call(lambda layer, x, y, v: F.gaussian_nll_loss(layer(x), y, v)), torch.rand(2, 8), torch.rand(2, 8), 0.5),
    "a distance": lambda: (
        call(lambda layer, a, b, c, d: F.triplet_margin_with_distance_loss(layer(a), b, c, distance_function=d)),
        *(torch.rand(2, 8) for _ in range(3)), nn.PairwiseDistance()),
    "a size of a grid": lambda: (
        call(lambda layer, t, size: F.affine_grid(t + layer.weight.sum(), size)), torch.rand(1, 2, 3),
        torch.Size([1, 2, 4, 4])),
    "tensors in dicts of lists": lambda: (call(lambda layer, d: layer(d["a"][0])), {"a": [torch.rand(2, 8)]}),
    "a buffer": lambda: (nn.Linear(8, 8), nn.Buffer(torch.rand(2, 8))),
    "parameters in a list": lambda: (
        call(lambda layer, ps: sum(p.sum() for p in ps)), nn.ParameterList([nn.Parameter(torch.rand(2))])),
    "a module with parameters": lambda: (
        call(lambda layer, m, x: m(layer(x))), nn.Linear(8, 3), torch.rand(2, 8)),
    "a lazy layer": lambda: (nn.LazyLinear(3), torch.rand(2, 8)),
}

#: what has no form without data, and the way out that the error names
REFUSED = {
    "a nested tensor in the strided layout": (
        lambda: (nn.Linear(8, 8), torch.nested.nested_tensor([torch.rand(3, 8), torch.rand(5, 8)])), "layout=torch.j"),
    "a masked tensor": (
        lambda: (call(lambda layer, m: m.to_tensor(0).sum() + layer.weight.sum()),
                 torch.masked.masked_tensor(torch.rand(3), torch.tensor([True, False, True]))), "MaskedTensor"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.filterwarnings("ignore")
def test_each_documented_argument_is_taken(name):
    made = ARGUMENTS[name]
    model, *args = made()
    model(*args)
    for device in ("cpu", "h100"):
        model, *args = made()
        found = profile(model, tuple(args), device=device)
        assert found.params and found.bwd_flops is not None and found.peak_allocated_bytes


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_what_has_no_form_without_data_is_refused_with_the_way_out(name):
    made, text = REFUSED[name]
    model, *args = made()
    model(*args)
    with pytest.raises(AnalyzerError, match=text):
        profile(model, tuple(args), device="h100")


def holds_tensors(value):
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return isinstance(value, torch.Tensor) or any(map(holds_tensors, values))


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.filterwarnings("ignore")
def test_each_documented_argument_is_traced_or_refused_clearly(name):
    model, *args = ARGUMENTS[name]()
    names = inspect.signature(model.forward).parameters
    given = dict(zip(names, args))
    try:
        graph = symbolic_trace(model, meta_args={n: a for n, a in given.items() if holds_tensors(a)},
                               concrete_args={n: a for n, a in given.items() if not holds_tensors(a)})
    except InputError as error:
        assert name in ("a lazy layer",) and "real input" in str(error)
    else:
        assert graph.graph.nodes
