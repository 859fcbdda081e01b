"""Operators of sparse tensors: what they return, with as many stored elements as their kernels give. Meta kernels lose
these. Where data decides how many there are, an operator has none here, and is refused.
"""
from __future__ import annotations

from typing import Any

import torch

from analyzer.cuda.kernel_registry import overloads, registering
from analyzer.errors import UnsupportedOperatorError
from analyzer.meta.operator_info import sparse_shapes
from analyzer.meta.spec import SPARSE_LAYOUTS, parts_of
from analyzer.meta.state import active_state
from analyzer.meta.tensor import sparse_like, sparse_tensor

Tensor = torch.Tensor
aten = torch.ops.aten


_sparse_shape = registering(sparse_shapes)


def _is_sparse(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout in SPARSE_LAYOUTS


# -- products ---------------------------------------------------------------------------------------------------------

@_sparse_shape("mm", "mv")
def _multiply(self: Tensor, other: Tensor) -> Tensor:
    """Sparse times dense, or dense times sparse, is dense: sparse/cuda/SparseCUDATensorMath.cu and
    SparseCsrTensorMath.cpp in aten/src/ATen/native.
    """
    if _is_sparse(self) and _is_sparse(other):
        raise UnsupportedOperatorError(
            "a product of two sparse matrices: how many elements it stores depends on data. "
            f"{active_state().where()}\nWay out: pass the product to the model, or multiply by a dense matrix.")
    if self.shape[-1] != other.shape[0]:
        raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({tuple(self.shape)} and {tuple(other.shape)})")
    dense = other if _is_sparse(self) else self
    return dense.new_empty((*self.shape[:-1], *other.shape[1:]))


@_sparse_shape("addmm", "_sparse_addmm", "addmv")
def _multiply_and_add(self: Tensor, one: Tensor, other: Tensor, *_: Any, **__: Any) -> Tensor:
    product: Tensor = _multiply(one, other)
    return product


# -- the same elements ------------------------------------------------------------------------------------------------

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
    active_state().assume(f"coalesce: all {values.shape[0]} stored elements are taken to be at different places, the "
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
        dense = other if _is_sparse(self) else self
        return torch.empty_like(dense)
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


@_sparse_shape("_to_dense")
def _to_dense(self: Tensor, dtype: torch.dtype | None = None, *_: Any, **__: Any) -> Tensor:
    values = parts_of(self)[-1]
    return values.new_empty(self.shape, dtype=dtype)


# What looks at a tensor's parts, or is another of the same.
for _name in ("detach alias _indices _values indices values crow_indices col_indices ccol_indices row_indices _nnz "
              "is_coalesced sparse_dim dense_dim _coalesced_ sum").split():
    for _op in overloads(_name):
        sparse_shapes(_op, _op)
