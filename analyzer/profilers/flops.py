"""FLOPs of the calls of a log, and what other tools count of them."""
from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from analyzer.cuda.workspaces.recurrent import GATES
from analyzer.errors import InputError
from analyzer.meta.fused_kernel import FusedKernel
from analyzer.meta.spec import Signature
from analyzer.meta.spec import TensorSpec as Spec
from analyzer.record.call_table import OpCall
from analyzer.record.log import Log, Tally

from .annotation import WAYS, Annotation, operator_key
from .flop_registry import NO_FLOPS, apply_formula, count_call
from .operator.fused import count_parts, list_uncounted
from .operator.registration import (
    TF32_KINDS,
    FlopCount,
    Formula,
    family,
    is_inexact,
    kept_with_signature,
    per_input,
    uses_tf32,
)
from .traffic import traffic_bytes

# Ways of counting FLOPs: the project's own, and DeepSpeed's, whose figures are often quoted.
#
# ``own`` is the convention that stands at the head of each file of `operator`: every operator, forward, backward and
# optimizer. ``deepspeed`` is what DeepSpeed's FLOPs profiler (and its copy, flops-profiler) prints: it counts the
# forward pass alone, so under it all else is unknown (None), and knows few operators: those with arithmetic that it
# does not see are listed in `Profile.uncounted`, and count nothing in the totals.
#
# It looks at Python functions where the log holds ATen operators, so where two functions run one operator the common
# reading is taken: sums and products are written ``a + b`` and ``a * b`` (which it does not see, unlike ``torch.add``),
# softmax comes from ``torch.nn.functional`` (but ``_safe_softmax`` from inside attention, where it is not seen), ReLU6
# from its module (which runs hardtanh, unseen), ``addmm`` from a linear layer, and ``baddbmm`` from ``torch.baddbmm``
# rather than the method.

Rule = Callable[[Signature], FlopCount | None]


@dataclass(frozen=True)
class Convention:
    """One way of counting: ``rule`` gives the FLOPs and MACs of a call, None where it has none for arithmetic that is
    done; ``hidden`` names, by class of the module that calls them, operators that it does not see there.
    """

    name: str
    rule: Rule
    forward_only: bool = False
    hidden: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def count(self, call: OpCall, log: Log) -> FlopCount | None:
        """FLOPs and MACs of one call of a log; None where they are unknown or not seen."""
        if self.hidden and str(family(call.signature.op)[-1]) in self.hidden.get(log.modules[call.module].type, ()):
            return None
        return self.rule(call.signature)


def find_convention(name: str) -> Convention:
    if name not in CONVENTIONS:
        raise InputError(f"convention={name!r}: must be one of {', '.join(map(repr, CONVENTIONS))}")
    return CONVENTIONS[name]


def aten(names: str, formula: Formula) -> dict[str, Formula]:
    return {f"aten::{name}": formula for name in names.split()}


# DeepSpeed's formulas: deepspeed/profiling/flops_profiler/profiler.py, version 0.19.8.

def biased_convolution_flops(x: Spec, weight: Spec, bias: Any, stride: Any, padding: Any, dilation: Any,
                             transposed: bool = False, output_padding: Any = None, groups: int = 1, *_: Any, out: Spec,
                             **__: Any) -> FlopCount:
    """2 a multiply-add and 1 an output element for the bias. A transposed one is divided by its groups once more than
    is right, and its bias counts the outputs that the same convolution would have were it not transposed.
    """
    if not transposed:
        macs = out.numel * prod(weight[1:])
        return FlopCount(2 * macs + (out.numel if bias is not None else 0), macs)
    macs = prod(weight[2:]) * x[1] * (weight[1] // groups) * x[0] * prod(x[2:])
    outputs = prod((size + 2 * p - (d * (k - 1) + 1)) // s + 1
                   for size, p, d, k, s in zip(x[2:], padding, dilation, weight[2:], stride))
    return FlopCount(2 * macs + (weight[1] * x[0] * outputs if bias is not None else 0), macs)


def recurrent_flops(x: Spec, weight: list[Spec], weight_stride0: int, weight_buf: Any, hx: Spec, cx: Any, mode: int,
                    hidden_size: int, proj_size: int, num_layers: int, batch_first: bool, dropout: float, train: bool,
                    bidirectional: bool, *_: Any, out: Any = None, **__: Any) -> FlopCount:
    """Each row and layer: 2 a weight less gates, biases, and a few sums and products a hidden element. No MACs."""
    if proj_size:
        return NO_FLOPS
    per_layer = weight_stride0 * (2 if bidirectional else 1)
    # of the forward direction, doubled below
    flops = sum(one_layer_flops(weight[layer * per_layer:layer * per_layer + weight_stride0], mode, hidden_size)
                for layer in range(num_layers))
    return FlopCount(flops * prod(x[:-1]) * (2 if bidirectional else 1))


def one_layer_flops(weight: list[Spec], mode: int, hidden_size: int) -> int:
    """Of one row of the sequence, in one direction."""
    elementwise = {0: 1, 1: 1, 2: 10, 3: 7}[mode]  # RNN: one sum; LSTM: 4 + 3 + 3; GRU: 1 + 3 + 3
    products = sum(2 * w.numel - GATES[mode] * hidden_size for w in weight if len(w) == 2)
    return products + sum(w.numel for w in weight if len(w) == 1) + elementwise * hidden_size


DEEPSPEED: dict[str, Formula] = {
    # norms: 5 an element in training, 2 in evaluation, 1 less without a weight; of `no_stats`, as with statistics given
    **aten("native_batch_norm cudnn_batch_norm miopen_batch_norm _native_batch_norm_legit",
           lambda x, weight, bias, mean, var, training, *_, **__: x.numel * (2 + 3 * training - (weight is None))),
    **aten("_native_batch_norm_legit.no_stats",
           lambda x, weight, bias, training, *_, **__: x.numel * (2 + 3 * training - (weight is None))),
    **aten("_native_batch_norm_legit_no_training _batch_norm_no_update",
           lambda x, weight=None, *_, **__: x.numel * (2 - (weight is None))),
    **aten("_batch_norm_with_update native_group_norm",
           lambda x, weight=None, *_, **__: x.numel * (5 - (weight is None))),
    **aten("native_layer_norm", lambda x, _shape, weight=None, *_, **__: x.numel * (5 - (weight is None))),
    # 1 an element of a global average pooling, whose dimensions ATen's AdaptiveAveragePooling.cpp and
    # AdaptiveAveragePooling3d.cpp write so, and user code does not; any other mean is not seen
    **aten("mean.dim", lambda x, dim=None, keepdim=False, *_, **__: (
        x.numel if keepdim and dim is not None and list(dim) in ([-1, -2], [-1, -2, -3]) else None)),
    **aten("convolution _convolution cudnn_convolution convolution_overrideable", biased_convolution_flops),
    **aten("baddbmm", lambda x, a, b, *_, **__: FlopCount(2 * a.numel * b[-1] + x.numel, a.numel * b[-1])),
    **aten(
        "relu _prelu_kernel elu leaky_relu silu gelu _softmax avg_pool1d avg_pool2d avg_pool3d max_pool1d_with_indices "
        "max_pool2d_with_indices max_pool3d_with_indices mkldnn_max_pool2d mkldnn_max_pool3d adaptive_avg_pool1d "
        "_adaptive_avg_pool2d mkldnn_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d",
        per_input(1)),
    # 1 an output element given a scale; given a size, its product alone, whatever the batch and the channels
    **aten(
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d "
        "upsample_trilinear3d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa "
        "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d",
        lambda x, size, *rest, out, **_: out.numel if any(isinstance(r, float) for r in rest) else prod(size)),
    **aten("_cudnn_rnn", recurrent_flops),
    # which an LSTM runs on a CPU for each layer and direction
    **aten("mkldnn_rnn_layer",
           lambda x, w_ih, w_hh, b_ih, b_hh, hx, cx, reverse, lengths, mode, size, layers, has_biases, *_, **__: (
               prod(x[:-1]) * one_layer_flops([w_ih, w_hh, *((b_ih, b_hh) if has_biases else ())], mode, size)))}


# fast paths: no function of theirs is replaced
DEEPSPEED_UNSEEN = {"aten::_native_multi_head_attention", "aten::_transformer_encoder_layer_fwd"}
# Took torch.nn.functional.gelu when they were built, before the profiler replaced it (transformers/activations.py).
DEEPSPEED_HIDDEN = {"GELUActivation": frozenset({"aten::gelu"}), "GELUTanh": frozenset({"aten::gelu"})}


@kept_with_signature
def count_as_deepspeed(signature: Signature) -> FlopCount | None:
    """By the table's formula, else products of any operator; what else it does, and layers in one call, is not seen."""
    op: Any = signature.op
    if isinstance(op, FusedKernel):
        return count_parts(op, count_as_deepspeed)
    own, names = count_call(signature), list(map(str, family(signature.op)))
    formula = next((DEEPSPEED[key] for key in names if key in DEEPSPEED), None)
    result = None if formula is None else apply_formula(formula, signature)
    if result is not None or own is None:
        return result
    if own.macs:
        return FlopCount(2 * own.macs, own.macs) if DEEPSPEED_UNSEEN.isdisjoint(names) else None
    return None if own.flops else NO_FLOPS


CONVENTIONS = {"own": Convention("own", count_call), "deepspeed": Convention(
    "deepspeed", count_as_deepspeed, forward_only=True, hidden=DEEPSPEED_HIDDEN)}


_COLUMNS = ("fwd_flops", "bwd_flops", "fwd_macs", "bwd_macs")


@functools.cache
def make_flops_profiler(convention: str = "own") -> Callable[[Log], Annotation]:
    """A profiler that counts every call of the last step where it happened as ``convention`` says: ``own``, or
    ``deepspeed``, under which all but the forward pass is None. Raises InputError for another name. What autograd runs
    for a forward node counts as that node's backward; operators run again under activation checkpointing count in
    ``recompute_flops`` and in the backward phase, not in ``bwd_flops``. Operators without a formula are in
    ``uncounted`` (operator, calls, bytes), never taken as zero.
    """
    chosen = find_convention(convention)
    return lambda log: _Count(log, chosen).run()


class _Count:
    """What the calls of a log count, by the formulas that are registered now."""

    def __init__(self, log: Log, convention: Convention) -> None:
        self.log, self.convention, self.last = log, convention, log.steps - 1
        self.counts: dict[Any, FlopCount | None] = {}

    def run(self) -> Annotation:
        log, out, last = self.log, Annotation(self._fill), self.last
        totals: dict[str, Any] = dict.fromkeys(
            (*_COLUMNS, "recompute_flops", "recompute_macs", "executed_flops", "optimizer_flops"), 0)
        uncounted: dict[str, list[int]] = {}
        products: Counter[str | None] = Counter()  # multiply-adds, by what they are computed in
        for record in log.phases:
            out.phases[record.step, record.phase].update(flops=0, macs=0)
        # Where the module decides what is seen, calls are alike only in modules of one class.
        tallies = log.tallies() if not self.convention.hidden else (Tally(call.step, call, log.storages, 1)
                                                                    for call in log.calls)
        for step, call, storages, number in tallies:
            phase = call.phase
            if self.convention.forward_only and phase != "forward":
                continue
            count = self._count(call)
            if count is None:
                if step == last:
                    for name in list_uncounted(call.signature, self.convention.rule):
                        row = uncounted.setdefault(name, [0, 0])
                        row[0] += number
                        row[1] += number * traffic_bytes(call, storages)
                continue
            if not count.flops:
                continue
            flops, macs = number * count.flops, number * count.macs
            row_of_phase = out.phases[step, phase]
            row_of_phase["flops"] += flops
            row_of_phase["macs"] += macs
            if step != last:
                continue
            if phase not in WAYS:
                totals["optimizer_flops"] += flops
                continue
            totals["executed_flops"] += number * count.executed
            way = "recompute" if call.recomputed else WAYS[phase]
            totals[f"{way}_flops"] += flops
            totals[f"{way}_macs"] += macs
            floating = max(filter(is_inexact, call.signature.inputs), key=lambda spec: spec.numel, default=None)
            products[None if floating is None else str(floating.dtype).removeprefix("torch.")] += macs
        if self.convention.forward_only:
            for (_, phase), row_of_phase in out.phases.items():
                if phase != "forward":
                    row_of_phase.update(flops=None, macs=None)
            totals.update(dict.fromkeys(
                ("bwd_flops", "bwd_macs", "recompute_flops", "recompute_macs", "executed_flops", "optimizer_flops")))
        listed = [(op, n, nbytes) for op, (n, nbytes) in sorted(uncounted.items())]
        out.totals = {**totals, "uncounted": listed, "flop_convention": self.convention.name,
                      "product_dtype": products.most_common(1)[0][0] if products.total() else None,
                      "tf32": tuple([kind for kind in TF32_KINDS if uses_tf32(kind)])}
        return out

    def _count(self, call: OpCall) -> FlopCount | None:
        key = (call.signature, self.log.modules[call.module].type) if self.convention.hidden else call.signature
        if key not in self.counts:
            self.counts[key] = self.convention.count(call, self.log)
        return self.counts[key]

    def _fill(self, out: Annotation) -> None:
        forward_only = self.convention.forward_only
        out.start_rows(self.log, dict.fromkeys((*_COLUMNS, "recompute_flops"), 0))
        for call in self.log.calls:
            if call.step != self.last or forward_only and call.phase != "forward":
                continue
            count = self._count(call)
            row = out.operators[operator_key(call)]
            if count is None:
                row.update(flops=None, macs=None)
                continue
            if row.get("flops", 0) is not None:
                row["flops"], row["macs"] = row.get("flops", 0) + count.flops, row.get("macs", 0) + count.macs
            if not count.flops or call.phase not in WAYS:
                continue
            if call.recomputed:
                out.add_where(call, "recompute_flops", count.flops)
                continue
            out.add_where(call, f"{WAYS[call.phase]}_flops", count.flops)
            out.add_where(call, f"{WAYS[call.phase]}_macs", count.macs)
        if forward_only:  # what the convention says nothing of is unknown, not zero
            for rows in (out.nodes, out.modules):
                for row in rows.values():
                    row.update(dict.fromkeys(("bwd_flops", "bwd_macs", "recompute_flops")))
