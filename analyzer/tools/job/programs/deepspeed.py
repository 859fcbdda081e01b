"""DeepSpeed's JSON file, beside the options of a trainer that fill in what it leaves "auto"."""
from __future__ import annotations

import torch

from analyzer.errors import find_close

from ..document import Document
from ..options import Options
from ..plan import Sharding
from ..program import JobLaunch

# DeepSpeed 0.19, runtime/config.py and runtime/zero/config.py


#: runtime/config.py, DEEPSPEED_OPTIMIZERS
_OPTIMIZERS = ("adagrad", "adam", "adamw", "lamb", "onebitadam", "onebitlamb", "zerooneadam", "muadam", "muadamw",
               "musgd", "lion", "muon", "cpuadam", "cpu_adam")


def read_deepspeed(document: Document, options: Options, launch: JobLaunch) -> Sharding:
    """How DeepSpeed shares a model by a file. Raises JobError for a stage that there is not."""
    own = Options.of(document, readings=options.readings)
    zero = own.part("zero_optimization")
    stage = 0 if zero is None else zero.number("stage", 0, means="what ranks share: 1 states, 2 gradients, 3 weights")
    if zero is not None:
        if stage not in (0, 1, 2, 3):
            raise zero.fail("stage", "must be 0, 1, 2 or 3")
        for name in ("offload_optimizer", "offload_param"):
            if (part := zero.part(name)) is not None:
                part.text("device", "none", choices=("cpu", "nvme", "none"))
                part.rest("pin_memory ratio buffer_count buffer_size fast_init pipeline* max_in_cpu nvme_path")
        zero.rest("""allgather_partitions allgather_bucket_size overlap_comm reduce_scatter
            reduce_bucket_size contiguous_gradients sub_group_size stage3_* round_robin_gradients elastic_checkpoint
            memory_efficient_linear
            zero_hpz_partition_size zero_quantized_weights zero_quantized_gradients ignore_unused_parameters
            legacy_stage1 max_live_parameters max_reuse_distance gather_16bit_weights_on_model_save
            load_from_fp32_weights mics_* model_persistence_threshold cpu_offload log_trace_cache_warnings
            override_module_apply param_persistence_threshold leaf_module""")
    if all(isinstance(own.get(name), dict) and own.get(name).get("enabled") is True for name in ("fp16", "bf16")):
        raise own.fail("fp16", "bf16 is enabled too; DeepSpeed refuses both")
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        if own.get(name) != "auto":
            own.number(name, least=1)
    for name in ("fp16", "bf16", "optimizer"):
        if (part := own.part(name)) is not None:
            kind = part.get("type")
            if name == "optimizer" and kind is not None and str(kind).lower() not in _OPTIMIZERS and not hasattr(
                    torch.optim, str(kind)):
                raise part.fail("type", f"neither DeepSpeed nor torch.optim has it{find_close(str(kind), _OPTIMIZERS)}")
            part.rest("enabled type params auto_cast loss_scale loss_scale_window initial_scale_power hysteresis "
                      "min_loss_scale immediate_grad_update consecutive_hysteresis bf16_*")
    if (part := own.part("compile")) is not None:
        if part.get("disable") is not True:
            part.note("disable", "not modelled", "passes are taken as they run uncompiled")
        part.rest("backend kwargs deepcompile debug_log free_activation offload_*")
    own.finish("deepspeed")
    return Sharding(kind="deepspeed", config=document.data, document=document)
