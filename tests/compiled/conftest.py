"""What tests of compiled steps share."""
from typing import NamedTuple

import pytest
from torch import fx

from analyzer.compiled import region
from analyzer.meta.fused_kernel import FusedKernel

collect_ignore_glob = ["test_*.py"] if not region.is_known() else []  # compiled functions run as written


class Made(NamedTuple):
    graph: fx.GraphModule
    source: str
    kernels: list[FusedKernel]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Made]:
    """All graphs that are lowered in a test, with their programs."""
    found: list[Made] = []
    lower = region.lower

    def watch(graph, *args, **kwargs):
        lowered = lower(graph, *args, **kwargs)
        found.append(Made(graph, lowered.source, lowered.kernels))
        return lowered

    monkeypatch.setattr(region, "lower", watch)
    monkeypatch.setattr(region, "_made", {})
    return found
