"""Programs that PyTorch refuses are refused, with an error of the same kind; programs that it runs are not."""
from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map_only

from analyzer import MetaTensorMode
from analyzer.errors import DataDependentError, UnsupportedOperatorError
from analyzer.meta.value.known_value import Watched, reads
from benchmarks.fuzz.torch_samples import KNOWN, SAME_KIND, load_operators, try_refused_calls

Call = Callable[[], Any]



def _run_with_state(cls: type[torch.nn.RNNBase], dtype: torch.dtype) -> None:
    state = torch.zeros(1, 2, 4, dtype=dtype)
    with torch.no_grad():
        cls(3, 4)(torch.rand(5, 2, 3), (state, state) if cls is torch.nn.LSTM else state)


CALLS: dict[str, Call] = {
    "groups that do not divide the outputs": lambda: F.conv2d(torch.rand(2, 8, 9, 9), torch.rand(6, 2, 3, 3), groups=4),
    "more groups than outputs": lambda: F.conv1d(torch.rand(2, 12, 30), torch.rand(3, 2, 3), groups=6),
    "a bias of another length": lambda: F.conv2d(torch.rand(1, 3, 8, 8), torch.rand(4, 3, 3, 3), torch.rand(3)),
    "output_padding as large as the stride": lambda: F.conv_transpose2d(
        torch.rand(2, 4, 9, 9), torch.rand(4, 4, 3, 3), stride=2, output_padding=2),
    "nll_loss of int32 targets": lambda: F.nll_loss(torch.rand(4, 10), torch.randint(0, 10, (4,)).int()),
    "index_add of another dtype": lambda: torch.rand(3, 4).index_add(
        0, torch.randint(0, 3, (5,)), torch.rand(5, 4).half()),
    "a negative beta": lambda: F.smooth_l1_loss(torch.rand(3), torch.rand(3), beta=-1.0),
    "celu of no alpha": lambda: F.celu(torch.rand(3), 0.0),
    "a complex number in full floats": lambda: torch.full((2,), 1j, dtype=torch.float32),
    "a range of truth values": lambda: torch.arange(3.5, dtype=torch.bool),
    **{f"a complex factor of {name}": (lambda run=run: run(1j)) for name, run in {
        "add": lambda z: torch.rand(3).add(torch.rand(3), alpha=z),
        "sub in place": lambda z: torch.rand(3).sub_(torch.rand(3), alpha=z),
        "rsub of integers": lambda z: torch.rsub(torch.ones(3, dtype=torch.int64), 1, alpha=z),
        "foreach": lambda z: torch._foreach_add([torch.rand(3)], [torch.rand(3)], alpha=z),
        "addmm": lambda z: torch.addmm(torch.rand(3, 3), torch.rand(3, 3), torch.rand(3, 3), beta=z),
        "addmv in half": lambda z: torch.rand(3).half().addmv_(
            torch.rand(3, 3).half(), torch.rand(3).half(), alpha=z),
        "baddbmm": lambda z: torch.rand(2, 3, 3).baddbmm(torch.rand(2, 3, 3), torch.rand(2, 3, 3), alpha=z),
        "addcmul of no elements": lambda z: torch.addcmul(torch.rand(0), torch.rand(0), torch.rand(0), value=z),
        "lerp": lambda z: torch.lerp(torch.rand(3), torch.rand(3), z),
        "fill_": lambda z: torch.rand(3).fill_(z), "full_like": lambda z: torch.full_like(torch.rand(3), z),
        "scatter": lambda z: torch.rand(3).scatter(0, torch.arange(2), z), "clamp": lambda z: torch.rand(3).clamp(z),
        "leaky_relu": lambda z: F.leaky_relu(torch.rand(3), z), "celu": lambda z: F.celu(torch.rand(3), z),
        "remainder": lambda z: torch.rand(3).remainder(z), "a comparison": lambda z: torch.rand(3) < z,
        "a norm": lambda z: torch.linalg.vector_norm(torch.rand(3), z)}.items()},
    "a broken factor of integers": lambda: torch.add(
        torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.int64), alpha=1.5),
    "a truth value as a factor": lambda: torch.rand(3).sub(torch.rand(3), alpha=True),
    "no bounds": lambda: torch.rand(3).clamp(), "no bounds in place": lambda: torch.rand(0).clip_(),
    "a quotient rounded up": lambda: torch.rand(3).div(2, rounding_mode="up"),
    "a quotient of booleans rounded up": lambda: torch.div(
        torch.ones(3, dtype=torch.bool), torch.ones(3, dtype=torch.bool), rounding_mode="up"),
    "batch norm with a running mean alone": lambda: F.batch_norm(torch.rand(2, 3), torch.rand(3), None, training=True),
    "instance norm with a running variance alone": lambda: F.instance_norm(torch.rand(2, 3, 4), None, torch.rand(3)),
    **{f"a state of {cls.__name__} in {dtype}": (lambda cls=cls, dtype=dtype: _run_with_state(cls, dtype))
       for cls in (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN) for dtype in (torch.float64, torch.float16, torch.int64)},
    "whole numbers to a negative power": lambda: torch.arange(1, 4).pow(-1),
    "a copy of no leaf": lambda: copy.deepcopy(torch.rand(3, requires_grad=True) * 2),
    "softmax of integers": lambda: torch.randint(0, 4, (4,)).softmax(0),
    "svd in half": lambda: torch.linalg.svd(torch.rand(3, 4).half()),
    "bits of floats": lambda: torch.rand(4) & 1,
    "bits of floats in place": lambda: torch.rand(4).bitwise_and_(1),
    "erf of complex numbers": lambda: torch.erf(torch.rand(4, dtype=torch.complex64)),
    "silu of integers": lambda: F.silu(torch.ones(4, dtype=torch.int64)),
    "sum of products of booleans": lambda: torch.ones(2, 2, dtype=torch.bool) @ torch.ones(2, 2, dtype=torch.bool),
    "determinant in half": lambda: torch.linalg.det(torch.rand(2, 2).half()),
    "softmax over a dimension that is not there": lambda: torch.rand(2, 5).softmax(3),
    "rms_norm with a weight of another length": lambda: F.rms_norm(torch.rand(2, 4, 5), (5,), torch.rand(4)),
    "multinomial of more than there are": lambda: torch.multinomial(torch.rand(4, 5), 9),
    "index_put of values that do not broadcast": lambda: torch.rand(3, 4).index_put(
        (torch.randint(0, 3, (2,)),), torch.rand(3, 4)),
    "a result that lies over itself": lambda: torch.index_select(
        torch.rand(3, 6), 1, torch.tensor([0, 1]), out=torch.rand(1, 2).expand(3, 2)),
    "a result that lies over an argument": lambda: torch.cat([(x := torch.rand(2, 3)), torch.rand(2, 3)], out=x),
    "a number among what is concatenated": lambda: torch.cat([torch.rand(())]),
    "a boolean subtracted": lambda: torch.rand(2) - torch.ones(2, dtype=torch.bool),
    "batch norm of another dtype": lambda: torch.nn.BatchNorm1d(4)(torch.rand(2, 4, dtype=torch.float64)),
    "layer norm of another dtype": lambda: torch.nn.LayerNorm(4)(torch.rand(2, 4, dtype=torch.float64)),
    "index_copy of another dtype": lambda: torch.rand(3, 4).index_copy(0, torch.tensor([1]), torch.rand(1, 4).half()),
    "sort along a dimension that is not there": lambda: torch.rand(2, 3).sort(2),
    "index_fill with int32": lambda: torch.rand(3).index_fill(0, torch.tensor([1], dtype=torch.int32), 1.0),
    "numbers of a foreach call of another length": lambda: torch._foreach_addcmul_(
        [torch.rand(3)], [torch.rand(3)], [torch.rand(3)], torch.rand(2, device="cpu")),
    "numbers of a foreach call in rows": lambda: torch._foreach_addcmul_(
        [torch.rand(3)], [torch.rand(3)], [torch.rand(3)], torch.rand(1, 1, device="cpu")),
    "products added to a matrix of another shape": lambda: torch.rand(4).addbmm_(
        torch.rand(2, 3, 4), torch.rand(2, 4, 5)),
    "no whole numbers by uniform_": lambda: torch.zeros(0, dtype=torch.int64).uniform_(),
    "no whole numbers by normal_ of a negative deviation": lambda: torch.zeros(0, dtype=torch.int64).normal_(0, -1),
    "no booleans by random_ beyond them": lambda: torch.zeros(0, dtype=torch.bool).random_(0, 5),
    "int32 by random_ beyond it": lambda: torch.zeros(2, dtype=torch.int32).random_(0, 10**12),
    "complex numbers by random_": lambda: torch.zeros(2, dtype=torch.complex64).random_(),
    "draws by probabilities of another size": lambda: torch.zeros(2).bernoulli_(torch.zeros(0)),
    "poisson of whole numbers": lambda: torch.poisson(torch.zeros(0, dtype=torch.int64)),
    # contents that are known
    "a label beyond the classes": lambda: F.cross_entropy(torch.rand(2, 5), torch.tensor([1, 5])),
    "x[i]": lambda: torch.rand(5, 2)[torch.tensor([1, 5])],
    "x[:, i] from the end": lambda: torch.rand(5, 2)[:, torch.tensor([1, -3])],
    "x[i] = 0": lambda: torch.rand(5, 2).__setitem__(torch.tensor([1, 5]), 0.0),
    "embedding": lambda: F.embedding(torch.tensor([1, 5]), torch.rand(5, 2)),
    "embedding of bounded norm": lambda: F.embedding(torch.tensor([1, 5]), torch.rand(5, 2), max_norm=1.0),
    "gather": lambda: torch.rand(5, 2).gather(0, torch.tensor([[1, 5]])),
    "scatter": lambda: torch.rand(5, 2).scatter(0, torch.tensor([[1, 5]]), 1.0),
    "index_add beyond": lambda: torch.rand(5, 2).index_add(0, torch.tensor([5]), torch.rand(1, 2)),
    "index_fill": lambda: torch.rand(5, 2).index_fill(0, torch.tensor([5]), 1.0),
    "index_copy": lambda: torch.rand(5, 2).index_copy(0, torch.tensor([5]), torch.rand(1, 2)),
    "take": lambda: torch.rand(5, 2).take(torch.tensor([10])),
    "masked_scatter of fewer values": lambda: torch.zeros(3).masked_scatter(torch.tensor([True] * 3), torch.rand(2)),
    "a mask of another length": lambda: torch.rand(3, 4)[torch.rand(4) > 0.5],
    "a mask of another length behind a slice": lambda: torch.rand(3, 4)[:, torch.rand(3) > 0.5],
    "a mask of more dimensions": lambda: torch.rand(3, 4)[torch.rand(3, 4, 2) > 0.5],
    "x[mask of another length] = 0": lambda: torch.rand(3, 4).__setitem__(torch.rand(2, 4) > 0.5, 0.0),
    "a mask beside indices": lambda: torch.rand(3, 4)[torch.tensor([0]), torch.rand(3) > 0.5],
    "masked_select of another length": lambda: torch.rand(3, 4).masked_select(torch.rand(3) > 0.5),
    "masked_select by numbers": lambda: torch.rand(3, 4).masked_select(torch.ones(4)),
    "unique along a dimension that is not there": lambda: torch.unique_consecutive(torch.rand(3, 2), dim=2),
    "values for another number of rows": lambda: torch.rand(3, 4).__setitem__(
        torch.tensor([True, True, False]), torch.rand(3, 4)),
    "a probability of two": lambda: F.binary_cross_entropy(torch.tensor([2.0]), torch.ones(1)),
    # written in place
    "a power of more elements": lambda: torch.rand(()).pow_(torch.rand(3)),
    "a product of more dimensions": lambda: torch.rand(2).atan2_(torch.rand(3, 2)),
    "a comparison with more elements": lambda: torch.rand(()).ge_(torch.rand(3)),
    "sums of booleans in place": lambda: torch.ones(3, dtype=torch.bool).cumsum_(0),
    "floats times integers": lambda: torch.ones(3, dtype=torch.int64).mul_(torch.rand(3)),
    "a number times booleans": lambda: torch.ones(3, dtype=torch.bool).mul_(2),
    "products of floats added to integers": lambda: torch.ones(3, dtype=torch.int64).addcmul_(
        torch.rand(3), torch.rand(3)),
    "logit of integers": lambda: torch.ones(3, dtype=torch.int64).logit_(),
    "addmm of two dtypes": lambda: torch.rand(2, 2).addmm_(torch.ones(2, 2, dtype=torch.int64), torch.rand(2, 2)),
    "addr of another shape": lambda: torch.rand(1).addr_(torch.rand(2), torch.rand(3)),
    "masked_fill by numbers": lambda: torch.rand(3).masked_fill_(torch.ones(3), 0.0),
    "masked_scatter to fewer": lambda: torch.rand(3).masked_scatter_(torch.rand(2, 3) > 0.5, torch.rand(6)),
    "no number between": lambda: torch.rand(3).random_(0),
    "a probability of three": lambda: torch.rand(3).bernoulli_(3.0),
    "heaviside of two dtypes": lambda: torch.rand(3).heaviside_(torch.rand(3).double()),
    "x[floats]": lambda: torch.rand(3, 4)[torch.ones(3)],
    "select_scatter beyond": lambda: torch.rand(3, 4).select_scatter(torch.rand(3), 1, 4),
    "a bag that ends beyond its indices": lambda: F.embedding_bag(
        torch.tensor([1, 2]), torch.rand(3, 2), torch.tensor([0, 3])),
    "max_unpool beyond": lambda: F.max_unpool1d(torch.rand(1, 1, 2), torch.tensor([[[0, 4]]]), 2),
    "a sorter beyond": lambda: torch.searchsorted(
        torch.tensor([1, 2]), torch.tensor([1]), sorter=torch.tensor([0, 2])),
    "segments of other lengths": lambda: torch.segment_reduce(torch.rand(5), "sum", lengths=torch.tensor([2, 2])),
    "multinomial of negative weights": lambda: torch.multinomial(torch.tensor([1.0, -1.0]), 1),
    "running statistics of another dtype": lambda: F.batch_norm(
        torch.rand(2, 3), torch.rand(3).double(), torch.rand(3).double(), training=True),
    "running statistics of two dimensions": lambda: F.batch_norm(
        torch.rand(2, 3), torch.rand(1, 3), torch.rand(1, 3), training=True),
    "a source that is no slice": lambda: torch.rand(3, 4).select_scatter(torch.rand(3), 0, 1),
    "a source that is no diagonal": lambda: torch.rand(3, 4).diagonal_scatter(torch.rand(4)),
    "a view beyond the storage": lambda: torch.rand(4).as_strided((3, 2), (2, 1)),
    "a draw with whole probabilities": lambda: torch.bernoulli(torch.ones(3, dtype=torch.int64)),
    "a draw from nothing": lambda: torch.randint(5, 5, (3,)),
    "a loss of whole numbers": lambda: F.soft_margin_loss(torch.ones(3, dtype=torch.int64), torch.rand(3)),
    "a loss of fewer inputs": lambda: F.soft_margin_loss(torch.rand(()), torch.rand(3)),
    "searchsorted in a number": lambda: torch.searchsorted(torch.rand(()), torch.rand(3)),
    "hardshrink of integers": lambda: F.hardshrink(torch.ones(3, dtype=torch.int64)),
    "kthvalue of complex numbers": lambda: torch.rand(3, dtype=torch.complex64).kthvalue(1),
    "a dilated convolution of integers": lambda: F.conv1d(
        torch.ones(1, 2, 9, dtype=torch.int32), torch.ones(2, 2, 3, dtype=torch.int32), dilation=2),
    "unfolded integers": lambda: F.unfold(torch.ones(1, 2, 4, 4, dtype=torch.int64), 2),
    "an extreme of complex numbers": lambda: torch.zeros(3, dtype=torch.complex64).scatter_reduce(
        0, torch.tensor([0]), torch.ones(1, dtype=torch.complex64), "amax"),
    "a whole quotient of booleans": lambda: torch.div(
        torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=torch.bool), rounding_mode="trunc"),
    "bounds of booleans": lambda: torch.ones(3, dtype=torch.bool).clamp(*[torch.ones(3, dtype=torch.bool)] * 2),
    "a complex number beside floats": lambda: torch.atan2(torch.rand(3), torch.tensor(1j)),
    "steps of complex numbers as floats": lambda: torch.linspace(torch.tensor(1j), 2, 3, dtype=torch.float32),
    "booleans summed as booleans": lambda: torch.rand(3).cumsum(0, dtype=torch.bool),
    "a number's extreme so far along another dimension": lambda: torch.rand(()).cummax(3),
    "the largest of none": lambda: torch.empty(0).max(),
    "the least of none": lambda: torch.empty(2, 0).min(),
    "the largest of no row": lambda: torch.empty(0, 3).max(0),
    "the least of no row": lambda: torch.empty(0, 3).min(dim=-2),
    "the median of no row": lambda: torch.empty(0, 3).median(0),
    "the mode of none": lambda: torch.empty(0).mode(),
    "a copy of a view beyond the storage": lambda: torch.as_strided_copy(torch.rand(4), (2, 2), (3, 2)),
    "negative strides": lambda: torch.empty_strided((2, 2), (-1, 1)),
    "a source for a place that is not there": lambda: torch.rand(5, 5).select_scatter(torch.rand(5), 0, 7),
    "a view whose elements are one": lambda: torch.rand(4).as_strided_scatter(torch.rand(2, 2), (2, 2), (0, 1)),
    "a complex number in floats": lambda: torch.rand(3).index_fill(0, torch.tensor([0]), 1j),
    "a mean of complex numbers at indices": lambda: torch.rand(3, dtype=torch.complex64).index_reduce(
        0, torch.tensor([0]), torch.rand(1, dtype=torch.complex64), "mean"),
    "a mask of other sizes": lambda: torch.rand(5, 5).index_put((torch.ones(4, dtype=torch.bool),), torch.rand(5)),
    "more values than a mask marks": lambda: torch.rand(3, 5).index_put(
        (torch.tensor([True, False, True]),), torch.rand(3, 5)),
    "values of a leading dimension": lambda: torch.rand(5, 5).index_put((torch.tensor([1]),), torch.rand(1, 1, 5)),
    "a group norm's weight of two dimensions": lambda: F.group_norm(torch.rand(2, 4, 3), 2, torch.rand(1, 4)),
    "logits of whole numbers": lambda: F.binary_cross_entropy_with_logits(
        torch.ones(3, dtype=torch.int64), torch.rand(3)),
    "weights wider than the logits": lambda: F.binary_cross_entropy_with_logits(
        torch.rand(5), torch.rand(5), torch.rand(2, 5)),
    "an image of no size": lambda: F.interpolate(torch.rand(1, 1, 4, 4), size=(0, 3), mode="bilinear"),
    "maxima of integers in one dimension": lambda: F.max_pool1d(torch.ones(1, 2, 6, dtype=torch.int64), 2),
    "a distance of booleans": lambda: torch.dist(torch.rand(3), torch.ones(3, dtype=torch.bool)),
    "a draw beyond the dtype": lambda: torch.randint(0, 300, (3,), dtype=torch.uint8),
    "uniform whole numbers": lambda: torch.rand(3, dtype=torch.int64),
    "a complex deviation": lambda: torch.normal(torch.rand(3), torch.rand(3, dtype=torch.complex64)),
    "whole means": lambda: torch.normal(torch.ones(3, dtype=torch.int64), 1.0),
    "complex boundaries": lambda: torch.bucketize(torch.rand(3), torch.rand(2, dtype=torch.complex64)),
    "a bounded norm of whole rows": lambda: F.embedding(
        torch.tensor([1]), torch.ones(3, 2, dtype=torch.int64), max_norm=1.0),
    "weights of samples in another dtype": lambda: F.embedding_bag(
        torch.tensor([[0]]), torch.rand(3, 2), per_sample_weights=torch.rand(1, 1).half(), mode="sum"),
    "lengths that are booleans": lambda: F.ctc_loss(
        torch.rand(5, 1, 3), torch.tensor([[1, 2]]), torch.tensor([5]), torch.tensor([True])),
    "more dimensions than the product": lambda: torch.addmm(torch.rand(1, 2, 3), torch.rand(2, 4), torch.rand(4, 3)),
    "shifts of other dimensions": lambda: torch.rand(0, 3).roll((1, 2), (1,)),
    "states of another dtype": lambda: torch.nn.GRU(4, 4)(torch.rand(2, 1, 4, dtype=torch.float64)),
}
ON_THE_CPU_ALONE: dict[str, Call] = {
    "a division by a known zero": lambda: torch.tensor([4, 6]) // torch.tensor([2, 0]),
    "a remainder by zero": lambda: torch.tensor([4, 6]) % 0,
    "a transform in half": lambda: torch.stft(
        torch.rand(16).half(), 4, window=torch.ones(4).half(), return_complex=True),
}
VALID: dict[str, Call] = {
    "a label that is ignored": lambda: F.cross_entropy(torch.rand(2, 5), torch.tensor([1, -100])),
    "x[i] from the end": lambda: torch.rand(5, 2)[torch.tensor([4, -5])],
    "a mask": lambda: torch.rand(3)[torch.tensor([True, False, True])],
    "masked_scatter": lambda: torch.zeros(3).masked_scatter(torch.tensor([True, False, True]), torch.rand(2)),
    "no index": lambda: torch.rand(5, 2)[torch.zeros(0, dtype=torch.int64)],
    "softmax of no integers": lambda: torch.zeros(0, dtype=torch.int64).softmax(0),
    "scatter_reduce by max": lambda: torch.zeros(3, 4).scatter_reduce(
        1, torch.tensor([[1, 2]]), torch.rand(1, 2), "max"),
    "scatter_reduce_ by min": lambda: torch.zeros(3, 4).scatter_reduce_(
        1, torch.tensor([[1, 2]]), torch.rand(1, 2), "min"),
    "a pointwise result in its place": lambda: torch.add((x := torch.rand(2, 3)), 1, out=x),
    "normalization of a low dtype by float32": lambda: F.group_norm(
        torch.rand(2, 4).bfloat16(), 2, torch.rand(4), torch.rand(4)),
    "a view of the whole storage": lambda: torch.rand(6).as_strided((3, 2), (2, 1)),
    "running statistics of float32 in a low dtype": lambda: F.batch_norm(
        torch.rand(2, 3).bfloat16(), torch.rand(3), torch.rand(3), training=True),
    "kthvalue of a complex number": lambda: torch.rand((), dtype=torch.complex64).kthvalue(1),
    "a number lifts integers": lambda: torch.ones(3, dtype=torch.int64).pow(0.5),
    "a mask of two dimensions": lambda: torch.rand(3, 4, 5)[torch.rand(3, 4) > 0.5],
    "a mask behind a slice": lambda: torch.rand(3, 4, 5)[:, torch.rand(4) > 0.5],
    "a mask beside indices": lambda: torch.rand(3, 4)[torch.tensor([0]), torch.tensor([True, False, True, False])],
    "values for a mask": lambda: torch.rand(3, 4).__setitem__(torch.tensor([True, True, False]), torch.rand(2, 4)),
    "a comparison with a number of another kind": lambda: torch.ones(3, dtype=torch.int64).eq_(1.5),
    "integers times a flag": lambda: torch.ones(3, dtype=torch.int64).mul_(True),
    "random numbers of a range": lambda: torch.rand(3).random_(1, 5).random_(7).random_(),
    "addcmul of a float value": lambda: torch.ones(3).addcmul_(torch.ones(3), torch.ones(3), value=0.5),
    "drawn by a tensor": lambda: torch.rand(3).bernoulli_(torch.rand(3)),
    "a mask of a number": lambda: torch.rand(3)[torch.tensor(True)],
    "bags": lambda: F.embedding_bag(torch.tensor([1, 2]), torch.rand(3, 2), torch.tensor([0, 2])),
    "places of numbers": lambda: torch.unravel_index(torch.tensor([11]), (3, 4)),
    "segments": lambda: torch.segment_reduce(torch.rand(5), "sum", lengths=torch.tensor([2, 3])),
    "complex convolution": lambda: F.conv1d(
        torch.rand(2, 9, dtype=torch.complex64), torch.rand(3, 2, 3, dtype=torch.complex64)),
    "complex means": lambda: torch.normal(torch.rand(2, dtype=torch.complex64), 1.1),
    "a label in a vector of one": lambda: F.nll_loss(torch.rand(3), torch.tensor([1])),
    "a loss of images whose weight is a row": lambda: F.nll_loss(
        torch.rand(2, 3, 2, 2), torch.zeros(2, 2, 2, dtype=torch.int64), torch.rand(1, 3)),
    "no elements repeated": lambda: torch.rand(0).repeat(2, -6),
    "no elements rolled": lambda: torch.rand(0, 0).roll(1, 4),
    "no booleans in a softmax": lambda: torch.zeros(0, 3, dtype=torch.bool).log_softmax(1),
    "no whole numbers drawn": lambda: torch.randn_like(torch.zeros(0, dtype=torch.int64)),
    "no elements in a bag of booleans": lambda: F.embedding_bag(
        torch.zeros(4, dtype=torch.int64), torch.rand(4, 3), torch.tensor([False, True])),
    "values with a leading dimension": lambda: torch.rand(5, 2).__setitem__(torch.tensor([1, 3]), torch.rand(1, 2, 2)),
    "values with a leading dimension in a slice": lambda: torch.rand(5, 2).__setitem__(
        slice(0, 2), torch.rand(1, 2, 2)),
    "as many values as a mask marks": lambda: torch.rand(3, 5).index_put(
        (torch.tensor([True, False, True]),), torch.rand(2, 5)),
    "a value for all that a mask marks": lambda: torch.rand(3, 5).index_put(
        (torch.tensor([True, False, True]),), torch.rand(5)),
    "a complex factor without an imaginary part": lambda: torch.addmm(
        torch.rand(3, 3), torch.rand(3, 3), torch.rand(3, 3), alpha=2 + 0j),
    "a complex factor of complex numbers": lambda: torch.rand(3, dtype=torch.complex64).add(torch.rand(3), alpha=1j),
    "a truth value as a factor of booleans": lambda: torch.ones(3, dtype=torch.bool).add(
        torch.ones(3, dtype=torch.bool), alpha=True),
    "a broken factor of a float": lambda: torch.add(torch.ones(3, dtype=torch.int64), 1.5, alpha=1.5),
    "a comparison with a complex number": lambda: torch.rand(3) == 1j,
    "a complex product of no elements": lambda: torch.addmm(
        torch.rand(3, 3), torch.rand(3, 0), torch.rand(0, 3), alpha=1j),
    "batch norm of no elements with a running mean alone": lambda: F.batch_norm(
        torch.rand(0, 3, 4), torch.rand(3), None, training=True),
    "a quotient by a zero": lambda: torch.tensor([4, 6]) / torch.tensor([2, 0]),
    "a float's remainder by zero": lambda: torch.tensor([4.0]) % 0,
    "booleans summed": lambda: torch.ones(3, dtype=torch.bool).cumsum(0),
    "a draw of all of a dtype": lambda: torch.randint(0, 256, (3,), dtype=torch.uint8),
    "a boolean limited by one tensor": lambda: torch.ones(3, dtype=torch.bool).clamp(
        min=torch.ones(3, dtype=torch.bool)),
    "a product of complex numbers at indices": lambda: torch.rand(3, 2, dtype=torch.complex64).index_reduce(
        0, torch.tensor([0]), torch.rand(1, 2, dtype=torch.complex64), "prod"),
    "a reduction of a number": lambda: torch.rand(()).amax(0),
    "the larger of none and none": lambda: torch.empty(0).max(torch.empty(0)),
    "the largest of each of no rows": lambda: torch.empty(0, 3).max(1),
    "the median of none": lambda: torch.empty(0).median(),
    "products added to a number that grows": lambda: torch.rand(1).addbmm_(torch.rand(2, 3, 4), torch.rand(2, 4, 5)),
    "products added to a row that grows": lambda: torch.rand(5).addbmm_(torch.rand(2, 3, 4), torch.rand(2, 4, 5)),
    "quotients by a tensor of numbers": lambda: torch._foreach_addcdiv_(
        [torch.rand(3), torch.rand(2)], [torch.rand(3), torch.rand(2)], [torch.rand(3), torch.rand(2)],
        torch.rand(2, device="cpu")),
    "products by a tensor of numbers": lambda: torch._foreach_addcmul(
        [torch.rand(3), torch.rand(2)], [torch.rand(3), torch.rand(2)], [torch.rand(3), torch.rand(2)],
        torch.tensor([1, 2], device="cpu")),
    "no whole numbers by normal_": lambda: torch.zeros(0, dtype=torch.int64).normal_(),
    "no booleans by exponential_": lambda: torch.zeros(0, 3, dtype=torch.bool).exponential_(),
    "no whole numbers by log_normal_": lambda: torch.zeros(0, dtype=torch.int32).log_normal_(),
    "no booleans by geometric_": lambda: torch.zeros(0, dtype=torch.bool).geometric_(0.5),
    "no whole numbers by random_": lambda: torch.zeros(0, dtype=torch.int64).random_(),
    "no complex numbers by random_": lambda: torch.zeros(0, dtype=torch.complex64).random_(),
    "no complex numbers by uniform_": lambda: torch.zeros(0, dtype=torch.complex64).uniform_(3, 1),
    "no means that are whole numbers": lambda: torch.normal(torch.zeros(0, dtype=torch.int64), 1.0),
    "no elements by probabilities of another size": lambda: torch.zeros(0, 3).bernoulli_(torch.zeros(5)),
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", VALID)
def test_what_the_cpu_runs_is_not_refused(name: str, device: str) -> None:
    VALID[name]()
    with MetaTensorMode(), torch.device(device):
        VALID[name]()


@pytest.mark.parametrize("name", ON_THE_CPU_ALONE)
def test_what_only_the_cpu_refuses_is_refused_there(name: str) -> None:
    call = ON_THE_CPU_ALONE[name]
    with pytest.raises(RuntimeError) as right:
        call()
    with MetaTensorMode():
        with pytest.raises(RuntimeError, match=str(right.value)):
            call()
        with torch.device("cuda"):
            call()


def test_what_lies_over_the_written_tensor_is_looked_for_after_a_call_that_was_fine() -> None:
    with MetaTensorMode():
        x, y = torch.ones(5, dtype=torch.int64), torch.ones(5, dtype=torch.int64)
        torch.zeros(5, dtype=torch.int64).put_(x, y)
        with pytest.raises(RuntimeError, match="single memory location"):
            x.put_(x, y)


def test_functions_that_compare_devices_take_tensors_with_data() -> None:
    x, q = torch.rand(4, 4), torch.tensor([0.1, 0.9])
    with MetaTensorMode():
        assert torch.quantile(torch.rand(4, 4), q, dim=1).shape == torch.quantile(x, q, dim=1).shape == (2, 4)
        assert torch.linalg.matrix_rank(x).shape == ()
        assert torch.linalg.multi_dot([torch.rand(2, 4), x, x]).shape == (2, 4)


def test_arrays_of_tensors_with_a_gradient_or_on_a_gpu_are_refused_as_by_pytorch() -> None:
    with MetaTensorMode():
        known = torch.zeros(4, requires_grad=True)
        with pytest.raises(RuntimeError, match="requires grad. Use tensor.detach"):
            known.numpy()
        with pytest.raises(TypeError, match="cuda:0 device type tensor to numpy. Use Tensor.cpu"):
            torch.zeros(4, device="cuda").numpy()
        assert known.detach().numpy().tolist() == known.numpy(force=True).tolist() == [0.0] * 4
        with torch.no_grad():
            assert known.numpy().shape == (4,)


def test_a_check_of_known_contents_does_not_count_as_reading_them() -> None:
    with MetaTensorMode():
        labels = torch.tensor([1, 3])
        storage: Any = labels.untyped_storage()
        storage.known = watched = Watched(storage.known)
        before = reads.count
        F.cross_entropy(torch.rand(2, 5), labels)
        torch.rand(5, 2)[labels + 1]
        assert not watched.was_read and reads.count == before
        assert (labels + 1).tolist() == [2, 4] and watched.was_read


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", CALLS)
def test_what_the_cpu_refuses_is_refused(name: str, device: str) -> None:
    call = CALLS[name]
    with pytest.raises(Exception) as right:
        call()
    with MetaTensorMode(), torch.device(device), pytest.raises(type(right.value)):
        call()


@pytest.mark.parametrize("name", [
    "a complex factor of add", "a complex factor of addmm", "a complex factor of a norm", "a broken factor of integers",
    "a truth value as a factor", "no bounds", "a quotient rounded up", "batch norm with a running mean alone",
    "a state of LSTM in torch.float64"])
def test_what_is_refused_by_a_number_or_for_want_of_one_is_refused_in_pytorchs_words(name: str) -> None:
    with pytest.raises(Exception) as right:
        CALLS[name]()
    with MetaTensorMode(), pytest.raises(type(right.value)) as found:
        CALLS[name]()
    assert str(found.value) == str(right.value)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("given", "message"), [
    ((None, None, None, None, False), "running_mean must be defined in evaluation mode"),
    ((None, None, 1, 3, True), "running_mean should contain 3 elements not 1"),
    ((None, None, 3, 2, False), "running_var should contain 3 elements not 2"),
    ((1, 3, None, None, True), "weight should contain 3 elements not 1")])
def test_calls_of_batch_norm_that_end_the_process_are_refused(
        given: tuple[int | None, int | None, int | None, int | None, bool], message: str, device: str) -> None:
    *sizes, training = given
    with MetaTensorMode(), torch.device(device):
        tensors = [None if n is None else torch.rand(n) for n in sizes]
        with pytest.raises(RuntimeError, match=message):
            torch.native_batch_norm(torch.rand(2, 3, 4), *tensors, training, 0.1, 1e-5)


def test_a_state_of_another_dtype_is_refused_on_a_gpu_in_the_words_of_cudnns_check() -> None:
    words = "Input and hidden tensors are not the same dtype, found input tensor with Float and hidden tensor with Long"
    with MetaTensorMode(), torch.device("cuda"), pytest.raises(RuntimeError, match=words):
        _run_with_state(torch.nn.GRU, torch.int64)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("numel", "settings"), [(n, {"training": t, "inplace": i}) for n in (0, 3) for t in (
    False, True) for i in (False, True)])
def test_a_randomized_relu_is_refused_by_dtype_with_and_without_elements(dtype: torch.dtype, numel: int,
                                                                        settings: dict[str, bool]) -> None:
    def call() -> torch.Tensor:
        return F.rrelu(torch.zeros(numel, dtype=dtype), **settings)

    try:
        call()
    except NotImplementedError:
        with MetaTensorMode(), pytest.raises(NotImplementedError, match=r'^"rrelu_with_noise_?" not implemented for'):
            call()
    else:
        with MetaTensorMode():
            assert call().shape == (numel,)
    with MetaTensorMode(), torch.device("cuda"):  # RreluWithNoise.cu: nothing is done where there are no elements
        assert numel or call().shape == (0,)


# Operators of torch's database whose error inputs reach most of the rules.
SAMPLED = ("cat", "take", "kthvalue", "multinomial", "scatter_add", "gather", "nn.GRU",
           "nn_functional_conv2d", "index_add", "masked_scatter", "roll", "complex",
           "nn_functional_embedding", "aminmax", "amax", "slice_scatter", "nn.NLLLoss", "nn_functional_rms_norm",
           "nn_functional_multi_margin_loss", "bucketize")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_error_inputs_of_pytorch_raise_the_same_kind_of_error(device: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = list(try_refused_calls(SAMPLED, None, [device]))
    assert len(found) > 40
    assert [one for one in found if one.verdict != SAME_KIND and (device, one.name) not in KNOWN] == []


# Operators of torch's database that run an operator with a rule, or are composed of it.
WITH_RULES = ("nn.functional.conv1d", "nn.functional.conv2d", "nn.functional.conv_transpose2d", "softmax",
              "log_softmax", "nn.functional.nll_loss", "nn.functional.cross_entropy", "nn.functional.rms_norm",
              "nn.functional.embedding", "nn.functional.multi_margin_loss", "nn.functional.multilabel_margin_loss",
              "multinomial", "bucketize", "uniform", "complex", "polar", "amax", "amin", "aminmax", "roll",
              "linalg.svd", "index_add", "index_reduce", "index_select", "index_put", "masked_scatter",
              "as_strided_scatter", "slice_scatter", "put", "repeat", "rand_like", "bitwise_and", "clamp", "maximum",
              "lerp", "nn.functional.relu", "nn.functional.silu", "nn.functional.interpolate", "bernoulli", "normal",
              "std", "histc", "nn.functional.avg_pool2d", "nn.functional.batch_norm", "linalg.eigh", "addmm")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_samples_of_operators_with_rules_are_not_refused(device: str) -> None:
    chosen = [op for op in load_operators() if op.name in WITH_RULES]
    assert {op.name for op in chosen} == set(WITH_RULES)
    samples, wrong = [], []
    for op in chosen:
        for dtype in op.supported_dtypes(device):
            torch.manual_seed(0)
            samples += [(op, dtype, sample) for _, sample in zip(range(4), op.sample_inputs("cpu", dtype))]
    with MetaTensorMode():  # once: what is replaced for it takes longer than a call
        for op, dtype, sample in samples:
            given = sample.input, sample.args, sample.kwargs
            x, args, kwargs = tree_map_only(torch.Tensor, lambda t: t.to(device), given)
            try:
                op(x, *args, **kwargs)
            except (DataDependentError, UnsupportedOperatorError):
                continue
            except Exception as error:
                wrong.append((op.formatted_name, dtype, str(error)))
    assert wrong == []


def in_place_operators() -> list[torch._ops.OpOverload]:
    """Those of tensors and numbers that write to their first argument and read another tensor."""
    packets = [getattr(torch.ops.aten, name) for name in sorted(dir(torch.ops.aten)) if name.endswith("_")
               and not name.startswith("_")]
    found = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    return [op for op in found if len([a for a in op._schema.arguments if str(a.type) == "Tensor"]) > 1
            and (first := op._schema.arguments[0]).alias_info is not None and first.alias_info.is_write]


def overlaps(op: torch._ops.OpOverload, written: torch.Tensor, read: torch.Tensor) -> bool | None:
    """Whether an operator refuses these for what they share; None where it cannot be called so."""
    usual = {"number": 1, "float": 1.0, "int": 0}
    args: list[Any] = [written]
    for argument in op._schema.arguments[1:]:
        if argument.kwarg_only or argument.has_default_value():
            break
        args.append(read if str(argument.type) == "Tensor" else usual.get(str(argument.type)))
    try:
        op(*args)
    except Exception as error:  # whatever else it refuses
        return True if "single memory location" in str(error) else None
    return False


def all_overlaps(device: str) -> dict[Any, bool | None]:
    found = {}
    for op in in_place_operators():
        for dtype in (torch.float32, torch.bool, torch.int64):
            x, y = torch.ones(6, device=device).to(dtype), torch.ones(4, 4, device=device).to(dtype)
            pairs = {"beside": (x[1:], x[:-1]), "itself": (x, x), "all of it": (x, x[:]), "apart": (x[:3], x[3:]),
                     "turned": (y, y.t()), "columns": (y[:, 1:], y[:, :-1])}
            for name, pair in pairs.items():
                found[str(op), dtype, name] = overlaps(op, *pair)
    return found


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_an_operator_reads_may_lie_over_what_it_writes_to_where_pytorch_lets_it(device: str) -> None:
    real = {call: refused for call, refused in all_overlaps("cpu").items() if refused is not None}
    with MetaTensorMode():
        found = all_overlaps(device)
    assert {call: refused for call, refused in real.items() if bool(found[call]) != refused} == {}
    assert sum(real.values()) > 100 and real["aten.add_.Tensor", torch.float32, "beside"]
