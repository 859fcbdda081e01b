"""LLaMA-Factory: its YAML, and `llamafactory-cli train` with options."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..document import Edit
from ..options import Options
from ..plan import PROJECTORS, TOWERS, Adapter, Checkpoints, Sharding, Task, TrainedBlocks, TrainingPlan
from ..program import JobLaunch, JobProgram, set_option
from . import megatron
from .trainer import (
    CHANGES,
    FUSED_LOSS,
    LOW_RANK,
    OPTIMIZERS,
    read_batch,
    read_common,
    read_optimizer,
    read_precision,
    read_published_format,
    read_sharding,
)

# LLaMA-Factory 0.9.6, src/llamafactory/hparams/ and model/

_PARALLEL = """tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size
context_parallel_size virtual_pipeline_model_parallel_size"""
_ATTENTION = {"auto": None, "disabled": "eager", "sdpa": "sdpa", "fa2": "sdpa", "fa3": "sdpa"}
_STAGES: dict[str, Task] = {"pt": "sft", "sft": "sft", "rm": "reward", "ppo": "policy", "dpo": "dpo", "kto": "kto"}
_PREFERENCES: dict[str, Task] = {"orpo": "orpo", "simpo": "simpo"}
#: Weights of norms, whose names have one of these words (extras/constants.py, `LAYERNORM_NAMES`).
_NORMS = ("norm", "ln")


def read(options: Options, launch: JobLaunch) -> TrainingPlan:
    """The plan of a YAML or a command. Raises JobError for what LLaMA-Factory's own checks refuse."""
    model = options.needed("model_name_or_path", "LLaMA-Factory needs it", means="model")
    if not options.flag("do_train"):
        raise options.fail("do_train", "is not true, so that this predicts or evaluates; training alone is read")
    task = _read_task(options)
    kind = options.text("finetuning_type", "lora", choices=("lora", "oft", "freeze", "full"), means="what is trained")
    _read_ranks(options, launch)
    batch, accumulate = read_batch(options)
    sharding = read_sharding(options, launch)
    quantize = _read_quantization(options, kind, sharding)
    assumptions = _assume_scores(options, task)
    optimizer, projected = _read_optimizer(options, kind, launch)
    plan = TrainingPlan(
        model=model, task=task, reference=_read_reference(options, task, kind), micro_batch=batch,
        accumulate=accumulate, length=_read_length(options), pixels=options.number("image_max_pixels", least=1, means=(
            "each row has one picture, of at most so many pixels" if options.get("image_max_pixels") else "")),
        trained_dtype=_read_dtype(options, quantize, sharding),
        autocast=read_precision(options, launch), quantize=quantize, adapter=_read_adapter(options, kind),
        trained=_read_extra(options, kind), trained_blocks=_read_blocks(options, kind),
        frozen=_read_frozen(options, kind),
        upcast=_NORMS if options.flag("upcast_layernorm") else (), attention=_read_attention(options),
        checkpoints=_read_checkpoints(options, launch), loss_chunks=_read_loss(options, task),
        optimizer=optimizer, projected=projected, updates_in_backward=_updates_in_backward(options),
        computes_in_fp8=_read_fp8(options), sharding=sharding, assumptions=tuple(assumptions),
        **read_common(options, launch))
    if not any(options.get(name) is not None for name in _PARALLEL.split()):
        options.finish("trainer", "llamafactory")
        return plan
    plan = _divide(options, launch, plan)
    options.finish("trainer", "megatron", "llamafactory", "llamafactory_megatron")
    return plan


def _divide(options: Options, launch: JobLaunch, plan: TrainingPlan) -> TrainingPlan:
    """A plan whose model Megatron's ranks divide: mcore_adapter and Megatron Bridge have its arguments."""
    ranks, parallel = megatron.read_parallel(options, launch)
    sharding = megatron.read_sharding(options, divides=False)
    if parallel is not None:
        parallel = megatron.share_states(parallel, sharding, ranks)
    return replace(plan, ranks=ranks, parallel=parallel, sharding=sharding, trained_dtype=None,
                   checkpoints=megatron.read_checkpoints(options))


def _read_task(options: Options) -> Task:
    stage = options.text("stage", "sft", choices=_STAGES, means="what is trained for")
    if stage != "sft" and options.flag("neat_packing"):
        raise options.fail("neat_packing", f"LLaMA-Factory refuses it at stage {stage}; sft alone has it")
    if options.flag("use_asft_loss", means="a divergence from a reference" if options.get("use_asft_loss") else ""):
        return "anchored"
    if stage == "ppo":
        options.needed("reward_model", "stage ppo needs it")
        options.note("stage", "not modelled", "ppo: the rollout and the reward model are left out; what is profiled is "
                     "the update")
        return "policy"
    loss = options.text("pref_loss", "sigmoid", choices=("sigmoid", "hinge", "ipo", "kto_pair", "orpo", "simpo"),
                        means="loss of a pair of answers" if stage == "dpo" else "")
    return _PREFERENCES.get(loss or "", "dpo") if stage == "dpo" else _STAGES[stage]


def _read_reference(options: Options, task: Task, kind: str) -> Any:
    """train/trainer_utils.py, `create_ref_model`: a model of its own, or the one that trains without its adapter."""
    own = options.text("ref_model", means="what answers are compared with")
    if own is not None:
        options.assume("ref_model", f"{own}: of the model's own shape")
    if task not in ("anchored", "dpo", "kto", "policy"):
        return "none"
    return "copy" if own is not None or kind != "lora" else "adapter"


def _assume_scores(options: Options, task: Task) -> list[str]:
    """What this trainer does beside the usual way of a task."""
    if task in ("dpo", "orpo", "simpo", "kto"):
        return ["LLaMA-Factory holds the logarithms of all tokens' probabilities; here those of the tokens that are "
                "there are taken, as TRL does, which needs less (train/trainer_utils.py, get_batch_logps)"]
    if task == "reward":
        return ["LLaMA-Factory's reward model computes the logits of its language model too, which are left out"]
    return []


def _read_length(options: Options) -> int:
    length = options.count("cutoff_len", 2048, means="tokens of a sequence")
    packs = options.flag("packing", options.get("stage") == "pt", means="rows are filled up to cutoff_len")
    if options.flag("neat_packing") or packs:
        return length
    options.note("cutoff_len", "assumed", f"every row has {length:,} tokens: what the data set has is not known")
    return length


def _read_ranks(options: Options, launch: JobLaunch) -> None:
    workers = options.number("ray_num_workers", least=1)
    if workers is not None and launch.ranks is None:
        launch.ranks = workers


def _read_quantization(options: Options, kind: str, sharding: Sharding | None) -> str | None:
    """hparams/parser.py, `_verify_model_args`, and model/model_utils/quantization.py."""
    bits = options.number("quantization_bit", means="bits of the frozen weights")
    method = options.text("quantization_method", "bnb")
    options.text("quantization_type", "nf4", choices=("nf4", "fp4"))
    if (held := read_published_format(options, "model_name_or_path")) is not None:
        return held
    if bits is None:
        return None
    if kind not in ("lora", "oft"):
        raise options.fail("quantization_bit", f"LLaMA-Factory refuses it with finetuning_type {kind}; give lora")
    if method == "bnb" and bits not in (4, 8):
        raise options.fail("quantization_bit", "bitsandbytes holds weights in 4 or 8 bits")
    shares_weights = sharding is not None and (sharding.kind == "fsdp" or _stage(sharding) == 3)
    if shares_weights and (method != "bnb" or bits != 4):
        raise options.fail("quantization_bit", "LLaMA-Factory refuses it with FSDP and ZeRO-3, but for 4 bits of bnb")
    quantize = "nf4" if bits <= 4 else "int8"
    if _stage(sharding) == 3:
        options.note("quantization_bit", "not modelled", f"each rank is taken to hold all {quantize} weights, which "
                     "ranks share")
    elif method != "bnb" or bits not in (4, 8):
        options.note("quantization_bit", "assumed", f"{method} with {bits} bits: as {quantize} of bitsandbytes")
    return quantize


def _stage(sharding: Sharding | None) -> int:
    zero = {} if sharding is None else sharding.config.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    return stage if isinstance(stage, int) else 0


def _read_dtype(options: Options, quantize: str | None, sharding: Sharding | None) -> str | None:
    """The dtype of what trains, beside weights in that of the checkpoint: float32 (model/adapter.py, `init_adapter`),
    but for pure_bf16, BAdam and ZeRO-3, whose own copy is in float32.
    """
    pure = options.flag("pure_bf16", means="what trains stays in bfloat16")
    if pure and _stage(sharding) == 3:
        raise options.fail("pure_bf16", "LLaMA-Factory refuses it with ZeRO-3; give bf16: true")
    if pure or options.get("use_badam") in (True, "true") or (quantize is None and _stage(sharding) == 3):
        return None
    return "fp32"


def _read_adapter(options: Options, kind: str) -> Adapter | None:
    rank = options.count("lora_rank", 8, means="rank of the adapters" if kind == "lora" else "")
    dropout = options.fraction("lora_dropout", 0.0)
    targets = options.words("lora_target", ["all"])
    saved = options.words("additional_target")
    block, own = options.number("oft_block_size", 32), options.number("oft_rank", 0)
    oft_targets = options.words("oft_target", ["all"])
    if kind == "oft":
        rank, targets = block or 32, oft_targets
        if own:
            options.note("oft_rank", "not modelled", f"blocks of {rank} are taken in the place of {own} blocks")
    if kind not in ("lora", "oft"):
        return None
    return Adapter(r=rank, targets=() if targets == ["all"] else tuple(targets), dropout=dropout, saved=tuple(saved),
                   excluded=_list_frozen(options), rotates=kind == "oft")


def _read_blocks(options: Options, kind: str) -> TrainedBlocks | None:
    """model/adapter.py, `_setup_freeze_tuning`: with LLaMA-Pro those that were added, one after each equal part."""
    spread = options.flag("use_llama_pro")
    if spread and kind == "full":
        raise options.fail("use_llama_pro", "LLaMA-Factory refuses it with finetuning_type full")
    if spread and kind == "lora":
        options.note("use_llama_pro", "not modelled", "adapters are taken to be in all blocks")
    found = read_blocks(options, "blocks that train" if kind == "freeze" else "")
    return None if kind != "freeze" else replace(found, where="spread") if spread else found


def read_blocks(options: Options, means: str = "blocks that train") -> TrainedBlocks:
    """The last blocks, of a negative number the first."""
    count = options.number("freeze_trainable_layers", 2, least=-1000, means=means)
    if not count:
        raise options.fail("freeze_trainable_layers", "must be a whole number, and not 0")
    modules = options.words("freeze_trainable_modules", ["all"])
    return TrainedBlocks(abs(count), "last" if count > 0 else "first", () if modules == ["all"] else tuple(modules))


def _read_extra(options: Options, kind: str) -> tuple[str, ...]:
    extra = options.words("freeze_extra_modules")
    return tuple([rf".*{name}" for name in extra]) if kind == "freeze" else ()


def _read_frozen(options: Options, kind: str) -> tuple[str, ...]:
    """model/model_utils/visual.py, `get_forbidden_modules`; models without such parts have none of these names."""
    if options.flag("freeze_language_model"):
        options.note("freeze_language_model", "not modelled", "the language model is taken to train")
    parts = _list_frozen(options)
    return parts if kind in ("full", "freeze") else ()


def _list_frozen(options: Options) -> tuple[str, ...]:
    towers = TOWERS if options.flag("freeze_vision_tower", True) else ()
    projectors = PROJECTORS if options.flag("freeze_multi_modal_projector", True) else ()
    return tuple(dict.fromkeys((*towers, *projectors)))


def _read_attention(options: Options) -> str | None:
    return _ATTENTION[options.text("flash_attn", "auto", choices=_ATTENTION, means="attention")]


def _read_checkpoints(options: Options, launch: JobLaunch) -> Checkpoints:
    """On, unless it is disabled: model/model_utils/checkpointing.py, `prepare_model_for_training`."""
    disabled = options.flag("disable_gradient_checkpointing", False, means="blocks are not run again in backward")
    if options.flag("use_unsloth_gc") and not disabled:
        return "inputs_offloaded"
    return "none" if disabled and not launch.recomputes else "blocks"


def _read_loss(options: Options, task: Task) -> int | None:
    """model/model_utils/liger_kernel.py: stages that need logits compute them."""
    if not options.flag("enable_liger_kernel"):
        return None
    if task == "sft":
        options.note("enable_liger_kernel", "assumed", "the loss in parts, with the head; its other kernels are "
                     "left out")
        return FUSED_LOSS
    options.note("enable_liger_kernel", "assumed", "its kernels are left out: this stage computes logits as usual")
    return None


def _read_optimizer(options: Options, kind: str, launch: JobLaunch) -> tuple[str | None, tuple[int, bool] | None]:
    """The optimizer, and of one that projects gradients how: train/trainer_utils.py, `create_custom_optimizer`."""
    found = read_optimizer(options)
    chosen = [name for name in ("use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon")
              if options.flag(name)]
    for name in ("use_galore", "use_apollo", "use_badam"):
        if name in chosen and kind == "lora":
            raise options.fail(name, "LLaMA-Factory refuses it with finetuning_type lora; give full")
        if name in chosen and launch.size > 1 and name != "use_badam" and options.flag(f"{name[4:]}_layerwise"):
            raise options.fail(f"{name[4:]}_layerwise", "LLaMA-Factory refuses it with several ranks")
    if "use_badam" in chosen:
        options.note("use_badam", "not modelled", "optimizer states of all that trains, as AdamW has them: an upper "
                     "bound")
    if "use_adam_mini" in chosen:
        options.assume("use_adam_mini", "one state for each parameter, as momentum has, and few others")
        return "momentum", None
    if "use_muon" in chosen:
        options.assume("use_muon", OPTIMIZERS["muon"].assumed)
        return OPTIMIZERS["muon"].name, None
    low = next((name for name in ("use_galore", "use_apollo") if name in chosen), None)
    if low is None:
        return found, None
    rank = options.count(f"{low[4:]}_rank", 16)
    options.note(low, "understood", f"states of gradients that are projected to rank {rank}")
    return LOW_RANK, (rank, low == "use_galore")


def _updates_in_backward(options: Options) -> bool:
    """Of GaLore and APOLLO layer by layer: each parameter as its gradient comes, and with one pass a step."""
    for name in ("galore_layerwise", "apollo_layerwise"):
        uses = options.get(f"use_{name.partition('_')[0]}") in (True, "true")
        if options.flag(name, means="parameters are updated as their gradients come" if uses else "") and uses:
            if options.number("gradient_accumulation_steps", 1) > 1:
                raise options.fail(name, "LLaMA-Factory refuses it with gradient_accumulation_steps above 1")
            return True
    return False


def _read_fp8(options: Options) -> bool:
    """train/fp8_utils.py, `create_fp8_kwargs`: by torchao's layers, or Transformer Engine's, taken as those."""
    said = options.text("fp8_backend", "auto", choices=("auto", "torchao", "te", "msamp"))
    uses = options.flag("fp8", means="" if options.get("fp8") is None else "products of linear layers in 8 bits")
    if uses and said not in ("auto", "torchao"):
        options.assume("fp8_backend", f"{said}: as torchao's layers")
    return uses


# How its files and commands are known, and changed.

_OWN = {"stage", "finetuning_type", "template", "cutoff_len", "infer_backend", "export_dir"}


def _is_file(data: Any) -> bool:
    return "model_name_or_path" in data and bool(_OWN & set(data))


def _is_command(words: Sequence[str]) -> bool:
    """``src/train.py FILE``, which its launchers start themselves."""
    name = words[0].rsplit("/", 1)[-1]
    return name in ("train.py", "train_bash.py") and (
        words[0].endswith("src/train.py") and words[1:2] != [] and words[1].endswith((".yaml", ".yml", ".json"))
        or "--finetuning_type" in words)


def _set_four_bits(options: Options, plan: TrainingPlan, wanted: Any) -> list[Edit] | None:
    return None if plan.adapter is None else set_option("quantization_bit", 4)(options, plan, wanted)


LLAMAFACTORY = JobProgram(
    refuses_repeats=True,
    name="LLaMA-Factory", version="0.9.6", source="hiyouga/LLaMA-Factory src/llamafactory/hparams", read=read,
    is_file=_is_file, is_command=_is_command,
    commands=("llamafactory-cli train", "lmf train", "llamafactory.cli train", "llamafactory.launcher"),
    changes={**CHANGES, "checkpoints": set_option("disable_gradient_checkpointing", False),
             "loss": set_option("enable_liger_kernel", True),
             "quantize": _set_four_bits, "length": set_option("cutoff_len")})
