"""Picoseconds of the host for each operator call of a step."""
from __future__ import annotations

from typing import NamedTuple

from analyzer.hardware.cluster_spec import HostSpec
from analyzer.meta.spec import Signature
from analyzer.record.call_table import OpCall
from analyzer.record.log import Log

from .schedule import PICOSECONDS

# Operators that end with the host reading what the device computed: `item()`, sizes that data decides (PyTorch copies
# them to the host: ATen/native/cuda/Nonzero.cu, Unique.cu, IndexKernel.cpp's masked_select, by way of nonzero).
_READ_BACK = frozenset({"aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::is_nonzero", "aten::equal",
                        "aten::masked_select", "aten::unique_consecutive", "aten::_unique2", "aten::unique_dim",
                        "aten::bincount", "aten::repeat_interleave", "aten::_unique"})
MEMO_KEY = "host_work"
_COPIES = frozenset({"aten::_to_copy", "aten::copy_"})


class HostTime:
    """The host's share of each call: its dispatch by phase, its kernels' launches, and the part of the modules' Python
    and of checkpointing's hooks that comes before it, which is shared out evenly among the calls of the model's code.
    """

    def __init__(self, host: HostSpec, log: Log) -> None:
        self.host = host
        trains = any(record.phase == "backward" for record in log.phases)
        calls = again = 0
        for tally in log.tallies():
            if tally.step == log.steps - 1:
                calls += tally.number if tally.call.phase == "forward" else 0
                again += tally.number if tally.call.recomputed else 0
        seconds = forward_seconds(host, calls, again, log.count_module_calls(), trains)
        self._of = {"forward": seconds.forward, "recompute": seconds.again, "backward": host.backward_seconds}
        #: how long the host takes to see that what it waited for is done
        self.notice_picoseconds = round(host.synchronize_seconds * PICOSECONDS)

    def picoseconds(self, call: OpCall, kernels: int) -> int:
        """The host's time for a call that launches ``kernels``."""
        host = self.host
        pace = self._of.get("recompute" if call.recomputed else call.phase, host.update_seconds)
        work = _host_work(call.signature)
        return round(add_launches(host, pace, kernels, work.convolutions, work.listed) * PICOSECONDS)

    def notice(self, call: OpCall) -> int | None:
        """Picoseconds until the host goes on where it waits for what the call computed, else None."""
        return self.notice_picoseconds if _host_work(call.signature).waits else None


class _HostWork(NamedTuple):
    """What a signature alone tells of the host's work."""

    convolutions: int
    listed: int
    waits: bool


def _host_work(signature: Signature) -> _HostWork:
    """Worked out once for a signature, which never changes."""
    found: _HostWork | None = signature.memo.get(MEMO_KEY)
    if found is None:
        found = signature.memo[MEMO_KEY] = _HostWork(count_convolutions(signature), count_listed(signature),
                                                     waits_for_device(signature))
    return found


class ForwardSeconds(NamedTuple):
    """What the host takes for an operator that the model's code calls, the first time and when it runs again."""

    forward: float
    again: float


def add_launches(host: HostSpec, seconds: float, kernels: int, convolutions: int, listed: int) -> float:
    """The host's time for an operator that takes ``seconds`` itself, with what it launches and the tensors of its
    lists.
    """
    seconds += kernels * host.launch_seconds + convolutions * host.library_seconds
    return seconds + listed * host.list_tensor_seconds


def forward_seconds(host: HostSpec, calls: int, again: int, module_calls: int, trains: bool) -> ForwardSeconds:
    """The pace of the model's code, which makes ``calls`` of operators, and ``again`` of recomputation, in so many
    calls of modules.
    """
    base = host.forward_seconds + (host.gradient_seconds if trains else 0.0)
    base += host.module_seconds * module_calls / max(1, calls + again)
    return ForwardSeconds(base + host.checkpoint_seconds * again / max(1, calls), base + host.checkpoint_seconds)


def count_convolutions(signature: Signature) -> int:
    """How many convolutions an operator runs: its backward one for each gradient that is asked for."""
    name = signature.op.__name__
    if "convolution" not in name:
        return 0
    masks = [a for a in signature.args if isinstance(a, (list, tuple)) and len(a) == 3 and isinstance(a[0], bool)]
    return sum(masks[-1][:2]) if "backward" in name and masks else 1


def count_listed(signature: Signature) -> int:
    """How many tensors an operator works on in lists, each of which costs the host something."""
    takes_lists = signature.op.__name__.startswith(("_foreach_", "_fused_", "_amp_foreach"))
    return len(signature.inputs) if takes_lists else 0


def waits_for_device(signature: Signature) -> bool:
    """Whether the host waits until the device has computed the result."""
    schema = getattr(signature.op, "_schema", None)
    name = "" if schema is None else schema.name
    if name not in _READ_BACK and name not in _COPIES:
        return False
    if not any(spec.device.startswith("cuda") for spec in signature.inputs):
        return False
    if name in _READ_BACK:
        return True
    to_host = any(not spec.device.startswith("cuda") for spec in signature.outputs)
    is_blocking = not (signature.kwargs.get("non_blocking") or (name == "aten::copy_" and len(signature.args) > 2
                                                                and signature.args[2]))
    return to_host and is_blocking
