"""The cycle of a training script with several phases, as post-training has: plain data."""
from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CyclePhase:
    """One phase of a cycle: its parts are added up, and of its peaks the largest counts. None is unknown."""

    name: str                               #: rollout, scoring, update, sync, evaluation, save or the script's own
    parts: int                              #: how often it came
    passes: int                             #: calls of models from outside of them
    steps: int                              #: of optimizers
    samples: int | None                     #: in all its passes, of the model that has fewest
    tokens: int | None                      #: that these were given; None of models that are given none
    allocated_bytes: int                    #: at its end, the last time
    peak_allocated_bytes: int
    flops: int | None
    kernels: int | None
    seconds: float | None                   #: wall time: until the device has done what the phase launched
    seconds_range: tuple[float, float] | None = None  #: low and high, which hold nine of ten measured cases


@dataclass(frozen=True, slots=True)
class CycleInfo:
    """One iteration of a script's outermost repetition, with its phases in the order in which they came."""

    number: int                             #: 1 is the first
    steps: int                              #: whole optimizer steps
    phases: tuple[CyclePhase, ...]
    samples: int | None                     #: rows that its rollouts begin with; without one, those of its updates
    generated_tokens: int | None            #: by its rollouts: one a row and pass; None without a rollout of tokens
    seconds: float | None
    seconds_range: tuple[float, float] | None
    held: dict[str, int] = field(default_factory=dict)  #: bytes by category at its end

    @property
    def peak_allocated_bytes(self) -> int:
        """The largest peak of its phases."""
        return max([phase.peak_allocated_bytes for phase in self.phases], default=0)

    @property
    def samples_per_second(self) -> float | None:
        """Samples in a second of cycles; None where a part is unknown."""
        return self._per_second(self.samples)

    @property
    def generated_tokens_per_second(self) -> float | None:
        """Generated tokens likewise."""
        return self._per_second(self.generated_tokens)

    def _per_second(self, amount: int | None) -> float | None:
        return None if amount is None or not self.seconds else amount / self.seconds
