"""`analyzer posttrain`."""
from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

from analyzer.errors import InputError
from analyzer.hardware.price import read_prices
from analyzer.output import check_output, print_error
from analyzer.report.progress_bar import ProgressBar
from analyzer.tools.search import Layout
from analyzer.tools.search.command import read_field
from analyzer.tools.serving import Layout as EngineLayout
from analyzer.tools.serving.simulation import NoRoomError
from analyzer.zoo.target import load_target, model_errors

from .advice import advise
from .answers import Answers
from .choose import ChoiceInterrupted, choose
from .config import NO_LENGTHS, read_plan
from .plan import EnginePlan, PosttrainPlan
from .planner import Planner
from .run import usual_algorithm, usual_plan

_RANKS = ("tp", "pp", "dp", "ep")
#: Options that are fields of a plan, where they are given.
_FIELDS = ("prompts", "samples", "updates", "epochs", "reference", "lag", "in_flight", "loss_chunks", "entropy",
           "oversample", "lora")
_ENGINE = ("server", "memory_share", "sleep", "weights", "experts", "engine_devices", "max_sequences_of_engine")


def run_posttrain(arguments: argparse.Namespace) -> int:
    """The exit code: 0, or 3 where it does not fit."""
    if (arguments.target is None) == (arguments.config is None):
        raise InputError("posttrain: give a TARGET, as in hf:qwen2.5-7b, or --config FILE")
    check_output(arguments.json)
    plan = make_plan(arguments)
    price = read_prices(arguments.prices, "--price ").find(plan.cluster.device)
    planner = Planner(load_target(plan.model))
    bar = ProgressBar(among_output=True)
    try:
        with bar, model_errors(plan.model):
            if arguments.choose_plan:
                found = choose(planner, plan, price, bar)
            else:
                found = planner.plan(plan, price)
            bar.clear()
            print(found)
            sys.stdout.flush()  # it is there before what takes longer
            if not (arguments.no_advice or arguments.choose_plan):
                found = advise(planner, plan, found, bar)
                bar.clear()
                print(f"\n{found.advice()}")
    except ChoiceInterrupted as stop:
        bar.clear()
        if stop.result is not None:
            print(stop.result)
        print_error(f"interrupted: {stop}")
        return 130
    except NoRoomError as error:
        print(f"does NOT fit: {error}")
        return 3
    finally:
        bar.clear()
    if arguments.json is not None:
        found.to_json(arguments.json)
    return 3 if found.fits is False else 0


def make_plan(arguments: argparse.Namespace) -> PosttrainPlan:
    """The plan that options ask for, over that of a configuration. Raises InputError."""
    if arguments.config is not None:
        plan = read_plan(arguments.config, arguments.cluster, arguments.devices_per_host)
    else:
        if arguments.cluster is None:
            raise InputError("posttrain: give --cluster, as in 8xh100")
        plan = usual_plan(arguments.target, arguments.cluster, arguments.algorithm or "grpo",
                          arguments.engine_devices or 0)
    given = {name: value for name in _FIELDS
             if (value := getattr(arguments, name)) is not None and value is not False}  # 0 is refused by the plan
    if arguments.algorithm is not None:
        given.update(usual_algorithm(arguments.algorithm, plan))
        given.update({name: getattr(arguments, name) for name in ("reference",) if getattr(arguments, name)})
    if arguments.prompt_tokens is not None:
        words = arguments.prompt_tokens
        given.update(prompt=words[0], longest_prompt=words[-1] if len(words) > 1 else max(words[0], 2 * words[0]))
    if arguments.answer_tokens is not None:
        given["answers"] = Answers.read(arguments.answer_tokens)
    if arguments.micro_batch_tokens is not None:
        given["tokens"] = arguments.micro_batch_tokens
    if arguments.score_tokens is not None:
        given["score_tokens"] = arguments.score_tokens
    if arguments.keep is not None:
        given.update(_read_keep(arguments.keep))
    if "answers" in given and "prompt" in given:
        given["assumptions"] = tuple(text for text in plan.assumptions if not text.startswith(NO_LENGTHS[:20]))
    engine = _read_engine(arguments, given.get("engine", plan.engine))
    if arguments.trainer is not None or engine is not plan.engine:
        given["layout"] = _read_trainer(arguments.trainer or "", plan, engine)
    return replace(plan, **{**given, "engine": engine})


def _read_keep(text: str) -> dict[str, Any]:
    words = {word.strip() for word in text.split(",")} - {"", "none"}
    if words - {"weights", "optimizer"}:
        raise InputError(f"--keep {text}: write weights, optimizer, both with a comma between, or none")
    return {"offloads_model": "weights" not in words, "offloads_optimizer": "optimizer" not in words}


def _read_engine(arguments: argparse.Namespace, engine: EnginePlan | None) -> EnginePlan | None:
    ranks = {name: getattr(arguments, name) for name in _RANKS if getattr(arguments, name) != 1}
    given = {name: value for name in _ENGINE if (value := getattr(arguments, name)) is not None}
    if engine is None:
        if ranks or given:
            raise InputError(f"{', '.join(f'--{name}' for name in (*ranks, *given))}: is of engines, and DPO has none")
        return None
    if "server" in given:
        name, _, version = given.pop("server").partition(":")
        given.update(server=name, version=version or None)
    for option, name in (("engine_devices", "devices"), ("max_sequences_of_engine", "sequences")):
        if option in given:
            given[name] = given.pop(option)
    if ranks:
        given["layout"] = EngineLayout(**ranks)
    return replace(engine, **given) if given else engine


def _read_trainer(text: str, plan: PosttrainPlan, engine: EnginePlan | None) -> Layout:
    """``FIELD=VALUE,...`` of the trainer's layout; ranks that no word names share its samples."""
    given = dict(read_field(word) for word in text.split(",") if word.strip())
    layout = replace(plan.layout, **given)
    devices = plan.devices - (0 if engine is None else engine.devices)
    rest = layout.context * layout.tensor * layout.pipeline * layout.replicate
    if "shard" not in given:
        if devices % rest:
            raise InputError(f"--trainer {text}: {devices} devices are no multiple of {rest}")
        layout = replace(layout, shard=devices // rest)
    if layout.devices != devices:
        raise InputError(f"--trainer {text}: is of {layout.devices} devices, and the trainer has {devices}")
    return layout
