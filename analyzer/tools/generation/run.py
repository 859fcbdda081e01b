"""`profile_generate`: a prompt read and tokens generated, with or without speculation."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from analyzer.api.argument import build_model, set_training
from analyzer.api.session import Session
from analyzer.errors import AnalyzerError, InputError, is_count
from analyzer.fx.surroundings import leaves_no_tensor
from analyzer.hardware import DeviceSpec, find_device
from analyzer.memory.allocator import DeviceOutOfMemoryError
from analyzer.record.collector import first_line
from analyzer.record.options import ProfileOptions
from analyzer.record.recorder import Recorder
from analyzer.report.node_table import format_quantity, print_rows
from analyzer.results.info import OutOfMemoryInfo
from analyzer.results.profile import Profile
from analyzer.results.timeline import describe_shortage
from analyzer.results.tree import ModulePaths
from analyzer.results.verdict import Verdict
from analyzer.zoo.transformers_models import spectrogram_shape

from .decoder import Decoder, StoredDecoder, check_positions, is_of_transformers, make_decoder, tensors_kept
from .generation_profile import GenerationProfile, GenerationStep, fill_in, spread
from .serving import PREFILL_CHUNK, PassCost, PassRecorder, ServingSetting, fill_costs, with_amounts
from .stored_cache import BLOCK_SIZE, CacheForm

# `profile_generate`: what reading a prompt and generating tokens after it costs.

# the phase in which the cache grows by tokens that are not run: inference has no gradients to zero
_SKIPPED = "zero_grad"

# Fields of a step that are fields of a phase.
_AMOUNTS = ("flops", "macs", "read_bytes", "written_bytes", "seconds", "allocated_bytes", "peak_allocated_bytes",
            "peak_reserved_bytes")


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
    module = model if isinstance(model, nn.Module) else build_model(model)
    assumed: tuple[str, ...] = ()
    if prompt is None:
        prompt, assumed = _make_prompt(module, batch_size, prompt_tokens)
    if prompt.dim() < 2:
        raise InputError(
            f"profile_generate(prompt of shape {tuple(prompt.shape)}): its first dimension is the batch, the next the "
            "tokens")
    with set_training(module, False), _telling_what_reads_no_tokens(module):
        found = _Generation(session, module, prompt, new_tokens, form).run(samples)
        return replace(found, assumptions=(*assumed, *found.assumptions))


def _make_prompt(module: Any, batch_size: int, prompt_tokens: int) -> tuple[Tensor, tuple[str, ...]]:
    """What a model reads first, and what is assumed of it. Raises InputError for an encoder of other than tokens or
    spectrograms.
    """
    main, config = getattr(module, "main_input_name", "input_ids"), getattr(module, "config", None)
    if main == "input_ids" or not getattr(config, "is_encoder_decoder", False):
        return torch.ones((batch_size, prompt_tokens), dtype=torch.int64), ()
    sizes = spectrogram_shape(config) if main == "input_features" else None
    if sizes is None:
        raise InputError(f"{type(module).__name__}: its encoder reads {main}, not tokens; call it "
                         "from Python with prompt=, a tensor of them")
    _, channels, frames = sizes
    return (torch.zeros((batch_size, channels, frames), dtype=module.dtype),
            (f"the prompt is a spectrogram of {frames:,} frames with {channels} channels, the length that "
             f"{type(module).__name__} is for, whatever prompt_tokens says",))


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


def choose_decoder(model: nn.Module, form: CacheForm, prompt_tokens: int, new_tokens: int) -> Decoder:
    """What reads tokens with ``model`` over a cache of that form. Raises InputError for a model that cannot."""
    if not form.is_stored:
        return make_decoder(model, form.kind, prompt_tokens, new_tokens)
    if not is_of_transformers(model):
        raise InputError(f"profile_generate(cache={form.kind!r}, cache_dtype={form.dtype}): {type(model).__name__} is "
                         "no model of transformers, and only those are run so; give 'dynamic' or 'static' and no "
                         "cache_dtype")
    tokens = prompt_tokens + new_tokens - 1  # the last token is not read again
    check_positions(model, f"profile_generate(prompt_tokens={prompt_tokens!r}, new_tokens={new_tokens!r})", tokens)
    return StoredDecoder(model, form, tokens)


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
            unplaced = self.session.build_unplaced(self.module, error)
            return self._result((), unplaced, None, self.form.kind, unplaced.assumptions, unplaced.out_of_memory)

    def _run(self, samples: int | None) -> GenerationProfile:
        next_token: Tensor | None = None
        with self.session.open(self.module) as run:
            with run.recording() as recorder:
                recorder.planned_calls = len(recorder.log.modules) * min(samples or self.new_tokens, self.new_tokens)
                (tokens,), _ = run.take_inputs((self.prompt,), {}, ["prompt"])
                decoder = choose_decoder(run.root, self.form, self.prompt_tokens, self.new_tokens)
                next_token = self._pass(recorder, decoder, tokens, 0, 0)
            passes = self._choose_passes(samples, [bend - self.prompt_tokens for bend in decoder.bends()])
            prefill = run.build()
            with run.recording() as recorder:
                for step, index in enumerate(passes[1:] if next_token is not None else (), 1):
                    if (skipped := index - passes[step - 1] - 1) > 0:
                        with recorder.during(_SKIPPED), torch.no_grad():
                            decoder.skip(skipped)
                    if index == passes[-1]:
                        recorder.describe_step(step)
                    assert next_token is not None
                    next_token = self._pass(recorder, decoder, next_token, step, index)
            decode = run.build() if len(self.steps) > 1 else None
            steps = fill_costs(run, self.steps, _AMOUNTS)
            short = describe_shortage(recorder.log, ModulePaths())
            if short is not None and short.step is not None:
                short = replace(short, step=passes[short.step])
            return self._result(steps, prefill, decode, decoder.cache_kind,
                                tuple(recorder.mode.state.assumptions), short)

    def _result(self, steps: Sequence[GenerationStep], prefill: Profile, decode: Profile | None, cache: str,
                assumptions: tuple[str, ...], short: OutOfMemoryInfo | None) -> GenerationProfile:
        filled = tuple(fill_in(steps, steps[-1].index + 1)) if steps else ()
        return GenerationProfile(name=prefill.name, device=prefill.device, cache=cache,
                                 cache_dtype=_name_dtype(self.form.dtype),
                                 block_size=self.form.block_size if cache == "paged" else None,
                                 batch_size=self.prompt.shape[0],
                                 prompt_tokens=self.prompt_tokens, new_tokens=self.new_tokens, steps=filled,
                                 prefill=prefill, decode=decode, out_of_memory=short, assumptions=assumptions)

    def _choose_passes(self, samples: int | None, bends: list[int]) -> list[int]:
        """The passes to run: evenly spread, and those beside which a straight line ends."""
        last = self.new_tokens - 1
        if samples is None:
            return list(range(last + 1))
        beside = {index for bend in bends for index in range(bend - 1, bend + 3) if 0 < index < last}
        return sorted({0, *(1 + i for i in spread(last, max(2, samples))), *beside})

    def _pass(self, recorder: Recorder, decoder: Decoder, tokens: Tensor, step: int, index: int) -> Tensor:
        """One pass, and the choice of the next token, (batch, 1): the largest of the last logits in float32."""
        recorder.start_step(step, placeholders=step == 0)
        recorder.begin("forward")
        with torch.no_grad(), self.session.casting():
            logits = decoder.read(tokens)
            chosen = logits[:, -1, :].to(torch.float32, copy=True).argmax(dim=-1, keepdim=True)
        del logits
        recorder.end()
        kept = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors_kept(decoder.cache)}
        recorder.mark(tensors_kept(decoder.cache), "cache")
        context = self.prompt_tokens + index
        read = 1 if index and decoder.cache_kind != "none" else context
        self.steps.append(GenerationStep(index, read, context, cache_bytes=sum(kept.values()),
                                         used_cache_bytes=decoder.used_bytes()))
        return chosen


def _name_dtype(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


# A speculative step: a draft model proposes tokens one after the other, and the target reads all of them at once.

ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeStep:
    """A step of ``speculated`` draft tokens, beside the target's plain decode pass, both models on one device."""

    target: str
    draft: str
    device: str | None
    sequences: int
    context_tokens: int
    speculated: int
    plain: PassCost | None                   #: the target reads one token; None where memory ran out before
    drafts: tuple[PassCost, ...]             #: one token each
    verify: PassCost | None                  #: the target reads the last token and the speculated ones
    profile: Profile
    out_of_memory: OutOfMemoryInfo | None = None

    @property
    def seconds(self) -> float | None:
        """Of the whole step."""
        parts = [cost.seconds for cost in self.drafts] + [None if self.verify is None else self.verify.seconds]
        known = [part for part in parts if part is not None]
        return sum(known) if len(known) == len(parts) == self.speculated + 1 else None

    def tokens_per_step(self, acceptance: float) -> float:
        """New tokens that a step gives on average, where each draft token is accepted with that probability (Leviathan
        et al., https://arxiv.org/abs/2211.17192, equation 1).
        """
        if not 0 <= acceptance <= 1:
            raise InputError(f"tokens_per_step({acceptance!r}): a probability lies between 0 and 1")
        return sum(acceptance**i for i in range(self.speculated + 1))

    def speedup(self, acceptance: float) -> float | None:
        """How many times as fast as the plain decode pass."""
        if self.seconds is None or self.plain is None or self.plain.seconds is None:
            return None
        return self.tokens_per_step(acceptance) * self.plain.seconds / self.seconds

    @property
    def break_even(self) -> float | None:
        """The acceptance from which the step is no slower; None where it never is, or seconds are not known."""
        least, most = self.speedup(0.0), self.speedup(1.0)
        if least is None or most is None or most < 1:
            return None
        low, high = 0.0, 1.0
        while high - low > 1e-6:
            middle = (low + high) / 2
            found = self.speedup(middle)
            assert found is not None
            low, high = (middle, high) if found < 1 else (low, middle)
        return high if least < 1 else 0.0

    @property
    def verdict(self) -> Verdict | None:
        """Whether both models and their caches fit."""
        return self.profile.verdict

    def __str__(self) -> str:
        costs = [("plain decode", self.plain), *((f"draft {i}", cost) for i, cost in enumerate(self.drafts, 1)),
                 ("verify", self.verify)]
        shown = [row for i, row in enumerate(costs) if i in (0, 1, len(costs) - 2, len(costs) - 1)]
        rows = [(name, f"{cost.tokens:,}", *(format_quantity(getattr(cost, field), unit) for field, unit in _COLUMNS))
                for name, cost in dict(shown).items() if cost is not None]
        lines = [f"{self.target} with {self.draft}: {self.speculated} draft tokens a step, {self.sequences:,} "
                 f"sequences of {self.context_tokens:,} tokens" + (f", on {self.device}" if self.device else ""), "",
                 print_rows(("Pass", "Tokens", "FLOPs", "Read", "Time", "Peak allocated"), rows), "",
                 f"step: {format_quantity(self.seconds, 'seconds')}"]
        if self.seconds is not None:
            rows = [(f"{a:.0%}", f"{self.tokens_per_step(a):.2f}", f"{self.speedup(a) or 0:.2f}") for a in ACCEPTANCES]
            even = self.break_even
            lines += ["", print_rows(("Accepted", "Tokens a step", "Speed-up"), rows), "",
                      "no slower from " + (f"{even:.0%} accepted" if even is not None else "no acceptance on")]
        return "\n".join(lines)


_COLUMNS = (("flops", "count"), ("read_bytes", "bytes"), ("seconds", "seconds"), ("peak_allocated_bytes", "bytes"))


@leaves_no_tensor
def profile_speculative(model: nn.Module | Callable[[], nn.Module], draft: nn.Module | Callable[[], nn.Module],
                        context_tokens: int, *, speculated: int = 4, sequences: int = 1,
                        cache: Literal["paged", "static"] = "paged", cache_dtype: torch.dtype | None = None,
                        block_size: int = BLOCK_SIZE, autocast: torch.dtype | None = None,
                        device: str | DeviceSpec = "h200", options: ProfileOptions | None = None) -> SpeculativeStep:
    """Predict a speculative step after ``context_tokens`` of each of ``sequences``: ``speculated`` passes of the
    ``draft`` model, then one of ``model`` over all of its tokens. Both are decoders of transformers, of one vocabulary.

    Raises InputError as `profile_serving` does.
    """
    setting = ServingSetting("profile_speculative", context_tokens + speculated + 1 if is_count(speculated, 1) else 0,
                             CacheForm(cache, cache_dtype, block_size), PREFILL_CHUNK, autocast, find_device(device),
                             options or ProfileOptions())
    if not is_count(speculated, 1) or not is_count(sequences, 1) or not is_count(context_tokens, 1):
        raise InputError(f"profile_speculative(context_tokens={context_tokens!r}, speculated={speculated!r}, "
                         f"sequences={sequences!r}): each must be 1 or more")
    pair = nn.ModuleDict({"target": setting.prepare(model), "draft": setting.prepare(draft)})
    session = Session(setting.device, setting.options, autocast=autocast)
    names = {"target": type(pair["target"]).__name__, "draft": type(pair["draft"]).__name__}
    try:
        with set_training(pair, False):
            return _run(session, pair, setting, context_tokens, speculated, sequences, names)
    except DeviceOutOfMemoryError as error:
        unplaced = session.build_unplaced(pair, error)
        return SpeculativeStep(**names, device=unplaced.device, sequences=sequences, context_tokens=context_tokens,
                               speculated=speculated, plain=None, drafts=(), verify=None, profile=unplaced,
                               out_of_memory=unplaced.out_of_memory)


def _run(session: Session, pair: nn.ModuleDict, setting: ServingSetting, context: int, speculated: int, sequences: int,
         names: dict[str, str]) -> SpeculativeStep:
    with session.open(pair) as run:
        with run.recording() as recorder:
            (one, several), _ = run.take_inputs(
                tuple(torch.ones((sequences, n), dtype=torch.int64) for n in (1, speculated + 1)), {},
                ["last_tokens", "speculated_tokens"])
            root: Any = run.root
            target, draft = (StoredDecoder(root[name], setting.form, setting.context_tokens, sequences)
                             for name in ("target", "draft"))
            for name, decoder in (("target", target), ("draft", draft)):
                if decoder.has_states:
                    raise InputError(f"profile_speculative(): the {name}, {names[name]}, keeps states, which cannot go "
                                     "back to before tokens that were not accepted; give a model of attention alone")
            passes = PassRecorder(session, recorder)
            target.skip(context - 1)
            draft.skip(context - 1)
            passes.read(target, one)
            for _ in range(speculated):
                passes.read(draft, one)
            target.rewind(1)
            passes.read(target, several, keep=speculated + 1)
        costs = passes.list_costs(run)
        short, found = describe_shortage(recorder.log, ModulePaths()), run.build()
        whole = {name: max((amount for cost in costs if (amount := getattr(cost, name)) is not None), default=None)
                 for name in ("peak_allocated_bytes", "peak_reserved_bytes")} if short is None else {}
        return SpeculativeStep(
            **names, device=found.device, sequences=sequences, context_tokens=context, speculated=speculated,
            plain=costs[0] if costs else None, drafts=tuple(costs[1:speculated + 1]),
            verify=costs[speculated + 1] if len(costs) > speculated + 1 else None,
            profile=with_amounts(found, whole), out_of_memory=short)
