"""What TorchInductor makes of one operator: part of a kernel over elements, a reduction, or a kernel of its own.

After ``torch/_inductor/lowering.py`` and ``decomposition.py``: what PyTorch tags as pointwise or as a reduction is
lowered as one; those below are lowered or decomposed into such without the tag. Everything else (products,
convolutions, attention, sorting, what scatters with atomic additions) keeps its own kernel: it is extern.
"""
from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from analyzer.meta.spec import Signature, TensorSpec

from .operator.registration import bind

#: Lowered as functions of single elements of their inputs, without `torch.Tag.pointwise`.
POINTWISE = frozenset((
    "_to_copy copy fill zero native_dropout_backward hardtanh_backward elu_backward leaky_relu_backward "
    "softplus_backward hardswish_backward mse_loss_backward nll_loss_backward nll_loss2d_backward glu_backward glu "
    "embedding gather index _unsafe_index index_select cat stack constant_pad_nd flip roll repeat triu tril "
    "slice_backward select_backward diagonal_backward slice_scatter select_scatter masked_fill lift_fresh_copy "
    "zeros zeros_like new_zeros ones ones_like new_ones full full_like new_full arange linspace scalar_tensor eye "
    "one_hot max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward "
    "_native_batch_norm_legit_no_training upsample_nearest2d upsample_nearest2d_backward upsample_bilinear2d "
    "upsample_nearest1d pixel_shuffle pixel_unshuffle reflection_pad2d replication_pad2d im2col"
).split())
#: The same with numbers drawn in the kernel: their results are saved for backward, never drawn again.
RANDOM = frozenset("native_dropout rand randn rand_like randn_like bernoulli uniform normal".split())
#: What is tagged `torch.Tag.reduction`, which torch 2.9 does not have, and reductions that no version tags; most of
#: these give results of the input's size too, from it and what was reduced.
REDUCTIONS = frozenset((
    "all amax amin aminmax any argmax argmin count_nonzero linalg__powsum max mean min nansum norm prod std std_mean "
    "sum var var_mean "
    "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data native_layer_norm "
    "native_layer_norm_backward native_group_norm native_group_norm_backward native_batch_norm cudnn_batch_norm "
    "_native_batch_norm_legit _native_batch_norm_legit_functional _batch_norm_with_update batch_norm_backward "
    "native_batch_norm_backward cudnn_batch_norm_backward _fused_rms_norm _fused_rms_norm_backward mse_loss "
    "nll_loss_forward nll_loss2d_forward linalg_vector_norm logsumexp cumsum cumprod _adaptive_avg_pool2d"
).split())
_BATCH_NORMS = frozenset(name for name in REDUCTIONS if "batch_norm" in name)


class Reduction(NamedTuple):
    """``outputs`` results of ``reduced`` elements each; ``is_inner``: those are the last dimensions."""

    outputs: int
    reduced: int
    is_inner: bool


class Lowering(NamedTuple):
    """How an operator is lowered: ``"pointwise"``, ``"random"``, ``"reduction"`` or ``"extern"``."""

    kind: str
    reduction: Reduction | None = None


MEMO_KEY = "lowering"
EXTERN, ELEMENTS, DRAWN = Lowering("extern"), Lowering("pointwise"), Lowering("random")


def operator_name(signature: Signature) -> str:
    """The name without namespace and without the ``_`` of operators that write into their first argument.

    >>> x = TensorSpec.of((2,), (1,), torch.float32, "cuda:0")
    >>> operator_name(Signature(torch.ops.aten.relu_.default, (x,), {}, (x,), (x,)))
    'relu'
    """
    schema = getattr(signature.op, "_schema", None)
    name = "" if schema is None else str(schema.name).partition("::")[2]
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def lower(signature: Signature) -> Lowering:
    """The lowering of any call of a signature that is no view, made once.

    >>> x, row = (TensorSpec.of(s, (64, 1), torch.float32, "cuda:0") for s in ((8, 64), (8, 1)))
    >>> lower(Signature(torch.ops.aten.relu.default, (x,), {}, (x,), (x,))).kind
    'pointwise'
    >>> lower(Signature(torch.ops.aten._softmax.default, (x, -1, False), {}, (x,), (x,))).reduction
    Reduction(outputs=8, reduced=64, is_inner=True)
    """
    found: Lowering | None = signature.memo.get(MEMO_KEY)
    if found is None:
        found = signature.memo[MEMO_KEY] = _lower(signature)
    return found


def _lower(signature: Signature) -> Lowering:
    op, name = signature.op, operator_name(signature)
    if not isinstance(op, torch._ops.OpOverload) or op.namespace != "aten":
        return EXTERN
    if any(spec.dtype.is_complex or not spec.device.startswith("cuda")
           for spec in (*signature.inputs, *signature.outputs) if spec):
        return EXTERN
    if name in RANDOM:
        return DRAWN
    if name in REDUCTIONS:
        found = find_reduction(signature, name)
        return ELEMENTS if found is None else Lowering("reduction", found)
    return ELEMENTS if name in POINTWISE or torch.Tag.pointwise in op.tags else EXTERN


def find_reduction(signature: Signature, name: str) -> Reduction | None:
    """What an operator reduces, None where it reduces nothing (batch norm by running statistics).

    >>> x, column = (TensorSpec.of(s, (64, 1), torch.float32, "cuda:0") for s in ((8, 64), (1, 64)))
    >>> find_reduction(Signature(torch.ops.aten.sum.dim_IntList, (x, [0], True), {}, (x,), (column,)), "sum")
    Reduction(outputs=64, reduced=8, is_inner=False)
    """
    source = max(signature.inputs, key=lambda spec: spec.numel, default=None)
    if source is None or not source.numel or not signature.outputs:
        return None
    if "group_norm" in name:
        given = bind(signature)
        groups = given["group"] * source[0]
        return Reduction(groups, source.numel // groups, True)
    dims = reduced_dims(signature, name, source)
    reduced = math.prod(source[i] for i in dims)
    if reduced == 1:
        return None
    kept = [i for i, size in enumerate(source) if i not in dims and size > 1]
    is_inner = not kept or min((i for i in dims if source[i] > 1), default=0) > max(kept)
    return Reduction(source.numel // reduced, reduced, is_inner)


def reduced_dims(signature: Signature, name: str, source: TensorSpec) -> set[int]:
    """The dimensions of ``source`` that an operator reduces."""
    every = set(range(len(source)))
    given = bind(signature)
    if name in _BATCH_NORMS:
        return every - {1} if given.get("training", True) else set()  # else by statistics that are there
    if "layer_norm" in name or "rms_norm" in name:
        return set(range(len(source) - len(given["normalized_shape"]), len(source)))
    if name == "_adaptive_avg_pool2d":
        return set(range(len(source) - 2, len(source))) if signature.outputs[0][-1] == 1 else set()
    if name.startswith(("mse_loss", "nll_loss")):
        return every if signature.outputs[0].numel == 1 else set()
    dim: Any = given.get("dim")
    if dim is None or dim == []:
        return every
    return {d % len(source) for d in ([dim] if isinstance(dim, int) else dim)} if source else every
