"""A model that serves several sequences at once: what each pass costs, what fits, and the largest number that does."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from analyzer.api.argument import build_model, set_training
from analyzer.api.build_profile import annotate, build_profile, build_unplaced
from analyzer.api.result import Profile
from analyzer.api.run import Run, open_run
from analyzer.api.session import Session
from analyzer.errors import InputError, is_count
from analyzer.fx.surroundings import leaves_no_tensor
from analyzer.hardware import DeviceSpec, find_device, list_unseen
from analyzer.memory.allocator import DeviceOutOfMemoryError
from analyzer.record.options import ProfileOptions
from analyzer.record.recorder import Recorder
from analyzer.report.quantity import print_data
from analyzer.report.text_table import Column, check_layout, format_quantity, print_rows
from analyzer.results.info import OutOfMemoryInfo
from analyzer.results.timeline import describe_shortage
from analyzer.results.tree import ModulePaths
from analyzer.results.verdict import Verdict

from .decoder import StoredDecoder, TokenDecoder, check_positions, is_of_transformers, kept_bytes, tensors_kept
from .stored_cache import BLOCK_SIZE, CacheForm

Pass = TypeVar("Pass")


def run_pass(session: Session, recorder: Recorder, decoder: TokenDecoder, tokens: Tensor, step: int) -> Tensor:
    """One pass over ``tokens``, a step of the log, and the choice of the next ones, (batch, 1): the largest of the last
    logits in float32.
    """
    recorder.start_step(step, placeholders=step == 0)
    recorder.memory.begin("forward")
    with session.options.without_gradients(), session.casting():
        logits = decoder.read(tokens)
        chosen = logits[:, -1, :].to(torch.float32, copy=True).argmax(dim=-1, keepdim=True)
    del logits
    recorder.memory.end()
    recorder.memory.mark(tensors_kept(decoder.cache), "cache")
    return chosen


def fill_costs(run: Run, passes: Sequence[Pass]) -> list[Pass]:
    """``passes``, each a step of the log, with the figures of that step's forward phase that their fields are named
    as; None is unknown.
    """
    rows: dict[int, dict[str, Any]] = {}
    for annotation in annotate(run):
        for (step, phase), row in annotation.phases.items():
            if phase == "forward":
                rows.setdefault(step, {}).update(row)
    filled: list[Any] = list(passes)
    return [replace(record, **{field.name: rows[i][field.name] for field in fields(record)
                               if field.name in rows.get(i, {})}) for i, record in enumerate(filled)]


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


PREFILL_CHUNK = 2048  # tokens of prompts that a pass reads at most (vLLM's config, DEFAULT_MAX_NUM_BATCHED_TOKENS)


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
def profile_eager_passes(model: nn.Module | Callable[[], nn.Module], sequences: int, context_tokens: int, *,
                         cache: Literal["paged", "static"] = "paged", cache_dtype: torch.dtype | None = None,
                         block_size: int = BLOCK_SIZE, prefill_chunk: int = PREFILL_CHUNK,
                         autocast: torch.dtype | None = None, device: str | DeviceSpec = "h200",
                         options: ProfileOptions | None = None) -> ServingPoint:
    """Predict what two passes of a model take in eager PyTorch with a cache of ``sequences`` of ``context_tokens``
    each: the memory of weights, cache and activations, and the cost of a prefill of ``prefill_chunk`` tokens and of a
    decode pass of all sequences. An inference server runs other kernels and less of its host, and a token takes it an
    eighth of the time or so: what it takes is `analyzer.tools.serving.profile_served`'s to tell.

    ``model`` is a decoder of transformers, or a callable that builds one; its cache is ``"paged"`` in pages of
    ``block_size`` tokens, or ``"static"``, of the model's type or ``cache_dtype``. Raises InputError for arguments that
    cannot be used and models that cannot be run so.

    Two layers keep keys and values of 2 heads of 8 channels in 4 bytes; of 20 tokens the last is in a second page:

    >>> from analyzer.zoo.torchvision_ops import define_torchvision_ops; define_torchvision_ops()
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    ...                      num_key_value_heads=2, vocab_size=100)
    >>> p = profile_eager_passes(lambda: LlamaForCausalLM(config), sequences=3, context_tokens=20)
    >>> per_token = 2 * 2 * 2 * 8 * 4
    >>> p.used_cache_bytes == 3 * 20 * per_token, p.cache_bytes == 3 * 32 * per_token, p.fits
    (True, True, True)
    """
    if not is_count(sequences, 1):
        raise InputError(f"profile_eager_passes(sequences={sequences!r}): must be 1 or more")
    server = Server("profile_eager_passes", model, context_tokens, cache=cache, cache_dtype=cache_dtype,
                    block_size=block_size, prefill_chunk=prefill_chunk, autocast=autocast, device=device,
                    options=options)
    return server.run(sequences)


@leaves_no_tensor
def sweep_sequences(model: nn.Module | Callable[[], nn.Module], numbers: Sequence[int], context_tokens: int,
                    **settings: Any) -> tuple[ServingPoint, ...]:
    """`profile_eager_passes` for each of ``numbers`` of sequences; what does not fit is told too, with its cost."""
    if not numbers or not all(is_count(n, 1) for n in numbers):
        raise InputError(f"sweep_sequences(numbers={numbers!r}): give numbers of sequences, each 1 or more")
    server = Server("sweep_sequences", model, context_tokens, **settings)
    return tuple(map(server.run, numbers))


class Server:
    """A model with the settings that all points of one request share. Raises InputError where they cannot be used."""

    def __init__(self, caller: str, model: nn.Module | Callable[[], nn.Module], context_tokens: int, *,
                 cache: str = "paged", cache_dtype: torch.dtype | None = None, block_size: int = BLOCK_SIZE,
                 prefill_chunk: int = PREFILL_CHUNK, autocast: torch.dtype | None = None,
                 device: str | DeviceSpec = "h200", options: ProfileOptions | None = None) -> None:
        self.device, self.options, self.autocast = find_device(device), options or ProfileOptions(), autocast
        self.context_tokens, self.prefill_chunk = context_tokens, prefill_chunk
        self.form = CacheForm(cache, cache_dtype, block_size)
        self.form.check(caller)
        if cache == "dynamic":
            raise InputError(f"{caller}(cache='dynamic'): a server takes its cache at once; give 'paged' or 'static'")
        if not is_count(context_tokens, 2) or not is_count(prefill_chunk, 1):
            raise InputError(f"{caller}(context_tokens={context_tokens!r}, prefill_chunk={prefill_chunk!r}): a context "
                             "has 2 tokens or more, a chunk 1")
        self.module = model if isinstance(model, nn.Module) else build_model(model, spec=self.device)
        if not is_of_transformers(self.module):
            raise InputError(f"{caller}(): {type(self.module).__name__} is no model of transformers, and only those "
                             "are served; give one, e.g. hf:gpt2")
        check_positions(self.module, f"{caller}(context_tokens={context_tokens!r})", context_tokens)

    def run(self, sequences: int, limit_bytes: int | None = None) -> ServingPoint:
        options = self.options if limit_bytes is None else replace(
            self.options, capacity_bytes=limit_bytes, limit_to_device=False, keep_events=False)
        session = Session(self.device, options, autocast=self.autocast)
        try:
            with set_training(self.module, False):
                return self._run(session, sequences)
        except DeviceOutOfMemoryError as error:
            unplaced = build_unplaced(session, self.module, error)
            return ServingPoint(sequences=sequences, context_tokens=self.context_tokens, device=unplaced.device,
                                weight_bytes=unplaced.param_bytes, profile=unplaced,
                                out_of_memory=unplaced.out_of_memory)

    def _run(self, session: Session, sequences: int) -> ServingPoint:
        chunk = min(self.prefill_chunk, self.context_tokens - 1)
        passes: list[PassCost] = []
        with open_run(session, self.module) as run:
            with run.recording() as recorder:
                (prompt, last), _ = run.take_inputs(
                    (torch.ones((1, chunk), dtype=torch.int64), torch.ones((sequences, 1), dtype=torch.int64)), {},
                    ["prompt", "last_tokens"])
                decoder = StoredDecoder(run.root, self.form, self.context_tokens, sequences)

                def read(tokens: Tensor) -> None:
                    recorder.modules.describe_step(len(passes))
                    run_pass(session, recorder, decoder, tokens, len(passes))
                    passes.append(PassCost(tokens.shape[0], tokens.shape[1], decoder.context))

                put_back = None
                if decoder.has_states:  # which a pass of all sequences makes
                    decoder.skip(self.context_tokens - 1)
                    read(last)
                    put_back = decoder.start_over()
                read(prompt)
                if put_back is not None:
                    put_back()
                decoder.skip(self.context_tokens - 1 - chunk)
                read(last)
            costs = fill_costs(run, passes)[decoder.has_states:]
            short = describe_shortage(recorder.log, ModulePaths())
            peaks: dict[str, Any] = {} if short is not None else {
                name: max((peak for cost in costs if (peak := getattr(cost, name)) is not None), default=None)
                for name in ("peak_allocated_bytes", "peak_reserved_bytes")}
            found = build_profile(run, is_final=True, **peaks)
            point = ServingPoint(sequences=sequences, context_tokens=self.context_tokens, device=found.device,
                                 weight_bytes=found.param_bytes, prefill=costs[0] if costs else None, profile=found,
                                 out_of_memory=short)
            if short is not None:
                return point
            return replace(point, cache_bytes=kept_bytes(decoder.cache), used_cache_bytes=decoder.used_bytes(),
                           decode=costs[1])


# Numbers of sequences beside each other: speed, memory, and whether it fits; by the place of each figure in a point.
_COLUMNS = {
    "sequences": Column("sequences", "Sequences", "text"),
    "decode.seconds": Column("decode_seconds", "Decode pass", "seconds"),
    "tokens_per_second": Column("tokens_per_second", "Tokens/s", "count"),
    "decode.read_bytes": Column("decode_read_bytes", "Read", "bytes"),
    "prefill.seconds": Column("prefill_seconds", "Prefill chunk", "seconds"),
    "cache_bytes": Column("cache_bytes", "Cache", "bytes"),
    "activation_bytes": Column("activation_bytes", "Activations", "bytes"),
    "profile.peak_reserved_bytes": Column("peak_reserved_bytes", "Peak reserved", "bytes"),
    "fits": Column("fits", "Fits", "text")}
_SAID = {True: "yes", False: "no", None: "not known"}


def serving_table(points: Sequence[ServingPoint], fmt: str = "text") -> str:
    """A row for each number of sequences; ``fmt`` is as of `GenerationProfile.table`, in CSV figures are unrounded."""
    check_layout(None, 0, fmt, "serving_table()")
    known: Sequence[Any] = points
    rows = [[reduce(lambda found, name: getattr(found, name, None), place.split("."), point)  # None where it is not
             for place in _COLUMNS] for point in known]
    if fmt != "csv":
        rows = [[*row[:-1], _SAID[row[-1]]] for row in rows]
    return print_data(tuple(_COLUMNS.values()), rows, fmt)


def tell_which_fit(points: Sequence[ServingPoint]) -> str:
    lines = []
    for fits, said in ((True, "fit on"), (False, "do NOT fit on"), (None, "not known whether they fit on")):
        found = [point for point in points if point.fits is fits]
        if found:
            numbers = ", ".join(f"{point.sequences:,}" for point in found)
            lines.append(f"{said} {found[0].device}: {numbers} sequences of {found[0].context_tokens:,} tokens")
    return "\n".join(lines)


_ENDLESS = 1 << 24  # sequences


@dataclass(frozen=True, slots=True)
class MaxSequences:
    """The largest number of sequences that fits, and the points at it and beyond it, which were both run."""

    sequences: int                           #: 0 where not even one fits
    context_tokens: int
    device: str
    capacity_bytes: int                      #: what the allocator may take
    at_limit: ServingPoint | None            #: None where nothing fits
    beyond: ServingPoint | None              #: of one sequence more; None where ``sequences`` is the caller's bound
    tried: int                               #: how many numbers were run

    def split(self) -> list[tuple[str, int | None]]:
        """What the memory of the device is taken by, at the limit."""
        point = self.at_limit or self.beyond
        if point is None or point.out_of_memory is not None:
            return [("weights", None if point is None else point.weight_bytes)]
        used, cache, peak = point.used_cache_bytes, point.cache_bytes, point.peak_allocated_bytes
        reserved = point.profile.peak_reserved_bytes
        rest = None if reserved is None or peak is None else reserved - peak
        return [("weights", point.weight_bytes), ("cache of tokens", used),
                ("cache besides (pages, states)", None if cache is None or used is None else cache - used),
                ("activations", point.activation_bytes), ("reserved and cached", rest),
                ("not taken", None if reserved is None else self.capacity_bytes - reserved)]

    def __str__(self) -> str:
        said = (f"at most {self.sequences:,} sequences of {self.context_tokens:,} tokens fit" if self.sequences else
                f"not even one sequence of {self.context_tokens:,} tokens fits")
        more = "" if self.beyond is not None else "; no more were asked for"
        whole = self.capacity_bytes
        rows = [(what, format_quantity(nbytes, "bytes"), "" if nbytes is None else f"{nbytes / whole:.1%}")
                for what, nbytes in self.split()]
        lines = [f"{self.device}: {said}{more}",
                 f"the allocator may take {format_quantity(whole, 'bytes')}", "",
                 print_rows(("At the limit", "Size", "Share"), rows)]
        point = self.at_limit
        if point is not None and point.decode is not None:
            lines += ["", f"decode: {format_quantity(point.decode.seconds, 'seconds')} a pass, "
                          f"{format_quantity(point.tokens_per_second, 'count')} tokens a second"]
        return "\n".join(lines)


@leaves_no_tensor
def max_sequences(model: nn.Module | Callable[[], nn.Module], context_tokens: int, *, memory_share: float = 1.0,
                  at_most: int | None = None, **settings: Any) -> MaxSequences:
    """The largest number of sequences of ``context_tokens`` each whose serving fits on a device: what
    `profile_eager_passes` runs with the same settings, under the memory of the device as a limit. Memory rises with the
    number, so the answer lies between the largest that was run and fits and the smallest that was run and does not;
    they end up side by side.

    ``memory_share`` is what the server may take of the device's memory (vLLM's ``gpu_memory_utilization``), and
    ``options.capacity_bytes`` takes its place. Raises InputError as `profile_eager_passes` does.
    """
    if at_most is not None and not is_count(at_most, 1):
        raise InputError(f"max_sequences(at_most={at_most!r}): must be 1 or more, or None")
    if not 0 < memory_share <= 1:
        raise InputError(f"max_sequences(memory_share={memory_share!r}): a share lies above 0 and is at most 1")
    server = Server("max_sequences", model, context_tokens, **settings)
    spec, capacity = server.device, server.options.capacity_bytes
    if capacity is None:
        if spec.memory_bytes is None:
            raise InputError(f"max_sequences(): the memory of {spec.name!r} is not known; give "
                             "options=ProfileOptions(capacity_bytes=...)")
        capacity = int(memory_share * spec.memory_bytes) - sum(unseen.bytes or 0 for unseen in list_unseen(spec))
    search = _CapacitySearch(server, capacity, at_most)
    search.close()
    return MaxSequences(search.low, context_tokens, spec.name, capacity, search.points.get(search.low),
                        search.points.get(search.high or 0), search.tried)


class _CapacitySearch:
    """Follows the line of what is reserved to the capacity, and keeps the answer in a bracket."""

    def __init__(self, server: Server, capacity: int, at_most: int | None) -> None:
        self.server, self.capacity = server, capacity
        self.points: dict[int, ServingPoint] = {}
        self.low, self.high, self.tried = 0, None if at_most is None else at_most + 1, 0

    def close(self) -> None:
        """Run numbers until the one after the largest that fits is known not to, or is beyond the caller's bound."""
        self._try(1)
        while self.high is None or self.high > self.low + 1:
            if self.low > _ENDLESS:
                raise InputError(f"max_sequences(): {self.low:,} sequences still fit; give at_most")
            self._try(self._guess())

    def _try(self, number: int) -> None:
        point = self.points[number] = self.server.run(number, self.capacity)
        self.tried += 1
        if point.out_of_memory is None:
            self.low = number
        else:
            self.high = number
        self.points = {n: p for n, p in self.points.items() if n in (self.low, self.high) or p.out_of_memory is None}

    def _guess(self) -> int:
        fitting = sorted(n for n, p in self.points.items() if p.out_of_memory is None)
        limit = self.high if self.high is not None else 2 * _ENDLESS
        guess = 2 * self.low
        if len(fitting) > 1:
            (a, b), needs = fitting[-2:], [self.points[n].profile.peak_reserved_bytes or 0 for n in fitting[-2:]]
            slope = (needs[1] - needs[0]) / (b - a)
            guess = self.low + int((self.capacity - needs[1]) / slope) if slope > 0 else 64 * self.low
            if self.tried > 6 and self.high is not None:
                guess = (self.low + self.high) // 2  # the line bends
        return max(self.low + 1, min(guess, limit - 1))
