"""Products that meta lacks or that run otherwise: grouped, of quantized operands, bitsandbytes, sparse tensors."""
from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from analyzer.cuda import kernel_registry
from analyzer.cuda.kernel_registry import device_shape, kernel_replacements
from analyzer.errors import UnsupportedOperatorError
from analyzer.hardware.catalogue import asked, simulated_spec
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.intercept.replacement import Undo, answer
from analyzer.meta.operator_info import device_shapes, sparse_shapes
from analyzer.meta.spec import SPARSE_LAYOUTS, compositions, parts_of
from analyzer.meta.state import active_state
from analyzer.meta.tensor import device_of, sparse_like, sparse_tensor

Tensor = torch.Tensor


@device_shape("_grouped_mm", on_any_device=True)
def grouped_mm(a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None,
               out_dtype: torch.dtype | None = None) -> Tensor:
    """``offs`` cuts rows, columns or the inner dimension of the 2-d operands into groups. Rows of the result start at
    multiples of 16 bytes, as the tensor memory accelerator needs. Sources: ``_grouped_mm_validate_inputs`` and
    ``create_grouped_gemm_output_tensor`` in aten/src/ATen/native/GroupedMMUtils.h, which CPU and CUDA share.
    """
    if (a.dim() == 3 and b.dim() == 3) == (offs is not None):
        raise RuntimeError("_grouped_mm: offs must be given where an operand is 2-d, and only there")
    if a.shape[-1] != b.shape[-2] or a.dtype != b.dtype or not a.is_floating_point() or a.dtype is torch.float64:
        raise RuntimeError(f"_grouped_mm: cannot multiply {a.dtype}{list(a.shape)} by {b.dtype}{list(b.shape)}")
    if a.dim() == 2 and b.dim() == 2:
        assert offs is not None
        size = [offs.shape[0], a.shape[0], b.shape[1]]
    elif a.dim() == 2:
        size = [a.shape[0], b.shape[-1]]
    else:
        size = [a.shape[1], b.shape[1]] if b.dim() == 2 else [a.shape[0], a.shape[1], b.shape[-1]]
    dtype = out_dtype or a.dtype
    alignment = 16 // dtype.itemsize
    row = -(-size[-1] // alignment) * alignment
    return a.new_empty_strided(size, [row, 1] if len(size) == 2 else [size[1] * row, row, 1], dtype=dtype)


@device_shape("mm.dtype", "bmm.dtype", on_any_device=True)
def mm_dtype(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Torch 2.9 has no kernel for it on meta."""
    product: Tensor = (torch.ops.aten.mm if a.dim() == 2 else torch.ops.aten.bmm).default(a, b)
    return product.new_empty(product.shape, dtype=out_dtype)


@device_shape("addmm.dtype", on_any_device=True)
def addmm_dtype(self: Tensor, mat1: Tensor, mat2: Tensor, out_dtype: torch.dtype, **_: Any) -> Tensor:
    """The kernel of torch 2.9 on meta takes ``out_dtype`` for a factor."""
    product: Tensor = torch.ops.aten.addmm.default(self.new_empty(self.shape, dtype=mat1.dtype), mat1, mat2)
    return product.new_empty(product.shape, dtype=out_dtype)


# ``out_dtype``, by which libraries ask for products of int8 that give int32: below autograd it is one operator or a few
# (torch/_higher_order_ops/out_dtype.py, out_dtype_dense). Its package has the operator under this name.
_module: Any = importlib.import_module("torch._higher_order_ops.out_dtype")


@kernel_replacements.append
def answer_operator() -> Iterator[Undo]:
    yield kernel_registry.set_below_autograd(_module.out_dtype, _module.out_dtype_dense)


@device_shape("fake_quantize_per_tensor_affine_cachemask", "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
               "fake_quantize_per_channel_affine_cachemask")
def shape_fake_quantize(self: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """aten/src/ATen/native/quantized/FakeQuantPerTensorAffine.cpp: the output, and where it was not cut off."""
    return torch.empty_like(self), torch.empty_like(self, dtype=torch.bool)


@device_shape("_fused_moving_avg_obs_fq_helper", on_any_device=True)
def shape_observe(self: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """aten/src/ATen/native/quantized/cpu/fused_obs_fake_quant.cpp and cuda/FusedObsFakeQuant.cu: an observer of rows is
    empty before it sees the first input, and has ranges, scales and zero points for each row from then on.
    """
    ranges, axis, by_row = given[2:6], given[9], len(given) > 10 and given[10]
    for observed in ranges if by_row and not ranges[0].numel() else ():
        observed.resize_(self.shape[axis])
    return torch.empty_like(self), torch.empty_like(self, dtype=torch.bool)


device_shape("_fake_quantize_learnable_per_tensor_affine_backward",
             "_fake_quantize_learnable_per_channel_affine_backward")(
    lambda grad, *given: tuple(map(torch.empty_like, given[:3])))  # of the input, the scale and the zero point
device_shape("dequantize.self")(lambda self: torch.empty(self.shape, dtype=torch.float32, device=self.device))


@device_shape("quantize_per_tensor", "quantize_per_tensor.tensor_qparams", "quantize_per_channel", on_any_device=True)
def shape_quantize(self: Tensor, *args: Any, dtype: torch.dtype | None = None) -> Tensor:
    """The kernel on meta gives the dtype of its input."""
    return torch.empty(self.shape, dtype=dtype or args[-1], device=self.device)


@device_shape("int_repr")
def shape_int_repr(self: Tensor) -> Tensor:
    """c10/core/ScalarType.h, toUnderlying."""
    integer = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}.get(self.dtype)
    if integer is None:
        raise NotImplementedError(f"'aten::int_repr' has no kernel for {self.dtype}, which is not quantized")
    return torch.empty(self.shape, dtype=integer, device=self.device)


@device_shape("_weight_int4pack_mm", on_any_device=True)
def shape_int4_product(self: Tensor, weight: Tensor, *_: Any) -> Tensor:
    """aten/src/ATen/native/cuda/int4mm.cu: a weight of int32 in tiles of 8 rows."""
    return self.new_empty((self.shape[0], weight.shape[0] * 8))


def shape_linear_with_packed_weight(x: Tensor, packed: Any, *_: Any, **__: Any) -> Tensor:
    """aten/src/ATen/native/quantized/cpu/qlinear_dynamic.cpp: the weight is an object of C++, which hides its data."""
    state = active_state()
    with without_modes():
        weight = packed.unpack()[0]
    state.assume(f"a weight of {weight.numel() * weight.itemsize:,} bytes, packed by torch.ao.quantization, "
                 f"is in no count of memory {state.where()}")
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


for _name in ("linear_dynamic", "linear_relu_dynamic", "linear_dynamic_fp16", "linear_relu_dynamic_fp16"):
    if hasattr(torch.ops.quantized, _name):
        device_shapes[getattr(torch.ops.quantized, _name).default] = shape_linear_with_packed_weight


# What operators of bitsandbytes run on CUDA: those that its backend composes of others, and memory that it takes
# besides the allocator's. Source: bitsandbytes 0.50, backends/cuda/ops.py and backends/default/ops.py.

_bnb: Any = torch.ops.bitsandbytes  # empty until the library is imported
_BLOCK_OF_ABSMAX = 256
_LARGEST_CUSTOM_M = 1536  # _gemm_4bit_custom_max_m


def _composition(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what the operator runs where its first tensor is on CUDA; NotImplemented: one kernel of its own."""
    def register(impl: Callable[..., Any]) -> Callable[..., Any]:
        def compose(first: Tensor, *args: Any, **kwargs: Any) -> Any:
            return impl(first, *args, **kwargs) if device_of(first).type == "cuda" else NotImplemented
        compositions[f"bitsandbytes::{name}"] = compose
        return impl
    return register


@_composition("gemm_4bit")
def compose_gemm_4bit(a: Tensor, b: Tensor, shape: Any, absmax: Tensor, blocksize: int, quant_type: str,
                      bias: Tensor | None = None, absmax_8bit: Tensor | None = None,
                      absmax_code: Tensor | None = None, absmax_offset: Tensor | None = None) -> Any:
    """Where its own kernel does not pay: the weight in the input's precision, then a product."""
    rows, (columns, depth) = a.numel() // a.shape[-1], shape
    if depth % blocksize == 0 and rows <= _LARGEST_CUSTOM_M and _pays_here(
            device_of(a).index, a.dtype, rows, columns, depth):
        return NotImplemented
    if absmax_8bit is not None:
        large = _bnb.dequantize_blockwise.default(absmax_8bit, absmax, absmax_code, _BLOCK_OF_ABSMAX, torch.float32)
        absmax = large + absmax_offset
    weight = _bnb.dequantize_4bit.default(b, absmax, blocksize, quant_type, list(shape), a.dtype)
    return torch.nn.functional.linear(a, weight, bias)


@asked
def _pays_here(*product: Any) -> bool:
    return _pays(simulated_spec().name, *product)


@functools.cache
def _pays(device_name: str, *product: Any) -> bool:
    """The library's own choice, without its caches: they know a device by its index alone."""
    from bitsandbytes.backends.cuda import ops  # type: ignore[import-not-found,unused-ignore]
    ops._gpu_dispatch_props.cache_clear()
    found = bool(ops._gemm_4bit_use_custom_cuda.__wrapped__(*product))
    ops._gpu_dispatch_props.cache_clear()
    return found


@_composition("int8_linear_matmul")
def compose_int8_linear_matmul(a: Tensor, b: Tensor) -> Any:
    """A depth that four does not divide is nothing for cuBLASLt."""
    return NotImplemented if b.shape[-1] % 4 == 0 else torch.matmul(a.float(), b.float().t()).to(torch.int32)


@_composition("int8_mm_dequant")
def compose_int8_mm_dequant(a: Tensor, row_stats: Tensor, col_stats: Tensor, dtype: torch.dtype | None = None,
                            bias: Tensor | None = None) -> Any:
    """The kernel gives float16, and adds a bias of float16."""
    is_fused = bias is None or bias.dtype == torch.float16
    if is_fused and dtype in (None, torch.float16):
        return NotImplemented
    out = _bnb.int8_mm_dequant.default(a, row_stats, col_stats, torch.float16, bias if is_fused else None)
    if not is_fused:
        out.add_(bias)
    return out.to(dtype or torch.float16)


@_composition("int8_scaled_mm")
def compose_int8_scaled_mm(a: Tensor, b: Tensor, row_stats: Tensor, col_stats: Tensor, bias: Tensor | None = None,
                           dtype: torch.dtype | None = None) -> Any:
    product = _bnb.int8_linear_matmul.default(a, b)
    return _bnb.int8_mm_dequant.default(product, row_stats, col_stats, dtype or torch.float16, bias)


@_composition("int8_mixed_scaled_mm")
def compose_int8_mixed_scaled_mm(a: Tensor, ca: Tensor, cb: Tensor, sca: Tensor, scb: Tensor,
                                 outlier_cols: Tensor | None = None, bias: Tensor | None = None) -> Any:
    """The columns of outliers, of which none is known, would be multiplied in full precision."""
    none = a.new_empty(0)
    return _bnb.int8_scaled_mm.default(ca, cb, sca, scb, bias, a.dtype), none


@_composition("int8_vectorwise_quant")
def compose_int8_vectorwise_quant(a: Tensor, threshold: float = 0.0) -> Any:
    if threshold == 0.0:
        return NotImplemented
    quantized, scales, _ = _bnb.int8_vectorwise_quant.default(a, 0.0)
    outliers = a.abs() >= threshold
    active_state().assume(f"bitsandbytes: no activation is assumed to exceed llm_int8_threshold={threshold:g}, so that "
                          "no column of outliers is multiplied in 16 bits")
    del outliers
    return quantized, scales, a.new_empty(0, dtype=torch.int64)


@_composition("int8_double_quant")
def compose_int8_double_quant(a: Tensor, threshold: float = 0.0) -> Any:
    rows, row_stats, outliers = _bnb.int8_vectorwise_quant.default(a, threshold)
    magnitudes = a.abs().view(-1, a.shape[-1])
    mask = magnitudes >= threshold if threshold > 0.0 else None
    if mask is not None:
        magnitudes.masked_fill_(mask, 0.0)
    col_stats = magnitudes.amax(dim=0).float()
    del magnitudes
    if mask is not None:
        a = a.masked_fill(mask, 0.0)
    columns = torch.round(a.mul(127.0) / col_stats.unsqueeze(0)).to(torch.int8)
    return rows, columns, row_stats, col_stats.flatten().float(), outliers


def _make_paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> Tensor:
    """bitsandbytes/functional.py, get_paged: a tensor on the host around memory of ``cudaMallocManaged``."""
    out = torch.zeros(shape, dtype=dtype)
    out.is_paged = True  # type: ignore[attr-defined]
    out.page_deviceid = getattr(device, "index", 0)  # type: ignore[attr-defined]
    active_state().assume("states of paged optimizers of bitsandbytes are in managed memory, which is in no figure of "
                          "the allocator; while a step needs them they take as much of the memory of "
                          f"{simulated_spec().name}")
    return out


def _fill_or_multiply(name: str, a: Tensor, b: Tensor | None, value: float, prefetch: bool = True) -> None:
    """bitsandbytes/functional.py, elementwise_func: the native functions by their names."""
    if name == "fill":
        a.fill_(value)
    elif name == "_mul" and b is not None:
        a.mul_(b)
    else:
        raise NotImplementedError(f"Function not implemented: {name}")


def answer_for_managed_memory() -> Iterator[Undo]:
    functional = sys.modules.get("bitsandbytes.functional")
    if functional is not None:
        yield answer(functional, "get_paged", _make_paged)
        yield answer(functional, "elementwise_func", _fill_or_multiply)
        yield answer(functional, "prefetch_tensor", lambda *args, **kwargs: None)


kernel_replacements.append(answer_for_managed_memory)


# What operators of sparse tensors return, whose elements meta kernels lose; where data decides how many: none.

_sparse_shape = kernel_registry.registering(sparse_shapes)


def _is_sparse(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout in SPARSE_LAYOUTS


@_sparse_shape("mm", "mv")
def _multiply(self: Tensor, other: Tensor) -> Tensor:
    """Dense: SparseCUDATensorMath.cu and SparseCsrTensorMath.cpp in aten/src/ATen/native/sparse."""
    if _is_sparse(self) and _is_sparse(other):
        raise UnsupportedOperatorError(
            "a product of two sparse matrices: how many elements it stores depends on data. "
            f"{active_state().where()}\nWay out: pass the product to the model, or multiply by a dense matrix.")
    if self.shape[-1] != other.shape[0]:
        raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({tuple(self.shape)} and {tuple(other.shape)})")
    dense = other if _is_sparse(self) else self
    return dense.new_empty((*self.shape[:-1], *other.shape[1:]))


_sparse_shape("addmm", "_sparse_addmm", "addmv")(lambda self, one, other, *_, **__: _multiply(one, other))


@_sparse_shape("clone", "_to_copy")
def _copy(self: Tensor, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> Tensor:
    *indices, values = parts_of(self)
    return sparse_like(self, [*map(torch.empty_like, indices), torch.empty_like(values, dtype=dtype)])


@_sparse_shape("t", "transpose.int")
def _transpose(self: Tensor, *dims: int) -> Tensor:
    """sparse_transpose_ in TensorShape.cpp exchanges rows of a copy's indices; in compressed layouts it is a view."""
    if self.layout is not torch.sparse_coo:
        view: Tensor = self.transpose(*(dims or (0, 1)))
        return view
    one, other = (d % self.dim() for d in dims or (0, 1))
    shape = list(self.shape)
    shape[one], shape[other] = shape[other], shape[one]
    indices, values = parts_of(self)
    return sparse_tensor([torch.empty_like(indices), torch.empty_like(values)], shape, self.layout, False)


@_sparse_shape("_coalesce")
def _coalesce(self: Tensor) -> Tensor:
    indices, values = parts_of(self)
    active_state().assume(f"coalesce: all {values.shape[0]} stored elements are assumed to be at different places, the "
                          f"most there can be {active_state().where()}")
    return sparse_tensor([torch.empty_like(indices), torch.empty_like(values)], self.shape, self.layout)


@_sparse_shape("sparse_mask")
def _mask(self: Tensor, mask: Tensor) -> Tensor:
    """sparse/SparseTensor.cpp: the elements of a tensor at the places of another's."""
    indices, values = parts_of(mask)
    return sparse_like(mask, [torch.empty_like(indices), torch.empty_like(values, dtype=self.dtype)])


@_sparse_shape("mul.Tensor", "div.Tensor", "mul.Scalar", "div.Scalar")
def _scale(self: Tensor, other: Any, **_: Any) -> Tensor:
    """By a number: sparse/SparseTensorMath.cpp, which keeps the indices."""
    sparse, factor = (self, other) if _is_sparse(self) else (other, self)
    if isinstance(factor, Tensor) and (factor.dim() or _is_sparse(factor)):
        raise UnsupportedOperatorError(f"a sparse tensor multiplied element by element with another of "
                                       f"{list(factor.shape)} is not followed. {active_state().where()}\n"
                                       "Way out: multiply its values() and make a tensor of them.")
    *indices, values = parts_of(sparse)
    return sparse_like(sparse, [*indices, torch.empty_like(values)])


@_sparse_shape("add.Tensor")
def _add(self: Tensor, other: Tensor, *, alpha: Any = 1) -> Tensor:
    """add_sparse in sparse/SparseTensorMath.cpp: two sparse ones have the elements of both, one after the other."""
    if not (_is_sparse(self) and _is_sparse(other)):
        return torch.empty_like(other if _is_sparse(self) else self)
    if self.layout is not torch.sparse_coo:
        raise UnsupportedOperatorError(f"a sum of two tensors in {self.layout}: how many elements it stores depends on "
                                       f"data. {active_state().where()}\nWay out: use torch.sparse_coo.")
    pairs = zip(parts_of(self), parts_of(other))
    return sparse_tensor([torch.cat(pair, dim) for pair, dim in zip(pairs, (1, 0))], self.shape, self.layout, False)


@_sparse_shape("add_.Tensor", "_foreach_mul_.Scalar", "_foreach_add_.List")
def _add_in_place(self: Any, other: Any, *, alpha: Any = 1) -> Tensor:
    if isinstance(self, list) or _is_sparse(self):
        raise UnsupportedOperatorError(
            "sparse tensors that others are added to in place, as momentum is of sparse gradients, grow from step to "
            f"step: no step is like the others. {active_state().where()}\n"
            "Way out: SGD without momentum, SparseAdam or Adagrad, or an Embedding with sparse=False.")
    return self  # type: ignore[no-any-return]


_sparse_shape("_to_dense")(lambda self, dtype=None, *_, **__: parts_of(self)[-1].new_empty(self.shape, dtype=dtype))

# What looks at a tensor's parts, or is another of the same.
for _name in ("detach alias _indices _values indices values crow_indices col_indices ccol_indices row_indices _nnz "
              "is_coalesced sparse_dim dense_dim _coalesced_ sum").split():
    for _op in kernel_registry.overloads(_name):
        sparse_shapes[_op] = _op
