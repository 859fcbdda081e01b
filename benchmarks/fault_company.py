"""A profile in company: of another profile in another thread, of a training thread, of a forked process. Each trial
gives what did not hold.
"""
from __future__ import annotations

import json
import os
import queue
import random
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from .fault_fingerprint import Functions, list_changed, read_process
from .fault_stage import STAGES, Stack, Stage

ALONE = {stage.name: stage for stage in STAGES}


def train(steps: int, seed: int, *, draws: bool) -> list[float]:
    """The losses of a training of its own, with batch norm, hooks, autocast, checkpoints and AdamW; one that ``draws``
    does so from the generator of the process, for dropout and inputs.
    """
    generator = torch.default_generator if draws else torch.Generator()
    generator.manual_seed(seed)
    third = torch.nn.Linear(32, 8)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.GELU(),
                                third, torch.nn.LayerNorm(8), torch.nn.Dropout(0.2 * draws),
                                torch.nn.Linear(8, 1))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    third.register_forward_hook(lambda *_: None)
    third.weight.register_hook(lambda grad: grad * 0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for _ in range(steps):
        x = torch.rand(16, 8, generator=generator)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=len(losses) % 2 == 0):
            out = model(x) if draws else torch.utils.checkpoint.checkpoint(
                model, x, use_reentrant=False, preserve_rng_state=False)
        loss = (out.float() - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run_beside(stages: list[Stage], rounds: int, *, trains: bool, draws: bool = False) -> Iterator[str]:
    """Run stages in two threads at once, or in one beside a live training."""
    folders = [Path(tempfile.mkdtemp(prefix="faults-")) for _ in range(2)]
    owned = {(s.name, i): s.make(folders[i]) for s in stages for i in range(2)}
    right = {s.name: s.run(owned[s.name, 0], folders[0]) for s in stages}
    right = {s.name: s.run(owned[s.name, 0], folders[0]) for s in stages}
    losses = train(40, 7, draws=draws)
    before, functions = read_process(folders[0]), Functions(is_whole=True)
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    is_done = threading.Event()

    def work(number: int) -> None:
        order = stages * rounds
        random.Random(number).shuffle(order)
        for stage in order:
            try:
                answer = stage.run(owned[stage.name, number], folders[number])
                if _without_replay(answer) != _without_replay(right[stage.name]):
                    lost.put(f"{stage.name}: another answer beside another thread")
            except BaseException:  # noqa: BLE001
                lost.put(f"{stage.name}: {traceback.format_exc()}")

    def train_on() -> None:
        try:
            while not is_done.is_set():
                if train(40, 7, draws=draws) != losses:
                    lost.put("other losses than those of training alone")
        except BaseException:  # noqa: BLE001
            lost.put(f"training: {traceback.format_exc()}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1 if trains else 2)]
    trainer = threading.Thread(target=train_on)
    for thread in [*threads, *([trainer] if trains else [])]:
        thread.start()
    for thread in threads:
        thread.join()
    is_done.set()
    if trains:
        trainer.join()
    while not lost.empty():
        yield lost.get()
    yield from [line for line in list_changed(before, read_process(folders[0])) if not line.startswith(
        ("files", "random"))]
    yield from functions.list_changed()


def fork(rounds: int) -> Iterator[str]:
    """A forked child profiles, and its parent does after it; also a child that was forked while a thread profiled."""
    stages = [ALONE[name] for name in ("profile", "profile, hooks", "symbolic_trace")]
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    owned = {stage.name: stage.make(folder) for stage in stages}

    def answers() -> list[str]:
        return [_without_replay(stage.run(owned[stage.name], folder)) for stage in stages]

    answers()
    right = answers()
    for number in range(rounds):
        is_done = threading.Event()
        beside = threading.Thread(target=_profile_until, args=(is_done,))
        if number % 2:
            beside.start()
            time.sleep(0.05 * number)
        code = _in_child(lambda: answers() == right)
        is_done.set()
        if number % 2:
            beside.join()
        where = "of a process that profiled in another thread" if number % 2 else ""
        if code:
            yield f"a forked child {where} {'hung' if code < 0 else 'got another answer'}"
        if answers() != right:
            yield f"another answer after a fork {where}"


def _profile_until(is_done: threading.Event) -> None:
    while not is_done.is_set():
        ALONE["profile"].run({"model": Stack(), "x": torch.ones(4, 8)}, Path())


def _in_child(check: Callable[[], bool], seconds: float = 60) -> int:
    """The exit status of a forked child: 0 where ``check`` holds there, -1 where it does not end."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if check() else 1)
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
            os._exit(2)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return -1


def _without_replay(answer: str) -> str:
    """An answer but for which blocks were run once and replayed: beside another thread fewer are."""
    if not answer.startswith("{"):
        return answer
    fields = json.loads(answer)
    fields.pop("replay", None)
    return json.dumps(fields)
