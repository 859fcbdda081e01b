"""Files that a script saves under a dry run: kept in memory, where it finds them again, and not written to its disk."""
from __future__ import annotations

import io
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from typing import Any

import torch

from analyzer.meta.intercept.replacement import Undo, answer
from analyzer.meta.state import current


def assume(text: str) -> None:
    if (state := current()) is not None:
        state.assume(text)


class SavedFiles:
    """What was saved without data, by path: bytes of ``torch.save``, or the header of a file of safetensors; an error
    where PyTorch could not pickle it, which reading it raises.
    """

    def __init__(self) -> None:
        self._contents: dict[str, Any] = {}

    def keep(self, path: Any, content: Any) -> None:
        self._contents[_resolve(path)] = content

    def find(self, path: Any) -> Any:
        """None for a file that the script did not save."""
        return self._contents.get(_resolve(path)) if _is_path(path) else None

    def replacements(self) -> Iterator[Undo]:
        for owner, name, instead in (
                (torch, "save", self._save), (torch, "load", self._load), (os, "stat", self._stat),
                (os, "remove", self._remove), (os, "unlink", self._remove), (os, "rename", self._rename),
                (os, "replace", self._rename), (shutil, "copyfile", self._copy), (shutil, "copy", self._copy),
                (shutil, "copy2", self._copy)):
            yield answer(owner, name, instead, passes_original=True)

    def _save(self, original: Callable[..., Any], value: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        path: Any = f if _is_path(f) else getattr(f, "name", None)
        if not _is_path(path):  # a buffer of the script's own
            assume("torch.save wrote what tensors are, and no data")
            original(value, f, *args, **kwargs)
            return
        assume(f"torch.save to {os.fspath(path)!r} wrote nothing: there is no data")
        buffer = io.BytesIO()
        try:
            original(value, buffer, *args, **kwargs)
        except Exception as error:  # of what only reading it again needs
            self.keep(path, error)
        else:
            self.keep(path, buffer.getvalue())

    def _load(self, original: Callable[..., Any], f: Any, *args: Any, **kwargs: Any) -> Any:
        content = self.find(f if _is_path(f) else getattr(f, "name", None))
        if isinstance(content, Exception):
            raise content
        if isinstance(content, bytes):
            f = io.BytesIO(content)
            kwargs.pop("mmap", None)
        return original(f, *args, **kwargs)

    def _stat(self, original: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        content = self.find(path)
        if content is None:
            return original(path, *args, **kwargs)
        size = len(content) if isinstance(content, bytes) else 0
        return os.stat_result((stat.S_IFREG | 0o644, 0, 0, 1, os.getuid(), os.getgid(), size, 0, 0, 0))

    def _remove(self, original: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> None:
        if self._contents.pop(_resolve(path), None) is None:
            original(path, *args, **kwargs)

    def _rename(self, original: Callable[..., Any], src: Any, dst: Any, *args: Any, **kwargs: Any) -> None:
        content = self._contents.pop(_resolve(src), None)
        if content is None:
            original(src, dst, *args, **kwargs)
        else:
            self.keep(dst, content)

    def _copy(self, original: Callable[..., Any], src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
        content = self.find(src)
        if content is None:
            return original(src, dst, *args, **kwargs)
        if os.path.isdir(dst):
            dst = os.path.join(dst, os.path.basename(src))
        self.keep(dst, content)
        return dst


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike))


def _resolve(path: Any) -> str:
    return os.path.realpath(str(os.fspath(path)))
