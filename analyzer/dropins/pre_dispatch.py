"""Private torch API: sees the ATen operators that Python code calls, as it calls them, ``linear`` and not ``addmm``."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dispatch.python import enable_pre_dispatch, enable_python_dispatcher
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.utils._python_dispatch import TorchDispatchMode

#: Is told that an operator ran: what, its positional arguments, its keyword arguments and its result.
Listener = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]


class _PreDispatchMode(SchemaCheckMode):
    """Sees operators before autograd, where one that is composed of others is still whole; these others are not seen.

    Torch lets modes of three classes see operators there. This one is of the class whose place nothing else in a
    forward pass takes; it checks no schema.
    """

    def __init__(self, listener: Listener) -> None:
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)
        self.listener = listener

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            self.listener(func, args, kwargs or {}, result)
        return result


@contextmanager
def watching_operators(listener: Listener) -> Iterator[None]:
    """Tell of each ATen operator that this thread calls.

    >>> layer, x, names = torch.nn.Linear(2, 3), torch.ones(4, 5, 2), []
    >>> with watching_operators(lambda func, *_: names.append(func._schema.name)):
    ...     y = layer(x) + 1
    >>> names
    ['aten::linear', 'aten::add']
    """
    mode = _PreDispatchMode(listener)
    with enable_python_dispatcher(), enable_pre_dispatch(), mode:
        yield
