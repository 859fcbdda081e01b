"""A process that goes on for long holds no more than one that has begun."""
import gc
import os
import threading
import weakref

import pytest
import torch
from torch import nn

from analyzer import Profile, profile, symbolic_trace

X = torch.ones(4, 16)


def make_model():
    return nn.Sequential(*[nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
                           for _ in range(3)])


def make_class(number):
    """A model of a class that no round before has seen, with code of its own."""
    names = {"torch": torch}
    exec(f"def forward(self, x):\n    return torch.relu(self.inner(x)) * {number + 1}\n", names)
    model = type(f"Net{number}", (nn.Module,), {"forward": names["forward"]})()
    model.inner = make_model()
    return model


def fail(number):
    with pytest.raises(RuntimeError):
        profile(make_model(), args=(torch.ones(4, 3),))


ONE = make_model()
COURSES = {
    "profiles of one model": lambda i: profile(ONE, args=(X,), optimizer="adamw", device="h100"),
    "traces of one model": lambda i: symbolic_trace(ONE, meta_args={"input": X}),
    "profiles of new classes": lambda i: profile(make_class(i), args=(X,)),
    "traces of new classes": lambda i: symbolic_trace(make_class(i), meta_args={"x": X}),
    "profiles read": lambda i: Profile.from_json(profile(ONE, args=(X,), device="h100").to_json()),
    "pages": lambda i: profile(ONE, args=(X,), device="h100").to_html(), "profiles that fail": fail}


def look():
    gc.collect()
    return len(gc.get_objects()), len(os.listdir("/proc/self/fd")), threading.active_count()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("course", COURSES)
def test_objects_files_and_threads_stay_level(course):
    for number in range(5):
        COURSES[course](number)
    objects, *others = look()
    for number in range(5, 20):
        COURSES[course](number)
    more, *now = look()
    assert more - objects < 1000 and now == others  # a profile that is kept each round has more in all


def test_traced_models_are_freed_with_their_last_name():
    """torch's graphs hold their modules, and the tracer held the model."""
    gc.collect()
    gc.disable()
    try:
        weights = []
        for _ in range(5):
            model = make_model()
            weights.append(weakref.ref(next(model.parameters())))
            traced = symbolic_trace(model, meta_args={"input": X})
            del model, traced
        assert [ref() for ref in weights] == [None] * 5
    finally:
        gc.enable()
