"""The tree of modules of a profile: what each module does itself, from the log, and sums upwards."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from analyzer.record.log import Log

from .info import CostInfo, ModuleCall, ModuleInfo, OperatorInfo
from .module_shape import ModuleShape
from .node_info import TensorInfo, describe_spec
from .wrapper import WRAPPER_TYPE, ModulePaths, join_path

_COST_FIELDS = {f.name for f in fields(CostInfo)}
Rows = Mapping[int, Mapping[str, Any]]


class ModuleTree:
    """Builds the tree; a module's share of the optimizer's time is by elements, as elementwise updates work."""

    def __init__(self, log: Log, root: ModuleShape, paths: ModulePaths, rows: Rows,
                 operators: Mapping[int, Sequence[OperatorInfo]], optimizer_seconds: float | None) -> None:
        self.log, self.root, self.paths, self.rows, self.operators = log, root, paths, rows, operators
        self.optimizer_seconds = optimizer_seconds
        self.trainable = sum(p.numel for p in root.distinct_parameters().values() if p.requires_grad)
        self.index_of = {m.path: i for i, m in enumerate(log.modules)}
        self.first_path: dict[int, str] = {}
        self.counted: set[int] = set()

    def build(self) -> ModuleInfo:
        """The root of the tree."""
        return self._build(self.root, "", 0)

    def _build(self, module: ModuleShape, path: str, depth: int) -> ModuleInfo:
        *wrappers, shown = self.paths.list_levels(path)
        info = self._describe(module, path, shown, depth + len(wrappers))
        for wrapper in reversed(wrappers):
            info = _wrap(info, wrapper)
        return info

    def _describe(self, module: ModuleShape, path: str, shown: str, depth: int) -> ModuleInfo:
        shared = self.first_path.get(module.key)
        if shared is not None:
            zero = CostInfo(**dict.fromkeys(_COST_FIELDS, 0))
            return ModuleInfo(path=shown, type=module.type, depth=depth, shared_with=shared, own=zero, **_costs(zero))
        self.first_path[module.key] = shown
        index = self.index_of.get(path, -1)
        own = self._find_own(module, index)
        children = tuple([self._build(child, join_path(path, name), depth + 1) for name, child in module.children])
        total = own
        for child in children:
            total = total + child
        record = self.log.modules[index] if index >= 0 else None
        inputs = describe_all(record.inputs) if record else ()
        outputs = describe_all(record.outputs) if record else ()
        return ModuleInfo(
            path=shown, type=module.type, depth=depth, extra_repr=module.extra_repr, training=module.training,
            kernel_size=module.kernel_size, calls=record.calls if record else None,
            parameters={p.name: p.describe() for p in module.parameters},
            sharding={p.name: p.sharding for p in module.parameters if p.sharding is not None},
            inputs=inputs, outputs=outputs,
            output_bytes=sum(o.nbytes for o in outputs), own=own, operators=tuple(self.operators.get(index, ())),
            children=children, **_costs(total))

    def _find_own(self, module: ModuleShape, index: int) -> CostInfo:
        """What a module does outside its submodules; a parameter counts in the first that holds it."""
        row = dict(self.rows.get(index, {})) if index >= 0 else {}
        fresh = [p for p in module.parameters if p.key not in self.counted]
        self.counted.update(p.key for p in fresh)
        row["params"] = sum(p.numel for p in fresh)
        trainable = row["trainable_params"] = sum(p.numel for p in fresh if p.requires_grad)
        row["optimizer_seconds"] = self.optimizer_seconds and self.optimizer_seconds * trainable / max(
            1, self.trainable)
        return CostInfo(**{k: v for k, v in row.items() if k in _COST_FIELDS})


def _wrap(inner: ModuleInfo, path: str) -> ModuleInfo:
    """The level of a compiled module, which does nothing outside of the one that it wraps."""
    costs = _costs(inner)
    nothing = CostInfo(**{name: None if value is None else 0 for name, value in costs.items()})
    return ModuleInfo(path=path, type=WRAPPER_TYPE, depth=inner.depth - 1, training=inner.training, calls=inner.calls,
                      inputs=inner.inputs, outputs=inner.outputs, output_bytes=inner.output_bytes, own=nothing,
                      children=(inner,), **costs)


def list_module_calls(log: Log, paths: ModulePaths, rows: Rows) -> tuple[ModuleCall, ...]:
    """The runs of modules in one forward pass, with what the ``rows`` say of each by its index in the log."""
    found: list[ModuleCall] = []
    place: list[int] = []  # of each of the log's calls in `found`, where wrappers are called too
    for i, call in enumerate(log.module_calls):
        parent = None if call.parent is None else place[call.parent]
        inputs, outputs = describe_all(call.inputs), describe_all(call.outputs)
        for level in paths.list_levels(log.modules[call.module].path):
            found.append(ModuleCall(level, parent, inputs, outputs, **rows.get(i, {})))
            parent = len(found) - 1
        place.append(len(found) - 1)
    return tuple(found)


def describe_all(specs: Sequence[Any]) -> tuple[TensorInfo, ...]:
    """Tensors as plain data."""
    return tuple(map(describe_spec, specs))


def _costs(cost: CostInfo) -> dict[str, Any]:
    return {name: getattr(cost, name) for name in _COST_FIELDS}
