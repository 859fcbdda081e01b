"""A speculative step: a draft model proposes tokens one after the other, and the target reads all of them at once."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from analyzer.api.argument import set_training
from analyzer.api.session import Session
from analyzer.errors import InputError, is_count
from analyzer.fx.surroundings import leaves_no_tensor
from analyzer.hardware import DeviceSpec, find_device
from analyzer.memory.allocator import DeviceOutOfMemoryError
from analyzer.record.options import ProfileOptions
from analyzer.report.column import format_quantity, print_rows
from analyzer.results.info import OutOfMemoryInfo
from analyzer.results.out_of_memory import describe_shortage
from analyzer.results.profile import Profile
from analyzer.results.verdict import Verdict
from analyzer.results.wrapper import ModulePaths

from .serving import PREFILL_CHUNK, ServingSetting, with_amounts
from .serving_pass import PassCost, PassRecorder
from .stored_cache import BLOCK_SIZE, CacheForm
from .stored_decoder import StoredDecoder

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
