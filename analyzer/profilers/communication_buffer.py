"""What data-parallel wrappers hold beside parameters, gradients and states: told by the collectives that use it."""
from __future__ import annotations

from collections.abc import Callable

from analyzer.record.log import Log
from analyzer.record.op_call import OpCall
from analyzer.record.storage_lifetime import StorageLifetime

from .memory import BUFFER, RESHARDED, UNSHARDED, forward_ends, outlives_forward

BUILT = "held by the model"  #: what a wrapper made that is neither parameter nor buffer
CAST = "cast copy"  #: of a parameter
_GATHERS = {"_allgather_base_", "allgather_into_tensor_coalesced_"}
_SENDS = {"send"}  # what is sent is what a stage computed
_COPIES = {"aten::copy_", "aten::_to_copy"}  # of FSDP1: a shard in the dtype of computation, or from the host


def name_buffers(log: Log, made_to_communicate: Callable[[int], bool] = lambda number: False) -> None:
    """Give storages of a log that wrappers keep a category. What parameters, or copies of them, are gathered into is an
    *unsharded parameter*, what FSDP keeps of it for the backward pass (on a smaller mesh) a *resharded parameter*. A
    *communication buffer* is what ``made_to_communicate`` says of its number; what FSDP packs
    parameters and gradients into (``torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py``); and what else a
    collective of c10d reads or writes in place, but for activations: what outlives the forward pass that made it.
    """
    namer = _Namer(log)
    for number in log.storages:
        if made_to_communicate(number):
            namer.name(number, BUFFER)
    for call in log.calls:
        namer.hear(call)


class _Namer:
    def __init__(self, log: Log) -> None:
        self.log, self.storages, self.ends = log, log.storages, forward_ends(log)
        self.copies: set[int] = set()  #: storages of copies of parameters

    def name(self, number: int, category: str) -> None:
        lifetime = self.storages.get(number)
        if lifetime is not None and lifetime.category in ("", BUILT):
            lifetime.category = category

    def hear(self, call: OpCall) -> None:
        """Name what a call uses."""
        op = call.signature.op
        namespace = getattr(op, "namespace", "")
        if namespace == "fsdp":
            self._hear_fsdp(op._schema.name, call)
        elif namespace == "c10d":
            self._hear_c10d(op._schema.name.rpartition("::")[2], call)
        elif namespace == "aten" and op._schema.name in _COPIES and self._category(call.inputs[-1]) == "parameter":
            self.copies.add(call.inputs[0] if len(call.inputs) == 2 else call.outputs[0])

    def _hear_fsdp(self, name: str, call: OpCall) -> None:
        if name == "fsdp::split_with_sizes_copy":
            self.name(call.inputs[0], BUFFER)
            for number in call.inputs[1:]:
                self.name(number, UNSHARDED)
        elif name == "fsdp::all_gather_copy_in":
            for number in call.outputs:
                self.name(number, BUFFER)
            for number in call.inputs:  # a smaller mesh's shards, which forward left behind, or casts of shards
                lifetime = self.storages.get(number)
                if lifetime is not None:
                    self.name(number, RESHARDED if self._is_activation(lifetime) else CAST)
        elif name == "fsdp::chunk_cat":
            self.name(call.inputs[-1], BUFFER)  # out=

    def _hear_c10d(self, name: str, call: OpCall) -> None:
        if name in _SENDS:
            return
        if name in _GATHERS and (call.inputs[-1] in self.copies or self._category(call.inputs[-1]) == "parameter"):
            for number in call.inputs[:-1]:
                self.name(number, UNSHARDED)
        for number in call.inputs:
            lifetime = self.storages.get(number)
            if lifetime is not None and not self._is_activation(lifetime):
                self.name(number, BUFFER)

    def _category(self, number: int) -> str:
        lifetime = self.storages.get(number)
        return "unknown" if lifetime is None else lifetime.category

    def _is_activation(self, lifetime: StorageLifetime) -> bool:
        return not lifetime.category and lifetime.phase == "forward" and outlives_forward(
            lifetime, self.ends.get(lifetime.step, ()), self.log)
