"""``analyzer generate``: what it runs and prints."""
from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch

from analyzer.api.argument import build_model
from analyzer.errors import InputError
from analyzer.hardware import find_device
from analyzer.output import check_output
from analyzer.report.node_table import FORMATS
from analyzer.results.verdict import Verdict
from analyzer.zoo.command_option import find_autocast, model_errors, read_recipe
from analyzer.zoo.target import load_target

from .capacity import max_sequences, serving_table, tell_which_fit
from .run import profile_generate
from .serving import sweep_sequences
from .stored_cache import BLOCK_SIZE

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
    asked = [name for name, value in (("--max-sequences", arguments.max_sequences), ("--batches", arguments.batches))
             if value]
    if len(asked) > 1:
        raise InputError(f"{' and '.join(asked)}: one at a time")
    if asked:
        if arguments.json is not None:
            raise InputError(f"--json {arguments.json}: is of one generation; leave out {asked[0]}, or it")
        if arguments.max_sequences and arguments.format != "text":
            raise InputError(f"--format {arguments.format}: {asked[0]} gives no one table; leave one of them out")
    return bool(asked)


def _run_serving(arguments: argparse.Namespace, model: Any, options: dict[str, Any]) -> tuple[str, int]:
    """Run what is asked for; the text of the result, and the exit code."""
    context, chunk = arguments.prompt + arguments.new_tokens, arguments.prefill_chunk
    if arguments.batches is not None:
        with model_errors(arguments.target):
            points = sweep_sequences(model, arguments.batches, context, prefill_chunk=chunk, **options)
        text = serving_table(points, arguments.format)
        return (text if arguments.format != "text" else f"{text}\n\n{tell_which_fit(points)}",
                3 if all(point.fits is False for point in points) else 0)
    with model_errors(arguments.target):
        found = max_sequences(model, context, memory_share=arguments.memory_share, prefill_chunk=chunk, **options)
    point = found.at_limit or found.beyond
    return _add_verdict(str(found), None if point is None else point.verdict)


def _add_verdict(text: str, verdict: Verdict | None) -> tuple[str, int]:
    return (text, 0) if verdict is None else (f"{text}\n\n{verdict}", 3 if verdict.fits is False else 0)


def run_generate(arguments: argparse.Namespace) -> int:
    """``analyzer generate``; the result is the exit code."""
    find_device(arguments.device)  # before any work: a wrong name costs no waiting
    check_output(arguments.json)
    recipe = read_recipe(arguments)
    options = {**read_cache(arguments), "autocast": find_autocast(arguments), "device": arguments.device}
    target = load_target(arguments.target)
    with model_errors(arguments.target):
        model = build_model(partial(recipe.build, target.build))
    if asks_for_serving(arguments):
        text, code = _run_serving(arguments, model, options)
    else:
        with model_errors(arguments.target):
            found = profile_generate(model, arguments.prompt, arguments.new_tokens, batch_size=arguments.batch,
                                     samples=arguments.samples or None, **options)
        rows = arguments.rows or None
        text, code = _add_verdict(found.summary(rows), found.verdict)
        if arguments.format != "text":
            text = found.table(rows, fmt=FORMATS[arguments.format])
        if arguments.json is not None:
            found.to_json(arguments.json)  # before anything is printed, for a reader that goes
    print(text)
    return code
