"""CUDA graphs of the simulation: their memory, and what torch says meanwhile."""
from __future__ import annotations

import gc

import pytest
import torch

from analyzer import MetaTensorMode
from analyzer.errors import InputError

MIB = 1 << 20


def test_memory_of_a_graph_is_its_own():
    with MetaTensorMode() as mode:
        allocator = mode.space.allocator()
        graph = torch.cuda.CUDAGraph()
        assert isinstance(graph, torch.cuda.CUDAGraph) and not torch.cuda.is_current_stream_capturing()
        with torch.cuda.graph(graph):
            assert torch.cuda.is_current_stream_capturing() and torch.cuda.current_stream().is_capturing()
            torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")  # free at once, for the graph alone
            kept = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
        assert allocator.reserved_bytes == 64 * MIB and kept.data_ptr() % (2 * MIB) == 0
        other = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
        assert allocator.reserved_bytes == 96 * MIB  # not in the half that is free in the graph's
        del other
        torch.cuda.empty_cache()
        assert allocator.reserved_bytes == 64 * MIB
        del kept
        torch.cuda.empty_cache()
        assert allocator.reserved_bytes == 64 * MIB  # which a replay writes to
        graph.replay()
        graph.reset()
        torch.cuda.empty_cache()
        assert allocator.reserved_bytes == 0


def test_graphs_share_a_pool():
    with MetaTensorMode() as mode:
        allocator = mode.space.allocator()
        first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(first, pool=torch.cuda.graph_pool_handle()):
            torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        with torch.cuda.graph(second, pool=first.pool()):
            torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        assert first.pool() == second.pool() and allocator.reserved_bytes == 64 * MIB
        del first
        gc.collect()
        torch.cuda.empty_cache()
        assert allocator.reserved_bytes == 64 * MIB
        second.reset()
        torch.cuda.empty_cache()
        assert allocator.reserved_bytes == 0


def test_wrong_calls_are_named():
    with MetaTensorMode():
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(InputError, match="nothing was captured"):
            graph.replay()
        with pytest.raises(RuntimeError, match="nothing was captured"):
            graph.pool()
        with pytest.raises(RuntimeError, match="without capture_begin"):
            graph.capture_end()
        graph.capture_begin()
        with pytest.raises(RuntimeError, match="being captured already"):
            torch.cuda.CUDAGraph().capture_begin()
        graph.capture_end()
