"""Names for the storages that nodes keep for backward, and the records of the tensors in them."""
from __future__ import annotations

from collections.abc import Iterable, Mapping

from analyzer.profilers.saved_tensor import SavedRow
from analyzer.record.log import Log

from .node_info import SavedTensorInfo, describe_spec


class SavedStorages:
    """The storages that nodes keep: by which node each was made, and as which of those that the node made.

    ``rows`` holds what each node keeps and reads, by its index in the log.
    """

    def __init__(self, log: Log, rows: Mapping[int, Iterable[SavedRow]]) -> None:
        self.log = log
        #: number -> (name of the storage, who made it, kind)
        self._names: dict[int, tuple[str, str, str]] = {}
        for index, saved in rows.items():
            node = log.nodes[index]
            own = [row.number for row in saved if self._is_made_by(index, row.number)]
            kind = "input" if node.op == "placeholder" else "activation"
            for i, number in enumerate(n for n in own if n not in self._names):
                self._names[number] = f"{node.name}:{i}", node.name, kind
        for saved in rows.values():
            for row in saved:
                if row.number not in self._names:
                    self._names[row.number] = self._find(row.number)

    def _is_made_by(self, index: int, number: int) -> bool:
        lifetime = self.log.storages[number]
        if lifetime.category == "input":
            node = self.log.nodes[index]
            return node.op == "placeholder" and number in [n for n, _ in node.outputs]
        return lifetime.node == index and not lifetime.category

    def describe(self, rows: Iterable[SavedRow]) -> tuple[SavedTensorInfo, ...]:
        """The records of what one node keeps and reads."""
        found = []
        for row in rows:
            storage, made_by, kind = self._names[row.number]
            spec = describe_spec(row.spec)
            found.append(SavedTensorInfo(spec.shape, spec.dtype, spec.device, storage,
                                         self.log.storages[row.number].nbytes, made_by, kind, row.is_read))
        return tuple(found)

    def _find(self, number: int) -> tuple[str, str, str]:
        """Of a storage that no node of the step keeps: the model's own, or one from outside of the step."""
        lifetime = self.log.storages[number]
        if lifetime.category in ("parameter", "buffer", "input"):
            return lifetime.label, lifetime.label, lifetime.category
        made_by = self.log.nodes[lifetime.node].name if lifetime.node >= 0 else "(outside the model)"
        count = sum(maker == made_by for _, maker, _ in self._names.values())
        return f"{made_by}:{count}", made_by, "activation"
