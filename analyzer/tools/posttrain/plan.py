"""What a step of post-training consists of: models, who trains, who samples, how much of what."""
from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from analyzer.errors import InputError, is_count
from analyzer.hardware import ClusterSpec
from analyzer.tools.search import Layout
from analyzer.tools.serving import Layout as EngineLayout

from .answers import Answers

#: - ``grpo``: answers of one prompt are compared with each other; ``rloo`` likewise; a reference is optional;
#: - ``dapo``: as GRPO, without a reference, and more prompts are sampled than are learned of (``oversample``);
#: - ``ppo``: a critic of its own weights tells values and is trained too;
#: - ``dpo``: pairs of answers are there, which the model and a reference score.
Algorithm = Literal["grpo", "ppo", "rloo", "dapo", "dpo"]
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)
Reference = Literal["none", "copy", "adapter"]


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """The engines that sample. ``devices``: how many they have for themselves; 0: they share those of the trainer.

    - ``layout``: ranks of one engine; None: the fastest that holds the model.
    - ``memory_share``: of each device; None: the engine's own, and beside a trainer 0.6 (NeMo RL 0.5,
      examples/configs/grpo_math_1B.yaml, ``gpu_memory_utilization``).
    - ``sleep``: what leaves a shared device while the model trains: 0 nothing, 1 the cache, and weights to the host, 2
      both.
    - ``sequences``: at once of one engine at most; None: its own.
    """

    server: str = "vllm"
    version: str | None = None
    layout: EngineLayout | None = None
    devices: int = 0
    memory_share: float | None = None
    sleep: int = 1
    weights: str = "bf16"
    experts: str | None = None
    cache: str = "bf16"
    sequences: int | None = None
    drafted: int = 0


@dataclass(frozen=True, kw_only=True)
class PosttrainPlan:
    """A step: ``prompts`` of ``prompt`` tokens in the mean, ``longest_prompt`` at most, are answered ``samples`` times
    each; ``updates`` optimizer steps follow, each of an even part of the answers, ``epochs`` times over all of them.

    - ``layout``: how the trainer's ranks share the model (`analyzer.tools.search.Layout`); its micro-batches follow.
    - ``tokens``: that a micro-batch of the update has at most; rows are ``packs``-ed, or padded to the longest of the
      ``rows`` in it. ``score_tokens``: of a pass without gradients, None: as many.
    - ``reference``: what the policy is compared with: weights of its own, those under its adapters, or nothing;
      ``scores_old``: whether log probabilities of the policy itself are computed before the update.
    - ``critic``: a second model of the same size learns values.
    - ``lag``: steps by which the weights that sample are behind; above 0 the trainer and engines work at the same time,
      and ``in_flight`` ones get new weights without waiting for the longest answers.
    - ``offloads_optimizer``, ``offloads_model``: what of the trainer leaves a shared device while engines sample, to
      memory of the host; ``pins``: whether that of the optimizer's is pinned, as that of weights is (verl 0.7,
      utils/fsdp_utils.py: copies to the host that do not block; NeMo RL 0.5, megatron_policy_worker.py: those that do).
    """

    algorithm: Algorithm = "grpo"
    model: str
    cluster: ClusterSpec
    devices: int
    layout: Layout
    engine: EnginePlan | None = field(default_factory=EnginePlan)
    prompts: int = 64
    samples: int = 8
    prompt: int = 256
    longest_prompt: int = 512
    answers: Answers = field(default_factory=lambda: Answers.of(1024, 4096))
    tokens: int = 0                          #: 0: as many as the longest prompt with the longest answer
    rows: int = 1
    packs: bool = True
    score_tokens: int | None = None
    updates: int = 1
    epochs: int = 1
    reference: Reference = "none"
    scores_old: bool = True
    critic: bool = False
    lag: int = 0
    in_flight: bool = False
    oversample: float = 1.0
    loss_chunks: int | None = None
    entropy: bool = False
    lora: str | None = None
    offloads_optimizer: bool = True
    offloads_model: bool = True
    pins: bool = True
    assumptions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise InputError(f"algorithm {self.algorithm!r}: must be one of {', '.join(ALGORITHMS)}")
        for name in ("devices", "prompts", "samples", "prompt", "longest_prompt", "updates", "epochs", "rows"):
            if not is_count(getattr(self, name), 1):
                raise InputError(f"{name} {getattr(self, name)!r}: must be a whole number of at least 1")
        if self.prompt > self.longest_prompt:
            raise InputError(f"prompts of {self.prompt:,} tokens in the mean: their maximum is given as "
                             f"{self.longest_prompt:,}")
        if self.algorithm == "dpo" and self.engine is not None:
            raise InputError("dpo: learns of answers that are there; leave the engines out")
        if self.algorithm != "dpo" and self.engine is None:
            raise InputError(f"{self.algorithm}: samples answers; give the engines")
        if self.reference == "adapter" and self.lora is None:
            raise InputError("reference 'adapter': is the model under its adapters; give lora too, or 'copy'")
        if self.engine is not None and not 0 <= self.engine.devices < self.devices:
            raise InputError(f"engines with {self.engine.devices} devices of their own: the trainer needs some of the "
                             f"{self.devices}; 0 shares all")
        if self.lag and self.shares:
            raise InputError(f"lag {self.lag}: engines that share the trainer's devices cannot sample while it works; "
                             "give them devices of their own")
        if self.room < self.longest:
            raise InputError(f"{self.room:,} tokens a micro-batch: the longest prompt with its answer has "
                             f"{self.longest:,}; give at least as many")

    @property
    def shares(self) -> bool:
        """Whether engines share the trainer's devices."""
        return self.engine is not None and not self.engine.devices

    @property
    def trainer_devices(self) -> int:
        return self.devices - (0 if self.engine is None else self.engine.devices)

    @property
    def engine_devices(self) -> int:
        if self.engine is None:
            return 0
        return self.engine.devices or self.devices

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.longest_prompt + self.answers.longest

    @property
    def room(self) -> int:
        """Tokens of a micro-batch of the update at most."""
        return self.tokens or self.longest * (1 if self.packs else self.rows)

    @property
    def score_room(self) -> int:
        return self.score_tokens or self.room

    @property
    def sequences(self) -> int:
        """That are learned of in a step; of a pair both."""
        return self.prompts * self.samples

    def draw(self) -> list[int]:
        """Tokens of the sequences of a step."""
        return [self.prompt + answer for answer in self.answers.draw(self.sequences)]

    def with_layout(self, **changes: object) -> PosttrainPlan:
        """The same with another layout of the trainer."""
        return replace(self, layout=replace(self.layout, **changes))  # type: ignore[arg-type]
