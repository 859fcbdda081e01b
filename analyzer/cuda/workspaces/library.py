"""Workspaces that cuBLAS and cuBLASLt take from the caching allocator: ``aten/src/ATen/cuda/CublasHandlePool.cpp``.

Up to PyTorch 2.14 they are taken at the first product and kept for good, one per library, handle and stream; each
thread has a handle, so the backward pass takes another. From 2.12 on cuBLASLt uses that of cuBLAS
(``unified_cublas_and_lt_workspaces``). From 2.15 on each product takes one and gives it back (pytorch/pytorch#194311),
unless ``TORCH_CUBLAS_WORKSPACE_CACHE=1`` is set, or the device is AMD's. The states of cuDNN's random generators are
kept too, from the first recurrent layer in training with dropout on: get_dropout_state in
``aten/src/ATen/native/cudnn/RNN.cpp``.
"""
from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import torch

from analyzer.hardware.catalogue import simulated_spec
from analyzer.meta.spec import Signature
from analyzer.meta.state import MetaState

_version = torch.__version__
_aten = torch.ops.aten
_MIB = 1 << 20
# gemm's types; integer products run a kernel of PyTorch's own
_FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_COMPLEX = (torch.complex64, torch.complex128)


def _is_amd() -> bool:
    return simulated_spec().vendor == "AMD"


def _read_flag(name: str) -> bool | None:
    """An environment variable as ``c10::utils::check_env`` reads it."""
    return {"0": False, "1": True}.get(os.environ.get(name, ""))


def keeps_workspaces() -> bool:
    """Whether workspaces stay for good, as ``isCUDABlasWorkspaceCachingEnabled`` has it."""
    if _version < "2.15":
        return True
    flag = _read_flag("TORCH_CUBLAS_WORKSPACE_CACHE")
    return _is_amd() if flag is None else flag


def shares_workspaces() -> bool:
    """Whether cuBLASLt works in cuBLAS's workspace, where these are kept: only asked for before PyTorch 2.12."""
    flag = _read_flag("TORCH_CUBLASLT_UNIFIED_WORKSPACE")
    return not _is_amd() and (_version >= "2.12" if flag is None else flag)


def _majors_of_32_mib() -> tuple[int, ...]:
    """Major compute capabilities with 32 MiB: Blackwell from 2.12 on (pytorch/pytorch#175344), 11.0 from 2.14 on."""
    return (9, 10, 11, 12) if _version >= "2.14" else (9, 10, 12) if _version >= "2.12" else (9,)


def cublas_workspace_bytes() -> int:
    """Bytes of one cuBLAS workspace: ``CUBLAS_WORKSPACE_CONFIG`` (``:KIB:COUNT…``), else by parseChosenWorkspaceSize 32
    MiB on Hopper and what came after it, ``:4096:2:16:8`` on others. On AMD's devices of hipBLAS: also by
    ``HIPBLAS_WORKSPACE_CONFIG`` and ``ROCBLAS_WORKSPACE_CONFIG``, else 128 MiB on gfx94 and gfx95, 32 MiB on others.

    >>> cublas_workspace_bytes()
    33554432
    """
    names = ["CUBLAS_WORKSPACE_CONFIG"]
    if _is_amd():
        names += ["HIPBLAS_WORKSPACE_CONFIG", "ROCBLAS_WORKSPACE_CONFIG"]
    given = next((os.environ[name] for name in names if name in os.environ), "")
    pairs = re.findall(r":(\d+):(\d+)", given)
    if pairs:
        return sum(int(kib) * int(count) for kib, count in pairs) << 10
    major, minor = simulated_spec().compute_capability or (0, 0)
    if _is_amd():
        return (128 if (major, minor) >= (9, 4) else 32) * _MIB
    return 32 * _MIB if major in _majors_of_32_mib() else (2 * 4096 + 8 * 16) << 10


def cublaslt_workspace_bytes() -> int:
    """Bytes of one cuBLASLt workspace of its own: ``CUBLASLT_WORKSPACE_SIZE`` in KiB, else 1 MiB; of hipBLASLt also
    ``HIPBLASLT_WORKSPACE_SIZE``, else 76 MiB (parseCUDABlasLtWorkspaceSize).

    >>> cublaslt_workspace_bytes()
    1048576
    """
    names = ["CUBLASLT_WORKSPACE_SIZE", *(["HIPBLASLT_WORKSPACE_SIZE"] if _is_amd() else [])]
    given = re.match(r"\s*\d+", next((os.environ[name] for name in names if name in os.environ), ""))
    return int(given[0]) << 10 if given else (76 if _is_amd() else 1) * _MIB


def dropout_state_bytes() -> int:
    """Bytes of cuDNN's generators for dropout (``cudnnDropoutGetStatesSize``): one of 48 bytes (``curandStateXORWOW``
    of curand_kernel.h) for each thread of the kernel that draws a mask, which an H200 with cuDNN 9.19 ran in four
    blocks of 256 threads a multiprocessor. 0 where these are not known.

    >>> dropout_state_bytes()
    6488064
    """
    return (simulated_spec().multiprocessors or 0) * 4 * 256 * 48


_SIZES = {"cublas": cublas_workspace_bytes, "cublaslt": cublaslt_workspace_bytes, "cudnn dropout": dropout_state_bytes}


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
# Operators whose CUDA kernels ask for a cuBLAS handle, and where they do not always, when.
_PRODUCTS: dict[Any, Callable[[Signature], bool]] = {
    **dict.fromkeys((_aten.mm, _aten.addmm, _aten._addmm_activation, _aten.bmm, _aten.baddbmm, _aten.addmv, _aten.mv,
                     _aten.dot, _aten.vdot, _aten.addbmm, _aten.addmm_, _aten.baddbmm_, _aten.addmv_, _aten.addbmm_),
                    _not_empty),
    **dict.fromkeys((*_ALWAYS_LT, _aten.linalg_solve_triangular, _aten.triangular_solve), lambda signature: True)}


def _find_libraries(signature: Signature) -> tuple[str, ...] | dict[str | None, tuple[str, ...]]:
    """What is kept of a kind of call: its libraries; of a product a table of them by the vendor of the device."""
    if signature.op.overloadpacket is _aten._cudnn_rnn:
        named = signature.named_arguments()
        return ("cudnn dropout",) if named["train"] and named["dropout"] else ()
    rule, inputs = _PRODUCTS.get(signature.op.overloadpacket), signature.inputs
    if rule is None or not inputs or not inputs[-1].device.startswith("cuda") or signature.is_sparse:
        return ()
    return {} if rule(signature) else ()


def _choose_libraries(signature: Signature) -> tuple[str, ...]:
    """The libraries that a product asks for a workspace, in order."""
    if not runs_through_cublaslt(signature):
        return ("cublas",)
    # the handle of cuBLASLt is cuBLAS's, which gets its workspace when it is asked for, where these are kept; that of
    # hipBLASLt is one of its own
    if _is_amd() or not keeps_workspaces():
        return ("cublaslt",)
    return ("cublas",) if shares_workspaces() else ("cublaslt", "cublas")


def library_needs(signature: Signature) -> tuple[str, ...]:
    """The libraries whose workspace the kernel of ``signature`` asks for and that they keep, in order: of "cublaslt",
    "cublas" and "cudnn dropout".
    """
    memo = signature.memo
    found: tuple[str, ...] | dict[str | None, tuple[str, ...]] | None = memo.get("library_needs")
    if found is None:
        found = memo["library_needs"] = _find_libraries(signature)
    if not isinstance(found, dict):
        return found
    vendor = simulated_spec().vendor
    if vendor not in found:
        found[vendor] = _choose_libraries(signature) if keeps_workspaces() else ()
    return found[vendor]


def list_workspaces(signature: Signature) -> tuple[int, ...]:
    """Bytes that a product takes and gives back, once its result is there; none where libraries keep theirs."""
    if keeps_workspaces() or type(_find_libraries(signature)) is not dict:
        return ()
    return tuple([_SIZES[library]() for library in _choose_libraries(signature)])


def take_library_workspaces(state: MetaState, signature: Signature, needs: tuple[str, ...]) -> None:
    space = state.space
    device = torch.device(signature.inputs[-1].device)
    in_backward = torch._C._current_autograd_node() is not None  # autograd's thread for the device
    for library in needs:
        key = (library, device.index or 0, in_backward, space.current_stream(device.index or 0))
        if key not in space.library_workspaces:
            nbytes = _SIZES[library]()
            if not nbytes:
                continue
            region = space.library_workspaces[key] = space.reserve(device, nbytes)
            if state.recorder is not None:
                where = "backward" if in_backward else "forward"
                state.recorder.kept_workspace(region, nbytes, device, f"{library} workspace, {where} thread")
