"""A signal may come at any step: whatever its handler raises, torch and this process are as they were afterwards."""
import gc
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress

import pytest
import torch
from torch import nn

from analyzer import profile, symbolic_trace
from analyzer.errors import InputError
from analyzer.memory.allocator import CachingAllocator
from analyzer.meta.address_space import MetaStorage
from analyzer.meta.intercept import replacement
from analyzer.meta.intercept.replacement import InterruptsDeferred, InterruptsHeld, _watch, waiting
from analyzer.meta.intercept.shared_replacement import SharedReplacements


class TimeUp(Exception):
    """As the time-out of a test raises it: an ordinary exception."""


def time_up(*_):
    raise TimeUp


@pytest.fixture(autouse=True)
def alarm():
    before = signal.signal(signal.SIGALRM, time_up)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert signal.signal(signal.SIGALRM, before) is time_up


MODEL, X = nn.Sequential(nn.Linear(8, 8), nn.Dropout(.1), nn.Linear(8, 8)), torch.ones(4, 8)


def train():
    p = profile(MODEL, args=(X,), optimizer="adamw", reuse=False)
    return p.fwd_flops, p.bwd_flops, p.peak_allocated_bytes, p.peak_reserved_bytes


def trace():
    return len(symbolic_trace(MODEL, meta_args={"input": X}).graph.nodes)


def observable():
    return (torch.overrides.has_torch_function, nn.Module.__call__, sys.unraisablehook, torch.cuda.is_available(),
            torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack(), gc.get_threshold(),
            torch.is_grad_enabled(), torch.autograd._engine_run_backward, torch.cuda.Stream)


def run_with(tracer, run):
    """What ``run()`` gives, or TimeUp; ``tracer`` sees every call of a Python function."""
    before = sys.gettrace()
    sys.settrace(lambda frame, event, arg: tracer(frame.f_code) if event == "call" else None)
    try:
        return run()
    except (TimeUp, InputError) as error:  # a trace says where in the model it was
        assert isinstance(error, TimeUp) or isinstance(error.__cause__, TimeUp)
        return TimeUp
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("run", [train, trace])
def test_a_signal_at_the_first_step_of_what_must_not_be_left_halfway(run, recwarn):
    run()
    right, before, calls = run(), observable(), {}
    must_end = {CachingAllocator.allocate.__code__, CachingAllocator.free.__code__}

    def count(code):
        if code.co_name in ("__enter__", "__exit__", "__del__") or code in must_end:
            calls[code] = calls.get(code, 0) + 1

    run_with(count, run)
    assert len(calls) > 10
    for code, number in calls.items():
        for at in {1, (number + 1) // 2}:
            seen = 0

            def interrupt(called, code=code, at=at):
                nonlocal seen
                seen += called is code
                if called is code and seen == at:
                    signal.raise_signal(signal.SIGALRM)

            assert run_with(interrupt, run) in (TimeUp, right), code.co_qualname
            assert observable() == before, code.co_qualname
            assert run() == right, code.co_qualname


class AtLine:
    """A tracer that acts at the line number ``at`` of those that run of the file of these blocks."""

    def __init__(self, act):
        self.act, self.lines, self.at = act, 0, 0

    def __call__(self, frame, event, arg):
        if frame.f_code.co_filename != replacement.__file__ or frame.f_code.co_name == "__call__":
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                self.act()
        return self


@pytest.mark.parametrize("block", [InterruptsDeferred, InterruptsHeld])
def test_a_signal_at_any_line_on_the_way_out_of_a_block_leaves_nothing(block):
    """Signals of a later run did not wait, since a block was still counted whose handlers were gone."""
    tracer, at, strike = sys.gettrace(), 0, AtLine(lambda: signal.raise_signal(signal.SIGALRM))
    struck = 0
    while at <= strike.lines:  # until a run has fewer lines than this
        strike.lines, strike.at, at = 0, at + 1, at + 1
        try:
            with block():
                sys.settrace(strike)
        except TimeUp:
            struck += 1
        sys.settrace(tracer)
        assert signal.getsignal(signal.SIGALRM) is time_up
        assert not any((_watch.users, _watch.holds, _watch._replaced, _watch._around, waiting)), at
    assert struck == at - 1 > 15


def test_a_block_that_another_thread_ends_lets_signals_through():
    """Python's collector may end a suspended generator there, where no handler can be put back."""
    block = InterruptsHeld()
    block.__enter__()
    with ThreadPoolExecutor(1) as other:
        other.submit(block.__exit__).result()
    assert (_watch.users, _watch.holds) == (0, 0)
    with pytest.raises(TimeUp):
        signal.raise_signal(signal.SIGALRM)
    with InterruptsHeld():
        pass
    assert signal.getsignal(signal.SIGALRM) is time_up and not _watch._replaced


@pytest.mark.parametrize("outer", [nullcontext, InterruptsDeferred, InterruptsHeld])
@pytest.mark.parametrize("block", [InterruptsDeferred, InterruptsHeld])
def test_too_little_memory_at_any_line_on_the_way_into_a_block_leaves_the_handlers(outer, block):
    """Each line of this package that runs in ``__enter__`` raises MemoryError once."""
    def fail():
        raise MemoryError

    tracer, at, strike = sys.gettrace(), 0, AtLine(fail)
    while at <= strike.lines:  # until a run has fewer lines than this
        strike.lines, strike.at, at = 0, at + 1, at + 1
        with outer():
            before = signal.getsignal(signal.SIGALRM), _watch.users, _watch.holds
            entering = block()
            sys.settrace(strike)
            with suppress(MemoryError):
                entering.__enter__()
                sys.settrace(tracer)
                entering.__exit__()
            sys.settrace(tracer)
            assert (signal.getsignal(signal.SIGALRM), _watch.users, _watch.holds) == before, at
        assert (signal.getsignal(signal.SIGALRM), _watch.users, _watch.holds) == (time_up, 0, 0)
    assert at > 3


def test_what_a_dying_storage_raises_ends_the_run():
    def stop(frame, event, arg):
        if event == "call" and frame.f_code is MetaStorage.__del__.__code__:
            sys.settrace(None)
            raise KeyboardInterrupt

    right, tracer = train(), sys.gettrace()
    sys.settrace(stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            train()
    finally:
        sys.settrace(tracer)
    assert train() == right


def test_what_one_replacement_raises_when_it_is_put_back_leaves_no_other():
    undone = []

    def stop():
        raise KeyboardInterrupt

    shared = SharedReplacements(lambda: [lambda: undone.append("first"), stop, lambda: undone.append("last")])
    with pytest.raises(KeyboardInterrupt), shared.installed():
        pass
    assert undone == ["last", "first"]


@pytest.mark.parametrize("name", ["own", "inherited"])
def test_a_replacement_that_cannot_be_made_leaves_what_there_was(name):
    class Base:
        inherited = 1

    class Derived(Base):
        own = 2

    def make(original):
        raise MemoryError

    contents, count = dict(vars(Derived)), len(replacement._chains)
    with pytest.raises(MemoryError):
        replacement.replace(Derived, name, make)
    assert dict(vars(Derived)) == contents and len(replacement._chains) == count


def test_what_is_made_once_goes_around_what_is_there_then():
    class Owner:
        def told(self):
            return "own"

    made = []

    def make(original):
        made.append(original)
        return lambda self: f"around {original(self)}"

    shared = SharedReplacements(replacement.made_once(lambda: iter([replacement.replace(Owner, "told", make)])))
    own = Owner.told
    for _ in range(3):
        with shared.installed():
            assert Owner().told() == "around own"
        assert vars(Owner)["told"] is own
    assert len(made) == 1
    Owner.told = lambda self: "another"  # as a module is when it is loaded again
    with shared.installed():
        assert Owner().told() == "around another"
    assert Owner().told() == "another"
    Owner.told = own
    undo = replacement.replace(Owner, "told", lambda original: lambda self: f"before {original(self)}")
    with shared.installed():
        assert Owner().told() == "around before own"
        undo()
        assert Owner().told() == "around own"
        undo = replacement.replace(Owner, "told", lambda original: lambda self: f"behind {original(self)}")
    assert Owner().told() == "behind own"
    undo()
    assert vars(Owner)["told"] is own and not [key for key in replacement._chains if key[0] == id(Owner)]
