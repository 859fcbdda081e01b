"""What Transformer Engine's fused attention computes, and what its context parallelism exchanges.

Of exchanges round a ring (transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py,
``AttnFuncWithCPAndKVP2P``) what all steps compute is in one kernel.
"""
from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from analyzer import register_flop_impl, register_time_impl
from analyzer.hardware.device_spec import DeviceSpec
from analyzer.hardware.kernel_time.attention import attention_time
from analyzer.hardware.kernel_time.estimate import KernelTime
from analyzer.meta.spec import Signature, TensorSpec
from analyzer.profilers.flop_registry import FlopCount

_library = torch.library.Library("transformer_engine_stand_in", "FRAGMENT")
#: ``out`` is there already. Queries see half of ``keys`` keys, on the mean; ``sequence`` is the dimension of positions.
_library.define("attend(Tensor query, Tensor key, Tensor value, Tensor(a!) out, int keys, int sequence, bool backward) "
                "-> ()")
_library.impl("attend", lambda *args: None, "CompositeExplicitAutograd")
attend = torch.ops.transformer_engine_stand_in.attend.default


def _flops(query: TensorSpec, key: TensorSpec, value: TensorSpec, out_: TensorSpec, keys: int, sequence: int,
           backward: bool, out: Any) -> FlopCount:
    widths = (3, 2) if backward else (1, 1)
    macs = query[0] * query[1] * query[2] * keys * (widths[0] * query[3] + widths[1] * value[3])
    return FlopCount(2 * macs, macs, macs)


def _time(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    query, key, value, _out, keys, sequence, backward = signature.args
    length, is_whole = query[sequence], keys == query[sequence]
    return attention_time("cudnn", query[1 - sequence], query[2], key[2], length, keys if is_whole else keys // 2,
                          query[3], value[3], str(query.dtype), device, causal=is_whole, backward=backward)


register_flop_impl(attend)(_flops)
register_time_impl(attend)(_time)


class Exchange:
    """How the ranks of a group, or of two, that have parts of a sequence each come to the keys of all."""

    def __init__(self, group: Any, kind: str | None) -> None:
        groups = group if isinstance(group, (list, tuple)) else [group]
        self.groups = [one for one in groups if one is not None and one.size() > 1]
        self.ways = (kind or "p2p").split("+") if len(self.groups) > 1 else [(kind or "p2p").split("+")[-1]]
        self.ranks = 1
        for one in self.groups:
            self.ranks *= one.size()

    def run(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, backward: bool) -> None:
        """The messages of a pass; their tensors are gone afterwards, and as large as those that they came from."""
        for group, way in zip(self.groups, self.ways):
            if way == "a2a":
                for tensor in (q, k, v, out):
                    dist.all_to_all_single(torch.empty_like(tensor), tensor.contiguous(), group=group)
            elif way == "all_gather":
                self._gather(k, v, group, backward)
            else:
                self._go_round(q, k, v, out, group, backward)

    def _gather(self, k: Tensor, v: Tensor, group: Any, backward: bool) -> None:
        whole = [torch.empty(group.size() * t.shape[0], *t.shape[1:], dtype=t.dtype, device=t.device) for t in (k, v)]
        for tensor, gathered in zip((k, v), whole):
            dist.all_gather_into_tensor(gathered, tensor.contiguous(), group=group)
        for tensor, gathered in zip((k, v), whole) if backward else ():
            dist.reduce_scatter_tensor(torch.empty_like(tensor), gathered, group=group)

    def _go_round(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, group: Any, backward: bool) -> None:
        """Forward keys and values, each step's in a buffer of its own, beside what each step gives, which is added up
        at the end: half of the queries see the keys of a later rank. Backward keys and values with their gradients, in
        two buffers, beside the gradients of a step and the sum of the queries'.
        """
        n, rank = group.size(), dist.get_rank(group)
        after, before = (dist.get_global_rank(group, (rank + step) % n) for step in (1, -1))
        held = [torch.cat([k.flatten(), v.flatten()])]
        if backward:
            held = [torch.empty(2, held[0].numel(), dtype=k.dtype, device=k.device) for _ in range(2)]
        made = [torch.empty_like(q)] if backward else []
        for step in range(n):
            if backward:
                _gradients = [torch.empty_like(t) for t in (q, k, v)]
                parts = slice(step == n - 1, 2 - (step == 0))  # the gradients begin a step later, and end one later
                sent, received = held[step % 2][parts], held[(step + 1) % 2][parts]
            else:
                made.append(torch.empty(out.numel() // (1 if step <= rank else 2), dtype=out.dtype, device=out.device))
                if step == n - 1:
                    break
                sent = held[-1]
                held.append(received := torch.empty_like(sent))
            works = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, after, group),
                                            dist.P2POp(dist.irecv, received, before, group)])
            for work in works:
                work.wait()
