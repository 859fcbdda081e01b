"""What operators refuse that take a tensor of indices or a mask, or write to a part of a tensor."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .rule import expands, name_dtype, refuses, wrap_dim

Tensor = torch.Tensor
BOOLEAN = (torch.bool, torch.uint8)


@refuses("index_add", "index_add_")
def index_add(_: str, self: Tensor, dim: int, index: Tensor, source: Tensor, **_kwargs: Any) -> None:
    """aten/src/ATen/native/TensorAdvancedIndexing.cpp, index_func_meta_impl."""
    _check_indexed("index_add_", self, wrap_dim(dim, self.dim()), index, source)


@refuses("index_reduce", "index_reduce_")
def index_reduce(device_type: str, self: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str,
                 include_self: bool = True, **_kwargs: Any) -> None:
    """The same; aten/src/ATen/native/TensorAdvancedIndexing.cpp, index_reduce, which fills extremes where what was
    there is left out.
    """
    if reduce not in ("prod", "mean", "amax", "amin"):
        raise RuntimeError(f"index_reduce(): Expected reduce to be one of prod, mean, amax or amin but got {reduce}.")
    _check_indexed("index_reduce_", self, wrap_dim(dim, self.dim()), index, source)
    is_refused = reduce != "prod" or not include_self or self.dim() < 2 if self.dtype.is_complex else (
        self.dtype == torch.bool and (reduce in ("amax", "mean") or not include_self or device_type == "cuda"))
    if source.numel() and is_refused:
        raise NotImplementedError(f'"index_reduce_{reduce}" not implemented for \'{name_dtype(self.dtype)}\'')


def _check_indexed(name: str, self: Tensor, dim: int, index: Tensor, source: Tensor) -> None:
    if index.dim() > 1:
        raise IndexError(f"{name}(): Index is supposed to be a vector, but got dim: {index.dim()} with type: "
                         f"{name_dtype(index.dtype)} and size: {list(index.shape)}")
    if index.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(f"{name}(): Expected dtype int32/int64 for index but got: {name_dtype(index.dtype)}")
    if self.dtype != source.dtype:
        raise RuntimeError(f"{name}(): self ({name_dtype(self.dtype)}) and source ({name_dtype(source.dtype)}) must "
                           "have the same scalar type")
    if source.dim() and dim >= source.dim():
        raise RuntimeError(f"{name}(): Indexing dim {dim} is out of bounds of the source tensor with dim "
                           f"{source.dim()}")
    size = source.shape[dim] if source.dim() else 1
    if index.numel() != size:
        raise RuntimeError(f"{name}(): Number of indices ({index.numel()}) should be equal to source.size(dim): "
                           f"({size}), for dim: {dim}")
    is_along = bool(source.dim() and self.dim())

    def others(t: Tensor) -> list[int]:
        return [n for d, n in enumerate(t.shape) if d != dim or not is_along]
    if others(self) != others(source):
        raise RuntimeError("source tensor shape must match self tensor shape, excluding the specified dimension. "
                           f"Got self.shape = {list(self.shape)} source.shape = {list(source.shape)}")


@refuses("scatter_reduce", "scatter_reduce_")
def scatter_reduce(device_type: str, self: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str,
                   **_kwargs: Any) -> None:
    """aten/src/ATen/native/cpu/ScatterGatherKernel.cpp and cuda/ScatterGatherKernel.cu: extremes are of ordered types,
    and means of numbers.
    """
    is_refused = self.dtype.is_complex and reduce in ("amax", "amin") or self.dtype == torch.bool and (
        reduce == "mean" or reduce != "sum" and device_type == "cuda")
    if index.numel() and is_refused:
        raise NotImplementedError(f'"scatter_gather_tensor_{device_type}_reduce_{reduce}" not implemented for '
                                  f"'{name_dtype(self.dtype)}'")


@refuses("index_select")
def index_select(_: str, self: Tensor, dim: int, index: Tensor, **_kwargs: Any) -> None:
    """aten/src/ATen/native/TensorAdvancedIndexing.cpp, index_select_out_cpu_; cuda/Indexing.cu has the same."""
    wrap_dim(dim, self.dim())
    if index.dim() > 1:
        raise IndexError("index_select(): Index is supposed to be a vector")
    if index.dtype not in (torch.int32, torch.int64):
        raise RuntimeError("index_select(): Expected dtype int32 or int64 for index")
    if self.dim() == 0 and index.numel() != 1:
        raise RuntimeError(f"index_select(): Index to scalar can have only 1 value, got {index.numel()} value(s)")


@refuses("index", "_unsafe_index")
def index(_: str, self: Tensor, indices: Sequence[Tensor | None]) -> None:
    """aten/src/ATen/native/TensorAdvancedIndexing.cpp, the meta function of index."""
    _check_indices(self, indices)


def _check_indices(self: Tensor, indices: Sequence[Tensor | None]) -> None:
    """aten/src/ATen/native/IndexingUtils.h, checkIndexTensorTypes and expandTensors: a mask takes as many dimensions as
    it has, each of its own length.
    """
    if len(indices) > self.dim():
        raise IndexError(f"too many indices for tensor of dimension {self.dim()} (got {len(indices)})")
    given = [i for i in indices if i is not None]
    if any(i.dtype not in (torch.int64, torch.int32, *BOOLEAN) for i in given):
        raise IndexError("tensors used as indices must be long, int, byte or bool tensors")
    dim = 0
    for i in indices:
        if i is None or i.dtype not in BOOLEAN:
            dim += 1
            continue
        for place, size in enumerate(i.shape):
            if dim >= self.dim():
                raise IndexError(f"Dimension out of range (expected to be in range of [{-self.dim()}, "
                                 f"{self.dim() - 1}], but got {dim})")
            if size != self.shape[dim]:
                raise IndexError(f"The shape of the mask {list(i.shape)} at index {place} does not match the shape of "
                                 f"the indexed tensor {list(self.shape)} at index {dim}")
            dim += 1


@refuses("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
def index_put(_: str, self: Tensor, indices: Sequence[Tensor | None], values: Tensor, *_args: Any,
              **_kwargs: Any) -> None:
    """aten/src/ATen/native/TensorAdvancedIndexing.cpp, the meta function of index_put, make_index_put_iterator."""
    _check_indices(self, indices)
    if values.dtype != self.dtype:
        raise RuntimeError("Index put requires the source and destination dtypes match, got "
                           f"{name_dtype(self.dtype)} for the destination and {name_dtype(values.dtype)} for the "
                           "source.")
    given = [i for i in indices if i is not None]
    if given and not any(i.dtype in BOOLEAN for i in given):  # how many a mask selects its contents say
        check_written(tuple(self.shape), [None if i is None else tuple(i.shape) for i in indices], tuple(values.shape))


def check_written(shape: tuple[int, ...], indices: Sequence[tuple[int, ...] | None], values: tuple[int, ...]) -> None:
    """Raise RuntimeError where ``values`` do not broadcast to what indices of these shapes select. Of ``x[i] = values``
    C++ takes off leading dimensions of size one before (slicePrefix1sSize in ATen/TensorIndexing.h).
    """
    selected = _result_shape(shape, indices)
    if not expands(values, selected):
        raise RuntimeError(f"shape mismatch: value tensor of shape {list(values)} cannot be broadcast to "
                           f"indexing result of shape {list(selected)}")


def _result_shape(shape: tuple[int, ...], indices: Sequence[tuple[int, ...] | None]) -> tuple[int, ...]:
    """The shape of what ``x[indices]`` selects: aten/src/ATen/native/TensorAdvancedIndexingUtils.h, transposed where
    the indexed dimensions do not stand side by side. Raises IndexError.
    """
    places = [d for d, i in enumerate(indices) if i is not None]
    try:
        broadcast = tuple(torch.broadcast_shapes(*(i for i in indices if i is not None)))
    except RuntimeError as error:
        raise IndexError("shape mismatch: indexing tensors could not be broadcast together with shapes "
                         + ", ".join(str(list(i)) for i in indices if i is not None)) from error
    rest = [n for d, n in enumerate(shape) if d not in places]
    at = places[0] if places == list(range(places[0], places[0] + len(places))) else 0
    return (*rest[:at], *broadcast, *rest[at:])


@refuses("masked_select")
def masked_select(_: str, self: Tensor, mask: Tensor, **_kwargs: Any) -> None:
    """aten/src/ATen/native/TensorAdvancedIndexing.cpp, masked_select_out_impl_cpu; cuda/IndexKernel.cpp."""
    if mask.dtype != torch.bool:
        raise RuntimeError("masked_select: expected BoolTensor for mask")
    torch.broadcast_shapes(self.shape, mask.shape)


@refuses("unique_dim", "unique_dim_consecutive")
def unique_dim(_: str, self: Tensor, dim: int, *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/Unique.cpp and cuda/Unique.cu: the dimension is the first one for a while."""
    wrap_dim(dim, self.dim())


@refuses("unique_consecutive")
def unique_consecutive(_: str, self: Tensor, return_inverse: bool = False, return_counts: bool = False,
                       dim: int | None = None) -> None:
    """The same, where a dimension is given."""
    if dim is not None:
        wrap_dim(dim, self.dim())


@refuses("masked_fill_")
def masked_fill(_: str, self: Tensor, mask: Tensor, *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/TensorAdvancedIndexing.cpp, masked_fill_impl_cpu; cuda/Indexing.cu has the same."""
    if mask.dtype != torch.bool:
        raise RuntimeError("masked_fill_ only supports boolean masks, but got mask with dtype "
                           f"{name_dtype(mask.dtype)}")


@refuses("masked_scatter_")
def masked_scatter_in_place(device_type: str, self: Tensor, mask: Tensor, source: Tensor, **_kwargs: Any) -> None:
    """As masked_scatter; the mask is expanded to the tensor that is written (expand_inplace)."""
    if torch.broadcast_shapes(self.shape, mask.shape) != self.shape:
        raise RuntimeError(f"mask of shape {list(mask.shape)} cannot be expanded to that of the tensor, "
                           f"{list(self.shape)}")
    masked_scatter(device_type, self, mask, source)


@refuses("masked_scatter")
def masked_scatter(_: str, self: Tensor, mask: Tensor, source: Tensor, **_kwargs: Any) -> None:
    """aten/src/ATen/native/TensorAdvancedIndexing.cpp, masked_scatter__cpu; cuda/IndexKernel.cpp."""
    if mask.dtype != torch.bool:
        raise RuntimeError("masked_scatter_ only supports boolean masks, but got mask with dtype "
                           f"{name_dtype(mask.dtype)}")
    if self.dtype != source.dtype:
        raise RuntimeError("masked_scatter: expected self and source to have same dtypes but got "
                           f"{name_dtype(self.dtype)} and {name_dtype(source.dtype)}")


@refuses("as_strided_scatter")
def as_strided_scatter(_: str, self: Tensor, src: Tensor, size: Sequence[int], stride: Sequence[int],
                       storage_offset: int | None = None, **_kwargs: Any) -> None:
    """aten/src/ATen/native/Resize.h, checkInBoundsForStorage: the view is taken of a copy of the whole storage. No
    element of it may stand for several: MemoryOverlap.cpp, assert_no_internal_overlap.
    """
    if 0 not in size and any(step == 0 and n > 1 for n, step in zip(size, stride)):
        raise RuntimeError("unsupported operation: more than one element of the written-to tensor refers to a single "
                           "memory location. Please clone() the tensor before performing the operation.")
    offset = self.storage_offset() if storage_offset is None else storage_offset
    extent = 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride)) + offset
    held_bytes = self.untyped_storage().nbytes()
    if extent * self.itemsize > held_bytes:
        raise RuntimeError(f"setStorage: sizes {list(size)}, strides {list(stride)}, storage offset "
                           f"{offset}, and itemsize {self.itemsize} requiring a storage size of "
                           f"{extent * self.itemsize} are out of bounds for storage of size "
                           f"{held_bytes}")


@refuses("select_scatter")
def select_scatter(_: str, self: Tensor, src: Tensor, dim: int, index: int) -> None:
    """aten/src/ATen/native/TensorShape.cpp, select_scatter_symint and select."""
    dim = wrap_dim(dim, self.dim())
    if self.dim() and not -self.shape[dim] <= index < self.shape[dim]:
        raise IndexError(f"select(): index {index} out of range for tensor of size {list(self.shape)} at dimension "
                         f"{dim}")
    _check_source(src, [n for d, n in enumerate(self.shape) if d != dim])


@refuses("diagonal_scatter")
def diagonal_scatter(_: str, self: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> None:
    """The same, diagonal_scatter; the diagonal's size by diagonal."""
    first, second = wrap_dim(dim1, self.dim()), wrap_dim(dim2, self.dim())
    if first == second:
        raise RuntimeError(f"diagonal dimensions cannot be identical {dim1}, {dim2}")
    rows, columns = self.shape[first] + min(offset, 0), self.shape[second] - max(offset, 0)
    _check_source(src, [*(n for d, n in enumerate(self.shape) if d not in (first, second)), max(min(rows, columns), 0)])


def _check_source(src: Tensor, shape: Sequence[int]) -> None:
    if list(src.shape) != list(shape):
        raise RuntimeError("expected src to have a size equal to the slice of self. src size = "
                           f"{list(src.shape)}, slice size = {list(shape)}")


@refuses("as_strided", "as_strided_copy")
def as_strided(_: str, self: Tensor, size: Sequence[int], stride: Sequence[int],
               storage_offset: int | None = None) -> None:
    """aten/src/ATen/native/Resize.h, checkInBoundsForStorage."""
    if any(n == 0 for n in size) or self.layout is not torch.strided:
        return
    offset = self.storage_offset() if storage_offset is None else storage_offset
    itemsize, held_bytes = self.dtype.itemsize, self.untyped_storage().nbytes()
    needed_bytes = (offset + sum((n - 1) * step for n, step in zip(size, stride)) + 1) * itemsize
    if needed_bytes > held_bytes:
        raise RuntimeError(f"setStorage: sizes {list(size)}, strides {list(stride)}, storage offset {offset}, and "
                           f"itemsize {itemsize} requiring a storage size of {needed_bytes} are out of bounds for "
                           f"storage of size {held_bytes}")


@refuses("_unsafe_masked_index_put_accumulate")
def masked_index_put(_: str, self: Tensor, mask: Tensor, indices: Sequence[Tensor | None], values: Tensor) -> None:
    """aten/src/ATen/native/TensorAdvancedIndexing.cpp, _unsafe_masked_index_put_accumulate: as index_put."""
    if self.numel():
        check_written(tuple(self.shape), [None if i is None else tuple(i.shape) for i in indices],
                      tuple(torch.broadcast_shapes(values.shape, mask.shape)))
    if values.dtype != self.dtype and self.numel():
        raise RuntimeError("Index put requires the source and destination dtypes match, got "
                           f"{name_dtype(self.dtype)} for the destination and {name_dtype(values.dtype)} for the "
                           "source.")


@refuses("slice_scatter")
def slice_scatter(_: str, self: Tensor, src: Tensor, dim: int = 0, start: int | None = None, end: int | None = None,
                  step: int = 1, **_kwargs: Any) -> None:
    """aten/src/ATen/native/TensorShape.cpp, slice_scatter."""
    dim = wrap_dim(dim, self.dim())
    if step <= 0:
        raise RuntimeError("slice step must be positive")
    count = len(range(self.shape[dim])[slice(start, end, step)]) if self.dim() else 0
    wanted = [count if d == dim else n for d, n in enumerate(self.shape)]
    if list(src.shape) != wanted:
        raise RuntimeError("expected src to have a size equal to the slice of self. "
                           f"src size = {list(src.shape)}, slice size = {wanted}")


@refuses("put", "put_")
def put(_: str, self: Tensor, index: Tensor, source: Tensor, *_args: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/TensorAdvancedIndexing.cpp, put_."""
    if index.dtype != torch.int64:
        raise RuntimeError(f"put_(): Expected a long tensor for index, but got {name_dtype(index.dtype)}")
    if self.dtype != source.dtype:
        raise RuntimeError("put_(): self and source expected to have the same dtype, but got self.dtype = "
                           f"{name_dtype(self.dtype)} and source.dtype = {name_dtype(source.dtype)}")
    if index.numel() != source.numel():
        raise IndexError("put_(): Expected source and index to have the same number of elements, but got "
                         f"source.numel() = {source.numel()}, index.numel() = {index.numel()}")


@refuses("index_fill", "index_fill_")
def index_fill(_: str, self: Tensor, dim: int, index: Tensor, value: Any, **_kwargs: Any) -> None:
    """aten/src/ATen/native/TensorAdvancedIndexing.cpp, index_fill_."""
    is_complex = isinstance(value, complex) or isinstance(value, Tensor) and value.dtype.is_complex
    if is_complex and not self.dtype.is_complex:
        raise RuntimeError("index_fill_(): Converting complex Scalar to non-complex type is not supported")
    if index.dtype != torch.int64:
        raise IndexError("index_fill_(): Expected dtype int64 for index.")
    if index.dim() > 1:
        raise RuntimeError("Index has to be a vector/scalar")


@refuses("index_copy", "index_copy_")
def index_copy(_: str, self: Tensor, dim: int, index: Tensor, source: Tensor, **_kwargs: Any) -> None:
    """aten/src/ATen/native/TensorAdvancedIndexing.cpp, the meta function of index_copy."""
    wrap_dim(dim, self.dim())
    if index.dim() > 1:
        raise IndexError(f"index_copy_(): Index should have dimension 1 or 0 (got {index.dim()})")
    if index.dtype != torch.int64:
        raise RuntimeError(f"index_copy_(): Expected a long tensor for index, but got {name_dtype(index.dtype)}")
