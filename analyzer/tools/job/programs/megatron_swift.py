"""Megatron-SWIFT: the commands `megatron sft`, `megatron pt` and `megatron rlhf`, their scripts and their YAML."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..options import Options
from ..plan import TrainingPlan
from ..program import JobLaunch, JobProgram, set_option
from . import megatron, swift_model
from .ms_swift import read_environment, set_four_bits
from .rollout import add_rollout
from .trainer import accumulate_of

# ms-swift 4.6, swift/megatron/arguments/megatron_args.py


def read(options: Options, launch: JobLaunch) -> TrainingPlan:
    """The plan of a command or a YAML. Raises JobError for what Megatron-SWIFT's own checks refuse."""
    launch = read_environment(options, launch)
    apart = _join_groups(options, launch)
    model = swift_model.read_model(options, launch)
    kind = swift_model.read_kind(options, launch, ("dpo", "kto", "grpo", "gkd", "rm"))
    trained, quantize = swift_model.read_trained(options, model, "full"), swift_model.read_quantize(options, model)
    dtype = "fp16" if options.flag("fp16") else "bf16"
    options.flag("bf16", dtype == "bf16")
    adapter = trained.adapter
    ranks, parallel = megatron.read_parallel(options, launch)
    batch, accumulate = _read_batch(options, ranks // (1 if parallel is None else parallel.size))
    length = _read_length(options, model, kind)
    task = swift_model.read_task(options, kind)
    sharding = megatron.read_sharding(options)
    if parallel is not None:
        parallel = megatron.share_states(parallel, sharding, ranks)
    plan = TrainingPlan(
        model=model.name, task=task, classes=options.count("num_labels", 2), micro_batch=batch,
        accumulate=accumulate, reference=swift_model.reference_of(task, kind, adapter, options.get("beta")),
        length=length, dtype=dtype, quantize=quantize, adapter=adapter, trained=trained.trained, frozen=trained.frozen,
        attention=_read_attention(options), checkpoints=megatron.read_checkpoints(options, "selective"),
        optimizer=megatron.read_optimizer(options),
        clips=options.fraction("clip_grad", 1.0) > 0, ranks=ranks, sharding=sharding, parallel=parallel)
    if plan.task == "distill":
        reference, teacher = swift_model.read_teacher(options, model)
        plan = replace(plan, reference=reference, teacher=teacher, offloads_teacher=options.flag(
            "offload_teacher_model", means="the teacher is on the host while the model trains"))
    plan = add_rollout(options, plan, "rlhf_type", uses_engine=True, counts_passes=False,
                       mode="server" if apart else "colocate")
    options.text("ref_model")
    megatron.read_capacity(options)
    options.finish("trainer", "swift_model", "megatron", "megatron_swift")
    return plan


def _join_groups(options: Options, launch: JobLaunch) -> bool:
    """Whether engines have devices of their own, of a run under Ray whose file has a part for each group of devices
    (docs/source_en/Megatron-SWIFT/Ray.md): what each is given stands beside what all are.
    """
    train = options.part("train") if isinstance(options.get("train"), Mapping) else None
    if train is None:
        return False
    ranks = train.number("gpus", least=1, means="ranks of the model that trains")
    launch.ranks = launch.ranks or ranks
    options.join("train", "rollout")
    together = options.get("colocate_groups") or []
    if not isinstance(together, list) or not all(isinstance(group, list) for group in together):
        raise options.fail("colocate_groups", "must be a list of lists of groups: [[train, rollout]]")
    for name in ("use_ray", "gpus", "colocate_groups"):
        if options.get(name) is not None:
            options.note(name, "understood", "groups of devices" if name == "colocate_groups" else "")
    return not any({"train", "rollout"} <= set(group) for group in together)


def _read_batch(options: Options, ranks: int) -> tuple[int, int]:
    """Sequences of a pass, and passes of a step, of ranks that have sequences of their own (`_init_distributed`)."""
    batch = options.count("micro_batch_size", 1, means="sequences of a pass of one device")
    if options.get("global_batch_size") is None:
        options.number("global_batch_size", 16, means="sequences of a step of all ranks")
        if 16 % (batch * ranks):
            raise options.fail("global_batch_size", f"is 16 where it is not given, no multiple of {batch * ranks}")
        return batch, 16 // (batch * ranks)
    return batch, accumulate_of(options, "global_batch_size", batch, ranks) or 1


def _read_length(options: Options, model: Any, kind: str | None) -> int:
    length = swift_model.read_length(options, model, kind)
    completion = options.number("max_completion_length", 512 if kind == "grpo" else None, least=1,
                                means="tokens of an answer" if kind == "grpo" else "")
    if kind == "grpo" and options.get("max_length") is not None:
        return length + (completion or 0)
    return length


def _read_attention(options: Options) -> str | None:
    said = options.text("attention_backend", "flash", means="attention")
    return "eager" if said in ("unfused", "local") else "sdpa"


def _is_file(data: Mapping[str, Any]) -> bool:
    own = {"micro_batch_size", "global_batch_size", "recompute_granularity", "tensor_model_parallel_size"}
    return isinstance(data.get("model"), str) and len(own & set(data)) > 1


MEGATRON_SWIFT = JobProgram(
    name="Megatron-SWIFT", version="ms-swift 4.6", source="modelscope/ms-swift swift/megatron/arguments", read=read,
    is_file=_is_file, commands=tuple(form.format(kind) for kind in ("sft", "pt", "rlhf") for form in (
        "megatron {}", "swift/cli/_megatron/{}.py")),
    changes={"batch": megatron.CHANGE_BATCH, "checkpoints": megatron.set_checkpoints, "quantize": set_four_bits,
             "length": set_option("max_length"), "rollout": set_option("vllm_gpu_memory_utilization")})
