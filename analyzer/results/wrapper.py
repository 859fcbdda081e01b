"""Compiled modules in a profile: each is a level of the tree above the module that it wraps, as in the model's own
`named_modules()`.
"""
from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from dataclasses import fields, replace

from torch import nn

from analyzer.fx.module_borrow import uncompiled
from analyzer.record.module_walk import walk_modules

from .info import CostInfo, ModuleCall, ModuleInfo
from .profile import Profile

_HELD = "_orig_mod"  # the name under which torch.compile's module holds the one that it wraps


def list_wrappers(module: nn.Module, left_out: Iterable[nn.Module] = ()) -> frozenset[str]:
    """The paths of the compiled modules in ``module``, ``""`` for itself; ``left_out`` are modules that none is in."""
    if "torch._dynamo.eval_frame" not in sys.modules:
        return frozenset()  # nothing is compiled
    return frozenset(
        [path for path, inner in walk_modules(module, left_out=left_out) if uncompiled(inner) is not inner])


def show_wrappers(profile: Profile, wrappers: Collection[str]) -> Profile:
    """The profile of a model that was run without its compiled ``wrappers``, with them in the tree and in all paths.

    >>> leaf = ModuleInfo(path="fc", type="Linear", depth=1, params=3)
    >>> plain = Profile(name="Net", mode="infer", modules=ModuleInfo(path="", type="Net", params=3, children=(leaf,)))
    >>> [(m.path, m.type, m.depth, m.params) for m in show_wrappers(plain, {"fc"}).modules.walk()]
    [('', 'Net', 0, 3), ('fc', 'OptimizedModule', 1, 3), ('fc._orig_mod', 'Linear', 2, 3)]
    """
    if not wrappers:
        return profile

    def rename(path: str) -> str:
        return _levels(path, wrappers)[-1]

    short = profile.out_of_memory
    return replace(
        profile, modules=None if profile.modules is None else _wrap(profile.modules, wrappers, "", 0),
        module_calls=_wrap_calls(profile.module_calls, wrappers), nodes=tuple(
            replace(node, module_path=rename(node.module_path), target=rename(node.target) if node.op ==
                    "call_module" else node.target) for node in profile.nodes), holders=tuple(
                        replace(holder, module_path=rename(holder.module_path)) for holder in profile.holders),
        out_of_memory=None if short is None else replace(
            short, module_path=None if short.module_path is None else rename(short.module_path)))


def _levels(path: str, wrappers: Collection[str]) -> list[str]:
    """The paths of the wrappers around the module that is at ``path`` without them, the outermost first, and its own."""
    levels = [""]
    for name in [None, *path.split(".")] if path else [None]:
        if name is not None:
            levels = [_join(levels[-1], name)]
        while levels[-1] in wrappers:
            levels.append(_join(levels[-1], _HELD))
    return levels


def _wrap(module: ModuleInfo, wrappers: Collection[str], path: str, depth: int) -> ModuleInfo:
    if path in wrappers:
        inner = _wrap(module, wrappers, _join(path, _HELD), depth + 1)
        costs = {field.name: getattr(inner, field.name) for field in fields(CostInfo)}
        nothing = CostInfo(**{name: None if value is None else 0 for name, value in costs.items()})
        return ModuleInfo(path=path, type="OptimizedModule", depth=depth, training=inner.training, calls=inner.calls,
                          inputs=inner.inputs, outputs=inner.outputs, output_bytes=inner.output_bytes, own=nothing,
                          children=(inner, ), **costs)
    children = tuple(
        _wrap(child, wrappers, _join(path,
                                     child.path.rpartition(".")[2]), depth + 1) for child in module.children)
    shared = None if module.shared_with is None else _levels(module.shared_with, wrappers)[-1]
    return replace(module, path=path, depth=depth, children=children, shared_with=shared)


def _wrap_calls(calls: Collection[ModuleCall], wrappers: Collection[str]) -> tuple[ModuleCall, ...]:
    wrapped: list[ModuleCall] = []
    place: list[int] = []  # of each call, where it is now
    for call in calls:
        parent = None if call.parent is None else place[call.parent]
        for level in _levels(call.path, wrappers):
            wrapped.append(call._replace(path=level, parent=parent))
            parent = len(wrapped) - 1
        place.append(len(wrapped) - 1)
    return tuple(wrapped)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
