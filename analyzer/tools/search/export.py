"""The best layout as a file that another program takes: torchtitan, Megatron-LM, DeepSpeed, Accelerate."""
from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from analyzer.errors import InputError
from analyzer.output import write_output

from .compose import JobStep, list_parts
from .layout import Layout
from .result import SearchResult
from .stage import Piece

_ADAMW = ("adamw", "adamw_fused")


def export(found: SearchResult, program: str, path: str | Path | None = None, step: JobStep | None = None) -> str:
    """A layout of a search, by default the best, as the text of a file that ``program`` takes, also written to
    ``path``. Raises InputError for another program, and for a layout that it cannot run.
    """
    if program not in FORMATS:
        raise InputError(f"export(program={program!r}): must be of {', '.join(FORMATS)}")
    text = _WRITERS[program](found, step or found.best)
    if path is not None:
        write_output(Path(path), text)
    return text


def write_torchtitan(found: SearchResult, step: JobStep) -> str:
    """A TOML file by the names of torchtitan/config/job_config.py (0.2), without the model's and the data's part; the
    stages are those of its own Llama's names.
    """
    lay = step.layout
    _refuse(lay, "torchtitan", (
        (lay.optimizer in _ADAMW, "is given AdamW alone, this layout has another optimizer"),
        (lay.checkpointing != "planned", "takes no plan of blocks: `plan_blocks` gives one to apply"),
        (lay.sharding not in ("zero1", "distributed"), "divides no optimizer states alone"),
        (lay.precision != "bf16", "reduces gradients in float32"),
        (lay.sequence_parallel or lay.tensor == 1, "divides the tokens too where it divides tensors")))
    tables: dict[str, dict[str, Any]] = {
        "training": {"local_batch_size": lay.micro_batch * (lay.micro_batches if lay.pipeline > 1 else 1),
                     "global_batch_size": lay.global_batch, "seq_len": found.sequence,
                     "mixed_precision_param": "bfloat16", "mixed_precision_reduce": "float32", "dtype": "float32",
                     "enable_cpu_offload": lay.offload},
        "parallelism": {"data_parallel_replicate_degree": lay.replicate, "data_parallel_shard_degree": lay.shard,
                        "tensor_parallel_degree": lay.tensor, "context_parallel_degree": lay.context,
                        "pipeline_parallel_degree": lay.pipeline, "expert_parallel_degree": lay.expert,
                        # "always" gathers the head anew too
                        "fsdp_reshard_after_forward": "never" if lay.sharding == "fsdp_kept" else
                        "always" if lay.pipeline > 1 else "default"},
        "activation_checkpoint": {"mode": {"none": "none", "selective": "selective", "blocks": "full"}[
            lay.checkpointing]},
        "compile": {"enable": lay.compile, "components": ["model"]},
        "optimizer": {"name": "AdamW", "implementation": "fused" if lay.optimizer == "adamw_fused" else "foreach"}}
    if lay.checkpointing == "selective":
        tables["activation_checkpoint"]["selective_ac_option"] = "op"
    if lay.precision == "float8":
        tables["model"] = {"converters": ["quantize.linear.float8"]}
        tables["quantize.linear.float8"] = {"recipe_name": "rowwise", "filter_fqns": ["output"]}
    if lay.pipeline > 1:
        tables["parallelism"].update(pipeline_parallel_schedule=lay.schedule, module_fqns_per_model_part=_name_parts(
            step), pipeline_parallel_microbatch_size=lay.micro_batch)
    return "\n".join(f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
                     for name, table in tables.items())


def _name_parts(step: JobStep) -> list[list[str]]:
    """What each stage of a pipeline holds, by the names of torchtitan's models."""
    places = itertools.count()
    return [["tok_embeddings"] * part.first + [f"layers.{next(places)}" for _ in range(part.blocks)]
            + ["norm", "output"] * part.last for part in _list_parts(step)]


def _list_parts(step: JobStep) -> list[Piece]:
    return list_parts(step.layout, sum(stage.part.blocks for stage in step.stages))


def write_megatron(found: SearchResult, step: JobStep) -> str:
    """Arguments of Megatron-LM's pretrain_gpt.py (megatron/training/arguments.py), without the model's and data's.
    Where they are not all of the layout, a comment before them says so.
    """
    lay, notes = step.layout, []
    _refuse(lay, "megatron", (
        (lay.schedule in ("1F1B", "Interleaved1F1B"), f"has no schedule {lay.schedule}"),
        (lay.optimizer in (*_ADAMW, "adamw_offloaded"), "is given AdamW alone, this layout has another optimizer"),
        (lay.checkpointing in ("none", "blocks"), "has other selective checkpoints, and no plan of blocks"),
        (lay.precision == "mixed", "keeps float32 copies, and has no float8 scaled by row"),
        (not lay.offload, "keeps parameters on the device"),
        (not lay.compile, "compiles no blocks")))
    words: list[tuple[str, object]] = [
        ("--tensor-model-parallel-size", lay.tensor), ("--pipeline-model-parallel-size", lay.pipeline),
        ("--context-parallel-size", lay.context), ("--expert-model-parallel-size", lay.expert),
        ("--micro-batch-size", lay.micro_batch), ("--global-batch-size", lay.global_batch),
        ("--seq-length", found.sequence)]
    switches = ["--bf16", *["--sequence-parallel"] * (lay.tensor > 1 and lay.sequence_parallel)]
    if lay.pipeline > 1:
        parts = ("E," * part.first + f"t*{part.blocks}" + ",L" * part.last for part in _list_parts(step))
        words.append(("--pipeline-model-parallel-layout", f"'{'|'.join(parts)}'"))
    if lay.sharding != "ddp":
        switches += ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
    if lay.is_sharded and lay.pipeline > 1:
        notes.append("# gradients are whole on each rank, which the search has in shards: more memory")
    elif lay.is_sharded:
        words.append(("--data-parallel-sharding-strategy", "optim_grads" + "_params" * (lay.sharding == "fsdp")))
        switches += ["--use-megatron-fsdp", "--no-gradient-accumulation-fusion", "--ckpt-format fsdp_dtensor"]
    if lay.is_sharded and lay.replicate > 1:
        words.append(("--num-distributed-optimizer-instances", lay.replicate))
    if lay.checkpointing == "blocks":
        words += [("--recompute-granularity", "full"), ("--recompute-method", "uniform"), ("--recompute-num-layers", 1)]
    if lay.optimizer == "adamw_offloaded":
        switches += ["--optimizer-cpu-offload", "--use-precision-aware-optimizer"]
    arguments = " \\\n".join([*(f"{name} {value}" for name, value in words), *switches])
    return "\n".join([*notes, arguments]) + "\n"


def write_deepspeed(found: SearchResult, step: JobStep) -> str:
    """DeepSpeed's JSON (deepspeed.ai/docs/config-json). Tensor, context, expert and pipeline parallelism are not in it,
    nor are checkpoints and compilation: these are the model's (``gradient_checkpointing_enable()``) and the engine's.
    """
    lay = step.layout
    _refuse(lay, "deepspeed", (
        (lay.devices == lay.data and lay.expert == 1, "has them in the model's code"),
        (lay.optimizer in _ADAMW, "is given AdamW alone, this layout has another optimizer"),
        (lay.checkpointing in ("none", "blocks"), "takes no plan of blocks, and no selective checkpoints"),
        (lay.precision == "mixed", "keeps float32 copies, and has no float8 of torchao"),
        (lay.sharding != "fsdp_kept" or lay.replicate == 1, "has copies of shards with stage 3 alone")))
    stage = {"ddp": 0, "zero1": 1, "distributed": 1, "fsdp_kept": 2, "fsdp": 3}[lay.sharding]
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True}
    if lay.offload:
        held = ("offload_optimizer", "offload_param") if stage == 3 else ("offload_optimizer", )
        zero.update(dict.fromkeys(held, {"device": "cpu", "pin_memory": True}))
    if stage == 3 and lay.replicate > 1:
        zero["mics_shard_size"] = lay.shard
    data = {"train_batch_size": lay.global_batch, "train_micro_batch_size_per_gpu": lay.micro_batch,
            "gradient_accumulation_steps": lay.micro_batches, "bf16": {"enabled": True}, "zero_optimization": zero,
            "optimizer": {"type": "AdamW", "params": {}}}
    return json.dumps(data, indent=2) + "\n"


def write_accelerate(found: SearchResult, step: JobStep) -> str:
    """The YAML file of `accelerate launch --config_file` for FSDP2 (accelerate/utils/dataclasses.py). The script sets
    micro-batches, as a comment says; on several hosts ``--machine_rank`` and ``--main_process_ip`` are given beside it.
    """
    lay = step.layout
    _refuse(lay, "accelerate", (
        (lay.pipeline == lay.expert == 1 and lay.is_sharded, "shards with FSDP, in one stage"),
        (lay.checkpointing in ("none", "blocks"), "takes no plan of blocks, and no selective checkpoints"),
        (lay.precision == "mixed", "keeps parameters in float32, and has another float8")))
    lines = [f"# Accelerator(gradient_accumulation_steps={lay.micro_batches}), batches of {lay.micro_batch} a device",
             "compute_environment: LOCAL_MACHINE", "distributed_type: FSDP", "mixed_precision: bf16",
             f"num_machines: {-(-lay.devices // found.devices_per_host)}", f"num_processes: {lay.devices}",
             "fsdp_config:", "  fsdp_version: 2", "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
             f"  fsdp_reshard_after_forward: {str(lay.sharding == 'fsdp').lower()}",
             f"  fsdp_offload_params: {str(lay.offload).lower()}",
             f"  fsdp_activation_checkpointing: {str(lay.checkpointing != 'none').lower()}",
             "  fsdp_state_dict_type: SHARDED_STATE_DICT"]
    if lay.compile:
        lines += ["dynamo_config:", "  dynamo_backend: INDUCTOR", "  dynamo_use_regional_compilation: true"]
    if lay.tensor * lay.context > 1 or lay.replicate > 1:
        lines += ["parallelism_config:", f"  parallelism_config_dp_replicate_size: {lay.replicate}",
                  f"  parallelism_config_dp_shard_size: {lay.shard}", f"  parallelism_config_tp_size: {lay.tensor}",
                  f"  parallelism_config_cp_size: {lay.context}"]
    return "\n".join(lines) + "\n"


_WRITERS: dict[str, Callable[[SearchResult, JobStep], str]] = {
    "torchtitan": write_torchtitan, "megatron": write_megatron, "deepspeed": write_deepspeed,
    "accelerate": write_accelerate}
FORMATS = tuple(_WRITERS)


def _refuse(lay: Layout, program: str, conditions: Sequence[tuple[bool, str]]) -> None:
    """Raises InputError for the first condition that does not hold."""
    why = next((why for holds, why in conditions if not holds), None)
    if why is not None:
        raise InputError(f"export(program={program!r}): {lay}: {program} {why}; export another layout of the search")
