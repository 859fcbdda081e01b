"""A run that is stopped at a line of Python, by Ctrl-C or by too little memory, leaves nothing behind; and what goes on
in other threads meanwhile.
"""
import dis
import functools
import os
import pkgutil
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager

import numpy
import pytest
import torch
from torch import nn

import analyzer
from analyzer import MetaTensorMode, profile, symbolic_trace
from analyzer.errors import AnalyzerError
from analyzer.meta.intercept import patch, replacement
from analyzer.record import optimizer_step
from analyzer.tools.runtime import measure

PACKAGE = os.path.dirname(analyzer.__file__) + os.sep


class Stack(nn.Module):
    def __init__(self, blocks=3):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


class Hooked(nn.Module):
    """Hooks, gradients that are there already, a buffer that changes, autocast, a checkpoint, random numbers."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.norm.register_forward_hook(lambda *_: None)
        self.second.weight.register_hook(lambda _: None)
        for parameter in self.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)

    def forward(self, x):
        x = self.second(self.norm(self.first(x)))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.utils.checkpoint.checkpoint(self.first, x + numpy.random.rand(), use_reentrant=False).float()


def under_mode():
    with MetaTensorMode():
        x, model = torch.rand(64, 8, device="cuda", requires_grad=True), Stack().cuda()
        with torch.autocast("cuda", dtype=torch.float16):
            model(x).sum().backward()
        torch.cuda.synchronize()


def step(model, optimizer, x):
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


HOOKED, PLAIN, X = Hooked(), Stack(), torch.ones(4, 8)
#: Ways to use the package.
STAGES = {"mode": under_mode, "measure": lambda: measure(HOOKED, (X,), optimizer="adamw", steps=1),
          "trace": lambda: symbolic_trace(HOOKED, meta_args={"x": X}),
          "own step": lambda: profile(PLAIN, (X,), optimizer="sgd", step=step, reuse=False),
          "inference": lambda: profile(HOOKED, (X,), mode="infer", eval=True)}


def read_state():
    """What a program owns that a run could leave changed."""
    watch = replacement._watch
    modules = (torch, torch.nn.functional, torch.cuda, torch.optim.Optimizer, nn.Module, torch.autograd, torch.random)
    state = {**HOOKED.state_dict(), **{f"grad {n}": p.grad for n, p in HOOKED.named_parameters()}, **PLAIN.state_dict()}
    return {
        "tensors": {name: t.tolist() for name, t in state.items()},
        "functions": [{name: id(value) for name, value in vars(owner).items() if callable(value)} for owner in modules],
        "autocast": [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")],
        "modes": (torch.is_grad_enabled(), torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()),
        "random": (torch.get_rng_state().tolist(), numpy.random.get_state()[1].tolist()),
        "signals": (signal.getsignal(signal.SIGINT), sys.getprofile(), threading.active_count()),
        "this package": (watch.users, watch.holds, len(watch._replaced), len(watch._around), len(replacement.waiting),
                         patch.mode_replacements._users, len(patch.mode_replacements._undo),
                         len(replacement._chains), len(optimizer_step._observers))}


@functools.cache
def list_nops(code):
    """Places before a step that does nothing, which ``try:`` compiles to: no signal is handled there and nothing fails,
    so that CPython lets it be outside of the ``with`` block that it is in (the exception table in the output of `dis`).
    """
    return {one.offset for one in dis.get_instructions(code) if one.opname == "NOP"}


@functools.cache
def list_able(code):
    """The lines of a function on which more is done than to move, compare and return what there is."""
    found, line = set(), 0
    for one in dis.get_instructions(code):
        line = one.starts_line or line
        if one.opname.startswith(("CALL", "BINARY", "BUILD", "LIST", "DICT", "SET", "FORMAT", "IMPORT", "MAKE")):
            found.add(line)
    return found


@contextmanager
def seeing(see):
    """A block in which ``see`` is told each line of the package that does something, with its frame."""
    def start(frame, event, arg):
        return line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def line(frame, event, arg):
        if event == "line" and frame.f_lasti not in list_nops(frame.f_code):
            see(frame)
        return line

    before = sys.gettrace()
    sys.settrace(start)
    try:
        yield
    finally:
        sys.settrace(before)


def place_of(frame):
    return frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno


def puts_back(frame):
    """Whether a frame is within the end of a block or in a finaliser: an error there is one in putting back."""
    while frame is not None and frame.f_code.co_name not in ("__exit__", "__del__"):
        frame = frame.f_back
    return frame is not None


def strike(run, kind, place, times):
    """Run, and stop at a place, the ``times``-th time that it is reached."""
    left, struck = times, False

    def see(frame):
        nonlocal left, struck
        if place_of(frame) == place and not struck:
            left -= 1
            if left == 0 and (kind is KeyboardInterrupt or not puts_back(frame)):
                struck = True
                sys.settrace(None)
                if kind is KeyboardInterrupt:
                    signal.raise_signal(signal.SIGINT)
                else:
                    raise MemoryError("struck")

    try:
        with seeing(see):
            run()
    except kind:
        return
    except AnalyzerError as error:  # which tells where a model's pass failed
        assert isinstance(error.__cause__, kind)
        return
    assert not struck or kind is MemoryError, "the interrupt was swallowed"


#: What was left behind where a run was stopped in these functions, in its last line that is reached or its first.
FOUND = {
    "what had been replaced, where a step failed before it was noted what undoes the step before": (
        MemoryError, "mode", False, lambda file, name: name in (
            "_activate", "install", "_enter_thread", "_higher_order_operators", "follow_switch", "supply")),
    "trained parameters: a measurement let every signal through": (
        KeyboardInterrupt, "measure", True,
        lambda file, name: "runtime" in file and name in ("unchanged", "stop")),
    "autocast, off for every later run of the thread": (
        KeyboardInterrupt, "mode", False, lambda file, name: name == "kernel_at_key" and file.endswith("autocast.py")),
    "autocast, on: what took the place of its __exit__ was left before the original was called": (
        KeyboardInterrupt, "trace", True, lambda file, name: name in ("_enter_autocast", "_exit_autocast")
        or name in ("call", "__enter__", "__exit__") and file.endswith("effect_patch.py")),
    "an observer of optimizers, of a run that never began": (
        MemoryError, "own step", False, lambda file, name: name == "observed_steps"),
    "autocast, on: its block had been entered, and nothing left it": (
        MemoryError, "trace", False, lambda file, name: name == "_enter_autocast"),
    "nothing, of lines all over the package": (MemoryError, "inference", False, lambda file, name: True),
    "nothing, of interrupts all over the package": (KeyboardInterrupt, "inference", True, lambda file, name: True),
}


@pytest.mark.sweep(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "stage", "is_last", "is_meant"), FOUND.values(), ids=FOUND)
def test_what_was_left_behind(kind, stage, is_last, is_meant):
    run, reached = STAGES[stage], Counter()

    def see(frame):
        if is_meant(*place_of(frame)[:2]) and (kind is KeyboardInterrupt or frame.f_lineno in list_able(frame.f_code)):
            reached[place_of(frame)] += 1

    run()  # what is imported and cached once
    with seeing(see):
        run()
    places = sorted(reached)
    torch.manual_seed(0)
    numpy.random.seed(0)
    for place in places[::max(1, len(places) // 8)]:
        before = read_state()
        strike(run, kind, place, reached[place] if is_last else 1)
        after = read_state()
        if stage == "measure":  # which runs the model's own code, as the user would
            before.pop("random"), after.pop("random")
        assert {name: after[name] for name in before if after[name] != before[name]} == {}, place
        run()
    assert places


def train(steps, seed):
    """The losses of a training of its own, whose inputs and dropout are drawn from the generator of the process."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        x = torch.rand(16, 8)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_training_in_another_thread_draws_what_it_draws_alone():
    """The generator's state was put back after each run, so that its dropout repeated itself."""
    model, x, is_done = Stack(1), torch.ones(4, 8), threading.Event()
    profile(model, (x,), mode="infer")
    alone = train(30, 7)

    def profile_on():
        while not is_done.is_set():
            profile(model, (x,), mode="infer")

    thread = threading.Thread(target=profile_on)
    thread.start()
    try:
        assert all(train(30, 7) == alone for _ in range(4))
    finally:
        is_done.set()
        thread.join()


def test_a_seed_that_a_model_sets_is_put_back_beside_another_thread():
    class Seeding(nn.Linear):
        def forward(self, x):
            torch.manual_seed(5)
            return super().forward(x)

    model, is_done = Seeding(2, 2), threading.Event()
    thread = threading.Thread(target=is_done.wait)
    thread.start()
    before = torch.get_rng_state()
    profile(model, (torch.ones(1, 2),), mode="infer")
    is_done.set()
    thread.join()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["analyzer.meta.intercept.patch:mode_replacements.lock",
                                  "analyzer.compiled.region:_compiling"])
def test_a_fork_while_another_thread_replaces_functions_of_torch(name):
    """Its child found the lock taken, and waited for ever."""
    lock, holds, is_done = pkgutil.resolve_name(name), threading.Event(), threading.Event()

    def hold():
        with lock:
            holds.set()
            is_done.wait(0.2)

    thread = threading.Thread(target=hold)
    thread.start()
    holds.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if lock.acquire(timeout=5) else 1)
    end = time.monotonic() + 30
    while not (found := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < end:
        time.sleep(0.01)
    is_done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(found[1]) == 0
