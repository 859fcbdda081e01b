"""A model's own text with figures in place of what each module says of itself."""
from __future__ import annotations

from collections.abc import Callable

from torch import nn


def print_with(model: nn.Module, tell: Callable[[nn.Module, str], str]) -> str:
    """``str(model)`` where each module says ``tell(module, what it says else)`` for its ``extra_repr()``.

    >>> print(print_with(nn.Sequential(nn.Linear(2, 3, bias=False)), lambda module, said: type(module).__name__))
    Sequential(
      Sequential
      (0): Linear(Linear)
    )
    """
    modules = list(model.modules())
    texts = [(module, tell(module, module.extra_repr())) for module in modules]
    before = [(module, module.__dict__.get("extra_repr")) for module in modules]
    try:
        for module, text in texts:
            module.__dict__["extra_repr"] = _make(text)
        return str(model)
    finally:
        for module, own in before:
            if own is None:
                module.__dict__.pop("extra_repr", None)
            else:
                module.__dict__["extra_repr"] = own


def _make(text: str) -> Callable[[], str]:
    return lambda: text
