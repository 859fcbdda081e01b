"""Contents of tensors that a module holds, and that its forward both reads and changes (a queue's pointer).

What is read is different in the next call, so it must not become a constant of the graph. The forward is traced again
with these contents unknown: code that asks for them becomes one node (`outline`). Where the forward of the root itself
asks for them, the graph checks that they are what they were when it was traced.
"""
from __future__ import annotations

from typing import Any, NamedTuple

import torch

from analyzer.errors import InputError
from analyzer.fx.borrowed import Borrowed
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.storage import MetaStorage
from analyzer.meta.value.known_value import Watched

Tensor = torch.Tensor


class ChangedContent(NamedTuple):
    """A tensor without data whose contents were read and changed; ``value`` are those before the forward."""

    tensor: Tensor
    value: Tensor


class _Held(NamedTuple):
    tensor: Tensor
    original: Tensor
    storage: MetaStorage
    contents: Watched | None  #: None where they are unknown


class ContentWatch:
    """Tells which contents of a module's tensors its forward reads and changes; those of ``unknown`` ids are hidden."""

    def __init__(self, borrowed: Borrowed, unknown: frozenset[int]) -> None:
        self._held: list[_Held] = []
        for original, tensor in borrowed.fakes:
            storage = tensor.untyped_storage() if tensor.layout is torch.strided else None
            if isinstance(storage, MetaStorage) and storage.known is not None:
                storage.known = None if id(original) in unknown else Watched(storage.known)
                self._held.append(_Held(tensor, original, storage, storage.known))

    def forget(self) -> None:
        """Let contents that were unknown when the forward began be unknown, whatever wrote to them since."""
        for held in self._held:
            storage = held.tensor.untyped_storage()
            if held.contents is None and isinstance(storage, MetaStorage):
                storage.known = None

    def find_changed(self, replaced: frozenset[int]) -> dict[int, ChangedContent]:
        """What was read and changed, by the id of the user's tensor; ``replaced`` are ids of replaced buffers."""
        with without_modes():
            return {id(original): ChangedContent(tensor, contents.flat().as_strided(
                        original.shape, original.stride(), original.storage_offset()))
                    for tensor, original, storage, contents in self._held if contents is not None and contents.was_read
                    and (storage.known is not contents or id(tensor) in replaced
                         or tensor.untyped_storage() is not storage)}


def keep_contents(tensor: Tensor, traced: Tensor, name: str) -> None:
    """Raise InputError where ``tensor``, which the module has as ``name``, has other contents than were traced."""
    if isinstance(tensor.untyped_storage(), MetaStorage) or torch.equal(tensor, traced.to(tensor.device)):
        return
    raise InputError(f"{name} was {shorten(traced.tolist())} when the graph was traced and is "
                     f"{shorten(tensor.tolist())} now; the traced forward itself reads and changes it, so that the "
                     "graph is right for one value. Put the code that reads it into a submodule or a function, which "
                     "then becomes one node")


def keep_read(method: str, traced: Any, place: str | None, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
    """Raise InputError where a method of ``tensor`` gives another value than when the graph was traced."""
    if any(t.device.type == "meta" or isinstance(t.untyped_storage(), MetaStorage)
           for t in (tensor, *args) if isinstance(t, Tensor)):
        return  # a run without data
    found = getattr(Tensor, method)(tensor, *args, **kwargs)
    if found != traced and repr(found) != repr(traced):  # which NaN is not
        raise InputError(f"{method} of a tensor gives {shorten(found)} at {place}, and the graph was traced with "
                         f"{shorten(traced)}: trace again with this data, or put the code that reads it into a "
                         "submodule or a function, and give meta_args without data: it then becomes one node")


def shorten(value: Any) -> str:
    """The beginning of a value as text."""
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."
