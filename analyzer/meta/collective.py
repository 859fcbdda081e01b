"""How the simulation of other ranks takes part in operator calls: the room of distributed programs puts itself here."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from .operator_info import OperatorInfo


class CollectiveImpl(Protocol):
    """What collective operators do where other ranks are simulated."""

    device_count: int  #: devices of the host

    def shape(self, info: OperatorInfo) -> Callable[..., Any] | None:
        """What a communicating operator returns: a function of its arguments; None: as its kernel on meta."""

    def launching(self, info: OperatorInfo, given: dict[str, Any]) -> AbstractContextManager[object]:
        """A block around a call of a communicating operator, whose arguments come by name: on its stream."""

    def propagate(self, info: OperatorInfo, given: dict[str, Any], result: Any) -> None:
        """Tell what was written, and the result, their contents."""


impl: CollectiveImpl | None = None  #: while there is a world of ranks
#: Tensor classes that dispatch in C++ and call the same operator again on their parts. What is called first may answer:
#: a function of the operator, its arguments and the mode's handler; else NotImplemented.
redispatching: dict[type, Callable[..., Any]] = {}


@contextmanager
def simulating(collectives: CollectiveImpl) -> Iterator[None]:
    """A block in which ``collectives`` say what communicating operators do."""
    global impl
    before, impl = impl, collectives
    try:
        yield
    finally:
        impl = before
