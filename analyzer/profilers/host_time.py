"""Picoseconds of the host for each operator call of a step."""
from __future__ import annotations

import torch

from analyzer.hardware import DeviceSpec
from analyzer.hardware.cluster_spec import HostSpec, host_of
from analyzer.hardware.kernel_time.estimate import find_constants
from analyzer.hardware.kernel_time.generated import FAMILY
from analyzer.meta.fused_kernel import FusedKernel
from analyzer.meta.spec import Launch, Signature
from analyzer.record.call_table import OpCall
from analyzer.record.log import Log

from .operator.registration import kept_with_signature
from .schedule import PICOSECONDS

# Operators that end with the host reading what the device computed: `item()`, sizes that data decides (PyTorch copies
# them to the host: ATen/native/cuda/Nonzero.cu, Unique.cu, IndexKernel.cpp's masked_select, by way of nonzero).
_READ_BACK = frozenset({"aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::is_nonzero", "aten::equal",
                        "aten::masked_select", "aten::unique_consecutive", "aten::_unique2", "aten::unique_dim",
                        "aten::bincount", "aten::repeat_interleave", "aten::_unique"})


_aten = torch.ops.aten


class HostTime:
    """The host's share of each call: dispatch, launches, and an even part of the Python of modules and hooks."""

    def __init__(self, device: DeviceSpec, log: Log) -> None:
        self.host = host = host_of(device)
        self._compiled = find_constants(FAMILY, device)
        steady = [(call, number) for step, call, _, number in log.tallies() if step == log.steps - 1]
        again = [(call.signature, number) for call, number in steady if call.recomputed]
        self._paces = find_paces(
            host, sum(number for call, number in steady if call.phase == "forward"),
            sum(number for _, number in again), sum(number for signature, number in again if is_repacked(signature)),
            log.count_module_calls(), any(record.phase == "backward" for record in log.phases))
        #: how long the host takes to see that what it waited for is done
        self.notice_picoseconds = round(host.synchronize_seconds * PICOSECONDS)

    def picoseconds(self, call: OpCall, kernels: int) -> int:
        """The host's time for a call that launches ``kernels``."""
        if call.signature.launch is not None:
            return round(self._launch_seconds(call.signature, call.signature.launch, kernels) * PICOSECONDS)
        pace = self._paces.get("recompute" if call.recomputed else call.phase, self.host.update_seconds)
        convolutions, listed, _ = _read(call.signature)
        kernels = min(kernels, 1) if _loops(call.signature) else kernels
        return round(add_launches(self.host, pace, kernels, convolutions, listed) * PICOSECONDS)

    def _launch_seconds(self, signature: Signature, launch: Launch, kernels: int) -> float:
        """A compiled graph's share of a call: with the first one the checks of what the graph is given."""
        constants, seconds = self._compiled, 0.0
        if launch.inputs is not None:
            seconds = constants["graph_seconds"] + launch.inputs * constants["tensor_seconds"]
            seconds += constants["graph_launch_seconds"] if launch.captured else 0.0
        if launch.captured:
            return seconds
        seconds += constants["kernel_seconds" if isinstance(signature.op, FusedKernel) else "extern_seconds"]
        return add_launches(self.host, seconds, kernels, count_convolutions(signature), 0)

    def loop_seconds(self, signature: Signature, kernels: int) -> float:
        """How long a library takes that launches an operator's kernels while the first of them run: of each as long as
        a compiled program does, which has no dispatcher between two either (``benchmarks/calibration/inductor.py``).
        """
        return self._compiled["kernel_seconds"] * kernels if _loops(signature) else 0.0

    def notice(self, call: OpCall) -> int | None:
        """Picoseconds until the host goes on where it waits for what the call computed, else None."""
        return self.notice_picoseconds if _read(call.signature)[2] else None


def _loops(signature: Signature) -> bool:
    """Whether cuDNN launches kernels for each step of a sequence."""
    return getattr(signature.op, "overloadpacket", None) in (_aten._cudnn_rnn, _aten._cudnn_rnn_backward)


@kept_with_signature
def _read(signature: Signature) -> tuple[int, int, bool]:
    """What a signature alone tells of the host's work: convolutions, tensors in lists, and whether it waits."""
    return count_convolutions(signature), count_listed(signature), waits_for_device(signature)


def add_launches(host: HostSpec, seconds: float, kernels: int, convolutions: int, listed: int) -> float:
    """The host's time for an operator that takes ``seconds`` itself, with its launches and the tensors of its lists."""
    seconds += kernels * host.launch_seconds + convolutions * host.library_seconds
    return seconds + listed * host.list_tensor_seconds


def find_paces(host: HostSpec, calls: int, again: int, packed: int, module_calls: int,
               trains: bool) -> dict[str, float]:
    """Seconds of an operator by phase, for so many ``calls`` of operators, and ``again`` in recomputation, which fills
    the places of ``packed`` tensors.
    """
    base = host.forward_seconds + (host.gradient_seconds if trains else 0.0)
    base += host.module_seconds * module_calls / max(1, calls + again)
    packing = host.checkpoint_seconds * packed
    return {"forward": base + packing / max(1, calls), "recompute": base + packing / max(1, again),
            "backward": host.backward_seconds}


def is_repacked(signature: Signature) -> bool:
    """Whether a call of a recomputation is of the hook that keeps a tensor: it detaches it (torch/utils/checkpoint.py,
    ``_recomputation_hook``). A reentrant checkpoint, without hooks, detaches its inputs alone.
    """
    return signature.op is torch.ops.aten.detach.default


def count_convolutions(signature: Signature) -> int:
    """How many calls of cuDNN an operator makes for convolutions or recurrent layers: backward one for each gradient
    that is asked for, of a recurrent layer that of the data in any case.
    """
    name = signature.op.__name__
    if _loops(signature):
        return 1 + ("backward" in name and bool(signature.args[-1][-1]))
    if "convolution" not in name:
        return 0
    masks = [a for a in signature.args if isinstance(a, (list, tuple)) and len(a) == 3 and isinstance(a[0], bool)]
    return sum(masks[-1][:2]) if "backward" in name and masks else 1


def count_listed(signature: Signature) -> int:
    """How many tensors an operator works on in lists, each of which costs the host something."""
    takes_lists = signature.op.__name__.startswith(("_foreach_", "_fused_", "_amp_foreach"))
    return len(signature.inputs) if takes_lists else 0


def waits_for_device(signature: Signature) -> bool:
    name = getattr(getattr(signature.op, "_schema", None), "name", "")
    is_copy = name in ("aten::_to_copy", "aten::copy_")
    if name not in _READ_BACK and not is_copy or not any(s.device.startswith("cuda") for s in signature.inputs):
        return False
    is_blocking = not (signature.kwargs.get("non_blocking") or name == "aten::copy_" and any(signature.args[2:]))
    return not is_copy or is_blocking and any(not s.device.startswith("cuda") for s in signature.outputs)
