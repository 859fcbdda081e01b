"""What programs share that are built on transformers' `Trainer`: its arguments, optimizers by its names, ranks."""
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from analyzer.errors import find_close

from ..document import Document, JobError
from ..model_name import named_format
from ..options import Options, names_of
from ..plan import Adapter, Checkpoints, ModelParallel, Sharding, Task
from ..program import Change, JobLaunch, read_beside, set_batch, set_option
from .deepspeed import read_deepspeed

# transformers 5.17, training_args.py

#: What changes the trainer's own options.
CHANGES: Mapping[str, Change] = {
    "batch": set_batch("per_device_train_batch_size", "gradient_accumulation_steps"),
    "checkpoints": set_option("gradient_checkpointing", True), "loss": set_option("use_liger_kernel", True),
    "optimizer": set_option("optim", "adamw_bnb_8bit")}
#: Parts of the loss, where a kernel computes it with the head and never holds all logits: as Liger's kernel and
#: Apple's cut cross entropy (their chunks follow from sizes; 8 is this project's usual number).
FUSED_LOSS = 8


def read_published_format(options: Options, name: str, told: str = "") -> str | None:
    """How linear layers are held of a checkpoint whose name says that it is quantized; None for another one. ``told``
    is the option of which that is told, where it is not that of the name.
    """
    form = named_format(str(options.get(name)))
    if form is None:
        return None
    held = "int8" if form in ("int8", "fp8") else "nf4"
    options.note(told or name, "assumed",
                 f"by its name a quantized checkpoint: linear layers as {held} of bitsandbytes")
    return held


class _Optimizer(NamedTuple):
    name: str | None
    assumed: str = ""
    is_left_out: bool = False


PAGED = "its states lie in managed memory, of which nothing is needed on the device"
PAGED_ADAMW, PAGED_ADAMW8BIT = (f"analyzer.recipe.optimizer:Paged{name}" for name in ("AdamW", "AdamW8bit"))
LOW_RANK = "analyzer.recipe.optimizer:LowRankAdamW"
_STATE = "one state for each parameter, as momentum has"
_PLAIN = "AdamW, whose states it keeps"
_LOW_RANK = "its states are of projected gradients; those of AdamW for whole ones are an upper bound"
#: By the names of `transformers.training_args.OptimizerNames`: the optimizer here, and what is assumed.
OPTIMIZERS = {
    "adamw_torch": _Optimizer("adamw"), "adamw_torch_fused": _Optimizer("adamw_fused"),
    "adamw_hf": _Optimizer("adamw", _PLAIN), "adamw_apex_fused": _Optimizer("adamw_fused", _PLAIN),
    "adamw_anyprecision": _Optimizer("adamw", _PLAIN),
    "adamw_bnb_8bit": _Optimizer("adamw8bit"), "adamw_8bit": _Optimizer("adamw8bit"),
    "paged_adamw_8bit": _Optimizer(PAGED_ADAMW8BIT, PAGED),
    "paged_adamw": _Optimizer(PAGED_ADAMW, PAGED), "paged_adamw_32bit": _Optimizer(PAGED_ADAMW, PAGED),
    "adamw_torch_8bit": _Optimizer("adamw8bit", "torchao's states of 8 bits, taken as those of bitsandbytes"),
    "adamw_torch_4bit": _Optimizer("adamw8bit", "its states have 4 bits; those of 8 are an upper bound"),
    "adafactor": _Optimizer("torch.optim:Adafactor", "PyTorch's own Adafactor"),
    "ademamix": _Optimizer("adamw", "three states, of which AdamW has two", True),
    "ademamix_8bit": _Optimizer("adamw8bit", "three states of 8 bits, of which AdamW has two", True),
    "lion_32bit": _Optimizer("momentum", _STATE), "lion": _Optimizer("momentum", _STATE),
    "paged_lion_32bit": _Optimizer(PAGED_ADAMW, f"one state; AdamW's two are an upper bound on the host; {PAGED}"),
    "lion_8bit": _Optimizer("adamw8bit", "one state of 8 bits; AdamW's two are an upper bound"),
    "paged_lion_8bit": _Optimizer(PAGED_ADAMW8BIT, f"one state; AdamW's two are an upper bound on the host; {PAGED}"),
    "sgd": _Optimizer("sgd"), "adagrad": _Optimizer("torch.optim:Adagrad"),
    "rmsprop": _Optimizer("torch.optim:RMSprop"), "rmsprop_bnb": _Optimizer("torch.optim:RMSprop"),
    "rmsprop_bnb_32bit": _Optimizer("torch.optim:RMSprop"),
    "rmsprop_bnb_8bit": _Optimizer("adamw8bit", "one state of 8 bits; AdamW's two are an upper bound"),
    "galore_adamw": _Optimizer("adamw", _LOW_RANK), "galore_adamw_8bit": _Optimizer("adamw8bit", _LOW_RANK),
    "galore_adafactor": _Optimizer("torch.optim:Adafactor", _LOW_RANK),
    "apollo_adamw": _Optimizer("adamw", _LOW_RANK),
    "lomo": _Optimizer("sgd", "gradients are kept, which it frees as they come: an upper bound"),
    "adalomo": _Optimizer("sgd", "gradients are kept, which it frees as they come: an upper bound"),
    "grokadamw": _Optimizer("adamw", "a further state for each parameter is left out", True),
    "stable_adamw": _Optimizer("adamw", _PLAIN), "schedule_free_adamw": _Optimizer("adamw", _PLAIN),
    "schedule_free_radam": _Optimizer("torch.optim:RAdam", _PLAIN), "schedule_free_sgd": _Optimizer("momentum", _STATE),
    "muon": _Optimizer("analyzer.recipe.optimizer:MuonWithAdamW", "PyTorch's own Muon for the matrices of blocks, "
                       "AdamW for all else")}


def read_optimizer(options: Options, name: str = "optim", default: str = "adamw_torch_fused",
                   known: Mapping[str, _Optimizer] = OPTIMIZERS) -> str | None:
    """The optimizer here of one that transformers, or another program, names. Raises JobError for a name that it does
    not know.
    """
    said = options.text(name, default, choices=known, means="optimizer") or default
    found = known[said.removesuffix("_layerwise")] if said not in known else known[said]
    if found.assumed:
        options.note(name, "not modelled" if found.is_left_out else "assumed", f"{said}: {found.assumed}")
    return found.name


def read_checkpoints(options: Options, default: bool = False) -> Checkpoints:
    """Whether blocks are run again in backward."""
    if not options.flag("gradient_checkpointing", default, means="blocks are run again in backward"):
        return "none"
    options.section("gradient_checkpointing_kwargs").rest(
        "use_reentrant preserve_rng_state determinism_check early_stop debug")
    return "blocks"


def read_precision(options: Options, launch: JobLaunch, bf16: bool = False) -> str | None:
    """The dtype of autocast: by fp16 and bf16, which is on by itself in some trainers (TRL, trainer/base_config.py),
    else by accelerate's own. Raises JobError where both are given.
    """
    fp16 = options.flag("fp16")
    bf16 = options.flag("bf16", bf16 and not fp16, means="passes in bfloat16" if bf16 else "")
    if bf16 and fp16:
        raise options.fail("fp16", "bf16 is given too; the trainer refuses both")
    said = "bf16" if bf16 else "fp16" if fp16 else launch.mixed_precision
    return said if said in ("bf16", "fp16") else None


def read_batch(options: Options) -> tuple[int, int]:
    """Sequences of a pass of one rank, and passes of a step."""
    return (options.count("per_device_train_batch_size", 8, means="sequences of a pass of one device"),
            options.count("gradient_accumulation_steps", 1, means="passes of a step"))


def read_common(options: Options, launch: JobLaunch) -> dict[str, Any]:
    """Fields of a plan that all trainers built on this one have by the same options, and by their launch."""
    return {"clips": options.fraction("max_grad_norm", 1.0) > 0, "compiles": options.flag("torch_compile"),
            "ranks": launch.size, "ranks_per_host": launch.ranks_per_host}


def reference_of(task: Task, adapter: Adapter | None) -> Literal["none", "adapter", "copy"]:
    """With what the answers of a task are compared: the model without its adapter, or a copy of it."""
    return "none" if task not in ("dpo", "kto") else "copy" if adapter is None else "adapter"


def read_attention(options: Options) -> str | None:
    """The attention that transformers is asked for, of which all but eager are as PyTorch's fused one."""
    said = options.text("attn_implementation", means="attention")
    return None if said is None else "eager" if said == "eager" else "sdpa"


def read_sharding(options: Options, launch: JobLaunch) -> Sharding | None:
    """How ranks share the model: by ``deepspeed``, by ``fsdp`` with ``fsdp_config``, by accelerate's file, or DDP."""
    document = read_beside(options, "deepspeed", launch) if not isinstance(options.get("deepspeed"), dict) else None
    if document is not None:
        _check_match(document, options, launch)
        if launch.ranks is None:
            options.assume("deepspeed", "one device: nothing says how many there are; --world does")
        return read_deepspeed(document, options, launch)
    words = {word for text in options.words("fsdp") for word in text.split()} - {"false", "False", ""}
    if unknown := sorted(words - {*_FSDP, "true", "True"}):
        raise options.fail("fsdp", f"must be some of {', '.join(_FSDP)}{find_close(unknown[0], _FSDP)}")
    config = options.part("fsdp_config")
    if words:
        found = replace(read_fsdp_config(config)[0], kind="fsdp") if config is not None else Sharding(kind="fsdp")
        return replace(found, reshards=found.reshards and "shard_grad_op" not in words,
                       offloads=found.offloads or "offload" in words)
    if launch.sharding is not None:
        return launch.sharding
    return Sharding(kind="ddp") if launch.size > 1 else None


#: transformers/trainer_utils.py, `FSDPOption`
_FSDP = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2", "offload", "auto_wrap")
#: Values of DeepSpeed's file that must be those of the trainer, or "auto" (transformers/integrations/deepspeed.py,
#: `HfTrainerDeepSpeedConfig.trainer_config_process`).
_MATCHED = {"train_micro_batch_size_per_gpu": "per_device_train_batch_size", "gradient_clipping": "max_grad_norm",
            "gradient_accumulation_steps": "gradient_accumulation_steps"}


def _check_match(document: Document, options: Options, launch: JobLaunch) -> None:
    """Raises JobError where DeepSpeed's file says one value and the trainer's own option another."""
    whole, batch = document.data.get("train_batch_size"), str(options.get("per_device_train_batch_size"))
    passes = str(options.get("gradient_accumulation_steps") or 1)
    if isinstance(whole, int) and batch.isdecimal() and passes.isdecimal() and launch.ranks is not None:
        found = int(batch) * int(passes) * launch.ranks
        if whole != found:
            raise JobError(f"{document.place('train_batch_size')}: train_batch_size: {whole}: {batch} sequences a "
                           f"pass, {passes} passes and {launch.ranks} ranks are {found}, and transformers refuses a "
                           'difference; write "auto" there')
    for name, own in _MATCHED.items():
        said, given = document.data.get(name), options.get(own)
        if said is None or given is None or said == "auto":
            continue
        try:
            differs = float(said) != float(given)
        except (TypeError, ValueError):
            continue  # which the option's own reading refuses
        if differs:
            raise options.fail(own, f"{document.name} has {name}: {said}, and transformers refuses a difference; write "
                               '"auto" there')


_STRATEGIES = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "HYBRID_SHARD_ZERO2"}


def read_fsdp_config(options: Options) -> tuple[Sharding, bool]:
    """FSDP's settings as accelerate and transformers name them, with ``fsdp_`` before them or without, and whether
    they ask for blocks to be run again in backward.
    """
    def named(name: str) -> str:
        return f"fsdp_{name}" if options.get(f"fsdp_{name}") is not None else name

    if str(options.get(named("version"))) == "1":
        options.note(named("version"), "assumed", "FSDP1: as FSDP2, which holds and gathers as much")
    recomputes = any(options.get(name) in (True, "true", "True") for name in (
        "fsdp_activation_checkpointing", "activation_checkpointing"))
    said = options.text(named("sharding_strategy"), "", choices=(*_STRATEGIES.values(), *_STRATEGIES))
    said = _STRATEGIES.get(said, said)
    if said == "NO_SHARD":
        return Sharding(kind="ddp"), recomputes
    replicas = 0 if said.startswith("HYBRID") else 1  # 0: as many as there are hosts
    again = named("reshard_after_forward")
    if str(options.get(again)).upper() in ("FULL_SHARD", "SHARD_GRAD_OP"):
        reshards = options.text(again, "").upper() == "FULL_SHARD"
    else:
        reshards = options.flag(again, said in ("", "FULL_SHARD", "HYBRID_SHARD"))
    offloads = options.flag(named("offload_params"), False)
    options.flag(named("activation_checkpointing"), False)
    names = names_of("trainer", "without effect of FSDP").split()
    options.text(named("mixed_precision_policy"))
    options.rest(" ".join([*names, *(f"fsdp_{name}" for name in names)]), known=(
        "fsdp_sharding_strategy", "fsdp_reshard_after_forward", "fsdp_offload_params", "fsdp_activation_checkpointing"))
    return Sharding(kind="fsdp", reshards=reshards, offloads=offloads, replicas=replicas), recomputes


def accumulate_of(options: Options, global_name: str, batch: int, ranks: int) -> int | None:
    """Passes of a step that a batch of all ranks asks for; None where it is not given. Raises JobError where ranks and
    passes do not divide it.
    """
    whole = options.number(global_name, least=1, means="sequences of a step of all ranks")
    if whole is None:
        return None
    if whole % (batch * ranks):
        raise options.fail(global_name, f"is no multiple of {batch} sequences a pass on {ranks} "
                           f"rank{'s' if ranks > 1 else ''}, {math.ceil(whole / (batch * ranks)) * batch * ranks} is")
    return whole // (batch * ranks)


def divide_model(options: Options, launch: JobLaunch, sharding: Sharding | None,
                 names: Mapping[str, str]) -> ModelParallel | None:
    """How ranks divide the model itself, where PyTorch's FSDP shares what is left: ``names`` are options by the fields
    of `ModelParallel`. None where each rank has a whole one. Raises JobError for ranks that cannot be divided so.
    """
    sizes: dict[str, Any] = {field: options.count(name, 1) for field, name in names.items()}
    given = {field: size for field, size in sizes.items() if size > 1}
    if not given:
        return None
    found = ModelParallel(**sizes)
    name = names[next(iter(given))]
    if launch.ranks is None:
        launch.ranks = max(found.size, found.expert)
        options.assume(name, f"{launch.ranks} devices, the least that there can be: --world says how many there are")
    if launch.size % found.size:
        raise options.fail(name, f"all degrees make {found.size}, by which {launch.size} ranks cannot be divided")
    shards = launch.size // found.tensor > 1
    keeps = sharding is not None and not sharding.reshards
    return replace(found, sharding="ddp" if not shards else "fsdp_kept" if keeps else "fsdp",
                   replicas=1 if sharding is None else max(1, sharding.replicas),
                   offloads=sharding is not None and sharding.offloads)
