"""Records some of whose fields are worked out when they are read first."""
from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

Groups = Mapping[Callable[[], Mapping[str, Any]], Sequence[str]]
"""Functions that work out fields of a record, with the names of these."""
_Record = TypeVar("_Record", bound="DeferredFields")


class DeferredFields:
    """A dataclass with slots, some of whose fields are worked out when first read; copies and pickles have all."""

    __slots__ = ("_groups", "_lock", "_request")  # each has its own lock: a forked child finds those of others' free
    _groups: Groups

    @classmethod
    def deferred(cls: type[_Record], known: Mapping[str, Any], groups: Groups) -> _Record:
        """A record with ``known`` fields; those of each of ``groups`` are worked out when one of them is read."""
        record = cls(**known)
        for names in groups.values():
            for name in names:
                object.__delattr__(record, name)
        record._defer(groups)
        return record

    def _defer(self, groups: Groups) -> None:
        """Work fields that are not set out by ``groups`` when one of them is read."""
        object.__setattr__(self, "_groups", dict(groups))
        object.__setattr__(self, "_lock", threading.RLock())

    if not TYPE_CHECKING:
        def __getattr__(self, name: str) -> Any:  # of a slot that is not set
            if not any(f.name == name for f in fields(self)):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            if hasattr(self, "_lock"):
                with self._lock:
                    self._work_out(name)
            return object.__getattribute__(self, name)

    def _work_out(self, name: str) -> None:
        """Set the field and those that are worked out with it, unless another thread has done so meanwhile."""
        for make, names in self._groups.items():
            if name in names:
                for field_name, value in make().items():
                    object.__setattr__(self, field_name, value)
                object.__setattr__(self, "_groups", {m: n for m, n in self._groups.items() if m is not make})
                return

    @property
    def request(self) -> dict[str, Any] | None:
        """The arguments that make such a record again, None where they are not known; copies and pickles have none."""
        return getattr(self, "_request", None)

    def remember(self: _Record, request: Mapping[str, Any]) -> _Record:
        """Keep the arguments that make such a record again."""
        object.__setattr__(self, "_request", dict(request))
        return self

    def complete(self, **known: Any) -> None:
        """Set fields that the function that made the record could not know, before others have it."""
        for name, value in known.items():
            object.__setattr__(self, name, value)

    def __getstate__(self) -> list[Any]:
        return [getattr(self, f.name) for f in fields(self)]  # type: ignore[arg-type]

    def __setstate__(self, state: list[Any]) -> None:
        for f, value in zip(fields(self), state):  # type: ignore[arg-type]
            object.__setattr__(self, f.name, value)
