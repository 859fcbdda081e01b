"""Registries whose keys are operators, filled by the package's own files at their first use."""
from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from importlib import import_module
from typing import Any, TypeVar

import torch

from analyzer.meta.operator_info import register_shape_impl
from analyzer.meta.spec import as_operator, check_operator
from analyzer.registry import Call, Registry

V = TypeVar("V", bound=Callable[..., Any])


def name_key(key: Hashable) -> Hashable:
    """One key for the ways to name an operator: ``aten::mm`` for a packet, ``aten::mm.out`` for an overload.

    >>> name_key(torch.ops.aten.mm), name_key(torch.ops.aten.mm.default), name_key("aten::mm")
    ('aten::mm', 'aten::mm.default', 'aten::mm')
    """
    if isinstance(key, torch._ops.OpOverload):
        return f"{key._schema.name}.{key._overloadname}"
    if isinstance(key, torch._ops.OpOverloadPacket):
        return key._qualified_op_name
    return key if isinstance(key, str) or (operator := as_operator(key)) is key else name_key(operator)


def check_registered(key: Hashable, caller: str) -> Hashable:
    """The one key for ``key``. Raises InputError, which begins with ``caller``, for what names no operator."""
    return name_key(check_operator(key, caller, register_shape_impl))


class OperatorRegistry(Registry[Hashable, V]):
    """`Registry` whose keys are operators, operator packets, their names, higher-order operators or Triton kernels.

    What the ``families``, files of a ``package``, register is imported at the first use: with the package, it would
    take a tenth of torch's time. A thread that comes while another imports them waits for each, as imports do.
    """

    def __init__(self, name: str, package: str, families: Sequence[str], call: Call) -> None:
        super().__init__(name, check_registered, call)
        self._package, self._families = package, families
        self._is_filled, self._filling = False, threading.local()

    def fill(self) -> None:
        """Import the package's own implementations, once."""
        if self._is_filled or getattr(self._filling, "is_on", False):  # the files themselves register while imported
            return
        self._filling.is_on = True
        try:
            for family in self._families:
                import_module(f"{self._package}.{family}")
            self._is_filled = True
        finally:
            self._filling.is_on = False

    def __call__(self, key: Hashable, impl: V | None = None, *, override: bool = False) -> Any:
        """Register ``impl`` for ``key``, as `Registry` does; the package's own, while it fills the table, unchecked."""
        if getattr(self._filling, "is_on", False):
            known = name_key(key)
            return (lambda f: self.add(known, f, override)) if impl is None else self.add(known, impl, override)
        return super().__call__(key, impl, override=override)

    def find(self, key: Hashable) -> V | None:
        """The implementation for ``key``, or None."""
        return super().find(name_key(key))

    def __contains__(self, key: Hashable) -> bool:
        return super().__contains__(name_key(key))
