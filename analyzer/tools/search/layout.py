"""How a model is laid out over devices: the choices of a search, and all their combinations that can be."""
from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

from analyzer.errors import InputError, is_count
from analyzer.recipe.optimizer import find_optimizer

#: what is run again in backward: nothing; in each block all but attention and every second product; each block; what
#: `plan_blocks` chooses for the memory of the device, without a pipeline
CHECKPOINTING = ("none", "selective", "blocks", "planned")
#: ``"ddp"``: copies; ``"zero1"``: copies whose optimizer states are divided (`ZeroRedundancyOptimizer`); ``"fsdp"``:
#: `fully_shard`, gathered for each pass; ``"fsdp_kept"``: gathered once for both passes; ``"distributed"``: Megatron's
#: distributed optimizer, with weights of 16 bits and gradients in float32 that are whole, and states that are divided
SHARDING = ("ddp", "zero1", "fsdp", "fsdp_kept", "distributed")
#: ``"mixed"``: parameters, gradients and states in float32, computing in bfloat16; ``"bf16"``: all in bfloat16;
#: ``"float8"``: as mixed, with products of blocks in float8 by torchao, scaled by row
PRECISIONS = ("mixed", "bf16", "float8")
SCHEDULES = ("1F1B", "Interleaved1F1B", "GPipe", "InterleavedZeroBubble", "LoopedBFS", "ZBVZeroBubble")
BACKWARDS = ("ZBVZeroBubble", )  #: whose ranks hold a stage from each end
ONE_STAGE = ("1F1B", "GPipe")  #: whose ranks hold one


@dataclass(frozen=True)
class Layout:
    """One way to train: degrees of parallelism (their product is the number of devices), and what each rank does.

    - ``replicate`` copies of ``shard`` ranks divide the samples; ``sharding`` says what the ``shard`` ranks divide
      besides (`SHARDING`; with context parallel ranks too).
    - ``virtual``: pipeline stages of a rank. ``micro_batches``: of one rank in a step, of ``micro_batch`` samples each.
    - ``expert``: as many of the ``shard`` ranks have different experts, to which they send each other their tokens.
    - ``sequence_parallel``: tensor parallel ranks divide the tokens of norms and residuals too.
    - ``offload``: parameters, gradients and optimizer states are on the host; of ``"distributed"`` the states alone.

    >>> layout = Layout(shard=8, tensor=4, micro_batches=16)
    >>> layout.devices, layout.global_batch, str(layout)
    (32, 128, 'fsdp 8, TP 4, 16 x 1')
    """

    replicate: int = 1
    shard: int = 1
    context: int = 1
    expert: int = 1
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    schedule: str = "1F1B"
    micro_batch: int = 1
    micro_batches: int = 1
    sharding: str = "fsdp"
    checkpointing: str = "none"
    sequence_parallel: bool = True
    precision: str = "mixed"
    optimizer: str | None = "adamw_fused"
    offload: bool = False
    compile: bool = False

    def __lt__(self, other: Layout) -> bool:
        """By the fields in their order; no optimizer comes before all."""
        mine, others = (["" if value is None else value for value in astuple(one)] for one in (self, other))
        return mine < others

    @property
    def devices(self) -> int:
        return self.replicate * self.shard * self.context * self.tensor * self.pipeline

    @property
    def stages(self) -> int:
        """Of the pipeline."""
        return self.pipeline * self.virtual

    @property
    def data(self) -> int:
        """Ranks that have samples of their own."""
        return self.replicate * self.shard

    @property
    def is_sharded(self) -> bool:
        """Whether `fully_shard` divides its parameters."""
        return self.sharding.startswith("fsdp")

    @property
    def is_distributed(self) -> bool:
        """Whether Megatron's distributed optimizer divides its states."""
        return self.sharding == "distributed"

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return self.data * self.micro_batch * self.micro_batches

    def __str__(self) -> str:
        data = f"{self.sharding} {self.replicate}x{self.shard}" if self.replicate > 1 and self.shard > 1 else (
            f"{self.sharding} {self.data}" if self.data * self.context > 1 else "")
        pipeline = f"PP {self.pipeline}" + (
            "" if self.schedule == "1F1B" else f" {self.schedule}" + f" x{self.virtual}" * (self.virtual > 1))
        sequence = " no SP" * (not self.sequence_parallel)
        parts = [data, f"TP {self.tensor}{sequence}" * (self.tensor > 1), f"CP {self.context}" * (self.context > 1),
                 f"EP {self.expert}" * (self.expert > 1), pipeline * (self.pipeline > 1),
                 f"{self.micro_batches} x {self.micro_batch}",
                 f"checkpoint {self.checkpointing}" * (self.checkpointing != "none"),
                 self.precision * (self.precision != "mixed"),
                 str(self.optimizer or "no update") * (self.optimizer != "adamw_fused"), "offload" * self.offload,
                 "compiled" * self.compile]
        return ", ".join(filter(None, parts))


@dataclass(frozen=True)
class ModelFacts:
    """What of a model decides which layouts there are: its alike ``blocks`` (0: it has none that are divided), the
    degree that tensor parallelism may divide (0: nothing says how), why there can be no pipeline, if so, and how many
    ``experts`` a block has that can be divided.
    """

    blocks: int
    tensor_limit: int = 0
    no_pipeline: str = ""
    takes_tokens: bool = True
    experts: int = 0


@dataclass(frozen=True)
class Space:
    """What a search chooses from: of each field of `Layout` the values, None where they follow from the cluster.

    >>> Space.of({"tensor": 8, "checkpointing": ["none", "blocks"]}).tensor
    (8,)

    Raises InputError for a choice that does not exist, or has no values.
    """

    replicate: tuple[int, ...] | None = None
    shard: tuple[int, ...] | None = None
    context: tuple[int, ...] | None = None
    expert: tuple[int, ...] | None = None
    tensor: tuple[int, ...] | None = None
    pipeline: tuple[int, ...] | None = None
    virtual: tuple[int, ...] = (1, 2, 4)
    schedule: tuple[str, ...] = ("1F1B", "Interleaved1F1B")
    micro_batch: tuple[int, ...] = (1, 2, 4)
    sharding: tuple[str, ...] = SHARDING[:-1]  # what the last needs, a user asks for
    checkpointing: tuple[str, ...] = ("none", "selective", "blocks")
    sequence_parallel: tuple[bool, ...] = (True,)
    precision: tuple[str, ...] = ("mixed",)
    optimizer: tuple[str | None, ...] = ("adamw_fused",)
    offload: tuple[bool, ...] = (False,)
    compile: tuple[bool, ...] = (False,)

    @classmethod
    def of(cls, choices: Mapping[str, Any]) -> Space:
        """The usual choices, with those that are given in their place: a value, or several."""
        known = {f.name for f in fields(cls)}
        given = {}
        for name, value in choices.items():
            if name not in known:
                raise InputError(f"search({name}={value!r}): no such choice; there are {', '.join(sorted(known))}")
            single = isinstance(value, str) or not isinstance(value, Sequence)
            given[name] = (value,) if single else tuple(value)
            if not given[name]:
                raise InputError(f"search({name}={value!r}): holds no values")
        return cls(**given)

    def __post_init__(self) -> None:
        for name, known in (("schedule", SCHEDULES), ("sharding", SHARDING), ("checkpointing", CHECKPOINTING),
                            ("precision", PRECISIONS)):
            for value in getattr(self, name):
                if value not in known:
                    raise InputError(f"search({name}={value!r}): must be of {', '.join(known)}")
        for name in ("replicate", "shard", "context", "expert", "tensor", "pipeline", "virtual", "micro_batch"):
            for value in getattr(self, name) or ():
                if not is_count(value, 1):
                    raise InputError(f"search({name}={value!r}): must be a whole number of at least 1")
        for optimizer in self.optimizer:
            find_optimizer(optimizer)


def divisors(number: int) -> list[int]:
    """All divisors, the smallest first.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [n for n in range(1, number + 1) if number % n == 0]


@dataclass(frozen=True)
class Question:
    """What is asked: devices, how many of them share a host, samples of a step, tokens of a sample."""

    devices: int
    devices_per_host: int
    global_batch: int
    sequence: int
    space: Space


#: tokens of a sample up to which context parallelism is no choice unless it is asked for
SHORT_SEQUENCE = 16384


def list_layouts(question: Question, model: ModelFacts) -> Iterator[Layout]:
    """All layouts on exactly so many devices whose step takes exactly so many samples, in a fixed order."""
    space, devices = question.space, question.devices
    tensors = space.tensor or [n for n in divisors(min(question.devices_per_host, devices))
                               if model.tensor_limit % n == 0] if model.tensor_limit else [1]
    is_long = question.sequence > SHORT_SEQUENCE
    contexts = space.context or ([n for n in divisors(devices) if n & (n - 1) == 0 and n <= 16] if is_long else [1])
    pipelines = space.pipeline or [n for n in divisors(devices) if n <= max(1, model.blocks // 2)]
    for tensor, context, pipeline in itertools.product(tensors, contexts, pipelines):
        ranks = tensor * context * pipeline
        if devices % ranks or pipeline > 1 and (model.no_pipeline or pipeline > model.blocks):
            continue
        if context > 1 and (not model.takes_tokens or question.sequence % (2 * context)):
            continue  # torch/distributed/tensor/experimental: two parts a rank, for causal masks to be balanced
        for shard, micro_batch in itertools.product(divisors(devices // ranks), space.micro_batch):
            data = devices // ranks
            per_rank, rest = divmod(question.global_batch, data * micro_batch)
            if rest or not per_rank:
                continue
            base = dict(replicate=data // shard, shard=shard, context=context, tensor=tensor, pipeline=pipeline,
                        micro_batch=micro_batch, micro_batches=per_rank)
            if _takes(space, base, question):
                yield from _list_settings(space, base, model)


def _takes(space: Space, base: Mapping[str, int], question: Question) -> bool:
    """Whether a division of the data is one to choose: all shards, none, or shards within a host and copies of them."""
    if space.replicate is not None and base["replicate"] not in space.replicate:
        return False
    if space.shard is not None:
        return base["shard"] in space.shard
    inner = base["tensor"] * base["context"] * base["shard"]
    return 1 in (base["shard"], base["replicate"]) or inner == question.devices_per_host


def _list_settings(space: Space, base: Mapping[str, Any], model: ModelFacts) -> Iterator[Layout]:
    pipeline, shards = base["pipeline"], base["shard"] * base["context"]
    if base["micro_batches"] < pipeline:
        return  # torch.distributed.pipelining refuses it, and most ranks would idle
    schedules = [("1F1B", 1)]
    if pipeline > 1:
        schedules = [(name, chunks) for name in space.schedule for chunks in sorted(
            {2} if name in BACKWARDS else {1} if name in ONE_STAGE else set(space.virtual) - {1})
            if pipeline * chunks <= model.blocks and (chunks == 1 or base["micro_batches"] % pipeline == 0)]
    is_plain = base["tensor"] == base["context"] == pipeline == 1
    experts = [1]
    if model.experts and base["tensor"] == base["context"] == 1:
        common = math.gcd(model.experts, base["shard"])
        experts = [n for n in space.expert or divisors(common) if common % n == 0]
    names = "sharding", "checkpointing", "sequence_parallel", "precision", "optimizer", "offload", "compile"
    for (schedule, virtual), expert, *values in itertools.product(
            schedules, experts, *(getattr(space, name) for name in names)):
        layout = Layout(**base, virtual=virtual, schedule=schedule, expert=expert, **dict(zip(names, values)))
        if (layout.is_sharded or layout.is_distributed and shards > 1) != (shards > 1):
            continue
        if layout.offload and not (layout.is_sharded or layout.is_distributed):
            continue
        if layout.checkpointing != "none" and not model.blocks or layout.checkpointing == "planned" and pipeline > 1:
            continue
        if layout.is_distributed and layout.precision != "mixed":
            continue
        if not layout.is_sharded and not layout.is_distributed and not is_plain and layout.replicate > 1:
            continue  # torch's DDP takes no DTensors, and no stages
        if layout.sharding == "zero1" and (layout.replicate == 1 or layout.optimizer is None):
            continue
        if not layout.sequence_parallel and layout.tensor == 1 and True in space.sequence_parallel:
            continue
        if layout.sharding == "fsdp" and pipeline > 1 and "fsdp_kept" in space.sharding:
            continue  # gathered anew for every micro-batch of a pipeline: torchtitan keeps what it gathered
        yield layout
