"""CUDA graphs: what is captured runs in the simulation as it is captured, in a pool of memory of its own, and is logged
once more with each replay. Source: torch/cuda/graphs.py, c10/cuda/CUDACachingAllocator.cpp (private pools).
"""
from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.cuda.graphs

from analyzer.errors import InputError
from analyzer.meta.intercept.replacement import Undo, answer, replace, supply
from analyzer.meta.state import active_state, current

from .stream import simulated_class

_next_handle = itertools.count(1).__next__


def make_pool_handle() -> tuple[int, int]:
    """``torch.cuda.graph_pool_handle``."""
    return 0, _next_handle()


class SimulatedGraph:
    """Answers as ``torch.cuda.CUDAGraph``. Its memory is kept, and used by nothing else, as long as the graph lives."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._state: Any = None  # of the mode that it was captured under
        self._handle: tuple[int, int] | None = None
        self._calls: tuple[int, int] | None = None
        self._begin = 0

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global",
                      check_input_liveness: bool = False) -> None:
        """From now on, allocations are the graph's."""
        state = active_state()
        if state.space.capture is not None:
            raise RuntimeError("a CUDA graph is being captured already: end it before another begins")
        self.reset()
        self._state, self._handle = state, pool or make_pool_handle()
        state.space.begin_capture(self._handle)
        self._begin = 0 if state.recorder is None else state.recorder.count_calls()
        state.assume("a CUDA graph is logged as it is captured, and again with each replay; its memory is a pool that "
                     "it keeps. Give --steps more than the steps that warm it up")

    def capture_end(self) -> None:
        """The graph is whole."""
        if self._state is None:
            raise RuntimeError("capture_end() without capture_begin()")
        self._state.space.capture = None
        recorder = self._state.recorder
        self._calls = (self._begin, self._begin if recorder is None else recorder.count_calls())

    def replay(self) -> None:
        """Log what was captured once more."""
        if self._calls is None:
            raise InputError("CUDAGraph.replay(): nothing was captured; capture with torch.cuda.graph(g) first")
        state = current()
        if state is not None and state is self._state and state.recorder is not None:
            state.recorder.repeat_calls(*self._calls)

    def reset(self) -> None:
        """Let go of the graph; its memory may be given back."""
        state, self._state, self._calls = self._state, None, None
        if state is not None and self._handle is not None:
            state.space.leave_pool(self._handle)

    def pool(self) -> tuple[int, int]:
        """The handle of its memory, for other graphs to share."""
        if self._handle is None:
            raise RuntimeError("CUDAGraph.pool(): nothing was captured yet")
        return self._handle

    def instantiate(self) -> None:
        """Nothing to do."""

    enable_debug_mode = instantiate

    def debug_dump(self, debug_path: str) -> None:
        """Nothing to dump."""

    def __del__(self) -> None:
        self.reset()


def replacements() -> Iterator[Undo]:
    """Replace what captures; each result undoes one replacement."""
    graphs: Any = torch.cuda.graphs
    for owner in (torch.cuda, graphs):
        yield replace(owner, "CUDAGraph", lambda f: simulated_class(f, SimulatedGraph, _is_simulated))
        yield answer(owner, "graph_pool_handle", make_pool_handle)
        yield answer(owner, "is_current_stream_capturing", _is_capturing)
    yield supply(torch._C, "_host_emptyCache", lambda: None)
    # a stream that the class keeps for all captures
    kept, graphs.graph.default_capture_stream = graphs.graph.default_capture_stream, None
    yield partial(setattr, graphs.graph, "default_capture_stream", kept)


def _is_simulated(*args: Any, **kwargs: Any) -> bool:
    return current() is not None


def _is_capturing() -> bool:
    return active_state().space.capture is not None
