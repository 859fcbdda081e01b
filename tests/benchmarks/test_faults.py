"""A run that is stopped leaves nothing behind: a sample of fuzz/fault_trial.py, and the faults that it found."""
import os
import pkgutil
import threading
import time
import warnings

import pytest
import torch
from torch import nn

from analyzer import profile
from benchmarks.fuzz.fault_stage import STAGES, Stack
from benchmarks.fuzz.fault_trial import Place, Watched, at_place, list_lines, list_trials, of_package, try_faults


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(before)


def list_lost(watched, trials):
    return [f"{trial.where}: {line}" for trial, _, lost in try_faults(watched, trials) for line in lost]


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("stage", "counts"), [
    ("profile, inference", {"memory": 2}), ("symbolic_trace", {"interrupt": 4}), ("export", {"disk": 2})])
def test_faults_at_places_of_each_kind(stage, counts):
    watched = Watched(STAGES[stage])
    trials = list_trials(watched.stage, watched.run, counts)
    assert list_lost(watched, trials) == [] and len(trials) >= sum(counts.values())


def at_lines(kind, stage, is_meant, times=1):
    """Faults at the lines of the package that are meant, the last time that each is reached where ``times`` is 0."""
    watched = Watched(STAGES[stage])
    lines = list_lines(watched.run, of_package, fails=kind == "memory")
    return watched, [at_place(kind, Place(*line, times or lines[line])) for line in lines if is_meant(*line[:2])]


#: What was left behind where a run was stopped in these functions.
FOUND = {
    "what had been replaced, where a step failed before it was noted what undoes the step before": (
        "memory", "mode", 1, lambda file, name: name in (
            "_activate", "install", "_enter_thread", "_higher_order_operators", "follow_switch", "supply")),
    "trained parameters: a measurement let every signal through": (
        "interrupt", "measure, hooks", 0, lambda file, name: "runtime" in file and name in ("unchanged", "stop")),
    "autocast, off for every later run of the thread": (
        "interrupt", "mode", 1, lambda file, name: name == "kernel_at_key" and file.endswith("cuda/autocast.py")),
    "autocast, on: what took the place of its __exit__ was left before the original was called": (
        "interrupt", "symbolic_trace", 0, lambda file, name: name in ("_enter_autocast", "_exit_autocast")
        or name in ("call", "__enter__", "__exit__") and file.endswith("effect_patch.py")),
    "an observer of optimizers, of a run that never began": (
        "memory", "profile, own step", 1, lambda file, name: name == "observed_steps"),
    "autocast, on: its block had been entered, and nothing left it": (
        "memory", "symbolic_trace", 1, lambda file, name: name == "_enter_autocast"),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("kind", "stage", "times", "is_meant"), FOUND.values(), ids=FOUND)
def test_what_was_left_behind(kind, stage, times, is_meant):
    watched, trials = at_lines(kind, stage, is_meant, times)
    some = trials[::max(1, len(trials) // 8)]
    assert some and list_lost(watched, some) == []


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
