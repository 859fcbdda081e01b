"""Blocks that are played instead of run, noted."""
from __future__ import annotations

import pytest

from analyzer.meta.source_line import _is_users
from analyzer.replay.block_replay import BlockReplay


@pytest.fixture
def played(monkeypatch):
    """The classes of the blocks that were played."""
    seen: list[str] = []
    original = BlockReplay._replay_captured

    def count(self, match):
        seen.append(type(match.target).__name__)
        return original(self, match)

    monkeypatch.setattr(BlockReplay, "_replay_captured", count)
    monkeypatch.setitem(_is_users, __file__, False)  # this file runs no model whose lines nodes would name
    monkeypatch.setattr("analyzer.replay.block_replay.LEAST_LEAVES_SAVED", 0)  # the blocks here are small
    return seen
