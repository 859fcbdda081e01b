"""The options of ``analyzer generate`` for inference as it is served: its cache, several sequences, draft models."""
from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from analyzer.errors import InputError
from analyzer.recipe.recipe import Recipe
from analyzer.report.choice import emit, end_with_verdict
from analyzer.results.verdict import Verdict
from analyzer.zoo.command_option import model_errors
from analyzer.zoo.model_target import Target
from analyzer.zoo.target import load_target

from .serving import PREFILL_CHUNK, ServingPoint
from .stored_cache import BLOCK_SIZE, CACHES

CACHE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn,
                "int8": torch.int8}


def add_serving_options(parser: argparse.ArgumentParser) -> None:
    """Add them to the command."""
    group = parser.add_argument_group("serving (decoders of transformers)")
    group.add_argument("--cache", choices=CACHES,
                       help="grow with each token (default), take room for all at once, or in pages (default of "
                       "--max-sequences, --batches and --draft)")
    group.add_argument("--cache-dtype", choices=tuple(CACHE_DTYPES), metavar="DTYPE",
                       help=f"of the cache, of {', '.join(CACHE_DTYPES)} (default: the model's)")
    group.add_argument("--block-size", type=int, default=BLOCK_SIZE, metavar="N",
                       help=f"tokens of a page (default {BLOCK_SIZE})")
    group.add_argument("--max-sequences", action="store_true",
                       help="the largest number of sequences of --prompt and --new-tokens that fits")
    group.add_argument("--memory-share", type=float, default=1.0, metavar="F",
                       help="of the device's memory that --max-sequences may take, e.g. 0.9 (default 1)")
    group.add_argument("--batches", metavar="N,N,...", help="a row for each number of sequences: decode speed, memory")
    group.add_argument("--prefill-chunk", type=int, default=PREFILL_CHUNK, metavar="N",
                       help=f"tokens of a prompt that a server reads at once (default {PREFILL_CHUNK})")
    group.add_argument("--draft", metavar="TARGET", help="a speculative step with this draft model")
    group.add_argument("--speculate", type=int, default=4, metavar="N", help="draft tokens of a step (default 4)")


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
    from .serving_table import serving_table, tell_which_fit

    emit(serving_table(points, arguments.format or "text"), arguments.output)
    if arguments.output is None and arguments.format in (None, "text"):
        print("\n" + tell_which_fit(points))
    return 3 if all(point.fits is False for point in points) else 0


def _run_draft(arguments: argparse.Namespace, model: Any, context: int, options: dict[str, Any]) -> Callable[[], int]:
    from analyzer.api.argument import build_model

    from .speculative import profile_speculative

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
