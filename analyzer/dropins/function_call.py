"""Counts calls of torch's functions in Python, as tools count that put functions of their own in their place."""
from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

from analyzer.meta.intercept.replacement import SharedReplacements, Undo, replace

#: FLOPs and MACs of a call, from its arguments.
Rule = Callable[..., tuple[int, int]]
#: Is told of a call: the name of the function, its FLOPs and its MACs.
Listener = Callable[[str, int, int], None]

OWNERS = {"F": functional, "torch": torch, "Tensor": torch.Tensor}
_OF_KERNELS = ("torch._", "analyzer.")  # modules whose calls are those of an operator, not of the model


@contextmanager
def counting_functions(rules: Mapping[str, Rule], listener: Listener) -> Iterator[None]:
    """Tell of each call in this thread of the functions named (``F.linear``, ``torch.matmul``, ``Tensor.add``), but
    not of those that such a function itself makes.

    A function is told of where code looks it up by that name: ``a @ b`` is no call of ``Tensor.matmul``.

    >>> calls = []
    >>> with counting_functions({"F.relu": lambda x, inplace=False: (x.numel(), 0)}, lambda *call: calls.append(call)):
    ...     y = torch.nn.ReLU()(torch.ones(3))
    >>> calls
    [('relu', 3, 0)]
    """
    thread, depth = threading.get_ident(), 0

    def make(name: str, rule: Rule) -> Callable[[Any], Any]:
        def make_counted(original: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal depth
                if depth or threading.get_ident() != thread or _is_kernel(sys._getframe(1).f_globals):
                    return original(*args, **kwargs)
                with torch._C.DisableTorchFunction():
                    listener(name, *rule(*args, **kwargs))
                depth += 1
                try:
                    return original(*args, **kwargs)
                finally:
                    depth -= 1

            return call

        return make_counted

    def replacements() -> Iterator[Undo]:
        for path, rule in rules.items():
            owner, _, name = path.partition(".")
            if hasattr(OWNERS[owner], name):
                yield replace(OWNERS[owner], name, make(name, rule))

    with SharedReplacements(replacements).installed():
        yield


def _is_kernel(caller: dict[str, Any]) -> bool:
    name = str(caller.get("__name__"))
    return name.startswith(_OF_KERNELS) and not name.startswith("analyzer.zoo.")
