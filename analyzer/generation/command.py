"""``analyzer generate``: its options and what it prints."""
from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from analyzer.errors import InputError
from analyzer.output import check_output
from analyzer.recipe.option import read_dtype, read_recipe
from analyzer.recipe.recipe import Recipe
from analyzer.report.choice import emit, end_with_verdict, print_report, read_report_options
from analyzer.report.node_table import FORMATS
from analyzer.results.verdict import Verdict
from analyzer.zoo.command_option import model_errors
from analyzer.zoo.input_spec import Target
from analyzer.zoo.target import load_target

from .serving import ServingPoint
from .stored_cache import BLOCK_SIZE

# The options of ``analyzer generate`` for inference as it is served: its cache, several sequences, draft models.

CACHE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn,
                "int8": torch.int8}


def read_cache(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the options say of the cache, as arguments of `profile_generate` and the functions of serving. Raises
    InputError for an option that nothing would follow.
    """
    kind = arguments.cache or ("paged" if asks_for_serving(arguments) else "dynamic")
    if arguments.block_size != BLOCK_SIZE and kind != "paged":
        raise InputError(f"--block-size {arguments.block_size}: pages are of a paged cache; add --cache paged")
    if arguments.memory_share != 1 and not arguments.max_sequences:
        raise InputError(f"--memory-share {arguments.memory_share}: is of --max-sequences")
    if arguments.attention is not None and (kind == "paged" or arguments.cache_dtype or asks_for_serving(arguments)):
        raise InputError(f"--attention {arguments.attention}: a served cache is read by a kernel of its own; leave it "
                         "out, or --cache paged and --cache-dtype")
    return {"cache": kind, "block_size": arguments.block_size,
            "cache_dtype": None if arguments.cache_dtype is None else CACHE_DTYPES[arguments.cache_dtype]}


def asks_for_serving(arguments: argparse.Namespace) -> bool:
    """Whether another result than one generation is asked for. Raises InputError for two, or for what none has."""
    asked = [name for name, value in (("--max-sequences", arguments.max_sequences), ("--batches", arguments.batches),
                                      ("--draft", arguments.draft)) if value]
    if len(asked) > 1:
        raise InputError(f"{' and '.join(asked)}: one at a time")
    if asked:
        for name, value in (("--report", arguments.report), ("--json", arguments.json)):
            if value is not None:
                raise InputError(f"{name}: is of one generation; leave out {asked[0]}, or it")
        if asked != ["--batches"] and arguments.format not in (None, "text"):
            raise InputError(f"--format {arguments.format}: {asked[0]} gives no one table; leave one of them out")
    return bool(asked)


def run_serving(arguments: argparse.Namespace, recipe: Recipe, target: Target, autocast: torch.dtype | None) -> int:
    """Run what is asked for and print it; the result is the exit code."""
    from analyzer.api.argument import build_model

    options = {**read_cache(arguments), "autocast": autocast, "device": arguments.device}
    context = arguments.prompt + arguments.new_tokens
    run = _run_draft if arguments.draft is not None else _run_maximum if arguments.max_sequences else _run_batches
    with model_errors(arguments.target):  # nothing is printed in it: a reader that goes is no error of the model's
        tell = run(arguments, build_model(partial(recipe.build, target.build)), context, options)
    return tell()


def _run_maximum(arguments: argparse.Namespace, model: Any, context: int, options: dict[str, Any]) -> Callable[[], int]:
    from .capacity import max_sequences

    found = max_sequences(model, context, memory_share=arguments.memory_share, prefill_chunk=arguments.prefill_chunk,
                          **options)
    point = found.at_limit or found.beyond
    return partial(_tell, found, None if point is None else point.verdict, arguments)


def _run_batches(arguments: argparse.Namespace, model: Any, context: int, options: dict[str, Any]) -> Callable[[], int]:
    from .serving import sweep_sequences

    points = sweep_sequences(model, read_numbers("--batches", arguments.batches), context,
                             prefill_chunk=arguments.prefill_chunk, **options)
    return partial(_tell_batches, points, arguments)


def _tell_batches(points: Sequence[ServingPoint], arguments: argparse.Namespace) -> int:
    from .capacity import serving_table, tell_which_fit

    emit(serving_table(points, arguments.format or "text"), arguments.output)
    if arguments.output is None and arguments.format in (None, "text"):
        print("\n" + tell_which_fit(points))
    return 3 if all(point.fits is False for point in points) else 0


def _run_draft(arguments: argparse.Namespace, model: Any, context: int, options: dict[str, Any]) -> Callable[[], int]:
    from analyzer.api.argument import build_model

    from .run import profile_speculative

    draft = build_model(load_target(arguments.draft).build)
    found = profile_speculative(model, draft, context, speculated=arguments.speculate, sequences=arguments.batch,
                                **options)
    return partial(_tell, found, found.verdict, arguments)


def _tell(found: object, verdict: Verdict | None, arguments: argparse.Namespace) -> int:
    print(found)
    return end_with_verdict(verdict, arguments)


def read_numbers(option: str, text: str) -> list[int]:
    """Numbers between commas. Raises InputError for anything else."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise InputError(f"{option} {text}: give numbers of 1 or more between commas, as in 1,2,4,8")
    return [int(word) for word in words]


# ``analyzer generate``: what reading a prompt and generating tokens costs.

def run_generate(arguments: argparse.Namespace) -> int:
    """``analyzer generate``; the result is the exit code."""
    from analyzer.api.argument import build_model
    from analyzer.hardware import find_device
    from analyzer.zoo.target import import_own_code, load_target

    from .run import profile_generate

    find_device(arguments.device)  # before any work: a wrong name costs no waiting
    import_own_code(arguments.target)  # which may register reports
    read_report_options(arguments, own=("fmt",))
    for path in (arguments.json, arguments.output):
        check_output(path)
    recipe, autocast = read_recipe(arguments), read_dtype("--autocast", arguments.autocast)
    cache = read_cache(arguments)
    target = load_target(arguments.target)
    if asks_for_serving(arguments):
        return run_serving(arguments, recipe, target, autocast)
    with model_errors(arguments.target):
        model = build_model(partial(recipe.build, target.build))
        found = profile_generate(model, arguments.prompt, arguments.new_tokens, batch_size=arguments.batch,
                                 autocast=autocast, device=arguments.device, samples=arguments.samples or None,
                                 **cache)
    if arguments.json is not None:
        found.to_json(arguments.json)  # before anything is printed, for a reader that goes
    if arguments.report is not None:
        for part in (found.prefill, found.decode):
            if part is not None:
                print_report(part, arguments)
    elif arguments.format not in (None, "text"):
        print(found.table(arguments.rows or None, fmt=FORMATS[arguments.format]))
    else:
        print(found.summary(arguments.rows or None))
    return end_with_verdict(found.verdict, arguments)
