"""The section of the speed benchmark that tells what each mechanism of replay buys: each is switched off alone."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

from analyzer import symbolic_profile
from analyzer.api import profile as profile_module
from analyzer.record.recorder import Recorder
from analyzer.replay import block_replay
from analyzer.replay.optimizer import replay as optimizer_replay
from analyzer.replay.step_replay import StepReplay

from . import speed_contender
from .speed_case import CASES, SpeedCase, opt
from .speed_contender import OURS, Prepared, Run, prepare
from .speed_report import CPU, Report, say
from .speed_table import format_ratio, markdown, ratio, time_in_turn

CONTENDERS = {"profile": "bare", "profile + AdamW": "bare + AdamW", "trace + profile": "bare"}
MODELS = ("resnet50", "vit_b_16", "bert_base", "opt_350m")
DEEP = SpeedCase("OPT of 64 layers", opt(64), tokens=(8, 512))
FEWEST_ROUNDS = 3


def _never(*args: Any, **kwargs: Any) -> bool:
    return False


def _nothing(*args: Any, **kwargs: Any) -> tuple[()]:
    return ()


#: What is patched, by mechanism. A block is no candidate where it saves too little, an optimizer where it has too few
#: parameters; a step is not replayed where its events do not hold all that it left.
SWITCHES: Mapping[str, tuple[tuple[Any, str, Any], ...]] = {
    "steps": ((StepReplay, "is_whole", _never),),
    "blocks": ((block_replay, "LEAST_LEAVES_SAVED", float("inf")),),
    "lazily materialized parameters": ((profile_module, "find_isomorphs", _nothing),),
    "optimizer": ((optimizer_replay, "FEWEST_TIMES", float("inf")),),
    "subgraphs": (),
    "unmaterialized gradients": (
        (Recorder, "unmaterialized_gradients", property(lambda recorder: None, lambda recorder, value: None)),
        (profile_module, "find_isomorphs", _nothing)),
}
#: What falls with a mechanism, being built on it.
FALLS_WITH = {"steps": "and the optimizer, which needs gradients that a replayed step left",
              "blocks": "and lazily materialized parameters, which only blocks that are replayed have",
              "unmaterialized gradients": "and lazily materialized parameters, to which no gradient could be attached"}
#: The contenders that a mechanism is part of.
PART_OF = {"optimizer": ("profile + AdamW",), "subgraphs": ("trace + profile",),
           "unmaterialized gradients": tuple(CONTENDERS)}


@contextmanager
def switched_off(mechanism: str) -> Iterator[None]:
    """Profiles in this block do without one mechanism. Raises AttributeError where what is patched is gone."""
    patches = [mock.patch.object(owner, name, value, create=owner is Recorder)
               for owner, name, value in SWITCHES[mechanism]]
    if mechanism == "subgraphs":
        patches.append(mock.patch.object(speed_contender, "symbolic_profile", partial(symbolic_profile, reuse=False)))
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in reversed(patches):
            patch.stop()


def run_without(mechanism: str, run: Run) -> Any:
    """``run()`` with a mechanism switched off."""
    with switched_off(mechanism):
        return run()


def measure_ablation(report: Report) -> None:
    """The ratios of the warm section with each mechanism switched off, and with none."""
    rows = []
    for case in [*(case for case in CASES if case.name in MODELS and case in report.cases), DEEP]:
        on = Prepared(case)
        made: dict[str, Callable[[], Any]] = {}
        for name in {*CONTENDERS, *CONTENDERS.values()}:
            run = prepare(name, on)
            if isinstance(run, str):
                raise RuntimeError(f"{case.name}, {name}: {run}")
            made[name] = run
        runs: dict[tuple[str, str], Callable[[], Any]] = {("", name): run for name, run in made.items()}
        for mechanism in SWITCHES:
            for name in PART_OF.get(mechanism, ("profile", "profile + AdamW")):
                runs[mechanism, name] = partial(run_without, mechanism, made[name])
                runs[mechanism, name]()
        timings = time_in_turn(runs, max(FEWEST_ROUNDS, report.rounds // 2))
        for mechanism in ("", *SWITCHES):
            cells = [format_ratio(ratio(timings[mechanism, name], timings["", under], CPU)
                                  if (mechanism, name) in timings else None) for name, under in CONTENDERS.items()]
            rows.append([case.name, mechanism or "none", *cells])
            say(f"  {rows[-1]}")
    told = "; ".join(f"{name}: {what}" for name, what in FALLS_WITH.items())
    report.add(
        "What each mechanism of replay buys",
        "Processor time divided by that of the bare step in the same round, as in the section on warm runs, with one "
        "mechanism switched off; a dash where it has no part. What falls with a mechanism: " + told + ".",
        markdown(["model", "switched off", *CONTENDERS], rows))


assert set(CONTENDERS) <= set(OURS)
