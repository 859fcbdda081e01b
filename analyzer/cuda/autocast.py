"""``torch.autocast`` on tensors without data: the lists of operators that PyTorch casts, and the casts."""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from analyzer.meta.intercept.replacement import InterruptsHeld, Undo, answer
from analyzer.meta.simulated_device import GatedKernels, any_on, device_type_of, is_simulating
from analyzer.meta.state import MetaState

from .kernel_registry import overloads

# CUDA: the lists AT_FORALL_* of ``aten/src/ATen/autocast_mode.h`` and the registrations at AutocastCUDA in
# ``autocast_mode.cpp``; CPU: those at AutocastCPU there. Both of PyTorch 2.13, with the overloads for named dimensions
# of earlier ones and what 2.14 casts besides (linalg_matrix_sqrth: observed on a fake tensor); what a version lacks is
# left out, as the dispatcher tells.

LOWER, FLOAT, FLOAT_IF_UNSET, FLOAT_APPENDED, WIDEST, BANNED = range(6)
"""What happens to an operator: its arguments cast to the region's dtype, or to float32; its ``dtype`` set to float32
where the caller gave none, or appended; its arguments cast to the widest among them; or it is refused."""

_CUDA = {
    LOWER: """_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
        conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv
        linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
        _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
        scaled_dot_product_attention cudnn_convolution cudnn_convolution_transpose""",
    FLOAT: """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
        pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim
        nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
        hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
        multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits
        dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
        _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
        _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa linalg_matrix_sqrth""",
    FLOAT_IF_UNSET: """prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
        linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList softmax.Dimname log_softmax.Dimname
        cumprod.dimname cumsum.dimname prod.dim_Dimname sum.dim_DimnameList""",
    FLOAT_APPENDED: "norm.Scalar norm.ScalarOpt_dim norm.names_ScalarOpt_dim",
    WIDEST: "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add",
    BANNED: "binary_cross_entropy",
}
# All others that AutocastCPU has run in float32.
_CPU = {
    LOWER: """conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding bmm mm linalg_vecdot baddbmm addmm
        _addmm_activation addbmm linear _convolution.deprecated matmul conv_tbc mkldnn_rnn_layer conv_transpose1d
        conv_transpose2d.input conv_transpose3d.input prelu scaled_dot_product_attention
        _native_multi_head_attention""",
    WIDEST: "stack cat index_copy index_copy.dimname",
}
APPENDED = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
            "norm.names_ScalarOpt_dim": "norm.names_ScalarOpt_dim_dtype"}
"""The overload with a dtype that stands in for one without."""

Policies = dict[str, dict[str, int]]


def _registered(key: str) -> set[str]:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return {n.removeprefix("aten::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")
            and has(n, key)}


def read_policies() -> Policies:
    """Operator ("softmax.int") to policy, by the type of device: "cuda" or "cpu".

    >>> policies = read_policies()
    >>> cuda, cpu = policies["cuda"], policies["cpu"]
    >>> cuda["linear"] == LOWER, cuda["softmax.int"] == FLOAT_IF_UNSET, cpu["mse_loss"] == FLOAT
    (True, True, True)
    """
    on_cuda, on_cpu = _registered("AutocastCUDA"), _registered("AutocastCPU")
    cuda = {name: policy for policy, names in _CUDA.items() for name in names.split() if name in on_cuda}
    named = {name: policy for policy, names in _CPU.items() for name in names.split()}
    return {"cuda": cuda, "cpu": {name: named.get(name, FLOAT) for name in on_cpu}}


# torch keeps the switches (``is_autocast_enabled``, ``get_autocast_dtype``); what does not reach tensors on meta are
# the kernels behind the dispatch key that tensors on CUDA carry. Source: ``aten/src/ATen/autocast_mode.{h,cpp}``.

Tensor = torch.Tensor
gate = GatedKernels("AutocastHPU")  # above AutocastIPU, where the simulated device's own kernels are
_TYPES = ("cuda", "cpu")  # the order of their keys in the dispatcher: CUDA's comes first


class _AutocastState(threading.local):
    #: types of device whose autocast is on; torch's own switch reads as off under a dispatch mode
    enabled: tuple[str, ...] = ()
    excluded = 0                   #: inside an operator that was cast: what it calls is not cast again

    def __init__(self) -> None:
        self.cache: dict[int, tuple[TensorWeakRef, Tensor]] = {}  # casts of weights, until the outermost region ends


_local = _AutocastState()

_policies = cache(read_policies)
# Since pytorch/pytorch#165068: what is cast without gradients can be used with them.
_CASTS_WITH_GRADIENTS = torch.__version__ >= "2.11"


def _is_eligible(state: MetaState, x: Any, device_type: str) -> bool:
    is_floating = isinstance(x, Tensor) and x.is_floating_point() and x.dtype is not torch.float64
    return is_floating and device_type_of(state, x) == device_type


def cached_cast(state: MetaState, x: Tensor, dtype: torch.dtype, device_type: str) -> Tensor:
    """``x`` as ``dtype`` where autocast may touch it; the cast of a float32 leaf that needs a gradient is kept."""
    if x.dtype is dtype or not _is_eligible(state, x, device_type):
        return x
    keep = (dtype is torch.get_autocast_dtype(device_type) and x.dtype is torch.float32 and x.requires_grad
            and x.is_leaf and not x._is_view() and torch.is_autocast_cache_enabled()
            and not (_CASTS_WITH_GRADIENTS and torch.is_inference_mode_enabled()))
    if not keep:
        return torch.ops.aten.to.dtype(x, dtype)  # type: ignore[no-any-return]
    key: int = x._cdata  # the C++ object: the same as long as the weak reference lives
    found = _local.cache.get(key)
    if found is not None and found[0]() is x:
        return found[1]
    with torch.set_grad_enabled(_CASTS_WITH_GRADIENTS or torch.is_grad_enabled()):
        cast: Tensor = torch.ops.aten.to.dtype(x, dtype)
    _local.cache[key] = (TensorWeakRef(x), cast)
    return cast


def lower_precision(state: MetaState) -> Callable[[Tensor], Tensor] | None:
    if "cuda" not in _local.enabled or _local.excluded:
        return None
    dtype = torch.get_autocast_dtype("cuda")
    return lambda x: cached_cast(state, x, dtype, "cuda")


def _cast_all(state: MetaState, tree: Any, dtype: torch.dtype, device_type: str) -> Any:
    if isinstance(tree, Tensor):
        return cached_cast(state, tree, dtype, device_type)
    if isinstance(tree, (list, tuple)):
        return [_cast_all(state, x, dtype, device_type) for x in tree]
    return tree


def _widest(state: MetaState, tree: Any, dtype: torch.dtype, device_type: str) -> torch.dtype:
    """float32 if an eligible tensor is, else the region's dtype. ``prioritize`` refuses any third type."""
    lower = torch.get_autocast_dtype(device_type)
    for x in tree:
        if isinstance(x, (list, tuple)):
            dtype = _widest(state, x, dtype, device_type)
        elif _is_eligible(state, x, device_type):
            if torch.float32 in (dtype, x.dtype):
                dtype = torch.float32
            elif x.dtype is not lower:
                raise RuntimeError(
                    f"Unexpected floating ScalarType in at::autocast::prioritize: {x.dtype} in a region of {lower}")
    return dtype


def _device_type(state: MetaState, name: str, args: Any, kwargs: dict[str, Any]) -> str | None:
    return next((kind for kind in _local.enabled if name in _policies()[kind]
                 and any_on(state, kind, (*args, *kwargs.values()))), None)


def _make_kernel(op: torch._ops.OpOverload, name: str) -> Callable[..., Any]:
    dtype_position = next((i for i, a in enumerate(op._schema.arguments) if a.name == "dtype"), None)
    appended = overloads(APPENDED[name])[0] if name in APPENDED else None
    def kernel_at_key(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        state = is_simulating()
        device_type = None if state is None or _local.excluded else _device_type(state, name, args, kwargs)
        if state is None or device_type is None:
            return gate.redispatch(op, keyset, args, kwargs)
        policy, target = _policies()[device_type][name], op
        _local.excluded += 1
        try:
            with torch._C.DisableTorchFunction():  # the engine calls this with the function mode still active
                if policy in (LOWER, FLOAT, WIDEST):
                    dtype = torch.float32 if policy == FLOAT else torch.get_autocast_dtype(device_type)
                    if policy == WIDEST:
                        dtype = _widest(state, (*args, *kwargs.values()), dtype, device_type)
                    # from the last to the first: WrapFunction_ casts in the arguments of a call, which GCC evaluates so
                    kwargs = {k: _cast_all(state, v, dtype, device_type) for k, v in reversed(kwargs.items())}
                    args = tuple([_cast_all(state, a, dtype, device_type) for a in reversed(args)][::-1])
                elif policy == FLOAT_IF_UNSET:
                    is_positional = dtype_position is not None and dtype_position < len(args)
                    if kwargs.get("dtype") is None and not is_positional and _is_eligible(state, args[0], device_type):
                        kwargs = {**kwargs, "dtype": torch.float32}
                elif policy == FLOAT_APPENDED:
                    assert appended is not None  # before the dtype: defaults, which the dispatcher leaves out
                    target, args = appended, (*args, *(a.default_value for a in op._schema.arguments[len(args):]))
                    kwargs = {"dtype": torch.float32 if _is_eligible(state, args[0], device_type) else args[0].dtype}
                elif policy == BANNED:
                    raise RuntimeError(
                        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast. Combine "
                        "the sigmoid and the loss: torch.nn.functional.binary_cross_entropy_with_logits and "
                        "torch.nn.BCEWithLogitsLoss are safe")
                return target(*args, **kwargs)
        finally:
            _local.excluded -= 1
    return kernel_at_key


@cache
def _fill_gate() -> None:
    for name in sorted({name for table in _policies().values() for name in table}):
        for op in overloads(name):
            gate.add(op, _make_kernel(op, name))


_undo: list[Callable[[], None]] = []
lock = threading.RLock()


def install() -> None:
    """Register the casts with the dispatcher, once: most uses of the mode see no autocast and are spared the time."""
    if _undo:
        return
    with lock, InterruptsHeld():
        if not _undo:
            _fill_gate()
            _undo.append(gate.install())


def uninstall() -> None:
    with lock:
        while _undo:
            _undo.pop()()


def follow_switch(is_simulating_thread: bool) -> None:
    """Let this thread's calls reach the casts if its autocast is on: whenever its switch may have moved."""
    _local.enabled = tuple(filter(torch.is_autocast_enabled, _TYPES)) if is_simulating_thread else ()
    if not is_simulating_thread:
        _local.excluded = 0  # also where an interrupt kept an operator from counting down
        _local.cache.clear()
    if _local.enabled:
        install()
    gate.set_open(bool(_local.enabled))


def replacements() -> Iterator[Undo]:
    yield uninstall
    for name in ("set_autocast_enabled", "set_autocast_cpu_enabled"):
        yield answer(torch, name, _switch, passes_original=True)
    yield answer(torch, "clear_autocast_cache", _clear_both, passes_original=True)
    # torch's own also sees the keys that the mode's kernels are at (simulated_device)
    yield answer(torch._C, "_is_any_autocast_enabled", lambda: bool(_local.enabled))


def _switch(original: Any, *args: Any, **kwargs: Any) -> None:
    is_on = args[-1:] == (True,)
    if is_on:
        install()  # before the switch is on, for this takes long: torch leaves it on after an interrupt
    original(*args, **kwargs)
    try:
        follow_switch(True)
    except BaseException:
        if is_on:  # or it stays so: the region was not entered
            original(*args[:-1], False)
        raise


def _clear_both(original: Any) -> None:
    original()
    _local.cache.clear()
