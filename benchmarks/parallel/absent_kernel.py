"""Lets torchtitan be imported without Triton, whose kernels these runs do not call."""
from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# what looks for Triton when it is imported, and must see that there is none
_BEFORE = ("torch._functorch.partitioners", "torch._inductor.codecache", "torch._inductor.compile_fx",
           "torch.nn.attention.flex_attention", "torch.distributed.tensor")


class _Anything:
    """Takes every call, attribute and index."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else _Anything()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __getitem__(self, key: Any) -> Any:
        return _Anything()


class _Module(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


@contextmanager
def triton_stand_in() -> Iterator[None]:
    """A block in which ``import triton`` works; a Triton that is installed is left alone."""
    if importlib.util.find_spec("triton") is not None:
        yield
        return
    for name in _BEFORE:
        importlib.import_module(name)
    names = ("triton", "triton.language")
    sys.modules.update({name: _Module(name) for name in names})
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
