"""What a configuration asks for, in terms of no program: a training step, or a server."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .document import Document

#: Names that transformers gives to parts of models that see or hear: towers, and what joins them to the language model.
TOWERS = ("visual", "vision_tower", "vision_model", "vision_backbone", "image_tower", "audio_tower", "audio_model")
PROJECTORS = ("multi_modal_projector", "merger", "projector", "aligner", "connector", "embed_vision", "embed_audio",
              "mlp1")
#: What a step trains for: which passes it has, and what they are given.
#: - ``sft`` next tokens of whole sequences; ``classify`` a class of each sequence;
#: - ``dpo`` both answers of a pair in one pass, and in one of the reference without gradients; ``orpo`` and ``simpo``
#:   the same without a reference; ``kto`` one answer, a second one for its divergence, and both of the reference;
#: - ``reward`` one number for each of both answers of a pair;
#: - ``policy`` the update of GRPO and PPO on answers that a `RolloutPlan` samples, or that are there.
#: - ``distill`` what a teacher gives for each token of a row, of which logits of both are there;
#: - ``denoise`` the noise in images.
#: - ``anchored`` next tokens, each weighted by its probability, with the divergence from a reference.
Task = Literal["sft", "anchored", "classify", "dpo", "orpo", "simpo", "kto", "reward", "policy", "distill", "denoise"]
#: How blocks are run again in backward: not at all, all of them, with all that is saved moved to the host, with the
#: inputs of blocks alone moved there, or with the results of attention and of every second product kept;
#: "saved_offloaded": not at all, with all that is saved moved to the host.
Checkpoints = Literal["none", "blocks", "offloaded", "inputs_offloaded", "operators", "saved_offloaded"]


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Low-rank adapters, and modules that train beside them. ``targets`` empty: all linear layers but the head."""

    r: int
    targets: tuple[str, ...] = ()
    dropout: float = 0.0
    dtype: str | None = None                 #: of the adapters; None: as peft makes them, float32 beside 16 bits
    saved: tuple[str, ...] = ()              #: names of modules that are trained whole (peft's modules_to_save)
    casts: bool = True                       #: whether they get what their layer does in their own dtype, as peft's do
    rotates: bool = False                    #: whether they rotate a layer's input, in blocks of ``r`` (OFT)
    excluded: tuple[str, ...] = ()           #: parts of paths: layers that have one of them get no adapter


@dataclass(frozen=True, kw_only=True)
class FakeQuantization:
    """Quantization-aware training: weights of linear layers are rounded to 4 bits in groups of ``group`` and back in
    each pass, with ``activations`` their inputs to 8 bits too.
    """

    group: int
    activations: bool = True


@dataclass(frozen=True)
class TrainedBlocks:
    """The only blocks that train: ``count`` of them, the last or the first, or each one at the end of ``count`` equal
    parts of the model; ``modules`` are names of the only modules in them that do, all where it is empty.
    """

    count: int
    where: Literal["last", "first", "spread"] = "last"
    modules: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How ranks share a model. ``kind`` is ``ddp``, ``fsdp`` or ``deepspeed``.

    - of ``fsdp``: ``reshards`` parameters after each forward pass, ``offloads`` them to the host, computes in
      ``dtype`` and reduces gradients in ``reduce_dtype``; ``replicas`` groups of ranks each hold a whole copy (HSDP);
    - of ``deepspeed``: ``config``, what its JSON file says, and ``document``, that file.
    """

    kind: Literal["ddp", "fsdp", "deepspeed"]
    reshards: bool = True
    offloads: bool = False
    replicas: int = 1
    shares_ends: bool = True                 #: whether embedding and head are gathered by themselves, not with the root
    dtype: str | None = None
    reduce_dtype: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    document: Document | None = None


@dataclass(frozen=True, kw_only=True)
class ModelParallel:
    """How many ranks divide each tensor, the blocks, each sequence, and the experts; ``virtual`` stages of the blocks
    are on each rank. ``sequence``: ranks that divide tensors divide the tokens between these too. ``sharding`` is a
    choice of `analyzer search`: how the ranks that have samples of their own share the states.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    virtual: int = 1
    schedule: str = "1F1B"
    sequence: bool = True
    sharding: str = "distributed"
    replicas: int = 1                        #: groups of ranks that each hold all states
    offloads: bool = False

    @property
    def size(self) -> int:
        """Ranks that work on the same sequences."""
        return self.tensor * self.pipeline * self.context


@dataclass(frozen=True, kw_only=True)
class EncodingPass:
    """What is encoded once before the first step, so many ``images`` and ``texts`` at a time; ``beside`` names what
    else is on the device meanwhile: denoiser, vae, texts.
    """

    images: int = 0
    texts: int = 0
    beside: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PicturePlan:
    """What a denoiser learns of images, and what is on the device beside it."""

    height: int
    width: int
    priors: bool = False                     #: whether each image comes with one of the class (prior preservation)
    encodes_images: bool = True              #: whether each pass encodes its images, by an autoencoder on the device
    #: The text encoders that each pass runs: all, those before T5, none; ``idle``: all are on the device, none is run.
    texts: Literal["all", "first", "none", "idle"] = "all"
    trained_texts: int = 0                   #: of these, so many of the first train
    text_adapter: Adapter | None = None      #: of those that train
    #: whether embeddings of those get a gradient too, which no optimizer reads and nothing sets to zero
    keeps_embedding_gradients: bool = False
    casts_texts: bool = False                #: whether they run under autocast
    text_tokens: int | None = None           #: of a T5; None: the pipeline's own
    image_dtype: str = "fp32"
    text_dtype: str = "fp32"
    follows_inputs: bool = False             #: whether gradients are computed back to the latents
    swapped: tuple[tuple[str, int], ...] = ()  #: lists of blocks, and how many of each are on the host meanwhile
    averages: bool = False                   #: whether a copy of the weights in float32 follows them (EMA)
    preparations: tuple[EncodingPass, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RolloutPlan:
    """How the answers of ``policy`` are sampled: each of some servers answers ``sequences`` at once, with ``new``
    tokens at most, for ``steps`` updates.
    """

    server: ServingPlan
    sequences: int
    new: int
    steps: float = 1.0
    is_apart: bool = False                   #: whether it has devices of its own
    overlaps: bool = False                   #: whether it answers while the model trains on the answers before
    sleeps: bool = False                     #: whether its weights and cache leave the device while the model trains
    offloads_model: bool = False             #: whether the trained model leaves the device meanwhile
    offloads_optimizer: bool = False


@dataclass(frozen=True, kw_only=True)
class PolicyPlan:
    """A step of post-training beside the passes of its update: ``prompts`` are answered ``samples`` times each, and
    ``updates`` optimizer steps follow, ``epochs`` times over all answers; of ``dpo`` both answers are there.

    - ``longest_prompt``, ``longest_answer``: tokens at most. ``room``: of a micro-batch that sequences are packed into,
      None where they are padded; ``score_room``: of a pass without gradients.
    - ``lag``: steps by which the weights that sample are behind; ``in_flight``: engines get new ones while they sample.
    - ``engine_devices``: that engines have for themselves; ``pins``: whether what leaves devices goes to pinned memory.
    """

    algorithm: Literal["grpo", "ppo", "rloo", "dapo", "dpo"] = "grpo"
    prompts: int
    samples: int
    longest_prompt: int
    longest_answer: int
    updates: int = 1
    epochs: int = 1
    room: int | None = None
    score_room: int | None = None
    scores_old: bool = True
    critic: bool = False
    entropy: bool = False
    lag: int = 0
    in_flight: bool = False
    oversample: float = 1.0
    engine_devices: int = 0
    pins: bool = True


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """A training step of one rank, and how many ranks there are."""

    model: str                               #: as the configuration names it
    config: Mapping[str, Any] | None = None  #: of transformers' model, where no name but its sizes are given
    task: Task = "sft"
    classes: int = 1                         #: of ``classify``
    reference: Literal["none", "adapter", "copy"] = "none"  #: of ``dpo`` and its like: what is compared with
    teacher: str | None = None               #: of ``distill``: the model that a copy is of; None: of its own
    offloads_teacher: bool = False           #: whether it is on the host but for its own passes, before the others
    micro_batch: int                         #: sequences, or pairs of them, of a pass of one rank
    accumulate: int = 1                      #: passes of a step
    length: int                              #: tokens of a sequence; 1 of images
    pixels: int | None = None                #: of the picture that each row has, at most; None: rows are text alone
    picture: PicturePlan | None = None       #: of ``denoise``
    dtype: str = "bf16"                      #: of the weights as they are loaded
    trained_dtype: str | None = None         #: of those that train, where that is another
    autocast: str | None = None
    quantize: str | None = None              #: how frozen linear layers are held: nf4, int8; of images fp8
    unpacks: bool = False                    #: whether operators of PyTorch unpack weights of 4 bits, as torchao's are
    quantizes_experts: bool = False          #: whether experts that are one parameter are held so too
    fake_quantization: FakeQuantization | None = None
    computes_in_fp8: bool = False            #: whether products of linear layers but the head are in 8 bits
    adapter: Adapter | None = None
    trained: tuple[str, ...] = ()            #: patterns of the only parameters that train; empty: all, or the adapter's
    trained_blocks: TrainedBlocks | None = None  #: the same by blocks; with ``trained``, those train too
    frozen: tuple[str, ...] = ()             #: patterns of parameters that do not train
    upcast: tuple[str, ...] = ()             #: patterns of parameters of one dimension that are held in float32
    attention: str | None = None             #: sdpa, eager; None: the model's own
    checkpoints: Checkpoints = "none"
    checkpoint_every: int = 1                #: of so many blocks one is run again
    loss_chunks: int | None = None           #: the loss in so many parts of its tokens (fused kernels of the head)
    optimizer: str | None = "adamw"
    projected: tuple[int, bool] | None = None  #: of ``LowRankAdamW``: its rank, and whether it decomposes gradients
    updates_in_backward: bool = False        #: each parameter as its gradient comes, which is then freed
    clips: bool = True                       #: whether gradients are clipped to a norm
    compiles: bool = False
    ranks: int = 1
    ranks_per_host: int | None = None
    sharding: Sharding | None = None         #: None where there is one rank
    rollout: RolloutPlan | None = None       #: of ``policy`` and ``distill``; None: answers are there
    policy: PolicyPlan | None = None         #: of ``policy`` and ``dpo``, where the step has phases before the update
    parallel: ModelParallel | None = None    #: None where each rank holds a whole model, as far as it is not sharded
    assumptions: tuple[str, ...] = ()        #: sentences on what was taken for granted, and is of no one option

    @property
    def sequences(self) -> int:
        """Of a forward pass of one rank: a pair has two, an image with its prior too."""
        if self.picture is not None:
            return self.micro_batch * (2 if self.picture.priors else 1)
        return self.micro_batch * (2 if self.task in ("dpo", "orpo", "simpo", "reward", "kto") else 1)

    @property
    def tokens(self) -> int:
        """Of an optimizer step of all ranks; of ``denoise`` images."""
        return self.sequences * self.accumulate * self.length * self.data_ranks

    @property
    def data_ranks(self) -> int:
        """Ranks, or groups of ranks that divide the model, which have sequences of their own."""
        return self.ranks // (1 if self.parallel is None else self.parallel.size)


@dataclass(frozen=True, kw_only=True)
class ServingPlan:
    """A server of a model. ``engine`` is ``vllm``, ``sglang`` or ``trtllm``; others as its options are named."""

    model: str
    engine: str
    weights: str | None = None               #: None: as the checkpoint's config says, else 16 bits
    experts: str | None = None               #: where their weights are held in another format
    cache: str | None = None                 #: None: 16 bits
    block_size: int = 16
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    length: int | None = None                #: the longest sequence, prompt and answer; None: what the model can take
    fits_length: bool = False                #: whether the engine shortens that to what has room
    is_stretched: bool = False               #: whether it may be longer than the positions that the model has
    memory_share: float | None = None        #: None: the engine's own
    sequences: int | None = None             #: at once; None: the engine's own
    chunk: int | None = None                 #: tokens of a pass; None: the engine's own
    drafted: int = 0                         #: tokens that are proposed for each, and verified at once
    has_tower: bool = True                   #: whether what reads pictures is loaded, where the model has it


Plan = TrainingPlan | ServingPlan
