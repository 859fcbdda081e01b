"""A model that serves several sequences at once, and what each of its passes costs."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from analyzer.api.argument import build_model, set_training
from analyzer.api.session import Run, Session
from analyzer.errors import InputError, is_count
from analyzer.fx.surroundings import leaves_no_tensor
from analyzer.hardware import DeviceSpec, find_device
from analyzer.memory.allocator import DeviceOutOfMemoryError
from analyzer.record.options import ProfileOptions
from analyzer.record.recorder import Recorder
from analyzer.results.info import OutOfMemoryInfo
from analyzer.results.profile import Profile
from analyzer.results.timeline import describe_shortage
from analyzer.results.tree import ModulePaths
from analyzer.results.verdict import Verdict

from .decoder import StoredDecoder, check_positions, is_of_transformers, tensors_kept
from .stored_cache import BLOCK_SIZE, CacheForm

# What each pass of a recorded run cost.

Pass = TypeVar("Pass")


def fill_costs(run: Run, passes: Sequence[Pass], names: Sequence[str]) -> list[Pass]:
    """``passes``, records of which each is a step of the log, with their fields ``names``, which are those of a phase,
    as in the forward phase of that step; None is unknown.
    """
    rows: dict[int, dict[str, Any]] = {}
    for annotation in run.annotate():
        for (step, phase), row in annotation.phases.items():
            if phase == "forward":
                rows.setdefault(step, {}).update(row)
    filled: list[Any] = list(passes)
    return [replace(record, **{name: rows.get(i, {}).get(name) for name in names}) for i, record in enumerate(filled)]


# Passes of models over their caches under one recorder, and what each of them cost.

@dataclass(frozen=True, slots=True)
class PassCost:
    """One pass: the FLOPs, the bytes that all operators read and write, seconds by the roofline, peaks."""

    sequences: int
    tokens: int                              #: of each sequence that it reads
    context_tokens: int                      #: of each sequence after it
    flops: int | None = None
    read_bytes: int | None = None
    written_bytes: int | None = None
    seconds: float | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None

    @property
    def intensity(self) -> float | None:
        """FLOPs for each byte moved."""
        if self.flops is None or self.read_bytes is None or self.written_bytes is None:
            return None
        moved = self.read_bytes + self.written_bytes
        return self.flops / moved if moved else None


_AMOUNTS = ("flops", "read_bytes", "written_bytes", "seconds", "peak_allocated_bytes", "peak_reserved_bytes")


class PassRecorder:
    """Runs passes one after the other, each a step of the recorder's log."""

    def __init__(self, session: Session, recorder: Recorder) -> None:
        self.session, self.recorder = session, recorder
        self.passes: list[PassCost] = []

    def read(self, decoder: StoredDecoder, tokens: Tensor) -> None:
        """One pass over ``tokens``, and the choice of the next ones: the largest of the last logits."""
        recorder, step = self.recorder, len(self.passes)
        recorder.start_step(step, placeholders=step == 0)
        recorder.describe_step(step)
        recorder.begin("forward")
        with torch.no_grad(), self.session.casting():
            logits = decoder.read(tokens)
            chosen = logits[:, -1:, :].to(torch.float32, copy=True).argmax(dim=-1)
        del logits, chosen
        recorder.end()
        recorder.mark(tensors_kept(decoder.cache), "cache")
        self.passes.append(PassCost(tokens.shape[0], tokens.shape[1], decoder.context))

    def list_costs(self, run: Run) -> list[PassCost]:
        """The passes with what they cost."""
        return fill_costs(run, self.passes, _AMOUNTS)


# A model that serves several sequences at once: what it keeps, what a prefill and a decode pass cost, what fits.

PREFILL_CHUNK = 2048  # tokens of prompts that a pass reads at most (vLLM's config, DEFAULT_MAX_NUM_BATCHED_TOKENS)
ServedCache = Literal["paged", "static"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPoint:
    """So many sequences of one context, served at once: the memory, and a pass of each kind.

    The prefill reads a chunk of one prompt while there is room for all sequences; the decode pass reads the last token
    of each.
    """

    sequences: int
    context_tokens: int
    device: str | None
    weight_bytes: int | None
    cache_bytes: int | None = None
    used_cache_bytes: int | None = None      #: of tokens that are there; the rest is room in pages, and states
    prefill: PassCost | None = None          #: None where memory ran out before
    decode: PassCost | None = None
    profile: Profile                         #: of the last pass, with the peaks of both
    out_of_memory: OutOfMemoryInfo | None = None

    @property
    def peak_allocated_bytes(self) -> int | None:
        """The larger of the two passes."""
        return self.profile.peak_allocated_bytes

    @property
    def activation_bytes(self) -> int | None:
        """What the peak holds besides weights and cache."""
        peak, weights, cache = self.peak_allocated_bytes, self.weight_bytes, self.cache_bytes
        return None if peak is None or weights is None or cache is None else peak - weights - cache

    @property
    def verdict(self) -> Verdict | None:
        """Whether all of it fits on its device; its phase is the pass of the peak."""
        found = self.profile.verdict
        if found is None or self.out_of_memory is not None and self.out_of_memory.phase == "setup":
            return found
        peaks = [0 if cost is None else cost.peak_allocated_bytes or 0 for cost in (self.prefill, self.decode)]
        in_decode = self.prefill is not None if self.out_of_memory is not None else peaks[1] > peaks[0]
        return replace(found, phase="decode" if in_decode else "prefill")

    @property
    def fits(self) -> bool | None:
        """None where that is not known."""
        found = self.verdict
        return None if found is None else found.fits

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens of all sequences, while they are decoded."""
        return self.sequences / self.decode.seconds if self.decode is not None and self.decode.seconds else None


@leaves_no_tensor
def profile_serving(model: nn.Module | Callable[[], nn.Module], sequences: int, context_tokens: int, *,
                    cache: ServedCache = "paged", cache_dtype: torch.dtype | None = None, block_size: int = BLOCK_SIZE,
                    prefill_chunk: int = PREFILL_CHUNK, autocast: torch.dtype | None = None,
                    device: str | DeviceSpec = "h200", options: ProfileOptions | None = None) -> ServingPoint:
    """Predict what serving ``sequences`` at once takes when each has ``context_tokens``: the memory of weights, cache
    and activations, and what a prefill of ``prefill_chunk`` tokens and a decode pass of all sequences cost.

    ``model`` is a decoder of transformers, or a callable that builds one; its cache is ``"paged"`` in pages of
    ``block_size`` tokens, or ``"static"``, of the model's type or ``cache_dtype``. Raises InputError for arguments that
    cannot be used and models that cannot be run so.

    Two layers keep keys and values of 2 heads of 8 channels in 4 bytes; of 20 tokens the last is in a second page:

    >>> from analyzer.zoo.torchvision_ops import define_torchvision_ops; define_torchvision_ops()
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    ...                      num_key_value_heads=2, vocab_size=100)
    >>> p = profile_serving(lambda: LlamaForCausalLM(config), sequences=3, context_tokens=20)
    >>> per_token = 2 * 2 * 2 * 8 * 4
    >>> p.used_cache_bytes == 3 * 20 * per_token, p.cache_bytes == 3 * 32 * per_token, p.fits
    (True, True, True)
    """
    setting = ServingSetting("profile_serving", context_tokens, CacheForm(cache, cache_dtype, block_size),
                             prefill_chunk, autocast, find_device(device), options or ProfileOptions())
    if not is_count(sequences, 1):
        raise InputError(f"profile_serving(sequences={sequences!r}): must be 1 or more")
    return setting.run(setting.prepare(model), sequences)


@leaves_no_tensor
def sweep_sequences(model: nn.Module | Callable[[], nn.Module], numbers: Sequence[int], context_tokens: int, *,
                    cache: ServedCache = "paged", cache_dtype: torch.dtype | None = None, block_size: int = BLOCK_SIZE,
                    prefill_chunk: int = PREFILL_CHUNK, autocast: torch.dtype | None = None,
                    device: str | DeviceSpec = "h200",
                    options: ProfileOptions | None = None) -> tuple[ServingPoint, ...]:
    """`profile_serving` for each of ``numbers`` of sequences; what does not fit is told too, with its cost."""
    setting = ServingSetting("sweep_sequences", context_tokens, CacheForm(cache, cache_dtype, block_size),
                             prefill_chunk, autocast, find_device(device), options or ProfileOptions())
    if not numbers or not all(is_count(n, 1) for n in numbers):
        raise InputError(f"sweep_sequences(numbers={numbers!r}): give numbers of sequences, each 1 or more")
    module = setting.prepare(model)
    return tuple(setting.run(module, n) for n in numbers)


@dataclass(frozen=True, slots=True)
class ServingSetting:
    """What all points of one request share."""

    caller: str
    context_tokens: int
    form: CacheForm
    prefill_chunk: int
    autocast: torch.dtype | None
    device: DeviceSpec
    options: ProfileOptions

    def prepare(self, model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
        """The model, built where it is not yet. Raises InputError where it or the setting cannot be used."""
        self.form.check(self.caller)
        if self.form.kind == "dynamic":
            raise InputError(f"{self.caller}(cache='dynamic'): a server takes its cache at once; give 'paged' or "
                             "'static'")
        if not is_count(self.context_tokens, 2) or not is_count(self.prefill_chunk, 1):
            raise InputError(f"{self.caller}(context_tokens={self.context_tokens!r}, prefill_chunk="
                             f"{self.prefill_chunk!r}): a context has 2 tokens or more, a chunk 1")
        module = model if isinstance(model, nn.Module) else build_model(model)
        if not is_of_transformers(module):
            raise InputError(f"{self.caller}(): {type(module).__name__} is no model of transformers, and only those "
                             "are served; give one, e.g. hf:gpt2")
        check_positions(module, f"{self.caller}(context_tokens={self.context_tokens!r})", self.context_tokens)
        return module

    def run(self, module: nn.Module, sequences: int, limit_bytes: int | None = None) -> ServingPoint:
        """One point; ``limit_bytes`` is the most that the allocator may take."""
        options = self.options if limit_bytes is None else replace(
            self.options, capacity_bytes=limit_bytes, limit_to_device=False, keep_events=False)
        session = Session(self.device, options, autocast=self.autocast)
        try:
            with set_training(module, False):
                return self._run(session, module, sequences)
        except DeviceOutOfMemoryError as error:
            unplaced = session.build_unplaced(module, error)
            return ServingPoint(sequences=sequences, context_tokens=self.context_tokens, device=unplaced.device,
                                weight_bytes=unplaced.param_bytes, profile=unplaced,
                                out_of_memory=unplaced.out_of_memory)

    def _run(self, session: Session, module: nn.Module, sequences: int) -> ServingPoint:
        chunk = min(self.prefill_chunk, self.context_tokens - 1)
        with session.open(module) as run:
            with run.recording() as recorder:
                (prompt, last), _ = run.take_inputs(
                    (torch.ones((1, chunk), dtype=torch.int64), torch.ones((sequences, 1), dtype=torch.int64)), {},
                    ["prompt", "last_tokens"])
                decoder = StoredDecoder(run.root, self.form, self.context_tokens, sequences)
                passes = PassRecorder(session, recorder)
                states = None
                if decoder.has_states:  # which a pass of all sequences makes
                    decoder.skip(self.context_tokens - 1)
                    passes.read(decoder, last)
                    states = decoder.start_over()
                passes.read(decoder, prompt)
                if states is not None:
                    decoder.take_back(states)
                decoder.skip(self.context_tokens - 1 - chunk)
                passes.read(decoder, last)
            costs: list[PassCost | None] = [*passes.list_costs(run)[decoder.has_states:], None, None]
            short = describe_shortage(recorder.log, ModulePaths())
            kept = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors_kept(decoder.cache)}
            found = run.build()
            whole = {name: max((getattr(cost, name) for cost in costs if cost is not None and
                                getattr(cost, name) is not None), default=None)
                     for name in ("peak_allocated_bytes", "peak_reserved_bytes")} if short is None else {}
            return ServingPoint(
                sequences=sequences, context_tokens=self.context_tokens, device=found.device,
                weight_bytes=found.param_bytes, cache_bytes=sum(kept.values()) if short is None else None,
                used_cache_bytes=decoder.used_bytes() if short is None else None, prefill=costs[0],
                decode=costs[1] if short is None else None, profile=with_amounts(found, whole), out_of_memory=short)


def with_amounts(profile: Profile, amounts: dict[str, Any]) -> Profile:
    """A profile with these fields in place of its own."""
    return replace(profile, **amounts)
