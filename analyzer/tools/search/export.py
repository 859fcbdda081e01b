"""The best layout as a file that another program takes: torchtitan, Megatron-LM, DeepSpeed, Accelerate."""
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from analyzer.errors import InputError
from analyzer.output import write_output

from .compose import Step
from .layout import Layout
from .result import SearchResult

_ADAMW = ("adamw", "adamw_fused")
_NO_OTHER = "is given AdamW alone, this layout has another optimizer"


def export(found: SearchResult, program: str, path: str | Path | None = None, step: Step | None = None) -> str:
    """A layout of a search, by default the best, as the text of a file that ``program`` takes, also written to
    ``path``. Raises InputError for another program, and for a layout that it cannot run.
    """
    if program not in FORMATS:
        raise InputError(f"export(program={program!r}): must be of {', '.join(FORMATS)}")
    text = _WRITERS[program](found, (step or found.best).layout)
    if path is not None:
        write_output(Path(path), text)
    return text


def write_torchtitan(found: SearchResult, lay: Layout) -> str:
    """A TOML file by the names of torchtitan/config/job_config.py (0.2), without the model's and the data's part."""
    _refuse(lay, "torchtitan", lay.optimizer in _ADAMW, _NO_OTHER)
    tables: dict[str, dict[str, Any]] = {
        "training": {"local_batch_size": lay.micro_batch * (lay.micro_batches if lay.pipeline > 1 else 1),
                     "global_batch_size": lay.global_batch, "seq_len": found.sequence,
                     "mixed_precision_param": "bfloat16", "mixed_precision_reduce": "float32",
                     "dtype": "bfloat16" if lay.precision == "bf16" else "float32", "enable_cpu_offload": lay.offload},
        "parallelism": {"data_parallel_replicate_degree": lay.replicate, "data_parallel_shard_degree": lay.shard,
                        "tensor_parallel_degree": lay.tensor, "context_parallel_degree": lay.context,
                        "pipeline_parallel_degree": lay.pipeline,
                        "fsdp_reshard_after_forward": "never" if lay.sharding == "fsdp_kept" else "always"},
        "activation_checkpoint": {"mode": {"none": "none", "selective": "selective", "blocks": "full"}[
            lay.checkpointing]},
        "compile": {"enable": lay.compile},
        "optimizer": {"name": "AdamW", "implementation": "fused" if lay.optimizer == "adamw_fused" else "foreach"}}
    if lay.checkpointing == "selective":
        tables["activation_checkpoint"]["selective_ac_option"] = "op"
    if lay.pipeline > 1:
        tables["parallelism"].update(pipeline_parallel_schedule=lay.schedule,
                                     pipeline_parallel_microbatch_size=lay.micro_batch)
    return "\n".join(f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
                     for name, table in tables.items())


def write_megatron(found: SearchResult, lay: Layout) -> str:
    """Arguments of Megatron-LM's pretrain_gpt.py (megatron/training/arguments.py), without the model's and data's."""
    _refuse(lay, "megatron", lay.schedule in ("1F1B", "Interleaved1F1B"), f"has no schedule {lay.schedule}")
    words: list[tuple[str, object]] = [
        ("--tensor-model-parallel-size", lay.tensor), ("--pipeline-model-parallel-size", lay.pipeline),
        ("--context-parallel-size", lay.context), ("--micro-batch-size", lay.micro_batch),
        ("--global-batch-size", lay.global_batch), ("--seq-length", found.sequence)]
    switches = ["--bf16", *["--sequence-parallel"] * (lay.tensor > 1 and lay.sequence_parallel)]
    if lay.virtual > 1:
        words.append(("--num-virtual-stages-per-pipeline-rank", lay.virtual))
    if lay.sharding == "fsdp":
        switches += ["--use-torch-fsdp2", "--no-gradient-accumulation-fusion"]
    elif lay.sharding != "ddp":  # its distributed optimizer divides states, gradients are reduced once
        switches += ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
    if lay.checkpointing == "blocks":
        words += [("--recompute-granularity", "full"), ("--recompute-method", "uniform"), ("--recompute-num-layers", 1)]
    elif lay.checkpointing == "selective":
        words.append(("--recompute-granularity", "selective"))
    if lay.offload:
        switches.append("--optimizer-cpu-offload")
    return " \\\n".join([*(f"{name} {value}" for name, value in words), *switches]) + "\n"


def write_deepspeed(found: SearchResult, lay: Layout) -> str:
    """DeepSpeed's JSON (deepspeed.ai/docs/config-json). Tensor, context and pipeline parallelism are not in it."""
    _refuse(lay, "deepspeed", lay.pipeline == lay.context == lay.tensor == 1, "has them in the model's code")
    _refuse(lay, "deepspeed", lay.optimizer in _ADAMW, _NO_OTHER)
    stage = {"ddp": 0, "fsdp_kept": 2, "fsdp": 3}[lay.sharding]
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True}
    if lay.offload:
        zero.update(offload_optimizer={"device": "cpu", "pin_memory": True},
                    **({"offload_param": {"device": "cpu", "pin_memory": True}} if stage == 3 else {}))
    if stage == 3 and lay.replicate > 1:
        zero["zero_hpz_partition_size"] = lay.shard
    data = {"train_batch_size": lay.global_batch, "train_micro_batch_size_per_gpu": lay.micro_batch,
            "gradient_accumulation_steps": lay.micro_batches, "bf16": {"enabled": True}, "zero_optimization": zero,
            "optimizer": {"type": "AdamW", "params": {}}}
    if lay.checkpointing != "none":
        data["activation_checkpointing"] = {"partition_activations": False}
    return json.dumps(data, indent=2) + "\n"


def write_accelerate(found: SearchResult, lay: Layout) -> str:
    """The YAML file of `accelerate launch --config_file` for FSDP2 (accelerate/utils/dataclasses.py)."""
    _refuse(lay, "accelerate", lay.pipeline == 1 and lay.is_sharded, "shards with FSDP, in one stage")
    lines = ["compute_environment: LOCAL_MACHINE", "distributed_type: FSDP", "mixed_precision: bf16",
             f"num_processes: {lay.devices}", f"gradient_accumulation_steps: {lay.micro_batches}", "fsdp_config:",
             "  fsdp_version: 2", "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
             f"  fsdp_reshard_after_forward: {str(lay.sharding == 'fsdp').lower()}",
             f"  fsdp_offload_params: {str(lay.offload).lower()}",
             f"  fsdp_activation_checkpointing: {str(lay.checkpointing != 'none').lower()}",
             "  fsdp_state_dict_type: SHARDED_STATE_DICT"]
    if lay.tensor * lay.context > 1 or lay.replicate > 1:
        lines += ["parallelism_config:", f"  parallelism_config_dp_replicate_size: {lay.replicate}",
                  f"  parallelism_config_dp_shard_size: {lay.shard}", f"  parallelism_config_tp_size: {lay.tensor}",
                  f"  parallelism_config_cp_size: {lay.context}"]
    return "\n".join(lines) + "\n"


_WRITERS: dict[str, Callable[[SearchResult, Layout], str]] = {
    "torchtitan": write_torchtitan, "megatron": write_megatron, "deepspeed": write_deepspeed,
    "accelerate": write_accelerate}
FORMATS = tuple(_WRITERS)


def _refuse(lay: Layout, program: str, is_known: bool, why: str) -> None:
    if not is_known:
        raise InputError(f"export(program={program!r}): {lay}: {program} {why}; export another layout of the search")
