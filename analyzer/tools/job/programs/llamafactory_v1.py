"""LLaMA-Factory's second configuration, which it calls v1: its YAML, and `llamafactory-cli sft` and its like."""
from __future__ import annotations

from typing import Any

from ..options import Options, names_of
from ..plan import Adapter, Sharding, Task, TrainedBlocks, TrainingPlan
from ..program import JobLaunch, JobProgram, read_beside, set_batch, set_option
from .deepspeed import read_deepspeed
from .llamafactory import read_blocks
from .trainer import OPTIMIZERS, accumulate_of, reference_of

# LLaMA-Factory 0.9.6, src/llamafactory/v1/config/, core/ and plugins/

_ADAPTER_WITHOUT_EFFECT = names_of("llamafactory_v1", "without effect of adapters")
_TASKS: dict[str, Task] = {"sft": "sft", "train": "sft", "dpo": "dpo", "rm": "reward"}


def read(options: Options, launch: JobLaunch) -> TrainingPlan:
    """The plan of a YAML. Raises JobError for what LLaMA-Factory's own checks refuse."""
    model = options.text("model", "Qwen/Qwen3-4B-Instruct-2507", means="model")
    task = _read_task(options, launch)
    batch = options.count("micro_batch_size", 1, means="sequences of a pass of one device")
    accumulate = accumulate_of(options, "global_batch_size", batch, launch.size) or 1
    length = options.count("cutoff_len", 2048, means="tokens of a sequence")
    _read_batching(options, length)
    sharding = _read_sharding(options, launch)
    kind, adapter, blocks, trained, casts = _read_trained(options)
    plan = TrainingPlan(
        model=model, task=task, reference=reference_of(task, adapter),
        micro_batch=batch, accumulate=accumulate, length=length, dtype="fp32" if kind == "full" else "bf16",
        trained_dtype="fp32" if casts else None, quantize=_read_quantization(options, kind, sharding),
        adapter=adapter, trained=trained, trained_blocks=blocks, attention=_read_attention(options),
        checkpoints="blocks" if options.flag("enable_activation_checkpointing", True,
                                             means="blocks are run again in backward") else "none",
        optimizer=_read_optimizer(options), clips=options.fraction("max_grad_norm", 1.0) > 0, ranks=launch.size,
        ranks_per_host=launch.ranks_per_host, autocast="bf16" if _computes_in_half(options, launch) else None,
        sharding=sharding, assumptions=(
            "LLaMA-Factory copies the logits once more before its loss (v1/core/base_trainer.py, compute_log_probs); "
            "that copy is left out",))
    options.finish("llamafactory_v1")
    return plan


def _read_task(options: Options, launch: JobLaunch) -> Task:
    """Of the command; a file alone does not say it, but for options of DPO."""
    if options.text("model_class", "llm", choices=("llm", "cls", "other")) == "cls":
        options.text("pref_loss")
        return "reward"
    loss = options.text("pref_loss", "sigmoid", choices=("sigmoid", "orpo", "simpo"))
    said = launch.command[-1] if launch.command else ""
    if said not in _TASKS and options.get("pref_loss") is not None:
        said = "dpo"
    task = _TASKS.get(said, "sft")
    if said not in _TASKS:
        options.assume("model_class", "trains on next tokens (sft); for pairs of answers give the command: "
                       "analyzer job -- llamafactory-cli dpo FILE")
    if task == "dpo" and loss in ("orpo", "simpo"):
        return "orpo" if loss == "orpo" else "simpo"
    return task


def _read_batching(options: Options, length: int) -> None:
    strategy = options.text("batching_strategy", "normal", choices=("normal", "padding_free", "dynamic_batching",
                                                                    "dynamic_padding_free"))
    if strategy == "dynamic_batching" and options.get("max_steps") is None:
        raise options.fail("batching_strategy", "LLaMA-Factory refuses dynamic_batching without max_steps")
    if strategy != "normal":
        options.assume("batching_strategy", f"{strategy}: as many tokens as full rows have")
    options.note("cutoff_len", "assumed", f"every row has {length:,} tokens: what the data set has is not known")


def _computes_in_half(options: Options, launch: JobLaunch) -> bool:
    """Whether one device that FSDP2 wraps computes in bfloat16 over weights in float32, as several do."""
    name = (options.get("dist_config") or {}).get("name")
    return launch.size == 1 and name in ("fsdp2", "fsdpturbo") and options.flag("bf16", True)


def _read_sharding(options: Options, launch: JobLaunch) -> Sharding | None:
    """v1/plugins/trainer_plugins/distributed/: passes in bfloat16, gradients reduced in float32."""
    bf16 = options.flag("bf16", True, means="passes of FSDP2 in bfloat16")
    part = options.part("dist_config")
    if part is None:
        return Sharding(kind="ddp") if launch.size > 1 else None
    name = part.text("name", choices=("fsdp2", "fsdpturbo", "deepspeed"), means="how ranks share the model")
    if name == "deepspeed":
        document = read_beside(part, "config_file", launch)
        if document is None:
            raise part.fail("config_file", "is not there, and LLaMA-Factory needs it")
        return read_deepspeed(document, options, launch)
    reshards, offloads = part.flag("reshard_after_forward", True), part.flag("offload_params")
    part.leave_out("ep_size ep_dispatcher ep_fsdp_size", "each rank is taken to compute all experts")
    part.rest("dcp_path pin_memory")
    if name == "fsdpturbo":
        part.note("name", "not modelled", "fsdpturbo: as FSDP2 without its experts' ranks")
    if launch.size == 1:
        part.note("name", "assumed", f"{name}: one device shares nothing, and its passes are as under autocast; "
                  "--world says how many there are")
        return None
    return Sharding(kind="fsdp", reshards=reshards, offloads=offloads, dtype="bf16" if bf16 else None,
                    reduce_dtype="fp32")


def _read_trained(options: Options) -> tuple[str, Adapter | None, TrainedBlocks | None, tuple[str, ...], bool]:
    """The kind of training, its adapter, its blocks, patterns of more that trains, and whether that is in float32."""
    part = options.part("peft_config")
    if part is None:
        return "full", None, None, (), False
    kind = part.text("name", choices=("lora", "freeze"), means="what is trained")
    if kind == "freeze":
        blocks = read_blocks(part)
        extra = tuple([rf".*{name}" for name in part.words("freeze_extra_modules")])
        casts = part.flag("cast_trainable_params_to_fp32", True)
        part.rest("")
        return "freeze", None, blocks, extra, casts
    targets = part.words("target_modules", ["all"])
    adapter = Adapter(r=part.count("r", 8, means="rank of the adapters"), dropout=part.fraction("lora_dropout", 0.05),
                      targets=() if targets == ["all"] else tuple(targets), saved=tuple(part.words("modules_to_save")))
    part.rest(_ADAPTER_WITHOUT_EFFECT)
    return "lora", adapter, None, (), False


def _read_quantization(options: Options, kind: str, sharding: Sharding | None) -> str | None:
    part = options.part("quant_config")
    if part is None:
        return None
    name = part.text("name", "bnb", choices=("auto", "bnb"))
    bits = part.number("quantization_bit", 4 if name == "bnb" else None, means="bits of the frozen weights")
    part.rest("compute_dtype double_quantization quantization_type")
    if bits is None:
        return None
    if bits not in (4, 8):
        raise part.fail("quantization_bit", "bitsandbytes holds weights in 4 or 8 bits")
    if kind == "full":
        raise part.fail("quantization_bit", "quantized weights do not train; give a peft_config")
    if sharding is not None and sharding.kind == "fsdp":
        part.note("quantization_bit", "not modelled", "each rank is taken to hold all quantized weights, which are "
                  "shared there")
    return "nf4" if bits == 4 else "int8"


def _read_attention(options: Options) -> str:
    said = options.text("flash_attn", "sdpa", means="attention")
    return "eager" if said in ("eager", "disabled") else "sdpa"


def _read_optimizer(options: Options) -> str | None:
    if (kernels := options.part("kernel_config")) is not None:
        kernels.text("name", "auto")
        kernels.rest("include_kernels chunk_size use_kernels require_logits")
        kernels.assume("name", "transformers' own kernels; logits and loss as usual, which v1 always has")
    part = options.part("optim_config")
    if part is None:
        return "adamw"
    name = part.text("name", choices=("muon",))
    part.rest("lr wd momentum nesterov ns_steps adamw_betas adamw_eps")
    if name is not None:
        part.assume("name", OPTIMIZERS["muon"].assumed)
    return OPTIMIZERS["muon"].name


def _is_file(data: Any) -> bool:
    return "model" in data and bool({"dist_config", "kernel_config", "peft_config", "model_class", "train_dataset",
                                     "quant_config"} & set(data))


LLAMAFACTORY_V1 = JobProgram(
    name="LLaMA-Factory v1", version="0.9.6", source="hiyouga/LLaMA-Factory src/llamafactory/v1/config", read=read,
    is_file=_is_file,
    commands=("llamafactory-cli train", "lmf train", "llamafactory-cli sft", "llamafactory-cli dpo",
              "llamafactory-cli rm"),
    changes={"batch": set_batch("micro_batch_size", whole="global_batch_size"),
             "checkpoints": set_option("enable_activation_checkpointing", True),
             "length": set_option("cutoff_len")})
