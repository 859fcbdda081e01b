"""A replayed block in the log: where it stands, its rows and modules."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from analyzer.record.log import CALLER, Log, LogModuleCall, LogNode, identifier

from .captured_block import BLOCK, CapturedBlock
from .segment import Site


class BlockSite(Site):
    """The place of a block of the model's, at the module ``path``; ``numbers`` of what the block holds are labels until
    they are looked up.

    ``producers`` tell for each row that stands for an input which node of the model made that, ``running_call`` which
    call of a module it is, ``called_from`` which line of code calls it.
    """

    def __init__(self, captured: CapturedBlock, path: str, numbers: Iterable[Sequence[Any]],
                 producers: dict[int, int | None], log: Log, step: int, running_call: int | None,
                 called_from: str | None) -> None:
        base = len(log.node_slots)
        super().__init__(numbers, captured.rows, range(base, base + len(captured.rows)))
        self.path, self.producers, self.step, self.running_call = path, producers, step, running_call
        self.called_from = called_from
        self.grad_specs: Any = None  #: of the gradients that its backward pass was given, once it ran
        self.source, self.held = captured.log, range(captured.inputs, captured.inputs + len(captured.held))
        self.index_of_path = log.index_of_path
        self.first_module_call = len(log.module_call_slots)
        self.slot_of = captured.segment.slot_of
        self.call_offset = len(log.call_slots) - captured.first_call

    def module_of(self, module: int) -> int:
        """The index in the log of one of the record's modules."""
        below = self.source.modules[module].path
        if below == BLOCK:  # the model around it
            return 0
        return self.index_of_path[f"{self.path}.{below}" if below else self.path]

    def reserve(self, log: Log) -> None:
        """Leave places in the log for what is written out later."""
        log.node_slots.extend([None] * len(self.own_rows))
        log.module_call_slots.extend([None] * (len(self.source.module_call_slots) - 1))

    def count_module_calls(self) -> int:
        """As `Pending`."""
        return sum(m.calls if m.path else max(0, m.calls - 1) for m in self.source.modules)

    def expand(self, log: Log) -> None:
        """Write the rows of the block into the log, and what its modules were given."""
        numbers, source = self.numbers, self.source
        for slot in self.held:
            numbers[slot] = log.number_of_label[f"{self.path}.{numbers[slot]}"]
        self.modules = [self.module_of(i) for i in range(len(source.modules))]
        for i, theirs in zip(self.modules, source.modules):
            mine = log.modules[i]
            # the block's own call is counted where it is called
            mine.calls += theirs.calls if theirs.path else max(0, theirs.calls - 1)
            mine.inputs, mine.outputs = mine.inputs or theirs.inputs, mine.outputs or theirs.outputs
        before = self.first_module_call - 1
        for i, call in enumerate(source.module_calls[1:], before + 1):  # the first is the root's own
            parent = self.running_call if not call.parent else before + call.parent
            log.module_call_slots[i] = LogModuleCall(self.modules[call.module], parent, call.inputs, call.outputs)
        self._write_rows(log)

    def _write_rows(self, log: Log) -> None:
        slot_of, rows, numbers, source = self.slot_of, self.rows, self.numbers, self.source
        for row in self.own_rows:
            node = source.node_slots[row]
            assert node is not None
            target = node.target
            if node.op == "call_module":  # "" is a module made in the forward pass: it runs for the block
                target = f"{self.path}.{target}" if target else self.path
            base = identifier(target) if node.op == "call_module" else node.base
            producers = [self.producers[j] if j in self.producers else rows[j] for j in node.inputs]
            log.node_slots[rows[row]] = LogNode(
                node.op, "", target, self.modules[node.module], base=base,
                source=self.called_from if node.source == CALLER else node.source, region=node.region, step=self.step,
                outputs=tuple([(numbers[slot_of[n]], spec) for n, spec in node.outputs]), inputs=tuple(
                    dict.fromkeys(p for p in producers if p is not None)), reads=tuple(
                        dict.fromkeys(numbers[slot_of[n]] for n in node.reads)))
