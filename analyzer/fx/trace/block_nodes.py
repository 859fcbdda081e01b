"""The nodes of a block of a model, written again for another block like it."""
from __future__ import annotations

import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx, nn

from analyzer.fx.graph.region import AutocastRegion, GradRegion, Region

from .call_target import CallTarget

if TYPE_CHECKING:
    from .tape import Tape

# What a call of a function may be of: things that are there once, whichever block calls them.
_SHARED = (type, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
           types.MethodWrapperType, torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator,
           torch.jit.ScriptFunction)


class NotCopied(Exception):
    """These nodes cannot be written again: they depend on more than the block and its inputs."""


class Place(NamedTuple):
    """Where a parameter or buffer is: the number of its module within the block, and whose dictionary holds it under
    which name.
    """

    module: int
    held: str
    name: str

    def get(self, modules: Sequence[nn.Module]) -> torch.Tensor:
        found: torch.Tensor = getattr(modules[self.module], self.held)[self.name]
        return found


class Surroundings:
    """What is around a block where it is called: its path, the modules that call it, and the regions that are open."""

    def __init__(self, tape: Tape, path: str) -> None:
        regions = tape.regions
        self.path, self.below = path, path + "."
        self.callers = tape.modules
        self.base = (*regions.frame.prefix, *regions.open_autocasts())
        self.numbers = dict(regions.numbers)
        self.renamed = len(regions.frame.renamed)


class _Copied(NamedTuple):
    """One node to be written. ``below`` is what follows the block's path in its target; None where that is the same for
    all blocks.
    """

    op: str
    target: Any
    below: str | None
    name: str | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    flat: bool                                  #: whether nothing in ``args`` is a container
    meta: dict[str, Any]
    tail: tuple[Region, ...]                    #: of its regions, those inside the block
    module_path: str | None                     #: what follows the block's path, else None
    #: modules that run, from the block on: what follows its path, else the whole path; class
    stack: tuple[tuple[str | None, str, str], ...]
    attribute: Place | None                     #: what a get_attr node stands for
    dependent: bool
    node: fx.Node


class BlockNodes:
    """Nodes that a block's forward made, for `write`.

    Raises NotCopied where they use more than the nodes in ``inputs``, parameters and buffers in ``places`` (by path),
    and what is the same for all.
    """

    def __init__(self, tape: Tape, around: Surroundings, made: list[fx.Node], inputs: Iterable[fx.Node],
                 places: Mapping[str, Place]) -> None:
        self.around = around
        self.inputs = list(inputs)
        known = {*self.inputs, *made}
        regions = tape.regions
        if regions.numbers["checkpoint"] != around.numbers["checkpoint"]:
            raise NotCopied("it checkpoints a part of itself")
        self.autocasts = regions.numbers["autocast"] - around.numbers["autocast"]
        optional = set(tape.optional)
        self.optional = [node for node in made if node in optional]
        self.copies: list[_Copied] = []
        for node in made:
            if not known.issuperset(node.all_input_nodes):
                raise NotCopied("it uses a value that is neither an input nor its own")
            self.copies.append(self._describe(node, places, node in tape.dependent))

    def _describe(self, node: fx.Node, places: Mapping[str, Place], dependent: bool) -> _Copied:
        around, meta = self.around, node.meta
        region = meta["region"]
        tail = region[len(around.base):]
        if region[:len(around.base)] != around.base or not all(
                isinstance(r, (AutocastRegion, GradRegion)) for r in tail):
            raise NotCopied("it leaves a region that it was called in")
        below = self._below(node.target) if node.op in ("call_module", "get_attr") else None
        place = None
        if node.op == "get_attr":
            place = places.get(node.target)  # type: ignore[arg-type]
            if place is None:
                raise NotCopied("it uses a tensor or an object that is not its own")
        elif node.op == "call_function" and not _is_shared(node.target):
            raise NotCopied("it calls a function that it may have made itself")
        stack = tuple((self._below(path), path, kind) for path, kind in meta["module_stack"][len(around.callers):])
        name = None if below is not None else node.graph._target_to_str(node.target)
        flat = not any(isinstance(a, (tuple, list, dict, slice)) for a in node.args)
        return _Copied(node.op, node.target, below, name, node.args, node.kwargs, flat, meta, tail,
                       self._below(meta["module_path"]), stack, place, dependent, node)

    def _below(self, path: Any) -> str | None:
        around = self.around
        return path[len(around.path):] if path == around.path or path.startswith(around.below) else None

    def write(self, tape: Tape, around: Surroundings, inputs: Iterable[fx.Node],
              modules: Sequence[nn.Module]) -> dict[fx.Node, fx.Node]:
        """Write the nodes for the block whose ``modules`` these are, itself first; which of them stands for which of
        the first block's.
        """
        graph, path, callers = tape.graph, around.path, around.callers
        attributes = tape.regions.frame.attributes
        of = dict(zip(self.inputs, inputs))
        find = of.__getitem__
        shift = around.numbers["autocast"] - self.around.numbers["autocast"]
        tails: dict[tuple[Region, ...], tuple[Region, ...]] = {(): around.base}
        for copied in self.copies:
            target = copied.target if copied.below is None else path + copied.below
            node = of[copied.node] = graph.create_node(copied.op, target, name=copied.name)
            if copied.args:
                node.args = tuple([find(a) if type(a) is fx.Node else a
                                   for a in copied.args]) if copied.flat else fx.node.map_arg(copied.args, find)
            if copied.kwargs:
                node.kwargs = fx.node.map_arg(copied.kwargs, find)
            region = tails.get(copied.tail)
            if region is None:
                region = tails[copied.tail] = (*around.base, *(
                    replace(r, id=r.id + shift) if isinstance(r, AutocastRegion) else r for r in copied.tail))
            meta = node.meta
            meta.update(copied.meta)
            meta["region"] = region
            if copied.module_path is not None:
                meta["module_path"] = path + copied.module_path
            meta["module_stack"] = (*callers, *[(whole if below is None else path + below, kind)
                                                for below, whole, kind in copied.stack])
            if copied.dependent:
                tape.dependent.add(node)
            if copied.attribute is not None:
                attributes[id(copied.attribute.get(modules))] = node
        tape.optional += [of[node] for node in self.optional]
        tape.regions.numbers["autocast"] += self.autocasts
        return of


def _is_shared(target: Any) -> bool:
    wrapped = target.wrapped if isinstance(target, CallTarget) else target
    return isinstance(wrapped, _SHARED) or isinstance(wrapped, types.FunctionType) and "<" not in wrapped.__qualname__
