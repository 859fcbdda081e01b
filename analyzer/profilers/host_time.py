"""Picoseconds of the host for each operator call of a step."""
from __future__ import annotations

import functools

from analyzer.hardware.host_spec import HostSpec
from analyzer.meta.signature import Signature
from analyzer.record.log import Log
from analyzer.record.op_call import OpCall

from .schedule import PICOSECONDS

# Operators that end with the host reading what the device computed: `item()`, sizes that data decides (PyTorch copies
# them to the host: ATen/native/cuda/Nonzero.cu, Unique.cu, IndexKernel.cpp's masked_select, by way of nonzero).
_READ_BACK = frozenset({"aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::is_nonzero", "aten::equal",
                        "aten::masked_select", "aten::unique_consecutive", "aten::_unique2", "aten::unique_dim",
                        "aten::bincount", "aten::repeat_interleave", "aten::_unique"})
_COPIES = frozenset({"aten::_to_copy", "aten::copy_"})


class HostTime:
    """The host's share of each call: its dispatch by phase, its kernels' launches, and the part of the modules' Python
    that comes before it, which is shared out evenly among the forward pass's calls.
    """

    def __init__(self, host: HostSpec, log: Log) -> None:
        self.host = host
        seconds = host.forward_seconds
        if any(record.phase == "backward" for record in log.phases):
            seconds += host.gradient_seconds
        calls = sum(tally.number for tally in log.tallies()
                    if tally.step == log.steps - 1 and tally.call.phase == "forward")
        if calls:
            seconds += host.module_seconds * log.count_module_calls() / calls
        self._forward = seconds
        self._notice = round(host.synchronize_seconds * PICOSECONDS)

    def picoseconds(self, call: OpCall, kernels: int) -> int:
        """The host's time for a call that launches ``kernels``."""
        host = self.host
        if call.phase == "forward" or call.recomputed:
            seconds = self._forward
        else:
            seconds = host.backward_seconds if call.phase == "backward" else host.update_seconds
        seconds += kernels * host.launch_seconds
        if takes_lists(call.signature):
            seconds += len(call.signature.inputs) * host.list_tensor_seconds
        return round(seconds * PICOSECONDS)

    def notice(self, call: OpCall) -> int | None:
        """Picoseconds until the host goes on where it waits for what the call computed, else None."""
        return self._notice if waits_for_device(call.signature) else None


@functools.lru_cache(maxsize=4096)
def takes_lists(signature: Signature) -> bool:
    """Whether an operator works on lists of tensors, each of which costs the host something."""
    name = signature.op.__name__
    return name.startswith(("_foreach_", "_fused_", "_amp_foreach"))


@functools.lru_cache(maxsize=4096)
def waits_for_device(signature: Signature) -> bool:
    """Whether the host waits until the device has computed the result."""
    schema = getattr(signature.op, "_schema", None)
    name = "" if schema is None else schema.name
    if not any(spec.device.startswith("cuda") for spec in signature.inputs):
        return False
    if name in _READ_BACK:
        return True
    to_host = any(not spec.device.startswith("cuda") for spec in signature.outputs)
    is_blocking = not (signature.kwargs.get("non_blocking") or (name == "aten::copy_" and len(signature.args) > 2
                                                                and signature.args[2]))
    return name in _COPIES and to_host and is_blocking
