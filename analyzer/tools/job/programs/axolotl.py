"""axolotl: its YAML."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..document import Edit
from ..options import Options
from ..plan import PROJECTORS, TOWERS, Adapter, Checkpoints, FakeQuantization, Sharding, Task, TrainingPlan
from ..program import JobLaunch, JobProgram, set_batch, set_option
from .trainer import FUSED_LOSS, divide_model, read_fsdp_config, read_optimizer, read_sharding, reference_of

# axolotl 0.18.0, src/axolotl/utils/schemas/

_TASKS: dict[str, Task] = {"dpo": "dpo", "ipo": "dpo", "orpo": "orpo", "simpo": "simpo", "kto": "kto",
                           "grpo": "policy", "gdpo": "policy", "ebft": "policy"}
_ATTENTION = {"eager": "eager", "sdpa": "sdpa", "flash_attention_2": "sdpa", "flash_attention_3": "sdpa",
              "flash_attention_4": "sdpa", "flex_attention": "sdpa", "xformers": "sdpa", "sage": "sdpa", "s2": "sdpa"}


def read(options: Options, launch: JobLaunch) -> TrainingPlan:
    """The plan of a YAML. Raises JobError for what axolotl's own checks refuse."""
    model = options.needed("base_model", "axolotl needs it", means="model")
    _check(options, model)
    length = options.count("sequence_len", 512, means="tokens of a sequence")
    batch, accumulate = _read_batch(options, launch)
    adapter, quantize = _read_adapter(options)
    dtype, autocast = _read_dtype(options)
    sharding, checkpoints = _read_ranks(options, launch)
    checkpoints = _read_offloading(options, checkpoints, adapter)
    task = _read_task(options)
    is_packed = options.flag("sample_packing", means="rows are packed up to sequence_len")
    is_padded = options.flag("pad_to_sequence_len")
    if not is_packed and not is_padded:
        options.note("sequence_len", "assumed", f"every row has {length:,} tokens: what the data set has is not known")
    parallel = divide_model(options, launch, sharding, {
        name: f"{name}_parallel_size" for name in ("tensor", "context", "expert")})
    plan = TrainingPlan(
        model=model, task=task, reference=reference_of(task, adapter), micro_batch=batch, accumulate=accumulate,
        length=length, dtype=dtype, autocast=autocast, quantize=quantize, adapter=adapter,
        frozen=_read_frozen(options),
        quantizes_experts=_read_experts(options, quantize), fake_quantization=_read_fake_quantization(options),
        classes=max(1, options.number("num_labels", 1)), trained=tuple(options.words("unfrozen_parameters")),
        attention=_read_attention(options), checkpoints=checkpoints, loss_chunks=_read_loss(options),
        optimizer=read_optimizer(options, "optimizer"), clips=options.fraction("max_grad_norm", 1.0) > 0,
        compiles=_reads_true(options, "torch_compile"), ranks=launch.size,
        ranks_per_host=launch.ranks_per_host, sharding=sharding, parallel=parallel)
    _read_published_quantization(options)
    options.finish("trainer", "axolotl")
    return plan


_LIGER = "axolotl.integrations.liger.LigerPlugin"
_CUT = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"
_EIGHT_BITS = ("adamw_8bit", "adamw_bnb_8bit")
_LOSSES = ("cut_cross_entropy", "chunked_cross_entropy", "liger_cross_entropy", "liger_fused_linear_cross_entropy")


def _check(options: Options, model: str) -> None:
    """Raises JobError for what axolotl refuses together (schemas/validation.py)."""
    given = {name for name in options.names() if options.get(name) not in (None, False, "", 0)}
    optimizer, rl = str(options.get("optimizer")), options.get("rl")
    config = options.get("fsdp_config") or {}
    offloads = isinstance(config, Mapping) and any(config.get(f"{name}offload_params") for name in ("", "fsdp_"))
    is_first = bool({"fsdp", "fsdp_config"} & given) and not _is_second(options)
    losses = [name for name in _LOSSES if name in given]
    for name, is_refused, why in (
            ("batch_size", {"gradient_accumulation_steps", "batch_size"} <= given,
             "gradient_accumulation_steps is given too; axolotl refuses both"),
            ("deepspeed", {"deepspeed", "fsdp"} <= given, "fsdp is given too; axolotl refuses both"),
            ("optimizer", _is_second(options) and optimizer in _EIGHT_BITS,
             "axolotl refuses it with FSDP2; give adamw_torch_8bit"),
            ("optimizer", is_first and offloads and "8bit" in optimizer,
             "axolotl refuses it with FSDP1 that offloads parameters; give fsdp_version: 2 and adamw_torch_8bit"),
            ("optimizer", (options.get("tensor_parallel_size") or 1) != 1
             and optimizer in (*_EIGHT_BITS, "paged_adamw_8bit"), "axolotl refuses it with tensor_parallel_size"),
            ("optimizer", optimizer == "muon" and "deepspeed" in given, "axolotl refuses it with deepspeed"),
            ("optimizer", optimizer == "muon" and is_first, "axolotl refuses it with FSDP1; give fsdp_version: 2"),
            ("sample_packing", {"sample_packing", "rl"} <= given, f"axolotl refuses it with rl: {rl}"),
            ("rl", rl in ("dpo", "ipo", "kto", "orpo") and _is_second(options)
             and bool({"load_in_4bit", "load_in_8bit"} & given), "axolotl refuses quantized weights with it and FSDP2"),
            ("gradient_checkpointing", "mpt" in model.lower() and "gradient_checkpointing" in given,
             "axolotl refuses it for MPT models"),
            (losses[-1] if losses else "", len(losses) > 1, f"{''.join(losses[:1])} is on too; axolotl refuses both")):
        if is_refused:
            raise options.fail(name, why)


def _is_second(options: Options) -> bool:
    """Whether FSDP2 shares the model: of two places that say the version the first counts."""
    config = options.get("fsdp_config")
    if not isinstance(config, Mapping) or not config:
        return False
    return str(options.get("fsdp_version") or config.get("version") or config.get("fsdp_version")) == "2"


def _eight_bits(options: Options) -> str:
    return "adamw_torch_8bit" if _is_second(options) else "adamw_bnb_8bit"


def _read_batch(options: Options, launch: JobLaunch) -> tuple[int, int]:
    """utils/config/__init__.py, `normalize_config`: of the three sizes two say the third."""
    batch = options.count("micro_batch_size", 1, means="sequences of a pass of one device")
    if options.get("batch_size") is not None and options.get("gradient_accumulation_steps") is None:
        whole = options.count("batch_size")
        if whole % batch:
            raise options.fail("batch_size", f"is no multiple of micro_batch_size {batch}")
        return batch, whole // batch
    options.number("batch_size")
    return batch, options.count("gradient_accumulation_steps", 1, means="passes of a step")


def _read_adapter(options: Options) -> tuple[Adapter | None, str | None]:
    """schemas/validation.py: qlora needs 4 bits; an adapter of another kind is one of few parameters."""
    kind = options.text("adapter", means="what is trained")
    four, eight = options.flag("load_in_4bit"), options.flag("load_in_8bit")
    rank, dropout = options.number("lora_r", least=1), options.fraction("lora_dropout", 0.0)
    targets, linear = _read_targets(options), options.flag("lora_target_linear")
    saved = options.words("lora_modules_to_save")
    if four and eight:
        raise options.fail("load_in_8bit", "load_in_4bit is given too; axolotl refuses both")
    if kind == "qlora" and eight:
        raise options.fail("adapter", "axolotl refuses load_in_8bit with qlora; give load_in_4bit: true")
    if kind == "qlora" and not four:
        raise options.fail("adapter", "axolotl refuses qlora without load_in_4bit: true")
    if kind is None and (four or eight):
        raise options.fail("load_in_4bit" if four else "load_in_8bit",
                           "axolotl refuses quantized weights without an adapter; add adapter: qlora")
    quantize = "nf4" if four else "int8" if eight else None
    if kind is None:
        return None, quantize
    if kind not in ("lora", "qlora"):
        options.note("adapter", "not modelled", f"{kind}: taken as LoRA of rank {rank or 8}")
    if rank is None and kind in ("lora", "qlora"):
        raise options.fail("lora_r", "is not there, and an adapter needs its rank")
    if not targets and not linear and kind in ("lora", "qlora") and not options.get("lora_target_parameters"):
        raise options.fail("lora_target_modules", "is not there; axolotl needs it, or lora_target_linear: true")
    return Adapter(r=rank or 8, targets=() if linear else tuple(targets), dropout=dropout, saved=tuple(saved)), quantize


def _read_targets(options: Options) -> list[str]:
    """Names of layers, or one regular expression over their paths."""
    if isinstance(value := options.get("lora_target_modules"), str) and value != "all-linear":
        options.text("lora_target_modules")
        return [f"re:{value}"]
    found = options.words("lora_target_modules")
    return [] if found == ["all-linear"] else found


def _read_dtype(options: Options) -> tuple[str, str | None]:
    """The dtype of weights, and that of autocast: utils/config/__init__.py, `normalize_config`. "auto" is bfloat16 on
    a device that has it; the trainer's own switch of that name puts each pass under autocast.
    """
    bf16 = options.get("bf16")
    if bf16 in ("auto", "full"):
        options.text("bf16", means="weights and passes in bfloat16 where the device has it")
        uses_bf16 = True
    else:
        uses_bf16 = options.flag("bf16", bf16 is None, means="weights and passes in bfloat16")
    is_bf16, is_fp16 = options.flag("bfloat16"), options.flag("float16")
    fp16 = options.flag("fp16")
    if uses_bf16 or is_bf16:
        return "bf16", "bf16" if uses_bf16 else None
    if fp16 or is_fp16:
        return "fp16", "fp16" if fp16 else None
    return "fp32", None


def _read_ranks(options: Options, launch: JobLaunch) -> tuple[Sharding | None, Checkpoints]:
    if options.get("gradient_checkpointing") in ("offload", "offload_disk", "unsloth", "legacy"):
        options.text("gradient_checkpointing", means="blocks are run again in backward, their inputs on the host")
        checkpoints: Checkpoints = "inputs_offloaded"
        options.part("gradient_checkpointing_kwargs")
    else:
        recomputes = options.flag("gradient_checkpointing", means="blocks run again in backward")
        checkpoints = "blocks" if recomputes else "none"
        options.section("gradient_checkpointing_kwargs").rest("use_reentrant preserve_rng_state")
    config = options.part("fsdp_config")
    if config is not None:
        options.words("fsdp")
        options.number("fsdp_version", 2)
        sharding, recomputes = read_fsdp_config(config)
        checkpoints = "blocks" if recomputes else checkpoints
        options.number("dp_shard_size", least=1)
        replicas = options.count("dp_replicate_size", 1)
        return (replace(sharding, replicas=replicas) if launch.size > 1 else None), checkpoints
    options.number("dp_shard_size")
    options.number("dp_replicate_size")
    return read_sharding(options, launch), checkpoints


def _read_offloading(options: Options, checkpoints: Checkpoints, adapter: Adapter | None) -> Checkpoints:
    """loaders/model.py, `_apply_activation_checkpointing`: in the place of checkpoints where adapters train, else of
    what these keep.
    """
    said = options.text("activation_offloading", means="what is saved for backward lies on the host")
    if said is None or said.lower() == "false":
        return checkpoints
    if checkpoints == "none":
        raise options.fail("activation_offloading", "axolotl refuses it without gradient_checkpointing")
    if said == "disk":
        options.assume("activation_offloading", "on the host, not on its disk")
    if said == "hidden_states":
        return "inputs_offloaded"
    return "offloaded" if adapter is None else "saved_offloaded"


def _read_task(options: Options) -> Task:
    said = options.text("rl", choices=_TASKS, means="what is trained for")
    if said is not None:
        if (task := _TASKS[said]) == "policy":
            options.note("rl", "not modelled", f"{said}: the rollout is left out; what is profiled is the update")
        return task
    if options.flag("reward_model"):
        return "reward"
    if options.flag("process_reward_model"):
        options.note("process_reward_model", "assumed", "a class of each sequence")
        return "classify"
    if (options.number("num_labels") or 0) > 0:
        return "classify"
    return "sft"


def _read_experts(options: Options, quantize: str | None) -> bool:
    """Whether experts are in four bits: by parametrizations of their tensors (monkeypatch/moe_quant.py), or as the
    linear layers of which some checkpoints of Llama 4 have them.
    """
    linear = options.flag("llama4_linearized_experts")
    if linear:
        options.assume("llama4_linearized_experts", "experts are one tensor each that is whole while a block runs")
    held = options.flag("quantize_moe_experts")
    if held:
        options.note("quantize_moe_experts", "understood", "experts are held in four bits, whole while a block runs")
    if not held and not linear:
        return False
    if quantize == "int8":
        options.note("quantize_moe_experts", "not modelled", "experts are taken to be held in 16 bits")
    return quantize == "nf4"


def _read_frozen(options: Options) -> tuple[str, ...]:
    """Parts of paths of parameters that do not train."""
    freezes = options.flag("freeze_mm_modules")
    return tuple([rf"(?:^|\.){tower}\." for tower in (*TOWERS, *PROJECTORS) if freezes])


def _read_published_quantization(options: Options) -> None:
    """How the checkpoint is held: loaders/model.py, `_set_quantization_config`."""
    kind = options.text("model_quantization_config")
    part = options.part("model_quantization_config_kwargs")
    whole = part is not None and part.flag("dequantize", means="weights are held in 16 bits")
    if kind is not None and not whole:
        options.note("model_quantization_config", "not modelled", f"{kind}: weights are taken to be held in 16 bits")


def _read_fake_quantization(options: Options) -> FakeQuantization | None:
    """utils/quantization.py, `prepare_model_for_qat`."""
    part = options.part("qat")
    if part is None:
        return None
    weights = part.text("weight_dtype", "int8", means="weights are rounded to it and back in each pass")
    inputs = part.text("activation_dtype")
    if weights != "int4":
        part.assume("weight_dtype", f"{weights}: rounded as int4 of torchao is")
    if part.flag("quantize_embedding"):
        part.note("quantize_embedding", "not modelled", "the embedding is taken as it is")
    group = part.count("group_size", 32)
    part.rest("fake_quant_after_n_steps")
    return FakeQuantization(group=group, activations=inputs is not None and weights != "nvfp4")


def _read_attention(options: Options) -> str | None:
    said = options.text("attn_implementation", means="attention")
    flags = [name for name in ("flash_attention", "sdp_attention", "flex_attention", "sage_attention", "s2_attention",
                               "eager_attention") if options.flag(name)]
    if said is None:
        return "eager" if flags == ["eager_attention"] else "sdpa" if flags else None
    if said in ("flex_attention", "xformers", "sage") or said not in _ATTENTION:
        options.note("attn_implementation", "assumed", f"{said}: as PyTorch's fused attention, whose memory it has")
    return _ATTENTION.get(said, "sdpa")


def _read_loss(options: Options) -> int | None:
    """utils/config/__init__.py, `validate_config`: options of a plugin are read where it is named."""
    plugins, uses = " ".join(options.words("plugins")), options.flag("chunked_cross_entropy")
    for name, plugin, usual in (("liger_fused_linear_cross_entropy", _LIGER, False), ("cut_cross_entropy", _CUT, True)):
        is_named = plugin.rpartition(".")[2] in plugins
        if options.flag(name, usual and is_named) and not is_named:
            options.assume(name, f"axolotl reads it with plugins: [{plugin}] alone: the loss of all tokens at once")
        uses = uses or is_named and options.flag(name, usual)
    return FUSED_LOSS if uses else None


def _set_fused_loss(options: Options, plan: TrainingPlan, wanted: Any) -> list[Edit] | None:
    """Liger's option, with its plugin where none is named; a list of others is changed by hand."""
    plugins = options.words("plugins")
    if plugins and "LigerPlugin" not in " ".join(plugins):
        return None
    edits = set_option("liger_fused_linear_cross_entropy", True)(options, plan, wanted)
    return edits if plugins or not edits else [Edit(("plugins",), None, [_LIGER]), *edits]


def _reads_true(options: Options, name: str) -> bool:
    if options.get(name) == "auto":
        options.text(name)
        return True
    return options.flag(name)


def _set_four_bits(options: Options, plan: TrainingPlan, wanted: Any) -> list[Edit] | None:
    if plan.adapter is None or plan.quantize == "nf4":
        return None
    edits = [Edit(("adapter",), options.get("adapter"), "qlora"),
             Edit(("load_in_4bit",), options.get("load_in_4bit"), True)]
    if options.get("load_in_8bit"):
        edits.append(Edit(("load_in_8bit",), True, False))
    return [edit for edit in edits if edit.before != edit.after]


def _is_file(data: Any) -> bool:
    return "base_model" in data and bool({"micro_batch_size", "sequence_len", "datasets", "adapter"} & set(data))


AXOLOTL = JobProgram(
    name="axolotl", version="0.18.0", source="axolotl-ai-cloud/axolotl src/axolotl/utils/schemas", read=read,
    is_file=_is_file, commands=("axolotl train", "axolotl preprocess", "axolotl.cli.train"),
    changes={"batch": set_batch("micro_batch_size", "gradient_accumulation_steps"),
             "checkpoints": set_option("gradient_checkpointing", True),
             "optimizer": set_option("optimizer", _eight_bits),
             "loss": _set_fused_loss,
             "quantize": _set_four_bits, "length": set_option("sequence_len")})
