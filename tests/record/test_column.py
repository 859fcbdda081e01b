"""Calls, acts, lives and sequence numbers that are kept in columns come back as they were written."""
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analyzer.record.call_table import CallTable, OpCall
from analyzer.record.storage_lifetime import AllocatorEventTable, LifetimeTable, StorageLifetime

FIELDS = OpCall.__slots__
NUMBERS = st.lists(st.integers(-3, 2**62), max_size=4).map(tuple)
CALLS = st.lists(
    st.tuples(st.builds(SimpleNamespace), NUMBERS, NUMBERS, st.integers(0, 3),
              st.sampled_from(["forward", "backward", "a phase of its own"]), st.integers(0, 9), st.integers(-1, 9),
              st.none() | st.integers(0, 9), st.booleans()), max_size=12)


def facts(call):
    return tuple(getattr(call, name) for name in FIELDS)


@settings(deadline=None)
@given(calls=CALLS)
def test_calls_come_back(calls):
    table = CallTable()
    for call in calls:
        table.append(*call)
    assert len(table) == len(calls)
    assert [facts(c) for c in table] == [facts(c)
                                         for c in table.to_list()] == [facts(table[i])
                                                                       for i in range(len(calls))] == calls
    assert [facts(c) for c in table[1:5]] == calls[1:5]
    for i in range(len(calls)):
        table.put_in_step(i, i % 3 + 7)
    assert [facts(c) for c in table] == [(*c[:3], i % 3 + 7, *c[4:]) for i, c in enumerate(calls)]
    assert [table.place(i) for i in range(len(calls))] == [c[5:7] for c in calls]


@settings(deadline=None)
@given(acts=st.lists(st.tuples(st.sampled_from(["alloc", "free", "segment_map"]), st.integers(-2**50, 2**63 - 1),
                               st.integers(0, 2**63), st.integers(0, 2**31)),
                     max_size=12))
def test_acts_come_back(acts):
    table = AllocatorEventTable()
    for act in acts:
        table.append(*act)
    assert list(table) == table[:] == [table[i] for i in range(len(acts))] == acts
    assert table[2:4] == acts[2:4]


def test_a_life_keeps_what_it_is_told():
    table = LifetimeTable()
    first, second = (StorageLifetime(table, n, 10 + n, 512, 2**47 + n, "cuda:0", 3, -1, "forward", 0, -1, 2)
                     for n in (7, 8 << 32))
    assert (first.number, second.number, first.nbytes, second.nbytes,
            second.address) == (7, 8 << 32, 17, 10 + (8 << 32), 2**47 + (8 << 32))
    assert (first.died, first.died_call, first.category, first.label, first.requires_grad,
            first.spec) == (None, None, "", "", False, None)
    spec = object()
    second.died, second.died_call, second.category, second.label = 9, 0, "parameter", "a.weight"
    second.requires_grad, second.spec = True, spec
    second.node, second.step = 4, -1
    assert (second.died, second.died_call, second.category, second.label, second.requires_grad,
            second.spec) == (9, 0, "parameter", "a.weight", True, spec)
    assert (second.node, second.step, second.device, second.phase, second.born_call) == (4, -1, "cuda:0", "forward", -1)
    assert (first.died, first.category, first.label, first.requires_grad, first.spec, first.node) == (None, "", "",
                                                                                                      False, None, -1)
    with pytest.raises(AttributeError):
        first.colour = "red"


def test_alike_calls():
    """Two calls are alike where step, phase and signature are, and where the storages that they have twice are of one
    size and stand in the same places.
    """
    view, add = object(), object()
    table = CallTable()
    for signature, inputs, outputs, step in (
            (view, (1,), (1,), 0), (view, (2,), (2,), 0), (view, (3,), (3,), 0),  # storage 3 is of another size
            (add, (1, 2), (7,), 0), (add, (1, 1), (8,), 0), (add, (2, 1), (9,), 0), (view, (1,), (1,), 1),
            (view, (4,), (5,), 0)):
        table.append(signature, inputs, outputs, step, "forward", 0, 0, None, False)
    sizes = {1: 4, 2: 4, 3: 8}
    groups = table.group_alike(np.arange(len(table)), lambda numbers: [sizes[number] for number in numbers])
    assert groups.number.tolist() == [0, 0, 1, 2, 3, 2, 4, 5]
    assert groups.first.tolist() == [0, 2, 3, 4, 6, 7]
