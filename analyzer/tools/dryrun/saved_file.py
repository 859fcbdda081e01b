"""Files that a script saves under a dry run: kept in memory, where it finds them again, and not written to its disk."""
from __future__ import annotations

import io
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
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
        self._kept_at: dict[str, float] = {}
        self._is_resolving = False

    def keep(self, path: Any, content: Any) -> None:
        self._contents[self._resolve(path)] = content
        self._kept_at[self._resolve(path)] = time.time()

    def find(self, path: Any) -> Any:
        """None for a file that the script did not save."""
        return self._contents.get(self._resolve(path)) if _is_path(path) else None

    def _resolve(self, path: Any) -> str:
        """The path without links, for which Python asks ``os.lstat`` of each folder: within it nothing is found."""
        if self._is_resolving:
            return ""
        self._is_resolving = True
        try:
            return os.path.realpath(str(os.fspath(path)))
        finally:
            self._is_resolving = False

    def replacements(self) -> Iterator[Undo]:
        for owner, name, instead in (
                (torch, "save", self._save), (torch, "load", self._load), (os, "stat", self._stat),
                (os, "lstat", self._stat), (os, "listdir", self._list), (os, "scandir", self._scan),
                (shutil, "rmtree", self._remove_folder),
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
        seconds = self._kept_at[self._resolve(path)]
        times = {f"st_{what}{unit}": value for what in ("atime", "mtime", "ctime")
                 for unit, value in (("", seconds), ("_ns", int(seconds * 1e9)))}
        return os.stat_result((stat.S_IFREG | 0o644, 0, 0, 1, os.getuid(), os.getgid(), size, *[int(seconds)] * 3),
                              times)

    def _names_in(self, path: Any, there: Iterable[str]) -> list[str]:
        """Names of files that were saved to a folder, but for those that are on the disk."""
        if not (_is_path(path) or path is None):  # a number of an open folder, bytes
            return []
        folder = self._resolve("." if path is None else path)
        saved = [os.path.basename(kept) for kept in self._contents if os.path.dirname(kept) == folder]
        return [name for name in saved if name not in set(there)]

    def _list(self, original: Callable[..., Any], path: Any = None) -> list[Any]:
        names: list[Any] = original(path)
        return names + self._names_in(path, names)

    def _scan(self, original: Callable[..., Any], path: Any = None) -> Any:
        with original(path) as found:
            entries: list[Any] = list(found)
        folder = "." if path is None else path
        return _Scanned([*entries, *[_SavedEntry(os.path.join(folder, name)) for name in self._names_in(
            path, [entry.name for entry in entries])]])

    def _remove_folder(self, original: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> None:
        if _is_path(path):
            inside = os.path.join(self._resolve(path), "")
            for kept in [kept for kept in self._contents if kept.startswith(inside)]:
                del self._contents[kept]
        original(path, *args, **kwargs)

    def _remove(self, original: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> None:
        if self._contents.pop(self._resolve(path), None) is None:
            original(path, *args, **kwargs)

    def _rename(self, original: Callable[..., Any], src: Any, dst: Any, *args: Any, **kwargs: Any) -> None:
        content = self._contents.pop(self._resolve(src), None)
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


class _SavedEntry:
    """What ``os.scandir`` tells of a file that was saved."""

    def __init__(self, path: str) -> None:
        self.path, self.name = path, os.path.basename(path)

    def __fspath__(self) -> str:
        return self.path

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return True

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return False

    def is_symlink(self) -> bool:
        return False

    def is_junction(self) -> bool:
        return False

    def inode(self) -> int:
        return 0

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path)


class _Scanned:
    """What ``os.scandir`` gives: an iterator that is closed."""

    def __init__(self, entries: list[Any]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Any]:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> _Scanned:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is open."""


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike))
