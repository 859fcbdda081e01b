"""Generated code with the blocks and checkpointed functions that ``node.meta["region"]`` asks for."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.utils.checkpoint  # noqa: F401  # the generated code calls it
from torch.fx import Node
from torch.fx.graph import CodeGen, PythonCode

from .region import CheckpointRegion, Region

_INDENT = "    "


class RegionCodeGen(CodeGen):
    """torch.fx's code generator, nested into ``with`` blocks and calls of ``torch.utils.checkpoint.checkpoint``.

    Consecutive nodes that share a region share its block. ``keyword_only`` are the arguments that forward takes by name only.
    """

    def __init__(self, keyword_only: Iterable[str] = ()) -> None:
        super().__init__()
        self.keyword_only = frozenset(keyword_only)
        self._extra: list[tuple[str, Any]] = []

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **options: Any) -> str:
        named = [v for v in free_vars if v.split("=")[0].split(":")[0].strip() in self.keyword_only]
        if named and not any(v.startswith("*") and not v.startswith("**") for v in free_vars):
            free_vars.insert(free_vars.index(named[0]), "*")
        return super().gen_fn_def(free_vars, maybe_return_annotation, **options)

    def additional_globals(self) -> list[tuple[str, Any]]:
        return self._extra

    def _gen_python_code(self, nodes: Any, root_module: str, namespace: Any, **options: Any) -> PythonCode:
        ordered = list(nodes)
        if not any(region_of(n) for n in ordered):
            return super()._gen_python_code(nodes, root_module, namespace, **options)
        users, self._extra = self._body_transformer, []

        def nest(body: list[str]) -> list[str]:
            nested = _Writer(ordered, body, namespace.create_name, self._extra).write()
            return users(nested) if users is not None else nested

        self._body_transformer = nest
        try:
            return super()._gen_python_code(nodes, root_module, namespace, **options)
        finally:
            self._body_transformer, self._extra = users, []


def region_of(node: Node) -> tuple[Region, ...]:
    """The regions that the code of ``node`` runs in: those of its annotation that are to be replayed."""
    if node.op in ("placeholder", "output"):
        return ()
    region = node.meta.get("region") or ()
    return tuple(r for r in region if not (isinstance(r, CheckpointRegion) and not r.replay))


class _Unit:
    """One statement of a function: a node, or the call of a checkpointed function."""

    def __init__(self, blocks: tuple[Region, ...], node: Node | None, checkpoint: CheckpointRegion | None = None,
                 body: list[_Unit] | None = None) -> None:
        self.blocks, self.node, self.checkpoint, self.body = blocks, node, checkpoint, body or []

    def nodes(self) -> list[Node]:
        if self.node is not None:
            return [self.node]
        return [n for unit in self.body for n in unit.nodes()]


def _units(items: Sequence[tuple[Node, tuple[Region, ...]]]) -> list[_Unit]:
    """Statements of one function from its nodes and their regions relative to it."""
    units: list[_Unit] = []
    i = 0
    while i < len(items):
        node, region = items[i]
        at = next((k for k, r in enumerate(region) if isinstance(r, CheckpointRegion)), None)
        if at is None:
            units.append(_Unit(region, node))
            i += 1
            continue
        end = i
        while end < len(items) and items[end][1][:at + 1] == region[:at + 1]:
            end += 1
        checkpoint = region[at]
        assert isinstance(checkpoint, CheckpointRegion)
        units.append(_Unit(region[:at], None, checkpoint, _units([(n, r[at + 1:]) for n, r in items[i:end]])))
        i = end
    return units


class _Writer:
    """Rearranges the lines that torch.fx wrote, one group per node, into nested blocks and functions."""

    def __init__(self, nodes: list[Node], body: list[str], create_name: Callable[[str, Any], str], extra: list[tuple[str, Any]]) -> None:
        self.nodes, self.create_name, self.extra = nodes, create_name, extra
        self.preamble: list[str] = []
        self.text: dict[Node, list[str]] = {}
        lines = self.preamble
        for line in body:
            if line.startswith("# COUNTER: "):
                lines = self.text[nodes[int(line.removeprefix("# COUNTER: "))]] = []
            lines.append(line)

    def write(self) -> list[str]:
        units = _units([(n, region_of(n)) for n in self.nodes])
        return [*self.preamble, *self._function(units, "", set(), set())]

    def _function(self, units: list[_Unit], indent: str, given: set[Node], returned: set[Node]) -> list[str]:
        """The body of a function that is given some values and returns others."""
        local = given | {n for unit in units for n in unit.nodes()}
        last = _last_uses(units, local)
        out: list[str] = []
        open_blocks: tuple[Region, ...] = ()
        for i, unit in enumerate(units):
            shared = 0
            while shared < min(len(open_blocks), len(unit.blocks)) and open_blocks[shared] == unit.blocks[shared]:
                shared += 1
            for depth in range(shared, len(unit.blocks)):
                out.append(f"{indent}{_INDENT * depth}with {unit.blocks[depth].header()}:\n")  # type: ignore[union-attr]
            open_blocks = unit.blocks
            inner = indent + _INDENT * len(open_blocks)
            dead = [n for n in last.get(i, []) if n not in returned]
            out.extend(self._node(unit.node, inner, dead) if unit.node is not None else self._checkpoint(unit, inner, dead))
        return out

    def _node(self, node: Node, indent: str, dead: list[Node]) -> list[str]:
        counter, *lines = self.text[node]
        ending = f";  {' = '.join(map(repr, dead))} = None\n" if dead and node.op not in ("placeholder", "output") else "\n"
        text = "".join(ending if line == "\n" or line.startswith(";  ") else line for line in lines)
        indented = "".join(indent + line for line in text.splitlines(keepends=True) if line.strip())
        return [counter, indented]

    def _checkpoint(self, unit: _Unit, indent: str, dead: list[Node]) -> list[str]:
        assert unit.checkpoint is not None
        inside = unit.nodes()
        members = set(inside)
        inputs = list(dict.fromkeys(i for n in inside for i in n.all_input_nodes if i not in members))
        outputs = [n for n in inside if any(u not in members for u in n.users)]
        name = self.create_name(f"checkpoint_{unit.checkpoint.id}", object())
        out = [f"{indent}def {name}({', '.join(map(repr, inputs))}):\n"]
        out.extend(self._function(unit.body, indent + _INDENT, set(inputs), set(outputs)))
        result = ", ".join(map(repr, outputs))
        out.append(f"{indent}{_INDENT}return {result}\n" if outputs else f"{indent}{_INDENT}return None\n")
        options = ", ".join(f"{k} = {self._option(k, v)}" for k, v in unit.checkpoint.options().items())
        call = f"torch.utils.checkpoint.checkpoint({', '.join([name, *map(repr, inputs)])}, {options})"
        dead = [n for n in dead if n not in members or n in outputs]
        ending = f";  {' = '.join([*map(repr, dead), name])} = None\n"
        out.append(f"{indent}{result} = {call}{ending}" if outputs else f"{indent}{call}{ending}")
        return out

    def _option(self, key: str, value: Any) -> str:
        if not callable(value):
            return repr(value)
        name = self.create_name(getattr(value, "__name__", key), value)
        if all(value is not held for _, held in self.extra):
            self.extra.append((name, value))
        return name


def _last_uses(units: list[_Unit], local: set[Node]) -> dict[int, list[Node]]:
    """For each statement, the values of this function that no later one reads."""
    seen: set[Node] = set()
    last: dict[int, list[Node]] = {}
    for i in range(len(units) - 1, -1, -1):
        members = units[i].nodes()
        read = [n for m in members for n in m.all_input_nodes]
        for n in (*read, *members):
            if n in local and n not in seen:
                seen.add(n)
                last.setdefault(i, []).append(n)
    return last
