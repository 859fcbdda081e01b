"""What stacks tell of blocks: the line of the user's code, and what a block is for."""
from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from .history import History
from .snapshot import Ints, StackFrame, Stacks

# Folders of installed packages and of Python's own library.
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib[/\\]python\d|<frozen ")
# Packages by which a frame is known where its path is cut or relative, and those that run the cells of a notebook.
_PACKAGES = frozenset(
    "torch transformers peft accelerate trl einops einx bitsandbytes lightning pytorch_lightning deepspeed vllm sglang "
    "diffusers xformers flash_attn triton torchvision timm ipykernel IPython tornado traitlets asyncio python "
    "ipykernel_launcher.py runpy.py".split())
_PYTHON = re.compile(r"\.pyx?$|^<ipython-input|^<string>$|^<stdin>$|ipykernel_\d+")


class Place(IntEnum):
    """Which part of a program a stack is in."""

    UNKNOWN = 0    #: no frame was recorded
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3
    LOADING = 4    #: parameters are made, moved or loaded
    OTHER = 5


@dataclass(frozen=True)
class Line:
    """A line of code, with the library's line below it that allocates where that is not torch's."""

    file: str
    line: int
    name: str
    within: str = ""

    def __str__(self) -> str:
        where = f"{_shorten(self.file)}:{self.line} {self.name}" if self.line else self.name
        return f"{where} > {self.within}" if self.within else where


NO_LINE = Line("", 0, "(no line recorded)")
_BACKWARD_LINE = Line("", 0, "(backward pass, in C++)")
# How C++ frames name the node of autograd that runs: torch::autograd::generated::MmBackward0::apply
_NODE = re.compile(r"(\w*Backward\d*|AccumulateGrad)::apply")
_LIBRARY_LINE = Line("", 0, "(library code)")


class Lines:
    """The line and the place of each stack, found once."""

    def __init__(self, stacks: Stacks) -> None:
        self._stacks = stacks
        frames = stacks.frames
        self._is_python = [_PYTHON.search(frame.file) is not None for frame in frames]
        self._is_library = [_is_library(frame.file) for frame in frames]
        self._is_torch = [_is_torch(frame.file) for frame in frames]
        self._hint = [_place_of(frame, is_torch) for frame, is_torch in zip(frames, self._is_torch)]
        self._found: dict[int, tuple[Line, Place]] = {}
        # The thread of the backward pass runs no Python: where stacks were recorded, one without a frame is its.
        # Stacks of one frame at most are names that another writer of snapshots gave.
        is_recorded = bool((np.diff(stacks.start) > 1).any())
        self._nothing = (_BACKWARD_LINE, Place.BACKWARD) if is_recorded else (NO_LINE, Place.UNKNOWN)

    def of(self, stack: int, is_recorded: bool = True) -> Line:
        """The line that a stack leads to, of an event that was recorded or of a block from before."""
        return self._find(stack, is_recorded)[0]

    def place(self, stack: int, is_recorded: bool = True) -> Place:
        """The part of the program that it is in."""
        return self._find(stack, is_recorded)[1]

    def of_block(self, history: History, block: int) -> Line:
        """Where a block was allocated."""
        return self.of(int(history.stack[block]), bool(history.born[block] >= 0))

    def _find(self, stack: int, is_recorded: bool) -> tuple[Line, Place]:
        if stack < 0:
            return self._nothing if is_recorded else (NO_LINE, Place.UNKNOWN)
        if stack not in self._found:
            self._found[stack] = self._read(stack)
        return self._found[stack]

    def _read(self, stack: int) -> tuple[Line, Place]:
        numbers = self._stacks.number[self._stacks.start[stack]:self._stacks.start[stack + 1]].tolist()
        hints = {self._hint[number] for number in numbers}
        frames = self._stacks.frames
        python = [number for number in numbers if self._is_python[number]]
        place = next((place for place in (Place.OPTIMIZER, Place.BACKWARD, Place.LOADING, Place.FORWARD)
                      if place in hints), Place.OTHER)
        if not python and Place.BACKWARD in hints:
            node = next((found[1] for number in numbers if (found := _NODE.search(frames[number].name))), None)
            return _BACKWARD_LINE if node is None else Line("", 0, f"(backward pass: {node})"), Place.BACKWARD
        if not python:  # C++ without a caller, or a name that another writer of snapshots gave
            is_cpp = any(frames[number].file == "??" or "::" in frames[number].name for number in numbers)
            return _LIBRARY_LINE if is_cpp else Line("", 0, frames[numbers[0]].name), place
        user = next((number for number in python if not self._is_library[number]), None)
        inner = next((number for number in python if not self._is_torch[number]), None)
        if user is None:
            user = inner
        if user is None:
            return _BACKWARD_LINE if place is Place.BACKWARD else _LIBRARY_LINE, place
        return _make_line(frames[user], None if inner is None else frames[inner]), place


def describe_frames(frames: Sequence[StackFrame]) -> Line:
    """The line that frames lead to, innermost first, as a traceback has them."""
    inner = next((frame for frame in frames if not _is_torch(frame.file)), None)
    user = next((frame for frame in frames if not _is_library(frame.file)), inner)
    return NO_LINE if user is None else _make_line(user, inner)


def _make_line(user: StackFrame, inner: StackFrame | None) -> Line:
    within = "" if inner is None or inner == user else f"{_shorten(inner.file)}:{inner.line}"
    return Line(user.file, user.line, user.name, within)


def _split(path: str) -> list[str]:
    return path.replace("\\", "/").split("/")


def file_of(path: str) -> str:
    r"""The last part of a path, also of one of Windows; of a source line its file and number.

    >>> file_of("/home/me/net.py:41"), file_of(r"C:\me\net.py")
    ('net.py:41', 'net.py')
    """
    return _split(path)[-1]


def _is_library(file: str) -> bool:
    return _INSTALLED.search(file) is not None or _split(file)[0] in _PACKAGES


def _is_torch(file: str) -> bool:
    """Also Python's own library, which stands between torch and its callers (contextlib, functools)."""
    parts = _split(file)
    if _INSTALLED.search(file) is None:
        return parts[0] in ("torch", "python")
    return "torch" in parts or not {"site-packages", "dist-packages"} & set(parts)


def _place_of(frame: StackFrame, is_torch: bool) -> Place:
    """What one frame says of its stack. Names are those of torch/optim/optimizer.py, torch/nn/modules/module.py,
    torch/autograd/graph.py and of the classes of torch/csrc/autograd.
    """
    file = frame.file.replace("\\", "/")
    if "torch::autograd::Engine" in frame.name or frame.name == "_engine_run_backward":
        return Place.BACKWARD
    if is_torch and "torch/optim/" in file or frame.name == "step" and "optim" in file.rpartition("/")[2]:
        return Place.OPTIMIZER
    if frame.name in ("from_pretrained", "load_state_dict", "_apply", "reset_parameters") or (
            is_torch and file.endswith("torch/nn/parameter.py")):
        return Place.LOADING
    if frame.name in ("_call_impl", "_wrapped_call_impl", "forward"):
        return Place.FORWARD
    return Place.OTHER


def _shorten(file: str) -> str:
    """The file and its folder; of a notebook's cell, that it is one.

    >>> _shorten("/home/me/project/model/attention.py"), _shorten("/tmp/ipykernel_4242/1234567.py")
    ('model/attention.py', 'notebook cell 1234567')
    """
    parts = _split(file)
    if len(parts) > 1 and parts[-2].startswith("ipykernel_"):
        return f"notebook cell {parts[-1].removesuffix('.py')}"
    return "/".join(parts[-2:])


#: What blocks are for, by where they are allocated and freed: `categorize`.
CATEGORIES = ("before recording", "parameters", "activations", "temporaries of forward", "gradients",
              "temporaries of backward", "optimizer states", "temporaries of the optimizer", "other")


def categorize(history: History, lines: Lines) -> Ints:
    """The category of each block, as a place in `CATEGORIES`: what forward allocates is an activation unless forward
    frees it; what backward allocates is a gradient unless backward frees it; likewise states of the optimizer.
    """
    end = len(history.memory.events)
    born = np.array([lines.place(*row) for row in zip(history.stack.tolist(), (history.born >= 0).tolist())], np.int64)
    freed = np.array([lines.place(*row) for row in zip(history.free_stack.tolist(), (history.died < end).tolist())],
                     np.int64)
    # Blocks from before may still have a stack (PyTorch keeps it with the block): it tells what they are for.
    found = np.full(len(born), CATEGORIES.index("other"))
    found[(born == Place.UNKNOWN) & (history.born < 0)] = CATEGORIES.index("before recording")
    found[born == Place.LOADING] = CATEGORIES.index("parameters")
    for place, kept, temporary in ((Place.FORWARD, "activations", "temporaries of forward"),
                                   (Place.BACKWARD, "gradients", "temporaries of backward"),
                                   (Place.OPTIMIZER, "optimizer states", "temporaries of the optimizer")):
        here = born == place
        found[here] = CATEGORIES.index(kept)
        found[here & (freed == place)] = CATEGORIES.index(temporary)
    return found
