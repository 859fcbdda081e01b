"""What functions of torch do under the mode instead: a table that is filled beside each handler."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from analyzer.meta.state import MetaState

Handler = Callable[[MetaState, Any, tuple[Any, ...], dict[str, Any]], Any]
handlers: dict[Any, Handler] = {}
"""By function: what is called with the state, the function, its positional and its named arguments."""


def handles(*functions: Any) -> Callable[[Handler], Handler]:
    """Decorator: a handler of torch's ``functions``."""
    def add(handler: Handler) -> Handler:
        handlers.update(dict.fromkeys(functions, handler))
        return handler
    return add
