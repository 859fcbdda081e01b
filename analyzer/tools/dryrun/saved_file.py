"""Files that a script saves under a dry run: kept in memory, where it finds them again, and not written to its disk."""
from __future__ import annotations

import io
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from analyzer.errors import InputError
from analyzer.meta.intercept.replacement import Undo, answer
from analyzer.meta.state import current
from analyzer.meta.tensor import is_around_tensors


class NotThereError(InputError, OSError):
    """What would be downloaded and has no stand-in. Libraries let an OSError of loading through."""


def assume(text: str) -> None:
    if (state := current()) is not None:
        state.assume(text)


def stage(sizes: Iterable[int], at_once: bool) -> None:
    """Count what is copied to the host to be written: each storage alone, or all of them ``at_once``."""
    if (state := current()) is None:
        return
    host = state.space.host
    held = []
    for nbytes in sizes:
        held.append(host.allocate(nbytes))
        if not at_once:
            host.free(held.pop())
    for region in held:
        host.free(region)


def _list_storages(value: Any) -> list[Any]:
    """The storages of the tensors in what is saved, each once: ``_save`` in torch/serialization.py copies those that
    are not on the host to it, one after the other.
    """
    leaves = [tensor for leaf in tree_leaves(value) for tensor in (
        leaf.state_dict().values() if isinstance(leaf, torch.nn.Module) else (leaf,))]
    with torch._C.DisableTorchFunction():
        found = [tensor.untyped_storage() for tensor in leaves if isinstance(tensor, torch.Tensor)
                 and tensor.layout is torch.strided and not is_around_tensors(tensor)]
    return list({id(storage): storage for storage in found if storage.device.type != "meta"}.values())


class SavedFiles:
    """What was saved without data, by path: bytes of ``torch.save``, or the header of a file of safetensors; an error
    where PyTorch could not pickle it, which reading it raises.
    """

    def __init__(self) -> None:
        self._contents: dict[str, Any] = {}
        self._kept_at: dict[str, float] = {}  #: when, of folders that were made for them too
        self._folders: set[str] = set()  #: that are not on the disk
        self._resolving = threading.local()  #: has ``here`` in a thread that works out a path

    def keep(self, path: Any, content: Any) -> None:
        self._contents[self._resolve(path)] = content
        self._kept_at[self._resolve(path)] = time.time()

    def make_folder(self, path: Any) -> None:
        """A folder, and those that it is in, that are there in what the script sees."""
        folder = self._resolve(path)
        while folder not in self._folders and not os.path.isdir(folder):
            self._folders.add(folder)
            self._kept_at[folder] = time.time()
            folder = os.path.dirname(folder)

    def move(self, src: Any, dst: Any) -> bool:
        """Whether a file that was saved has another path now."""
        if (content := self.forget(src)) is None:
            return False
        self.keep(dst, content)
        return True

    def forget(self, path: Any) -> Any:
        """What was saved, which is not any more; None for a file that the script did not save."""
        return self._contents.pop(self._resolve(path), None)

    def find(self, path: Any) -> Any:
        """None for a file that the script did not save. What is kept as a function of nothing is made when it is
        looked for.
        """
        if not _is_path(path):
            return None
        content = self._contents.get(place := self._resolve(path))
        if callable(content):
            content = self._contents[place] = content()
        return content

    def _resolve(self, path: Any) -> str:
        """The path without links, for which Python asks ``os.lstat`` of each folder: within it nothing is found."""
        if hasattr(self._resolving, "here"):
            return ""
        self._resolving.here = True
        try:
            return os.path.realpath(str(os.fspath(path)))
        finally:
            del self._resolving.here

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
            with torch.profiler.record_function("save"):
                original(value, f, *args, **kwargs)
                stage([storage.nbytes() for storage in _list_storages(value)], at_once=True)  # the buffer's bytes
            return
        assume(f"torch.save to {os.fspath(path)!r} wrote nothing: there is no data")
        buffer = io.BytesIO()
        try:
            with torch.profiler.record_function("save"):  # the phase of a script's cycle
                original(value, buffer, *args, **kwargs)
                stage([storage.nbytes() for storage in _list_storages(value) if storage.device.type != "cpu"],
                      at_once=False)
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
        is_folder = content is None and self._is_unwritten(path)
        if content is None and not is_folder:
            return original(path, *args, **kwargs)
        size = len(content) if isinstance(content, bytes) else 0
        seconds = self._kept_at[self._resolve(path)]
        times = {f"st_{what}{unit}": value for what in ("atime", "mtime", "ctime")
                 for unit, value in (("", seconds), ("_ns", int(seconds * 1e9)))}
        mode = stat.S_IFDIR | 0o755 if is_folder else stat.S_IFREG | 0o644
        return os.stat_result((mode, 0, 0, 1, os.getuid(), os.getgid(), size, *[int(seconds)] * 3),
                              times)

    def _names_in(self, path: Any, there: Iterable[str]) -> list[str]:
        """Names of what was saved to a folder, but for what is on the disk."""
        if not (_is_path(path) or path is None):  # a number of an open folder, bytes
            return []
        folder = self._resolve("." if path is None else path)
        saved = [os.path.basename(kept) for kept in (*list(self._contents), *sorted(self._folders))
                 if os.path.dirname(kept) == folder]
        return [name for name in saved if name not in set(there)]

    def _is_unwritten(self, path: Any) -> bool:
        """Whether a folder is only in what the script sees."""
        return bool(self._folders) and _is_path(path) and self._resolve(path) in self._folders

    def _list(self, original: Callable[..., Any], path: Any = None) -> list[Any]:
        names: list[Any] = [] if self._is_unwritten(path) else original(path)
        return names + self._names_in(path, names)

    def _scan(self, original: Callable[..., Any], path: Any = None) -> Any:
        entries: list[Any] = []
        if not self._is_unwritten(path):
            with original(path) as found:
                entries = list(found)
        folder = "." if path is None else path
        return _Scanned([*entries, *[_SavedEntry(os.path.join(folder, name)) for name in self._names_in(
            path, [entry.name for entry in entries])]])

    def _remove_folder(self, original: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> None:
        if _is_path(path):
            inside = os.path.join(self._resolve(path), "")
            for kept in [kept for kept in self._contents if kept.startswith(inside)]:
                del self._contents[kept]
            if self._is_unwritten(path):
                self._folders -= {folder for folder in self._folders if os.path.join(folder, "").startswith(inside)}
                return
        original(path, *args, **kwargs)

    def _remove(self, original: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> None:
        if self.forget(path) is None:
            original(path, *args, **kwargs)

    def _rename(self, original: Callable[..., Any], src: Any, dst: Any, *args: Any, **kwargs: Any) -> None:
        if not self.move(src, dst):
            original(src, dst, *args, **kwargs)

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
        return os.path.isfile(self.path)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isdir(self.path)

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
