"""A run that is stopped leaves nothing behind: a sample of benchmarks/trust_faults.py, and the faults that it found."""
from __future__ import annotations

import os
import threading
import time
import warnings

import pytest
import torch
from torch import nn

from analyzer import profile
from analyzer.meta.intercept.patch import mode_replacements
from benchmarks.fault_company import ALONE, train
from benchmarks.fault_place import Place, interrupt, list_lines, of_package, raise_error
from benchmarks.fault_stage import Stack
from benchmarks.fault_trial import Watched, at_place, list_trials, try_faults


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(before)


def list_lost(watched, trials):
    return [f"{trial.where}: {line}" for trial, outcome in try_faults(watched, trials) for line in outcome.lost]


@pytest.mark.parametrize(("stage", "counts"), [
    ("profile, inference", {"operator": 2, "own code": 1}),
    ("symbolic_trace", {"interrupt": 10, "operator": 3}),
    ("export", {"disk": 2}),
])
def test_faults_at_places_of_each_kind(stage, counts):
    watched = Watched(ALONE[stage])
    trials = list_trials(watched.stage, watched.run, counts)
    assert list_lost(watched, trials) == [] and len(trials) >= sum(counts.values()) / 2


def test_too_little_memory_while_torch_is_replaced():
    """What had been replaced stayed so, where a step failed before it was noted what undoes the step before."""
    watched = Watched(ALONE["mode"])
    lines = list_lines(watched.run, of_package, fails=True)
    places = [Place(*line, 1) for line in lines if line[1] in (
        "_activate", "install", "_enter_thread", "_higher_order_operators", "follow_switch", "supply")]
    places += [Place(*line, 1) for line in lines if line[1] == "_replacements" and line[0].endswith("patch.py")][::3]
    trials = [at_place("memory", place, raise_error(MemoryError), spares_cleanup=True) for place in places]
    assert len(trials) > 15 and list_lost(watched, trials) == []


def test_an_interrupt_while_measured_parameters_are_put_back():
    """Some of them stayed trained: a measurement let every signal through."""
    watched = Watched(ALONE["measure, hooks"])
    lines = list_lines(watched.run, lambda file: of_package(file) and "runtime" in file)
    places = [Place(*line, lines[line]) for line in lines if line[1] in ("unchanged", "stop")][::2]
    trials = [at_place("interrupt", place, interrupt, KeyboardInterrupt) for place in places]
    assert len(trials) > 5 and list_lost(watched, trials) == []


def test_a_cast_that_is_interrupted_does_not_keep_others_from_being_cast():
    """Ctrl-C at one line of a cast switched autocast off for every later run of the thread."""
    watched = Watched(ALONE["mode"])
    lines = list_lines(watched.run, of_package)
    trials = [at_place("interrupt", Place(*line, 1), interrupt, KeyboardInterrupt)
              for line in lines if line[1] == "kernel_at_key" and line[0].endswith("cuda/autocast.py")]
    assert len(trials) > 3 and list_lost(watched, trials) == []


def test_an_interrupt_at_the_end_of_an_autocast_block_that_is_traced():
    """Autocast stayed on: what took the place of its ``__exit__`` was left before the original was called."""
    watched = Watched(ALONE["symbolic_trace"])
    lines = list_lines(watched.run, of_package)
    places = [Place(*line, lines[line]) for line in lines if line[1] in ("_enter_autocast", "_exit_autocast") or (
        line[1] in ("call", "__enter__", "__exit__") and line[0].endswith("recording.py"))]
    trials = [at_place("interrupt", place, interrupt, KeyboardInterrupt) for place in places]
    assert len(trials) > 5 and list_lost(watched, trials) == []


def test_too_little_memory_while_optimizers_are_observed():
    """The observer of a run that never began heard the steps of later ones, whose profiles were others."""
    watched = Watched(ALONE["profile, own step"])
    lines = list_lines(watched.run, of_package, fails=True)
    trials = [at_place("memory", Place(*line, 1), raise_error(MemoryError), spares_cleanup=True)
              for line in lines if line[1] == "observed_steps"]
    assert len(trials) > 4 and list_lost(watched, trials) == []


def test_a_training_in_another_thread_draws_what_it_draws_alone():
    """The generator's state was put back after each run, so that its dropout repeated itself."""
    model, x, is_done = Stack(1), torch.ones(4, 8), threading.Event()
    profile(model, (x,), mode="infer")
    alone = train(60, 7, draws=True)

    def profile_on():
        while not is_done.is_set():
            profile(model, (x,), mode="infer")

    thread = threading.Thread(target=profile_on)
    thread.start()
    try:
        assert all(train(60, 7, draws=True) == alone for _ in range(4))
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


def test_a_fork_while_another_thread_replaces_functions_of_torch():
    """Its child found the lock taken, and waited for ever."""
    holds, is_done = threading.Event(), threading.Event()

    def hold():
        with mode_replacements.lock:
            holds.set()
            is_done.wait(0.2)

    thread = threading.Thread(target=hold)
    thread.start()
    holds.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if mode_replacements.lock.acquire(timeout=5) else 1)
    end = time.monotonic() + 30
    while not (found := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < end:
        time.sleep(0.01)
    is_done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(found[1]) == 0


def test_too_little_memory_where_a_trace_enters_autocast():
    """Autocast stayed on after the trace: its block had been entered, and nothing left it."""
    watched = Watched(ALONE["symbolic_trace"])
    lines = list_lines(watched.run, of_package, fails=True)
    trials = [at_place("memory", Place(*line, 1), raise_error(MemoryError), spares_cleanup=True)
              for line in lines if line[1] == "_enter_autocast"]
    assert trials and list_lost(watched, trials) == []
