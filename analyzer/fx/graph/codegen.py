"""Generated code with the blocks and checkpointed functions that ``node.meta["region"]`` asks for."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch.utils.checkpoint  # noqa: F401  # the generated code calls it
from torch.fx import Graph, Node
from torch.fx.graph import CodeGen, PythonCode

from .kept import KeptResults
from .offload import OffloadedTensors
from .statement import Block, Keeping, Offloading, Statement, last_uses, region_of, shared_blocks, statements_of

_INDENT = "    "
_COUNTER = "# COUNTER: "  # what torch.fx writes before the lines of a node
_ANNOTATIONS = ("region", "saved", "module_path", "module_stack", "source")


class RegionCodeGen(CodeGen):
    """torch.fx's code generator, nested into ``with`` blocks and calls of ``torch.utils.checkpoint.checkpoint``.

    Consecutive nodes that share a region share its block. ``keyword_only`` are arguments that forward takes by name.
    """

    def __init__(self, keyword_only: Iterable[str] = ()) -> None:
        super().__init__()
        self.keyword_only = frozenset(keyword_only)
        self._extra: list[tuple[str, Any]] = []
        self.home: Callable[[], Graph | None] = lambda: None  #: the graph that it was made for

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **options: Any) -> str:
        """The head of forward, with a star before the arguments that it takes by name only."""
        named = [v for v in free_vars if v.split("=")[0].split(":")[0].strip() in self.keyword_only]
        if named and not any(v.startswith("*") and not v.startswith("**") for v in free_vars):
            free_vars.insert(free_vars.index(named[0]), "*")
        return super().gen_fn_def(free_vars, maybe_return_annotation, **options)

    def additional_globals(self) -> list[tuple[str, Any]]:
        """What the generated code names besides torch.fx's own."""
        return self._extra

    def _gen_python_code(self, nodes: Any, root_module: str, namespace: Any, **options: Any) -> PythonCode:
        ordered = list(nodes)
        home = self.home()
        if home is not None and ordered and ordered[0].graph is not home:
            by_name = {n.name: n for n in home.nodes}
            for n in ordered:  # that `torch.fx.Transformer` made have the annotations of what they were made for
                sources = n.meta.get("from_node") if "region" not in n.meta else None
                maker = by_name.get(sources[0].node_info.name) if sources and sources[0].node_info else None
                if maker is not None:
                    n.meta.update({key: maker.meta[key] for key in _ANNOTATIONS if key in maker.meta})
        nests = any(region_of(n) or n.meta.get("saved") == "offload" for n in ordered)
        if not nests:
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


class _Writer:
    """Rearranges the lines that torch.fx wrote, one group per node, into nested blocks and functions."""

    def __init__(self, nodes: list[Node], body: list[str], create_name: Callable[[str, Any], str],
                 extra: list[tuple[str, Any]]) -> None:
        self.nodes, self.create_name, self.extra = nodes, create_name, extra
        self.offloaded = ""
        self.kept: dict[Statement, str] = {}
        self.preamble: list[str] = []
        self.text: dict[Node, list[str]] = {}
        lines = self.preamble
        for line in body:
            if line.startswith(_COUNTER):
                lines = self.text[nodes[int(line.removeprefix(_COUNTER))]] = []
            lines.append(line)

    def write(self) -> list[str]:
        statements = statements_of(self.nodes)
        if any(s.offloaded for s in statements):  # else nothing waits on the host outside of checkpoints
            self.offloaded = self.create_name("offloaded", object())
            self.preamble.append(f"{self.offloaded} = {self._global(OffloadedTensors)}()\n")
        return [*self.preamble, *self._function(statements, "", set(), set())]

    def _function(self, statements: list[Statement], indent: str, given: set[Node], returned: set[Node]) -> list[str]:
        """The body of a function that is given some values and returns others."""
        local = given | {n for s in statements for n in s.nodes()}
        last = last_uses(statements, local)
        out: list[str] = []
        open_blocks: tuple[Block, ...] = ()
        for i, statement in enumerate(statements):
            for depth in range(shared_blocks(open_blocks, statement.blocks), len(statement.blocks)):
                block = statement.blocks[depth]
                if isinstance(block, Keeping):
                    header = self.kept[block.checkpoint] + (".on_host" if block.offloads else "")
                else:
                    header = self.offloaded if isinstance(block, Offloading) else block.header()
                out.append(f"{indent}{_INDENT * depth}with {header}:\n")
            open_blocks = statement.blocks
            inner = indent + _INDENT * len(open_blocks)
            dead = [n for n in last.get(i, []) if n not in returned]
            late = [n for n in dead if n in statement.offloaded]  # offloaded before they go
            dead = [n for n in dead if n not in late]
            out.extend(self._checkpoint(statement, inner, dead) if statement.node is None
                       else self._node(statement.node, inner, dead))
            for n in statement.offloaded:
                out.append(f"{inner}{self.offloaded}.add({n!r}){f';  {n!r} = None' if n in late else ''}\n")
        return out

    def _node(self, node: Node, indent: str, dead: list[Node]) -> list[str]:
        counter, *lines = self.text[node]
        frees = dead and node.op not in ("placeholder", "output")
        ending = f";  {' = '.join(map(repr, dead))} = None\n" if frees else "\n"
        text = "".join(ending if line == "\n" or line.startswith(";  ") else line for line in lines)
        indented = "".join(indent + line for line in text.splitlines(keepends=True) if line.strip())
        return [counter, indented]

    def _checkpoint(self, statement: Statement, indent: str, dead: list[Node]) -> list[str]:
        assert statement.checkpoint is not None
        members = set(statement.nodes())
        inputs, outputs = statement.inputs(), statement.results()
        options = {k: self._global(v, k) if callable(v) else repr(v) for k, v in statement.checkpoint.options().items()}
        out: list[str] = []
        if statement.keeps or statement.buffered:
            kept = self.kept[statement] = self.create_name(f"kept_{statement.checkpoint.id}", object())
            given = ["self", *map(repr, statement.buffered)] if statement.buffered else []
            given += [] if statement.checkpoint.preserve_rng_state else ["skips_draws = False"]
            out.append(f"{indent}{kept} = {self._global(KeptResults)}({', '.join(given)})\n")
            options["context_fn"] = f"{kept}.contexts"
        name = self.create_name(f"checkpoint_{statement.checkpoint.id}", object())
        out.append(f"{indent}def {name}({', '.join(map(repr, inputs))}):\n")
        out.extend(self._function(statement.body, indent + _INDENT, set(inputs), set(outputs)))
        result = ", ".join(map(repr, outputs))
        out.append(f"{indent}{_INDENT}return {result}\n" if outputs else f"{indent}{_INDENT}return None\n")
        arguments = ", ".join([name, *map(repr, inputs), *(f"{k} = {v}" for k, v in options.items())])
        call = f"torch.utils.checkpoint.checkpoint({arguments})"
        dead = [n for n in dead if n not in members or n in outputs]
        ending = f";  {' = '.join([*map(repr, dead), name])} = None\n"
        out.append(f"{indent}{result} = {call}{ending}" if outputs else f"{indent}{call}{ending}")
        return out

    def _global(self, value: Any, name: str = "") -> str:
        """What generated code calls ``value``."""
        for known, held in self.extra:
            if held is value:
                return known
        known = self.create_name(getattr(value, "__name__", name), value)
        self.extra.append((known, value))
        return known
