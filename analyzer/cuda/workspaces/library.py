"""Workspaces that cuBLAS and cuBLASLt take from the caching allocator at their first product and keep for good, one per
library, handle and stream; each thread has a handle, so the backward pass takes another. Rules of PyTorch 2.8 to 2.11,
``aten/src/ATen/cuda/CublasHandlePool.cpp``. So are the states of cuDNN's random generators, from the first recurrent
layer in training with dropout on: get_dropout_state in ``aten/src/ATen/native/cudnn/RNN.cpp``. From 2.15 on
each product takes a workspace and gives it back when it is done. AMD's devices have hipBLAS and hipBLASLt, by the parts
of the same file under ``USE_ROCM``.
"""
from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import torch

from analyzer.hardware.catalogue import ask_apart, asked, simulated_spec
from analyzer.meta.operator_info import Stage, kernel_stages
from analyzer.meta.spec import Signature
from analyzer.meta.state import MetaState

from .reduction import one_stage

_aten = torch.ops.aten
_MIB = 1 << 20
# gemm's types; integer products run a kernel of PyTorch's own
_FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_COMPLEX = (torch.complex64, torch.complex128)


TORCH = torch.__version__


def keeps_workspaces() -> bool:
    """Whether a workspace stays once it was asked for. From 2.15 on, its nightly builds too, only where
    ``TORCH_CUBLAS_WORKSPACE_CACHE=1`` says so (pytorch/pytorch#194311, isCUDABlasWorkspaceCachingEnabled).
    """
    return TORCH < "2.15.0.dev0" or os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1"


def _majors_of_32_mib() -> tuple[int, ...]:
    """Major compute capabilities whose workspaces of cuBLAS are of 32 MiB."""
    return (9, 10, 11, 12) if TORCH >= "2.15.0.dev0" else (9, 10, 12) if TORCH >= "2.12" else (9,)


@asked
def cublas_workspace_bytes() -> int:
    """Bytes of one cuBLAS workspace: ``CUBLAS_WORKSPACE_CONFIG`` (``:KIB:COUNT…``), else by parseChosenWorkspaceSize 32
    MiB on Hopper, from 2.12 on on Blackwell (pytorch/pytorch#175344), from 2.15 on for compute capability 11, too;
    ``:4096:2:16:8`` on others.

    >>> cublas_workspace_bytes()
    33554432
    """
    pairs = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        return sum(int(kib) * int(count) for kib, count in pairs) << 10
    major, _ = simulated_spec().compute_capability or (0, 0)
    return 32 * _MIB if major in _majors_of_32_mib() else (2 * 4096 + 8 * 16) << 10


def cublaslt_workspace_bytes() -> int:
    """Bytes of one cuBLASLt workspace: ``CUBLASLT_WORKSPACE_SIZE`` in KiB, else 1 MiB (parseCUDABlasLtWorkspaceSize).

    >>> cublaslt_workspace_bytes()
    1048576
    """
    given = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
    return int(given) << 10 if given.isdigit() else _MIB


@asked
def dropout_state_bytes() -> int:
    """Bytes of cuDNN's generators for dropout (``cudnnDropoutGetStatesSize``): one of 48 bytes (``curandStateXORWOW``
    of curand_kernel.h) for each thread of the kernel that draws a mask, which an H200 with cuDNN 9.19 ran in four
    blocks of 256 threads a multiprocessor. 0 where these are not known.

    >>> dropout_state_bytes()
    6488064
    """
    return (simulated_spec().multiprocessors or 0) * 4 * 256 * 48


@asked
def is_rocm() -> bool:
    return simulated_spec().vendor == "AMD"


def _read_settings(*names: str) -> str:
    return next((os.environ[name] for name in names if name in os.environ), "")


@asked
def hipblas_workspace_bytes() -> int:
    """Bytes of one hipBLAS workspace (parseChosenWorkspaceSize): as a variable says, else 128 MiB on the MI300 and
    MI350 series (gfx94, gfx95), 32 MiB on others.
    """
    pairs = re.findall(r":(\d+):(\d+)", _read_settings(
        "CUBLAS_WORKSPACE_CONFIG", "HIPBLAS_WORKSPACE_CONFIG", "ROCBLAS_WORKSPACE_CONFIG"))
    if pairs:
        return sum(int(kib) * int(count) for kib, count in pairs) << 10
    return (128 if simulated_spec().compute_capability in ((9, 4), (9, 5)) else 32) * _MIB


def hipblaslt_workspace_bytes() -> int:
    """Bytes of one hipBLASLt workspace (parseCUDABlasLtWorkspaceSize): as a variable says, in KiB, else 76 MiB, from
    2.15 on 80 MiB (pytorch/pytorch#197201).
    """
    given = _read_settings("CUBLASLT_WORKSPACE_SIZE", "HIPBLASLT_WORKSPACE_SIZE")
    return int(given) << 10 if given.isdigit() else (80 if TORCH >= "2.15.0.dev0" else 76) * _MIB


_SIZES = {"cublas": cublas_workspace_bytes, "cublaslt": cublaslt_workspace_bytes, "cudnn dropout": dropout_state_bytes,
          "hipblas": hipblas_workspace_bytes, "hipblaslt": hipblaslt_workspace_bytes}

#: gfx90a, gfx942, gfx950, gfx1200: getHipblasltPreferredArchs, by blasPreferredBackend in ``aten/src/ATen/Context.cpp``
_PREFERS_HIPBLASLT = ((9, 0), (9, 4), (9, 5), (12, 0))


@asked
def _prefers_hipblaslt() -> bool:
    return simulated_spec().compute_capability in _PREFERS_HIPBLASLT


def _choose_rocm_library(signature: Signature) -> str:
    """What a product runs through: gemm_internal and bgemm_internal in ``aten/src/ATen/cuda/CUDABlas.cpp`` give
    matrices of doubles and of complex numbers to hipBLAS, and others to hipBLASLt where that is preferred.
    """
    packet, dtype = signature.op.overloadpacket, signature.inputs[-1].dtype
    is_matrix = packet in _GEMMS and dtype in _FLOATING[1:] and _prefers_hipblaslt()
    return "hipblaslt" if is_matrix or packet in _ALWAYS_LT else "hipblas"


def runs_through_cublaslt(signature: Signature) -> bool:
    """Source: isInputCompliesAddmmCudaLt in ``aten/src/ATen/native/cuda/Blas.cpp``."""
    packet = signature.op.overloadpacket
    if packet in _ALWAYS_LT:
        return True
    if packet not in (_aten.addmm, _aten._addmm_activation) or os.environ.get("DISABLE_ADDMM_CUDA_LT") == "1":
        return False
    bias, left, right = signature.args[:3]
    beta = signature.kwargs.get("beta", 1)
    is_bias = len(bias) == 1 and bias[0] == right[1] and bias.stride == (1,)
    return bool(beta == 1 and is_bias and left.dtype in _FLOATING and min(*left, *right) > 1)


def _not_empty(signature: Signature) -> bool:
    matrices = signature.inputs[-2:]
    return all(m.numel for m in matrices) and matrices[0].dtype in (*_FLOATING, *_COMPLEX)


_ALWAYS_LT = (_aten._scaled_mm, _aten._int_mm)
_GEMMS = (_aten.mm, _aten.addmm, _aten._addmm_activation, _aten.bmm, _aten.baddbmm, _aten.addbmm, _aten.addmm_,
          _aten.baddbmm_, _aten.addbmm_)
# Operators whose CUDA kernels ask for a cuBLAS handle, and where they do not always, when.
_PRODUCTS: dict[Any, Callable[[Signature], bool]] = {
    **dict.fromkeys((_aten.mm, _aten.addmm, _aten._addmm_activation, _aten.bmm, _aten.baddbmm, _aten.addmv, _aten.mv,
                     _aten.dot, _aten.vdot, _aten.addbmm, _aten.addmm_, _aten.baddbmm_, _aten.addmv_, _aten.addbmm_),
                    _not_empty),
    **dict.fromkeys((*_ALWAYS_LT, _aten.linalg_solve_triangular, _aten.triangular_solve), lambda signature: True)}


def asks_for_workspace(signature: Signature) -> bool:
    """Whether the kernel of ``signature`` is a product on a GPU, which runs through cuBLAS or cuBLASLt."""
    rule, inputs = _PRODUCTS.get(signature.op.overloadpacket), signature.inputs
    return bool(rule is not None and inputs and inputs[-1].device.startswith("cuda") and not signature.is_sparse
                and rule(signature))


def passing_workspace_bytes(signature: Signature) -> int:
    """Bytes of the workspace that a product takes and gives back: that of cuBLASLt, or of cuBLAS (CUDABlas.cpp, by
    allocateCUDABlasWorkspace); 0 where workspaces are kept.
    """
    if keeps_workspaces() or not asks_for_workspace(signature):
        return 0
    if is_rocm():
        return _SIZES[_choose_rocm_library(signature)]()
    return cublaslt_workspace_bytes() if runs_through_cublaslt(signature) else cublas_workspace_bytes()


@kernel_stages(_aten._scaled_mm, _aten._int_mm, _aten.addmv, _aten.addmv_, _aten.mv, _aten.dot, _aten.vdot,
               _aten.linalg_solve_triangular, _aten.triangular_solve)
def _hold_while_it_runs(signature: Signature) -> tuple[Stage, ...]:
    return one_stage(passing_workspace_bytes(signature))


def library_needs(signature: Signature) -> tuple[str, ...]:
    """The libraries of which the kernel of ``signature`` asks for a workspace that stays, in order: of "cublaslt",
    "cublas" and "cudnn dropout"; on AMD's devices one of "hipblaslt" and "hipblas".
    """
    if not isinstance(signature.op, torch._ops.OpOverload):  # a function with a registered shape
        return ()
    if is_rocm():
        needs = asks_for_workspace(signature) and keeps_workspaces()
        return (_choose_rocm_library(signature),) if needs else ()
    found = signature.memo.get("library_needs")
    if found is None and signature.op.overloadpacket is _aten._cudnn_rnn:
        named = signature.named_arguments()
        found = signature.memo["library_needs"] = ("cudnn dropout",) if named["train"] and named["dropout"] else ()
    elif found is None:
        if not asks_for_workspace(signature) or not keeps_workspaces():
            found = ()
        elif runs_through_cublaslt(signature) and os.environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE") != "1":
            # the handle of cuBLASLt is cuBLAS's, which gets its workspace when asked for
            found = ("cublaslt", "cublas")
        else:
            found = ("cublas",)
        signature.memo["library_needs"] = found
    return found


def take_library_workspaces(state: MetaState, signature: Signature, needs: tuple[str, ...]) -> None:
    take_workspaces(state, torch.device(signature.inputs[-1].device), needs)


def _join_sizes(nbytes: int, others: dict[str, int]) -> tuple[tuple[int, dict[str, int]], list[str]]:
    """Bytes of a workspace, and those on other devices; of these make a run of their own on which alone there is none,
    or one.
    """
    refused = [name for name, size in others.items() if bool(size) != bool(nbytes)]
    return (nbytes, {name: size for name, size in others.items() if name not in refused}), refused


def take_workspaces(state: MetaState, device: torch.device, needs: tuple[str, ...]) -> None:
    """Take the workspaces of libraries on a device that are not there yet."""
    space = state.space
    in_backward = torch._C._current_autograd_node() is not None  # autograd's thread for the device
    for library in needs:
        key = (library, device.index or 0, in_backward, space.current_stream(device.index or 0))
        if key not in space.library_workspaces:
            nbytes, elsewhere = ask_apart(_SIZES[library], (), _join_sizes)
            if not nbytes:
                continue
            region = space.library_workspaces[key] = space.reserve(device, nbytes)
            if state.recorder is not None:
                where = "backward" if in_backward else "forward"
                state.recorder.memory.kept_workspace(region, nbytes, device, f"{library} workspace, {where} thread",
                                                    elsewhere)
