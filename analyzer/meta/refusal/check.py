"""The check of a call before its kernel runs."""
from __future__ import annotations

from typing import Any

from . import index, layer
from .rule import Rule, rules

ROOMS = layer, index  #: which fill the table


def find_refusal(namespace: str, name: str) -> Rule | None:
    """The rule of an operator, None where its kernels on meta refuse as much as those of devices."""
    return rules.get(name) if namespace == "aten" else None


def check_call(namespace: str, name: str, device_type: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise what PyTorch's kernel of a device raises for these arguments, of which kernels on meta raise nothing."""
    rule = find_refusal(namespace, name)
    if rule is not None:
        rule(device_type, *args, **kwargs)
