"""Layers of the stand-in for Transformer Engine: what each saves, and the workspaces that it takes."""
from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

STREAMS = 4  #: on which grouped products run: transformer_engine/common, nvte_get_num_compute_streams
OVERLAP_STREAMS = 3  #: on which a product runs that overlaps its communication: _NUM_MAX_UB_STREAMS


def workspace_bytes() -> int:  # of one cuBLASLt call (cpp_extensions/gemm.py, get_cublas_workspace_size_bytes)
    return 32 * 2**20 + 1024 if torch.cuda.get_device_properties(0).major >= 9 else 4 * 2**20


class Workspace:
    """The process's own (cpp_extensions/gemm.py, get_cublas_workspace): one by the first product, one for each of four
    streams by the first grouped product, and one for each of three by the first that overlaps its communication.
    """

    held: dict[int, list[Tensor]] = {}               #: by how many

    @staticmethod
    @contextmanager
    def own() -> Iterator[None]:
        """A block whose products take none of those that PyTorch's products do, one for each stream."""
        name = "CUBLAS_WORKSPACE_CONFIG"
        before = os.environ.get(name)
        os.environ[name] = ":0:0"
        try:
            yield
        finally:
            os.environ.pop(name) if before is None else os.environ.update({name: before})

    @classmethod
    def take(cls, count: int = 1) -> None:
        if count not in cls.held:
            cls.held[count] = [torch.empty(workspace_bytes(), dtype=torch.uint8, device="cuda") for _ in range(count)]


def _gather(x: Tensor, group: Any) -> Tensor:  # along the first dimension, of all ranks of the group
    n = group.size()
    out = torch.empty(x.shape[0] * n, *x.shape[1:], dtype=x.dtype, device=x.device)
    torch.distributed.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def _scatter(x: Tensor, group: Any) -> Tensor:  # summed over the group's ranks, this rank's part of the first dimension
    out = torch.empty(x.shape[0] // group.size(), *x.shape[1:], dtype=x.dtype, device=x.device)
    torch.distributed.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, overlaps: bool) -> Tensor:
    """One GEMM with the bias in its epilogue."""
    Workspace.take(OVERLAP_STREAMS if overlaps else 1)
    return _multiply(x.reshape(-1, x.shape[-1]), weight.t(), bias).view(*x.shape[:-1], -1)


def general_gemm(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None, layout: str = "TN",
                 **_: Any) -> list[Tensor]:
    """A product by itself, as Megatron's routers ask for it: of one dtype into another without a copy."""
    Workspace.take()
    rows, columns = b.shape[1 if layout[1] == "T" else 0], a.shape[0 if layout[0] == "T" else 1]
    return [torch.empty(rows, columns, dtype=out_dtype or a.dtype, device=a.device)]


def _multiply(x: Tensor, y: Tensor, bias: Tensor | None = None) -> Tensor:
    if x.dtype == torch.uint8:  # float8, of which 16 bits come out
        return torch.empty(x.shape[0], y.shape[1], dtype=torch.bfloat16, device=x.device)
    with Workspace.own():
        out = torch.mm(x, y)
    return out if bias is None else out.add_(bias)


# Float8 with one scale a tensor, found of the tensor itself (`Float8CurrentScalingQuantizer`). Cards before Blackwell
# multiply rows by rows alone (`is_non_tn_fp8_gemm_supported`), so a tensor is held twice where its columns are needed
# too, a byte for each. A weight is: it takes what it takes in 16 bits, and is left in them here.


def _quantize(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=torch.uint8, device=x.device)


def _prepare(x: Tensor, layer: Any) -> tuple[Tensor, Tensor]:
    """What of an input is saved, and what is multiplied. Of float8 rows alone can be gathered; where nothing is, the
    columns are saved, of which the weight's gradient is made.
    """
    rows = _quantize(x) if layer.float8 else x
    total = _gather(rows, layer.tp_group) if layer.gathers else rows
    if layer.gathers or not layer.float8:
        return rows, total
    return x if layer.save_original_input else _quantize(x), total


def _prepare_backward(ctx: Any, gradient: Tensor, saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of the gradient, and its columns and the input's, which make the weight's gradient."""
    layer = ctx.layer
    rows = _quantize(gradient) if ctx.float8 else gradient
    rows = (_gather(rows, layer.tp_group) if layer.scatters else rows).reshape(-1, gradient.shape[-1])
    total = _gather(saved, layer.tp_group) if layer.gathers else saved
    if not ctx.float8:
        return rows, rows, total
    return rows, _quantize(rows), _quantize(total) if layer.gathers or layer.save_original_input else total


class Dummy:
    """What stands for a gradient that is in ``main_grad`` already, one a size (module/base.py, get_dummy_wgrad)."""

    held: dict[Any, Tensor] = {}

    @classmethod
    def take(cls, shape: Any, dtype: torch.dtype, zero: bool = False) -> Tensor:
        key = (*shape, dtype)
        if key not in cls.held:
            cls.held[key] = torch.empty(shape, dtype=dtype, device="cuda")
        return cls.held[key].detach()


class _Linear(torch.autograd.Function):
    """Saves the input of this rank (before a gather) and the weight; gathers again for the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Any) -> Tensor:
        ctx.layer, ctx.bias, ctx.float8 = layer, bias is not None, layer.float8
        saved, total = _prepare(x, layer)
        ctx.save_for_backward(saved, weight)
        out = _product(total, weight, bias, layer.overlaps)
        if layer.scatters:
            return _scatter(out, layer.tp_group)
        if layer.reduces:
            torch.distributed.all_reduce(out, group=layer.tp_group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved, weight = ctx.saved_tensors
        layer = ctx.layer
        flat, columns, total = _prepare_backward(ctx, gradient, saved)
        dgrad = _input_gradient(flat, weight, total.shape, layer) if ctx.needs_input_grad[0] else None
        if layer.row:
            Workspace.take()  # no communication overlaps this weight's gradient
        wgrad = _weight_gradient(weight, columns, total, layer.fused)
        return dgrad, wgrad, gradient.reshape(-1, gradient.shape[-1]).sum(0) if ctx.bias else None, None


def _input_gradient(flat: Tensor, weight: Tensor, shape: torch.Size, layer: Any) -> Tensor:
    out = _multiply(flat, weight).view(shape)
    if layer.gathers:
        return _scatter(out, layer.tp_group)
    if layer.column and layer.tp_size > 1:
        torch.distributed.all_reduce(out, group=layer.tp_group)
    return out


def _weight_gradient(weight: Tensor, flat: Tensor, total: Tensor, fused: bool) -> Tensor | None:
    """Of a weight; straight into ``main_grad`` where accumulation is fused."""
    if not weight.requires_grad:
        return None
    rows = total.reshape(-1, total.shape[-1])
    if fused:
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        if isinstance(main := getattr(weight, "main_grad", None), Tensor):
            add_product(main, flat.t(), rows)
        return Dummy.take(weight.shape, weight.dtype)
    return _multiply(flat.t(), rows)


def add_product(total: Tensor, x: Tensor, y: Tensor) -> None:
    """One product, written over the sum that it is added to, which may be of more bits."""
    if x.dtype == torch.uint8:
        return
    with Workspace.own(), torch.no_grad():  # else the sum's graph would keep what is multiplied after a backward pass
        if total.dtype == x.dtype:
            torch.addmm(total, x, y, out=total)
        else:
            torch.ops.aten.addmm.dtype_out(total, x, y, total.dtype, out=total)


class Norm(torch.autograd.Function):
    """Saves the input, as one piece (ops/basic/layer_norm.py), the weight and float32 statistics of each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        x = x.contiguous()
        rows = x.numel() // x.shape[-1]
        statistics = [torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(1 if bias is None else 2)]
        ctx.bias = bias is not None
        ctx.save_for_backward(x, weight, *statistics)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *_ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight) if ctx.bias else None, None


class _LayerNormLinear(torch.autograd.Function):  # saves the input, the normed input, statistics and the weight
    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor | None, weight: Tensor, bias: Tensor | None,
                layer: Any) -> Tensor:
        rows = x.numel() // x.shape[-1]
        statistics = [torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(1 if beta is None else 2)]
        normed = torch.empty_like(x)
        ctx.layer, ctx.bias, ctx.beta, ctx.float8 = layer, bias is not None, beta is not None, layer.float8
        saved, total = _prepare(normed, layer)
        del normed
        ctx.save_for_backward(x, saved, gamma, weight, *statistics)
        return _product(total, weight, bias, layer.overlaps)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, saved, gamma, weight, *_ = ctx.saved_tensors
        layer = ctx.layer
        flat, columns, total = _prepare_backward(ctx, gradient, saved)
        _dgrad = _input_gradient(flat, weight, total.shape, layer)
        wgrad = _weight_gradient(weight, columns, total, layer.fused)
        dbias = gradient.reshape(-1, gradient.shape[-1]).sum(0) if ctx.bias else None
        dx = torch.empty_like(x)
        return dx, torch.empty_like(gamma), torch.empty_like(gamma) if ctx.beta else None, wgrad, dbias, None


class Base(nn.Module):
    """What layers of Transformer Engine share."""

    float8 = False                                   #: within a block of ``autocast``
    save_original_input = False                      #: with float8, where the input is saved in 16 bits by another


@contextmanager
def autocast(enabled: bool = False, **_: Any) -> Iterator[None]:  # ``transformer_engine.pytorch.fp8_autocast``
    assert not enabled or torch.cuda.get_device_properties(0).major < 10, "float8 whose columns need no bytes"
    before, Base.float8 = Base.float8, enabled
    try:
        yield
    finally:
        Base.float8 = before


class Linear(Base):  # ``transformer_engine.pytorch.Linear``
    def __init__(self, in_features: int, out_features: int, sequence_parallel: bool = False, tp_group: Any = None,
                 tp_size: int = 1, init_method: Any = None, bias: bool = True, return_bias: bool = False,
                 parallel_mode: str | None = None, params_dtype: torch.dtype | None = None, device: Any = "cuda",
                 fuse_wgrad_accumulation: bool = False, **others: Any) -> None:
        super().__init__()
        self.fused = fuse_wgrad_accumulation
        self.overlaps = any(others.get(name) for name in ("ub_overlap_ag", "ub_overlap_rs", "ub_bulk_dgrad"))
        self.tp_group, self.tp_size, self.parallel_mode = tp_group, tp_size, parallel_mode
        self.in_features, self.out_features, self.use_bias, self.return_bias = (
            in_features, out_features, bias, return_bias)
        split, self.sequence_parallel = tp_size if self.column else 1, sequence_parallel and tp_size > 1
        size = (out_features // split, in_features // (tp_size if self.row else 1))
        self.weight = nn.Parameter(torch.empty(*size, dtype=params_dtype, device=device))
        if bias:
            self.bias = nn.Parameter(torch.zeros(size[0], dtype=params_dtype, device=device))
        if tp_size > 1:
            _mark(self.weight, self.column or self.row, 0 if self.column else 1)
            if bias:
                _mark(self.bias, self.column, 0)
                if self.scatters:
                    self.bias.sequence_parallel = True  # type: ignore[attr-defined]

    # by the mode, which Megatron takes away from shared experts, whose communication it does itself
    column = property(lambda self: self.parallel_mode == "column")
    row = property(lambda self: self.parallel_mode == "row")
    gathers = property(lambda self: self.sequence_parallel and self.column)
    scatters = property(lambda self: self.sequence_parallel and self.row)
    reduces = property(lambda self: self.row and self.tp_size > 1 and not self.sequence_parallel)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        bias = self.bias if self.use_bias else None
        fused = None if self.return_bias or self.row and self.tp_size > 1 else bias
        out = _Linear.apply(x, self.weight, fused, self)  # type: ignore[no-untyped-call]
        if self.return_bias:
            return out, bias
        return out if fused is bias else out + bias

    def backward_dw(self) -> None: ...


def _mark(parameter: Tensor, parallel: bool, dimension: int) -> None:
    parameter.tensor_model_parallel = parallel  # type: ignore[attr-defined]
    parameter.partition_dim = dimension  # type: ignore[attr-defined]
    parameter.partition_stride = 1  # type: ignore[attr-defined]


class LayerNormLinear(Linear):  # ``transformer_engine.pytorch.LayerNormLinear``
    def __init__(self, in_features: int, out_features: int, normalization: str = "LayerNorm",
                 sequence_parallel: bool = False, params_dtype: torch.dtype | None = None, device: Any = "cuda",
                 **kwargs: Any) -> None:
        super().__init__(in_features, out_features, sequence_parallel=sequence_parallel, params_dtype=params_dtype,
                         device=device, **kwargs)
        self.layer_norm_weight = nn.Parameter(torch.ones(in_features, dtype=params_dtype, device=device))
        self.layer_norm_weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
        self.layer_norm_bias: nn.Parameter | None = None
        if normalization == "LayerNorm":
            self.layer_norm_bias = nn.Parameter(torch.zeros(in_features, dtype=params_dtype, device=device))
            self.layer_norm_bias.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        bias = self.bias if self.use_bias else None
        out = _LayerNormLinear.apply(  # type: ignore[no-untyped-call]
            x, self.layer_norm_weight, self.layer_norm_bias, self.weight, None if self.return_bias else bias, self)
        return (out, bias) if self.return_bias else out


class LayerNorm(Base):  # ``transformer_engine.pytorch.LayerNorm``
    with_bias = True

    def __init__(self, hidden_size: int, eps: float = 1e-5, sequence_parallel: bool = False,
                 params_dtype: torch.dtype | None = None, device: Any = "cuda", **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=params_dtype, device=device))
        self.bias = nn.Parameter(torch.zeros_like(self.weight)) if self.with_bias else None
        for parameter in self.parameters():
            parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Any:
        return Norm.apply(x, self.weight, self.bias, self.eps)  # type: ignore[no-untyped-call]


class RMSNorm(LayerNorm):  # ``transformer_engine.pytorch.RMSNorm``
    with_bias = False


def _rows_of(x: Tensor, splits: list[int]) -> tuple[Tensor, ...]:
    """The rows of each expert: as many for each where the counts are not known, which a profile takes as one each."""
    rows, n = x.reshape(-1, x.shape[-1]), len(splits)
    if sum(splits) != len(rows):
        splits = [len(rows) * (i + 1) // n - len(rows) * i // n for i in range(n)]
    parts: tuple[Tensor, ...] = rows.split(splits)
    return parts


def _multiply_each(x: Tensor, kernels: Sequence[Tensor], splits: list[int], out: Tensor) -> None:
    with Workspace.own():
        for part, kernel, made in zip(_rows_of(x, splits), kernels, _rows_of(out, splits)):
            torch.mm(part, kernel, out=made)


class _GroupedLinear(torch.autograd.Function):  # one product an expert; saves the parts of the input and the weights
    @staticmethod
    def forward(ctx: Any, x: Tensor, splits: list[int], biased: bool, fused: bool, *weights: Tensor) -> Tensor:
        Workspace.take(STREAMS)
        ctx.splits, ctx.biased = splits, biased
        kernels = weights[:len(splits)]
        ctx.fused = fused
        out = torch.empty(*x.shape[:-1], kernels[0].shape[0], dtype=x.dtype, device=x.device)
        _multiply_each(x, [kernel.t() for kernel in kernels], splits, out)
        ctx.save_for_backward(x, *kernels)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, *kernels = ctx.saved_tensors
        dgrad = torch.empty_like(x)
        _multiply_each(gradient, kernels, ctx.splits, dgrad)
        wgrads = [_weight_gradient(weight, made, given, ctx.fused) for weight, made, given in zip(
            kernels, _rows_of(gradient, ctx.splits), _rows_of(x, ctx.splits))]
        dbias = [torch.empty(w.shape[0], dtype=w.dtype, device=w.device) for w in kernels] if ctx.biased else []
        return dgrad, None, None, None, *wgrads, *dbias


class GroupedLinear(Base):  # ``transformer_engine.pytorch.GroupedLinear``
    def __init__(self, num_gemms: int, in_features: int, out_features: int, tp_size: int = 1, bias: bool = True,
                 return_bias: bool = False, parallel_mode: str | None = None, params_dtype: torch.dtype | None = None,
                 device: Any = "cuda", fuse_wgrad_accumulation: bool = False, **_: Any) -> None:
        super().__init__()
        self.fused = fuse_wgrad_accumulation
        self.num_gemms, self.use_bias, self.return_bias = num_gemms, bias, return_bias
        size = (out_features // (tp_size if parallel_mode == "column" else 1),
                in_features // (tp_size if parallel_mode == "row" else 1))
        for number in range(num_gemms):
            self.register_parameter(f"weight{number}", nn.Parameter(
                torch.empty(*size, dtype=params_dtype, device=device)))
            if bias:
                self.register_parameter(f"bias{number}", nn.Parameter(
                    torch.zeros(size[0], dtype=params_dtype, device=device)))

    def forward(self, x: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Any:
        assert not self.float8, "grouped products of float8"
        weights = [getattr(self, f"weight{n}") for n in range(self.num_gemms)]
        biases = [getattr(self, f"bias{n}") for n in range(self.num_gemms)] if self.use_bias else []
        inside = [] if self.return_bias else biases
        out = _GroupedLinear.apply(  # type: ignore[no-untyped-call]
            x, list(m_splits), bool(inside), self.fused, *weights, *inside)
        return (out, biases) if self.return_bias else out

    def backward_dw(self) -> None: ...
