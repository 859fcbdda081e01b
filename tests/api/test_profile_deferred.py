"""Rows of a profile are worked out when they are read, and a profile is plain data all the same."""
import copy
import dataclasses
import os
import pickle
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from analyzer import profile
from analyzer.api.result import Profile
from analyzer.profilers.flop_registry import register_flop_impl
from analyzer.zoo import MODELS

ROWS = ("nodes", "modules", "module_calls", "operators", "timeline", "memory_events", "holders", "peak_by_category",
        "spans")


def make(**settings):
    return profile(MODELS["resnet18"].factory, args=(torch.empty(2, 3, 64, 64, device="meta"), ), optimizer="sgd",
                   **settings)


def pending(p: Profile) -> set[str]:
    slots = {name: getattr(Profile, name) for name in ROWS}

    def is_set(name):
        try:
            slots[name].__get__(p)
        except AttributeError:
            return False
        return True

    return {name for name in ROWS if not is_set(name)}


def test_rows_wait_until_they_are_read_and_sums_do_not():
    p = make()
    assert pending(p) == set(ROWS)
    assert p.fwd_flops and p.step_seconds and p.phases["backward"].allocated_bytes and p.fits() is not None
    assert pending(p) >= {"nodes", "modules", "timeline"}
    assert len(p.nodes) > 60
    assert "nodes" not in pending(p)
    assert "timeline" in pending(p)
    assert p.timeline
    with pytest.raises(AttributeError, match="no attribute 'node'"):
        p.node  # noqa: B018


@pytest.mark.parametrize("through", [
    copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p)), dataclasses.replace,
    lambda p: Profile.from_json(p.to_json()),
    lambda p: Profile(**{f.name: getattr(p, f.name) for f in dataclasses.fields(p)}),
])
def test_whoever_handles_it_has_all_of_it(through):
    whole = make()
    dataclasses.asdict(whole)
    assert pending(whole) == set()
    assert through(make()) == whole
    assert make() == whole


def test_rows_read_by_several_threads_at_once():
    p, whole = make(), make()
    with ThreadPoolExecutor(4) as pool:
        read = list(pool.map(lambda name: getattr(p, name), ROWS * 2))
    assert read == [getattr(whole, name) for name in ROWS * 2]


def test_rows_are_of_the_time_of_the_profile():
    """What was registered, and what the model was, when the profile was made."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def run():
        with register_flop_impl.scope():
            register_flop_impl(torch.ops.aten.addmm.default, override=True)(lambda *args, out, **kwargs: 1000)
            return profile(model, args=(torch.empty(4, 8),), mode="infer")

    p, whole = run(), run()
    with register_flop_impl.scope():
        register_flop_impl(torch.ops.aten.addmm.default, override=True)(lambda *args, out, **kwargs: 1)
        assert [n.fwd_flops for n in whole.nodes if n.op == "call_module"] == [1000, 1000]
        assert whole.modules is not None
    model.append(nn.Linear(8, 3))
    model[0].weight.requires_grad_(False)
    assert p == whole


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_child_that_is_forked_while_a_thread_works_rows_out_reads_its_own():
    begun, go_on = threading.Event(), threading.Event()

    def wait():
        begun.set()
        assert go_on.wait(60)
        return {"assumptions": ()}

    known = {f.name: None for f in dataclasses.fields(Profile) if f.name != "assumptions"}
    slow = Profile.deferred(known, {wait: ("assumptions",)})
    own = Profile.deferred(known, {lambda: {"assumptions": ("one",)}: ("assumptions",)})
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(getattr, slow, "assumptions")
        assert begun.wait(60)
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # ends a child that waits for what no thread of its gives back
            os._exit(0 if own.assumptions == ("one",) else 1)
        status = os.waitpid(child, 0)[1]
        go_on.set()
        assert reading.result() == () and status == 0
