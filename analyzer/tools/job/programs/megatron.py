"""What programs share that train with Megatron-LM: its arguments for layouts, checkpoints and optimizers."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..document import Document, Edit
from ..options import Options
from ..plan import Checkpoints, ModelParallel, Sharding, TrainingPlan
from ..program import JobLaunch, set_batch

# Megatron-LM core 0.16, megatron/training/arguments.py and core/model_parallel_config.py

_DEGREES = {"tensor": ("tensor_model_parallel_size", "ranks that divide each tensor"),
            "pipeline": ("pipeline_model_parallel_size", "stages of the blocks"),
            "context": ("context_parallel_size", "ranks that divide each sequence"),
            "expert": ("expert_model_parallel_size", "ranks that have different experts")}
#: Megatron reduces gradients, and gathers weights, in the buffers that hold them (its
#: core/distributed/param_and_grad_buffer.py): there are no buckets beside these.
_BUFFERS = {"contiguous_gradients": False, "reduce_bucket_size": 1_000_000, "allgather_bucket_size": 1_000_000}
_OPTIMIZERS = {"adam": "adamw", "sgd": "sgd", "muon": "momentum", "dist_muon": "momentum"}


def read_parallel(options: Options, launch: JobLaunch) -> tuple[int, ModelParallel | None]:
    """All ranks, and how they divide the model; None where each holds a whole one. Raises JobError where they are no
    multiple of those that work on one sequence.
    """
    sizes: dict[str, Any] = {field: options.count(name, 1, means=means if options.get(name) is not None else "")
             for field, (name, means) in _DEGREES.items()}
    found = ModelParallel(**sizes, virtual=_read_virtual(options, sizes["pipeline"]),
                          sequence=options.flag("sequence_parallel") or sizes["tensor"] == 1)
    found = replace(found, schedule="Interleaved1F1B" if found.virtual > 1 else "1F1B")
    ranks = launch.ranks or max(found.size, found.expert * found.pipeline)  # at least, where nothing says how many
    if ranks % found.size:
        raise options.fail("tensor_model_parallel_size", f"times pipeline and context parallel sizes are {found.size}, "
                           f"by which {ranks} ranks cannot be divided")
    if launch.ranks is None and ranks > 1:
        name = next(name for field, (name, _) in _DEGREES.items() if sizes[field] > 1)
        options.assume(name, f"{ranks} devices, the least that there can be: nothing says how many; --world does")
    found = divide_each_expert(options, "expert_tensor_parallel_size", found)
    return ranks, found if max(found.size, found.expert) > 1 else None


def divide_each_expert(options: Options, name: str, parallel: ModelParallel) -> ModelParallel:
    """A layout with whole experts on as many more ranks, in the place of those that divide each expert."""
    parts = options.count(name, 1)
    if parts > 1:
        options.assume(name, f"experts are whole, on {parts} times as many ranks: as many bytes, and tokens are sent "
                       "in the place of sums")
    return replace(parallel, expert=parallel.expert * parts)


def read_capacity(options: Options) -> None:
    """How many tokens an expert takes: the others are dropped, or where rows are filled up for as many, they are zeros
    (core/transformer/moe/moe_utils.py, `topk_routing_with_score_function`).
    """
    if options.get("moe_expert_capacity_factor") is None:
        return
    fills = options.flag("moe_pad_expert_input_to_capacity")
    options.note("moe_expert_capacity_factor", "not modelled" if fills else "assumed", "experts get equally many, "
                 + ("and no rows of zeros" if fills else "which is within their capacity"))


def _read_virtual(options: Options, stages: int) -> int:
    """Stages of a rank. Where they are told one by one, they are taken to hold equally many blocks."""
    layout = options.text("pipeline_model_parallel_layout")
    virtual = next((options.count(name, 1) for name in (
        "virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank") if options.get(name)), 1)
    each, layers = options.number("num_layers_per_virtual_pipeline_stage", least=1), options.get("num_layers")
    if each is not None and layers is not None:
        virtual = max(1, int(layers) // stages // each)
    if layout is not None:
        options.assume("pipeline_model_parallel_layout", "stages hold equally many blocks")
        virtual = max(1, (layout.strip("|").count("|") + 1) // stages)
    return virtual


def read_checkpoints(options: Options, default: str = "none") -> Checkpoints:
    """Layers are run again in backward where all of them are; "selective" of attention alone is what fused attention
    does by itself.
    """
    said = options.text("recompute_granularity", default, choices=("selective", "full", "none"),
                        means="what is run again in backward")
    layers = options.number("recompute_num_layers", least=1)
    modules = options.words("recompute_modules", ["core_attn"])
    if said == "full":
        if options.get("recompute_method") == "block":
            options.note("recompute_num_layers", "assumed", "all layers are run again, not only the first ones")
        elif layers is not None and layers > 1:
            options.note("recompute_num_layers", "assumed", "the input of each layer is kept, not of each group")
        return "blocks"
    if said == "selective" and options.get("recompute_method") is not None:
        raise options.fail("recompute_method", "Megatron refuses it with recompute_granularity selective")
    if said == "selective" and modules != ["core_attn"]:
        options.note("recompute_modules", "not modelled", "what is saved for backward is kept")
    return "none"


def read_optimizer(options: Options) -> str:
    """The optimizer here, of which master weights and states are in float32."""
    said = options.text("optimizer", "adam", choices=_OPTIMIZERS, means="optimizer")
    if "muon" in said:
        options.assume("optimizer", f"{said}: one state for each parameter, as momentum has; Adam's second one of "
                       "embeddings is left out")
    if options.flag("use_precision_aware_optimizer"):
        few = [name for name in ("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype")
               if options.get(name) not in (None, "fp32")]
        if few:
            options.note("use_precision_aware_optimizer", "not modelled", f"{', '.join(few)}: states have 32 bits")
    return _OPTIMIZERS[said]


def read_sharding(options: Options, divides: bool = True) -> Sharding:
    """Megatron's distributed optimizer: ranks share states and master weights in float32, each keeps its gradients
    in the dtype of ``main_grads_dtype``. That is what DeepSpeed's stage 1 does. ``divides``: whether it is the usual
    one of the program.
    """
    if options.flag("use_megatron_fsdp"):
        kept = options.text("data_parallel_sharding_strategy", "optim_grads_params",
                            choices=("no_shard", "optim", "optim_grads", "optim_grads_params"))
        if kept in ("optim_grads", "optim_grads_params"):
            options.assume("use_megatron_fsdp", "as PyTorch's own FSDP")
            options.flag("use_distributed_optimizer", True)
            return Sharding(kind="fsdp", reshards=kept == "optim_grads_params", dtype="bf16", reduce_dtype="fp32")
    options.text("data_parallel_sharding_strategy")
    divides = options.flag("use_distributed_optimizer", divides, means="ranks share the states of the optimizer")
    grads = options.text("main_grads_dtype", "fp32", choices=("fp32", "bf16"))
    options.flag("accumulate_allreduce_grads_in_fp32")
    zero: dict[str, Any] = {"stage": 1 if divides else 0, **_BUFFERS}
    if options.flag("optimizer_cpu_offload"):
        share = options.fraction("optimizer_offload_fraction", 1.0)
        zero["offload_optimizer"] = {"device": "cpu"}
        if 0 < share < 1:
            options.note("optimizer_offload_fraction", "assumed", "all states are on the host")
    config: Mapping[str, Any] = {"zero_optimization": zero, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"},
                                 "data_types": {"grad_accum_dtype": grads}, "gradient_clipping": 1.0}
    return Sharding(kind="deepspeed", config=config, document=Document("the distributed optimizer", "", config))


def share_states(parallel: ModelParallel, sharding: Sharding, ranks: int) -> ModelParallel:
    """A layout whose ranks share states as a `Sharding` says."""
    if sharding.kind == "fsdp":
        return replace(parallel, sharding="fsdp" if sharding.reshards else "fsdp_kept")
    zero = sharding.config["zero_optimization"]
    return replace(parallel, replicas=1 if zero["stage"] else ranks // parallel.size, offloads="offload_optimizer" in
                   zero)


#: The global batch would follow the micro-batch (megatron/training/arguments.py, `validate_args`).
CHANGE_BATCH = set_batch("micro_batch_size", whole="global_batch_size")


def set_checkpoints(options: Options, plan: TrainingPlan, wanted: Any) -> list[Edit] | None:
    """All layers, each run again."""
    return [Edit(("recompute_granularity",), options.get("recompute_granularity"), "full"),
            Edit(("recompute_method",), options.get("recompute_method"), "uniform"),
            Edit(("recompute_num_layers",), options.get("recompute_num_layers"), 1)]
