"""`profile_generate`: what reading a prompt and generating tokens after it costs."""
from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from analyzer.api.argument import build_model, set_training
from analyzer.api.build_profile import build_profile, build_unplaced
from analyzer.api.result import Profile
from analyzer.api.run import open_run
from analyzer.api.session import Session
from analyzer.errors import AnalyzerError, InputError, is_count
from analyzer.fx.surroundings import leaves_no_tensor
from analyzer.hardware import DeviceSpec, find_device
from analyzer.memory.allocator import DeviceOutOfMemoryError
from analyzer.output import check_output
from analyzer.record.failure import first_line
from analyzer.record.options import ProfileOptions
from analyzer.record.recorder import Recorder
from analyzer.report.text_table import FORMATS
from analyzer.results.info import OutOfMemoryInfo
from analyzer.results.timeline import describe_shortage
from analyzer.results.tree import ModulePaths
from analyzer.results.verdict import Verdict
from analyzer.zoo.command_option import find_autocast, read_recipe
from analyzer.zoo.target import load_target, model_errors

from .decoder import TokenDecoder, kept_bytes, make_decoder, prompt_shape
from .generation_profile import GenerationProfile, GenerationStep, fill_in, spread
from .serving import (
    PREFILL_CHUNK,
    ServingPoint,
    fill_costs,
    max_sequences,
    run_pass,
    serving_table,
    sweep_sequences,
    tell_which_fit,
)
from .stored_cache import BLOCK_SIZE, CacheForm

# the phase in which the cache grows by tokens that are not run: inference has no gradients to zero
_SKIPPED = "zero_grad"


@leaves_no_tensor
def profile_generate(model: nn.Module | Callable[[], nn.Module], prompt_tokens: int = 512, new_tokens: int = 128,
                     *, batch_size: int = 1, cache: Literal["dynamic", "static", "paged"] = "dynamic",
                     cache_dtype: torch.dtype | None = None, block_size: int = BLOCK_SIZE,
                     prompt: Tensor | None = None, autocast: torch.dtype | None = None,
                     device: str | DeviceSpec = "h200", options: ProfileOptions | None = None,
                     samples: int | None = 16) -> GenerationProfile:
    """Predict what it costs to read a prompt and to generate ``new_tokens`` after it, greedily, without any data.

    ``model`` is a language model of transformers (decoder-only or encoder-decoder, called as its ``generate()`` does),
    one of this package, or any that gives logits (batch, tokens, vocabulary) for token indices (batch, tokens), or a
    callable of no arguments that builds one. It is put in evaluation mode and is as it was afterwards. ``cache`` is
    ``"dynamic"``, which grows with each token, ``"static"``, which is made for all tokens at once, or ``"paged"``, in
    pages of ``block_size`` tokens; a model that takes none reads all tokens again each time. With pages, or where the
    cache has a type of its own (``cache_dtype``), attention is that of a serving engine: one kernel that reads the
    cache as it lies, of latent attention the latents. ``prompt`` is what it reads first in place of (``batch_size``,
    ``prompt_tokens``) token indices; without it a speech model as Whisper reads spectrograms of the length it is for.

    Where memory runs out under ``options`` that limit it, the result says so, and its steps are those before.
    Of the passes after the first, ``samples`` are run, evenly spread, and what is between them is on straight lines
    (None runs all). Raises InputError for arguments that cannot be used, and whatever the model raises.

    A layer keeps the keys and values of each token, here 2 layers of 64 channels in 4 bytes:

    >>> from analyzer.zoo.gpt2 import GPT2
    >>> model = GPT2(vocabulary=100, positions=64, hidden=64, layers=2, heads=4)
    >>> p = profile_generate(model, prompt_tokens=10, new_tokens=4)
    >>> [step.cache_bytes for step in p.steps] == [2 * 2 * 64 * 4 * tokens for tokens in (10, 11, 12, 13)]
    True
    """
    if not all(is_count(n, 1) for n in (prompt_tokens, new_tokens, batch_size, 1 if samples is None else samples)):
        raise InputError(
            f"profile_generate(prompt_tokens={prompt_tokens!r}, new_tokens={new_tokens!r}, batch_size={batch_size!r}, "
            f"samples={samples!r}): each must be 1 or more")
    form = CacheForm(cache, cache_dtype, block_size)
    form.check("profile_generate")
    session = Session(device, options, autocast=autocast)
    module = model if isinstance(model, nn.Module) else build_model(model, spec=session.spec)
    assumed: tuple[str, ...] = ()
    if prompt is None:
        shape, dtype = prompt_shape(module, prompt_tokens)
        prompt = torch.ones((batch_size, *shape), dtype=dtype)
        if len(shape) > 1:
            assumed = (f"the prompt is a spectrogram of {shape[1]:,} frames with {shape[0]} channels, the length that "
                       f"{type(module).__name__} is for, whatever prompt_tokens says",)
    if prompt.dim() < 2:
        raise InputError(f"profile_generate(prompt of shape {tuple(prompt.shape)}): its first dimension is the batch, "
                         "the next the tokens")
    with set_training(module, False), _telling_what_reads_no_tokens(module):
        found = _Generation(session, module, prompt, new_tokens, form).run(samples)
        return replace(found, assumptions=(*assumed, *found.assumptions))


@contextmanager
def _telling_what_reads_no_tokens(module: nn.Module) -> Iterator[None]:
    """Raise InputError where a model fails that has no embedding, which a model that reads tokens has."""
    try:
        yield
    except AnalyzerError:
        raise
    except Exception as error:
        if any(isinstance(part, nn.Embedding) for part in module.modules()):
            raise
        raise InputError(f"{type(module).__name__} is no model that generates text: it has no embedding of tokens, and "
                         f"called with token indices it raised {first_line(error)}; give a language model, or ask "
                         "`analyzer profile` what a step of this one costs") from error


class _Generation:
    """One generation under one recorder: each pass that is run is a step of its log."""

    def __init__(self, session: Session, module: nn.Module, prompt: Tensor, new_tokens: int, form: CacheForm) -> None:
        self.session, self.module, self.prompt = session, module, prompt
        self.new_tokens, self.form = new_tokens, form
        # of a spectrogram the time comes last
        self.prompt_tokens = prompt.shape[-1 if prompt.is_floating_point() else 1]
        self.steps: list[GenerationStep] = []  # the passes that were run, without what they cost

    def run(self, samples: int | None) -> GenerationProfile:
        try:
            return self._run(samples)
        except DeviceOutOfMemoryError as error:  # the model itself does not fit
            unplaced = build_unplaced(self.session, self.module, error)
            return self._result((), unplaced, None, self.form.kind, unplaced.assumptions, unplaced.out_of_memory)

    def _run(self, samples: int | None) -> GenerationProfile:
        next_token: Tensor | None = None
        with open_run(self.session, self.module) as run:
            with run.recording() as recorder:
                run_passes = min(samples or self.new_tokens, self.new_tokens)
                recorder.modules.planned_calls = len(recorder.log.modules) * run_passes
                (tokens,), _ = run.take_inputs((self.prompt,), {}, ["prompt"])
                decoder = make_decoder(run.root, self.form, self.prompt_tokens, self.new_tokens)
                next_token = self._pass(recorder, decoder, tokens, 0, 0)
            passes = self._choose_passes(samples, [bend - self.prompt_tokens for bend in decoder.bends()])
            prefill = build_profile(run)
            with run.recording() as recorder:
                for step, index in enumerate(passes[1:] if next_token is not None else (), 1):
                    if (skipped := index - passes[step - 1] - 1) > 0:
                        with recorder.memory.during(_SKIPPED), torch.no_grad():
                            decoder.skip(skipped)
                    if index == passes[-1]:
                        recorder.modules.describe_step(step)
                    assert next_token is not None
                    next_token = self._pass(recorder, decoder, next_token, step, index)
            decode = build_profile(run, is_final=True) if len(self.steps) > 1 else None
            steps = fill_costs(run, self.steps)
            short = describe_shortage(recorder.log, ModulePaths())
            if short is not None and short.step is not None:
                short = replace(short, step=passes[short.step])
            return self._result(steps, prefill, decode, decoder.cache_kind,
                                tuple(recorder.mode.state.assumptions), short)

    def _result(self, steps: Sequence[GenerationStep], prefill: Profile, decode: Profile | None, cache: str,
                assumptions: tuple[str, ...], short: OutOfMemoryInfo | None) -> GenerationProfile:
        dtype = self.form.dtype
        return GenerationProfile(
            name=prefill.name, device=prefill.device, cache=cache,
            cache_dtype=None if dtype is None else str(dtype).removeprefix("torch."),
            block_size=self.form.block_size if cache == "paged" else None, batch_size=self.prompt.shape[0],
            prompt_tokens=self.prompt_tokens, new_tokens=self.new_tokens,
            steps=tuple(fill_in(steps, steps[-1].index + 1)) if steps else (), prefill=prefill, decode=decode,
            out_of_memory=short, assumptions=assumptions)

    def _choose_passes(self, samples: int | None, bends: list[int]) -> list[int]:
        """The passes to run: evenly spread, and those beside which a straight line ends."""
        last = self.new_tokens - 1
        if samples is None:
            return list(range(last + 1))
        beside = {index for bend in bends for index in range(bend - 1, bend + 3) if 0 < index < last}
        return sorted({0, *(1 + i for i in spread(last, max(2, samples))), *beside})

    def _pass(self, recorder: Recorder, decoder: TokenDecoder, tokens: Tensor, step: int, index: int) -> Tensor:
        """One pass, and the choice of the next token, (batch, 1)."""
        chosen = run_pass(self.session, recorder, decoder, tokens, step)
        context = self.prompt_tokens + index
        read = 1 if index and decoder.cache_kind != "none" else context
        self.steps.append(GenerationStep(index, read, context, cache_bytes=kept_bytes(decoder.cache),
                                         used_cache_bytes=decoder.used_bytes()))
        return chosen


CACHE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn,
                "int8": torch.int8}


def read_cache(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of the cache as arguments of `profile_generate`. Raises InputError for one without use."""
    kind = arguments.cache or ("paged" if asks_for_serving(arguments) or arguments.cache_dtype else "dynamic")
    if arguments.block_size != BLOCK_SIZE and kind != "paged":
        raise InputError(f"--block-size {arguments.block_size}: only a paged cache has pages; add --cache paged")
    if arguments.memory_share is not None and not arguments.max_sequences:
        raise InputError(f"--memory-share {arguments.memory_share}: works only with --max-sequences "
                         "and --engine server")
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
        raise InputError(f"{' and '.join(asked)}: give one of them")
    if asked:
        if arguments.json is not None:
            raise InputError(f"--json {arguments.json}: saves one generation, and {asked[0]} runs "
                             "several; leave one of them out")
        if arguments.max_sequences and arguments.format != "text":
            raise InputError(f"--format {arguments.format}: {asked[0]} does not print one table; leave one of them out")
    return bool(asked)


def asks_for_server(arguments: argparse.Namespace) -> bool:
    """Whether the answer is a server's. Raises InputError where options of both engines are given."""
    from analyzer.tools.serving.run import names_server

    given = names_server(arguments)
    if arguments.engine == "transformers" and (given or arguments.server):
        given = given or [f"--server {arguments.server}"]
        raise InputError(f"{', '.join(given)}: works only with --engine server; leave out --engine transformers")
    if arguments.max_sequences or arguments.batches:
        if given:
            raise InputError(f"{', '.join(given)}: does not work with --max-sequences and --batches; "
                             "give --concurrency")
        return False
    return arguments.engine == "server" or bool(given or arguments.server) or (
        arguments.engine is None and arguments.cache == "paged")


def _run_serving(arguments: argparse.Namespace, model: Any, options: dict[str, Any]) -> tuple[str, int]:
    from analyzer.tools.serving.run import time_points

    context, chunk = arguments.prompt + arguments.new_tokens, arguments.prefill_chunk or PREFILL_CHUNK
    if arguments.batches is not None:
        with model_errors(arguments.target):
            points: Sequence[ServingPoint] = sweep_sequences(model, arguments.batches, context, prefill_chunk=chunk,
                                                             **options)
        said = ""
        if arguments.engine != "transformers":
            points, said = time_points(arguments, points)
        text = serving_table(points, arguments.format)
        return (text if arguments.format != "text" else "\n\n".join(filter(None, (text, said, tell_which_fit(points)))),
                3 if all(point.fits is False for point in points) else 0)
    with model_errors(arguments.target):
        found = max_sequences(model, context, memory_share=1.0 if arguments.memory_share is None else
                              arguments.memory_share, prefill_chunk=chunk, **options)
    said = ""
    if found.at_limit is not None and arguments.engine != "transformers":
        (timed,), said = time_points(arguments, [found.at_limit])
        found = replace(found, at_limit=timed)
    point = found.at_limit or found.beyond
    return _add_verdict(f"{found}\n{said}" if said else str(found), None if point is None else point.verdict)


def _add_verdict(text: str, verdict: Verdict | None) -> tuple[str, int]:
    return (text, 0) if verdict is None else (f"{text}\n\n{verdict}", 3 if verdict.fits is False else 0)


def run_generate(arguments: argparse.Namespace) -> int:
    check_output(arguments.json)
    if arguments.target.startswith("diffusers:"):
        from analyzer.tools.diffusion.run import run_diffusion

        text, code = run_diffusion(arguments)
    elif asks_for_server(arguments):
        from analyzer.tools.serving.run import run_server

        text, code = run_server(arguments)
    else:
        text, code = _run_eager(arguments)
    print(text)
    return code


def _run_eager(arguments: argparse.Namespace) -> tuple[str, int]:
    find_device(arguments.device)  # before any work: a wrong name costs no waiting
    recipe = read_recipe(arguments)
    options = {**read_cache(arguments), "autocast": find_autocast(arguments), "device": arguments.device}
    target = load_target(arguments.target)
    with model_errors(arguments.target):
        model = build_model(partial(recipe.build, target.build))
    if asks_for_serving(arguments):
        return _run_serving(arguments, model, options)
    with model_errors(arguments.target):
        found = profile_generate(model, arguments.prompt, arguments.new_tokens, batch_size=arguments.batch,
                                 samples=arguments.samples or None, **options)
    rows = arguments.rows or None
    text, code = _add_verdict(found.summary(rows), found.verdict)
    if arguments.format != "text":
        text = found.table(rows, fmt=FORMATS[arguments.format])
    if arguments.json is not None:
        found.to_json(arguments.json)  # before anything is printed, for a reader that goes
    return text, code
