"""The causes that docs/accuracy.md gives: placement only where the bytes asked for agree."""
from __future__ import annotations

import pytest

from benchmarks.accuracy_cause import find_cause


@pytest.mark.parametrize(("what", "error", "difference", "begins"), [
    ("1 backward held", -0.02, 0, "placement: the bytes asked for agree"),
    ("1 backward held", -0.02, -4, "placement: the bytes asked for agree"),
    ("1 backward held", -0.02, 4096, None),
    ("peak", 0.06, 0, None),
    ("reserved", 0.03, 0, "placement, or a library's workspace"),
    ("reserved", 0.03, 2**20, None),
])
def test_placement_is_said_only_where_requests_agree(what, error, difference, begins):
    cause = find_cause("bert_base-train-bf16-adamw-8x512", what, error, difference)
    assert cause is None if begins is None else cause.startswith(begins)


def test_a_late_workspace_can_only_be_missing():
    missing, spare = (find_cause("resnet50-train-fp32-sgd-32", "reserved", error, 0) for error in (-0.03, 0.03))
    assert missing.startswith("cuDNN: late in the backward pass") and spare.startswith("placement, or")
