"""ms-swift: the commands `swift sft`, `swift pt` and `swift rlhf`, their scripts and their YAML."""
from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..document import Document, Edit
from ..options import Options
from ..plan import Checkpoints, Sharding, TrainingPlan
from ..program import JobLaunch, JobProgram, set_option
from . import swift_model
from .deepspeed import read_deepspeed
from .rollout import add_rollout
from .trainer import CHANGES, FUSED_LOSS, LOW_RANK, OPTIMIZERS, read_common, read_fsdp_config, read_optimizer

# ms-swift 4.6, swift/arguments/sft_args.py and rlhf_args.py, swift/trainers/arguments.py

_BUCKETS = {"overlap_comm": False, "reduce_bucket_size": 200_000_000, "allgather_bucket_size": 200_000_000,
            "contiguous_gradients": True}
_GATHERED = {"overlap_comm": False, "contiguous_gradients": True, "sub_group_size": 1_000_000_000,
             "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
             "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1_000_000_000,
             "stage3_max_reuse_distance": 1_000_000_000}
_ON_HOST = {"device": "cpu", "pin_memory": True}
#: What DeepSpeed's ``zero_optimization`` is by the names that ms-swift has for it: swift/config/zero*.json.
ZERO: Mapping[str, Mapping[str, Any]] = {
    "zero0": {"stage": 0, **_BUCKETS}, "zero1": {"stage": 1, **_BUCKETS}, "zero2": {"stage": 2, **_BUCKETS},
    "zero3": {"stage": 3, **_GATHERED},
    "zero2_offload": {"stage": 2, **_BUCKETS, "offload_optimizer": _ON_HOST},
    "zero3_offload": {"stage": 3, **_GATHERED, "offload_optimizer": _ON_HOST, "offload_param": _ON_HOST}}
_OPTIMIZERS = {"galore": "galore_adamw", "lorap": "adamw_torch_fused", "multimodal": "adamw_torch_fused",
               "muon": "muon", "muonclip": "muon"}
_FLASH = ("flash_attn", "flash_attention_2", "flash_attention_3", "flash_attention_4")


def read(options: Options, launch: JobLaunch) -> TrainingPlan:
    """The plan of a command or a YAML. Raises JobError for what ms-swift's own checks refuse."""
    launch = read_environment(options, launch)
    model = swift_model.read_model(options, launch)
    kind = swift_model.read_kind(options, launch, swift_model.TASKS)
    trained, quantize = swift_model.read_trained(options, model), swift_model.read_quantize(options, model)
    dtype = swift_model.read_dtype(options, model)
    batch, accumulate = _read_batch(options, launch, kind)
    _check_devices(options, launch)
    attention = _read_attention(options, kind)
    sharding, recomputes = _read_sharding(options, launch)
    checkpoints: Checkpoints = "blocks" if options.flag(
        "gradient_checkpointing", True, means="blocks are run again in backward") or recomputes else "none"
    task = swift_model.read_task(options, kind)
    optimizer, projected = _read_optimizer(options)
    plan = TrainingPlan(
        model=model.name, task=task, classes=_read_classes(options), micro_batch=batch, accumulate=accumulate,
        reference=swift_model.reference_of(task, kind, trained.adapter, options.get("beta")),
        length=_read_length(options, model, kind), dtype=dtype, autocast=_read_autocast(options, dtype),
        quantize=quantize, adapter=trained.adapter, trained=trained.trained, frozen=trained.frozen,
        pixels=swift_model.read_pixels(options, launch) if model.has_vision else None,
        attention=attention, checkpoints=checkpoints, loss_chunks=_read_loss(options, task),
        optimizer=optimizer, projected=projected, sharding=sharding, **read_common(options, launch))
    if kind in ("dpo", "kto", "ppo", "grpo"):
        options.text("ref_model")
    elif options.get("ref_model") is not None:
        raise options.fail("ref_model", f"ms-swift refuses one with rlhf_type {kind}")
    if plan.task == "distill":
        reference, teacher = swift_model.read_teacher(options, model)
        options.leave_out("offload_teacher_model", "the teacher stays on the device")
        plan = replace(plan, reference=reference, teacher=teacher)
    plan = add_rollout(options, plan, "rlhf_type")
    options.finish("trainer", "swift_model", "ms_swift")
    return plan


def read_environment(options: Options, launch: JobLaunch) -> JobLaunch:
    """swift/cli/main.py, `parse_yaml_args`: variables that a YAML sets where the shell does not."""
    given = options.part("ENV")
    if given is None:
        return launch
    said = {name: str(given.get(name)) for name in given.names()}
    given.rest(" ".join(said))
    variables = {**said, **launch.variables}
    each, hosts = variables.get("NPROC_PER_NODE", ""), variables.get("NNODES", "1")
    ranks = int(each) * int(hosts) if launch.ranks is None and each.isdecimal() and hosts.isdecimal() else launch.ranks
    return replace(launch, variables=variables, ranks=ranks)


def _read_batch(options: Options, launch: JobLaunch, kind: str | None) -> tuple[int, int]:
    """trainers/arguments.py: as many passes as make 16 sequences of all ranks; of GRPO one."""
    batch = options.count("per_device_train_batch_size", 1, means="sequences of a pass of one device")
    usual = 1 if kind == "grpo" else max(1, math.ceil(16 / batch / launch.size))
    return batch, options.count("gradient_accumulation_steps", usual, means="passes of a step")


def _read_length(options: Options, model: swift_model.SwiftModel, kind: str | None) -> int:
    """Tokens that one rank has of a row: of GRPO a prompt and its completion, of a group of ranks that divide each
    row (`sequence_parallel_size`) its share.
    """
    length = swift_model.read_length(options, model, kind)
    if kind in ("grpo", "ppo", "gkd"):
        completion = options.count("max_completion_length", 512, means="tokens of an answer")
        length = length + completion if options.get("max_length") is not None else max(length, completion)
        if (most := options.number("vllm_max_model_len")) is not None:
            length = min(length, most)
    else:
        options.number("max_completion_length")
    parts = options.count("sequence_parallel_size", 1)
    if parts > 1:
        if kind not in (None, "grpo", "dpo"):
            raise options.fail("sequence_parallel_size", f"ms-swift refuses it with rlhf_type {kind}")
        options.assume("sequence_parallel_size", f"each rank has {math.ceil(length / parts):,} tokens of a row; the "
                       "time leaves out attention to the others' and what ranks send for it")
    return math.ceil(length / parts)


def _check_devices(options: Options, launch: JobLaunch) -> None:
    """utils/env.py, `is_mp`: a process that sees several devices spreads the layers of a model over them."""
    each = launch.visible // max(1, launch.size // (launch.hosts or 1))
    options.text("device_map")
    if each < 2 or launch.variables.get("SWIFT_SINGLE_DEVICE_MODE") == "1":
        return
    for name in ("deepspeed", "fsdp", "use_liger_kernel"):
        if options.get(name) not in (None, "false", "none", False):
            raise options.fail(name, f"ms-swift refuses it where a process sees {each} devices; set NPROC_PER_NODE")
    options.note("device_map", "not modelled", f"layers are spread over {each} devices of each process: what is told "
                 "is one device that holds all of them")


def _read_attention(options: Options, kind: str | None) -> str | None:
    """The attention, and whether rows without padding are refused (sft_args.py, `_check_padding_free`)."""
    said = options.text("attn_impl", means="attention")
    if said is not None and said not in (*_FLASH, "sdpa", "eager", "flash_attn", "flex_attention"):
        options.assume("attn_impl", f"{said}: as PyTorch's fused attention, whose memory it has")
    for name in ("packing", "padding_free"):
        if options.get(name) in (None, False, "false", "False"):
            continue
        if said not in _FLASH:
            raise options.fail(name, f"ms-swift needs a flash attention for it; give attn_impl {_FLASH[0]}")
        if kind not in (None, "grpo", "dpo", "kto", "gkd"):
            raise options.fail(name, f"ms-swift refuses it with rlhf_type {kind}")
    return None if said is None else "eager" if said == "eager" else "sdpa"


def _read_autocast(options: Options, dtype: str) -> str | None:
    """model_args.py, `_init_mixed_precision`: passes in the dtype of the weights, of float32 ones in float16."""
    bf16, fp16 = options.flag("bf16", dtype == "bf16"), options.flag("fp16", dtype != "bf16")
    if bf16 and fp16:
        given = "bf16" if options.get("bf16") is not None else "fp16"
        raise options.fail(given, f"with weights of {dtype} the other one of bf16 and fp16 is on too; the trainer "
                           "refuses both")
    return "bf16" if bf16 else "fp16" if fp16 else None


def _read_classes(options: Options) -> int:
    value = options.get("num_labels")
    if isinstance(value, str) and value.startswith("<"):  # a place to be filled in by the reader of an example
        options.assume("num_labels", f"2 classes in the place of {value}")
        return 2
    return options.number("num_labels", least=1) or 2


def _read_loss(options: Options, task: str) -> int | None:
    """Liger's kernels compute the loss with the head; of pairs logits are asked for none the less."""
    if not options.switch("use_liger_kernel", "the loss in parts, with the head"):
        return None
    if task == "policy":
        options.note("use_liger_kernel", "not modelled", "the loss of all tokens of a pass at once")
    return FUSED_LOSS if task == "sft" else None


def _read_optimizer(options: Options) -> tuple[str | None, tuple[int, bool] | None]:
    """`optim` of the trainer, or one of ms-swift's own, and how one projects: swift/optimizers/mapping.py."""
    usual = read_optimizer(options)
    name = options.text("optimizer", choices=("default", *_OPTIMIZERS), means="optimizer")
    if options.flag("use_galore") and name is None:
        name = "galore"
    if name in (None, "default"):
        return usual, None
    if name == "galore":
        rank = options.count("galore_rank", 128)
        options.note("optimizer" if options.get("optimizer") else "use_galore", "understood",
                     f"states of gradients that are projected to rank {rank}")
        return LOW_RANK, (rank, True)
    found = OPTIMIZERS[_OPTIMIZERS[name or ""]]
    if found.assumed:
        options.note("optimizer", "assumed", f"{name}: {found.assumed}")
    return found.name, None


def _read_sharding(options: Options, launch: JobLaunch) -> tuple[Sharding | None, bool]:
    """How ranks share the model, and whether FSDP's settings ask that blocks run again in backward."""
    document = _find_settings(options, "deepspeed", launch, _write_zero)
    fsdp = _find_settings(options, "fsdp", launch, _write_fsdp)
    if document is not None and fsdp is not None:
        raise options.fail("fsdp", "ms-swift refuses it with deepspeed")
    if document is not None:
        return read_deepspeed(document, options, launch), False
    if fsdp is not None:
        settings = Options.of(fsdp, readings=options.readings)
        words = " ".join(settings.words("fsdp")).split()
        config = settings.part("fsdp_config")
        settings.rest("_description _requires _note _param_docs")
        found, recomputes = (Sharding(kind="fsdp"), False) if config is None else read_fsdp_config(config)
        return (replace(found, offloads=found.offloads or "offload" in words) if launch.size > 1 else None), recomputes
    if launch.sharding is not None:
        return (launch.sharding if launch.size > 1 or launch.sharding.kind == "deepspeed" else None), launch.recomputes
    return (Sharding(kind="ddp") if launch.size > 1 else None), False


def _find_settings(options: Options, name: str, launch: JobLaunch, preset: Any) -> Document | None:
    """A document by a name of ms-swift's own, by a file, or as JSON in the option itself."""
    value = options.get(name)
    if value in (None, "none", "false", False, ""):
        options.text(name)
        return None
    if isinstance(value, Mapping):
        options.part(name)
        return Document(name, "", value)
    said = options.text(name, means="how ranks share the model") or ""
    if (data := preset(said)) is not None:
        return Document(f"{said}.json of ms-swift", "", data)
    if said.lstrip().startswith("{"):
        try:
            return Document(name, "", json.loads(said))
        except ValueError as error:
            raise options.fail(name, f"is no JSON: {error}") from error
    path = launch.files.find(said)
    if path is None:
        known = ", ".join(ZERO) if name == "deepspeed" else "fsdp2"
        raise options.fail(name, f"no such file, and not one of {known}; copy it beside the configuration")
    return launch.files.document(path)


def _write_zero(name: str) -> Mapping[str, Any] | None:
    if name not in ZERO:
        return None
    return {"zero_optimization": dict(ZERO[name]), "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"},
            "gradient_clipping": "auto"}


def _write_fsdp(name: str) -> Mapping[str, Any] | None:
    """swift/config/fsdp2.json"""
    return {"fsdp": "full_shard auto_wrap", "fsdp_config": {
        "reshard_after_forward": True, "activation_checkpointing": True}} if name == "fsdp2" else None


def set_four_bits(options: Options, plan: TrainingPlan, wanted: Any) -> list[Edit] | None:
    """A change to bitsandbytes' 4 bits for frozen weights; None without adapters, or where they have them."""
    if plan.adapter is None or plan.quantize == "nf4":
        return None
    return [Edit(("quant_method",), options.get("quant_method"), "bnb"),
            Edit(("quant_bits",), options.get("quant_bits"), 4)]


def _is_file(data: Mapping[str, Any]) -> bool:
    own = {"tuner_type", "train_type", "split_dataset_ratio", "per_device_train_batch_size", "lora_rank", "freeze_vit"}
    return isinstance(data.get("model"), str) and bool(own & set(data)) and "micro_batch_size" not in data


MS_SWIFT = JobProgram(
    name="ms-swift", version="4.6", source="modelscope/ms-swift swift/arguments", read=read, is_file=_is_file,
    commands=tuple(form.format(kind) for kind in ("sft", "pt", "rlhf") for form in (
        "swift {}", "swift/cli/{}.py", "swift.cli.{}")),
    changes={**CHANGES, "quantize": set_four_bits, "length": set_option("max_length"),
             "rollout": set_option("vllm_gpu_memory_utilization")})
