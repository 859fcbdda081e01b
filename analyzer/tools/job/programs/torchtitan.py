"""torchtitan: the TOML of the versions that read it, and commands that override it."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from analyzer.errors import find_close

from ..document import Edit
from ..model_name import find_config
from ..options import Options
from ..plan import Checkpoints, ModelParallel, PicturePlan, Sharding, TrainingPlan
from ..program import JobLaunch, JobProgram, set_batch, set_option
from .megatron import divide_each_expert
from .trainer import accumulate_of

# torchtitan 0.2.2, torchtitan/config/job_config.py; models/*/__init__.py

#: Pipelines whose denoiser, autoencoder and text encoders a flavor has; its model takes no guidance.
_PIPELINES = {"flux-dev": "black-forest-labs/FLUX.1-dev", "flux-schnell": "black-forest-labs/FLUX.1-dev"}
#: What flavors are, by the model's name.
_FLAVORS: dict[str, dict[str, str]] = {
    "llama3": {**{size: f"meta-llama/Llama-3.1-{size}" for size in ("8B", "70B", "405B")},
               "1B": "meta-llama/Llama-3.2-1B", "3B": "meta-llama/Llama-3.2-3B"},
    "llama4": {"17bx128e": "meta-llama/Llama-4-Maverick-17B-128E"},
    "deepseek_v3": {"671B": "deepseek-ai/DeepSeek-V3"},
    "qwen3": {size: f"Qwen/Qwen3-{size}"
              for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B", "235B-A22B")},
    "gpt_oss": {"20b": "openai/gpt-oss-20b", "120b": "openai/gpt-oss-120b"}, "flux": _PIPELINES}
#: Of flavors that are not published, or not with the blocks that they have here, the fields of transformers'
#: configuration: models/*/__init__.py and what their arguments are by themselves.
_SIZES: dict[tuple[str, str], dict[str, Any]] = {
    ("llama3", "debugmodel"): {
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6,
        "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 2048},
    ("qwen3", "debugmodel_moe"): {
        "model_type": "qwen3_moe", "hidden_size": 256, "intermediate_size": 3072, "moe_intermediate_size": 768,
        "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "num_experts": 64, "num_experts_per_tok": 8, "vocab_size": 2048},
    ("deepseek_v3", "debugmodel"): {
        "model_type": "deepseek_v3", "hidden_size": 256, "intermediate_size": 1024, "moe_intermediate_size": 256,
        "num_hidden_layers": 6, "first_k_dense_replace": 1, "num_attention_heads": 16, "num_key_value_heads": 16,
        "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3, "n_group": 1, "topk_group": 1,
        "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "vocab_size": 2048},
    ("llama4", "debugmodel"): {
        "model_type": "llama4_text", "hidden_size": 256, "intermediate_size": 512, "intermediate_size_mlp": 768,
        "num_hidden_layers": 6, "num_attention_heads": 16, "num_key_value_heads": 16, "num_local_experts": 8,
        "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "no_rope_layers": [1] * 6, "vocab_size": 2048},
    ("llama4", "17bx16e"): {
        "model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16_384,
        "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "num_local_experts": 16,
        "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "no_rope_layers": [1] * 48, "vocab_size": 202_048},
    ("gpt_oss", "debugmodel"): {
        "model_type": "gpt_oss", "hidden_size": 256, "intermediate_size": 2880, "num_hidden_layers": 4,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 8,
        "num_experts_per_tok": 4, "vocab_size": 201_088},
    ("deepseek_v3", "16b"): {
        "model_type": "deepseek_v3", "hidden_size": 2048, "intermediate_size": 10_944, "moe_intermediate_size": 1408,
        "num_hidden_layers": 27, "first_k_dense_replace": 1, "num_attention_heads": 16, "num_key_value_heads": 16,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1,
        "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "vocab_size": 102_400}}
#: Of the backend for models of transformers, what its flavor for trying things changes.
_SMALL = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 16,
          "num_key_value_heads": 16, "head_dim": 16}
_WITH_EXPERTS = ("llama4", "deepseek_v3", "gpt_oss")  #: and flavors such as 30B-A3B
_DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
SCHEDULES = ("1F1B", "Interleaved1F1B", "GPipe", "InterleavedZeroBubble", "LoopedBFS", "ZBVZeroBubble")
_PARTS = """job profiling metrics lr_scheduler checkpoint comm memory_estimation fault_tolerance experimental validation
debug hf_transformers"""
_QUANTIZED = "float8 mx quantize"


def read(options: Options, launch: JobLaunch) -> TrainingPlan:
    """The plan of a TOML. Raises JobError for what torchtitan refuses."""
    (model, config), draws = _read_model(options, launch), (options.get("model") or {}).get("name") == "flux"
    training = options.section("training")
    old = training.get("batch_size") is not None
    batch = training.count("batch_size" if old else "local_batch_size", 8, means="sequences of a pass of one device")
    length = 1 if draws else training.count(
        "seq_len", 2048, means="tokens of a sequence; rows are filled up to it")
    ranks, sharding, autocast, parallel = _read_ranks(options, training, launch)
    accumulate = None
    if training.get("global_batch_size") not in (None, -1, "-1"):
        accumulate = accumulate_of(training, "global_batch_size", batch, ranks // (parallel.size if parallel else 1))
    if parallel is not None and parallel.pipeline > 1:  # which divides the sequences of a pass into micro-batches
        part = options.get("parallelism") or {}
        size = int(part.get("pipeline_parallel_microbatch_size") or 1)
        if batch % size:
            raise training.fail("local_batch_size", f"is no multiple of pipeline_parallel_microbatch_size {size}")
        batch, accumulate = size, batch // size * (accumulate or 1)
    optimizer, in_backward = _read_optimizer(options.section("optimizer"))
    compiles = _read_compile(options, training)
    dtype = training.text("dtype", "float32", choices=_DTYPES, means="of the weights")
    clips = training.fraction("max_norm", 1.0) > 0
    training.rest("steps dataset dataset_path gc_freq gc_debug seed deterministic debug_* warmup_steps data_parallel_* "
                  "global_batch_size enable_* loss_* mixed_precision_* test_mode"
                  + " classifier_free_guidance_prob img_size" * draws)
    checkpoints, every = _read_checkpoints(options)
    picture = _read_picture(options, sharding) if draws else None
    if picture is not None and (accumulate or 1) > 1:
        raise training.fail("global_batch_size", "torchtitan's FLUX refuses several passes a step")
    for name in _PARTS.split():
        options.section(name).rest("*")
    converters = (options.get("model") or {}).get("converters")
    for name in _QUANTIZED.split():
        options.section(name).rest("*")
        if converters and options.get(name) is not None:
            options.note(name, "not modelled", "products in 8 bits are taken as those of 16")
    options.rest("use_for_integration_test")
    return TrainingPlan(
        model=model, config=config, task="denoise" if draws else "sft", picture=picture, micro_batch=batch,
        accumulate=accumulate or 1, length=length, dtype=_DTYPES[dtype],
        autocast=autocast, checkpoints="blocks" if draws and checkpoints != "none" else checkpoints,
        checkpoint_every=1 if draws else every, optimizer=optimizer,
        updates_in_backward=in_backward, clips=clips and not in_backward, compiles=compiles, ranks=ranks,
        sharding=sharding, parallel=parallel)


def _read_model(options: Options, launch: JobLaunch) -> tuple[str, Mapping[str, Any] | None]:
    """The model's name, and its sizes where no published model has them."""
    part = options.section("model")
    name = part.text("name", "llama3", means="family of the model")
    flavor = part.text("flavor", "debugmodel", means="size of the model")
    name = name.removesuffix("_ft").removesuffix("_simple_fsdp").rsplit(".", 1)[-1]
    family, own = _FLAVORS.get(name, {}), _SIZES.get((name, flavor.lower()))
    sizes = {size.lower(): model for size, model in family.items()}
    found = sizes.get(flavor.lower())
    if name == "transformers_modeling_backend":  # experiments/transformers_modeling_backend/__init__.py
        found = options.section("hf_transformers").needed("model", "this backend needs it", means="model")
        known = find_config(found, launch.files)
        if flavor == "debugmodel" and known:
            own = {**known, **_SMALL}
            own.pop("layer_types", None)
    if own is not None:
        part.note("flavor", "understood", "by its sizes")
    elif found is None:
        part.assume("flavor", f"{name} {flavor} has no published shape: give its config.json by --model FOLDER"
                    f"{find_close(name, _FLAVORS) or find_close(flavor, family)}")
    else:
        part.note("flavor", "understood", f"the shape of {found}")
    part.leave_out("converters", "layers that it replaces, such as those of float8, are taken as they were")
    part.rest("hf_assets_path tokenizer_path print_after_conversion norm_type")
    return found or f"torchtitan/{name}-{flavor}", own


def _read_picture(options: Options, sharding: Sharding | None) -> PicturePlan:
    """models/flux/train.py: each pass encodes its images and texts, in the dtype of passes where ranks shard."""
    size = options.section("training").count("img_size", 256, means="pixels of an image, each side")
    encoder = options.section("encoder")
    tokens = encoder.count("max_t5_encoding_len", 512, means="tokens of a text")
    encoder.rest("t5_encoder clip_encoder autoencoder_path")
    options.section("inference").rest("*")
    dtype = (sharding.dtype if sharding is not None and sharding.kind == "fsdp" else None) or "fp32"
    return PicturePlan(height=size, width=size, image_dtype=dtype, text_dtype=dtype, text_tokens=tokens)


def _read_ranks(options: Options, training: Options,
                launch: JobLaunch) -> tuple[int, Sharding | None, str | None, ModelParallel | None]:
    """Ranks, how they share the model, the dtype of autocast, and how they divide the model itself: without sharding
    passes run under autocast (job_config.py, `mixed_precision_param`).
    """
    part = options.section("parallelism")
    if (shard := part.number("data_parallel_shard_degree", -1, least=-1)) == 0:
        raise part.fail("data_parallel_shard_degree", "must be -1, which is all ranks, or at least 1")
    replicas = part.count("data_parallel_replicate_degree", 1)
    sizes: dict[str, Any] = {name: part.count(f"{name}_parallel_degree", 1) for name in (
        "tensor", "pipeline", "context", "expert")}
    parallel = ModelParallel(**sizes, replicas=replicas)
    others = parallel.size
    given = launch.ranks
    ranks = given or max(max(1, shard) * replicas * others, parallel.expert)
    if ranks % (others * replicas) or shard > 0 and shard * replicas * others != ranks:
        raise part.fail("data_parallel_shard_degree", f"degrees of {max(1, shard)} x {replicas} x {others} are not the "
                        f"{ranks} ranks of the job; torchtitan refuses it")
    if shard < 0:
        shard = ranks // (others * replicas)
        part.note("data_parallel_shard_degree", "understood" if given else "assumed",
                  f"all ranks: {ranks}" + ("" if given else "; give their number by --world"))
    policy = part.text("fsdp_reshard_after_forward", "default", choices=("default", "always", "never"))
    said = training.text("mixed_precision_param", "bfloat16", choices=_DTYPES, means="of passes")
    param = _DTYPES[said]
    training.text("mixed_precision_reduce", "float32", choices=("float32",))
    offloads = training.flag("enable_cpu_offload")
    if others > 1 or parallel.expert > 1:
        name = options.get("model") or {}
        has_experts = str(name.get("name")).startswith(_WITH_EXPERTS) or "-a" in str(name.get("flavor")).lower()
        parallel = _divide(part, replace(parallel, offloads=offloads), shard, policy, has_experts)
    part.rest("*")
    if others > 1 or parallel.expert > 1:
        return ranks, None, None, parallel
    autocast = None if param == "fp32" else param
    if ranks == 1:
        return 1, None, autocast, None
    if shard == 1 and replicas > 1:
        return ranks, Sharding(kind="ddp"), autocast, None
    return ranks, Sharding(kind="fsdp", reshards=policy != "never", offloads=offloads, replicas=replicas, dtype=param,
                           reduce_dtype="fp32"), None, None


def _divide(part: Options, parallel: ModelParallel, shard: int, policy: str | None,
            has_experts: bool) -> ModelParallel:
    """How ranks divide a model. Pipelines keep what they gathered: models/llama3/infra/parallelize.py, `apply_fsdp`"""
    schedule, virtual = "1F1B", 1
    if parallel.pipeline > 1:
        schedule = part.text("pipeline_parallel_schedule", "1F1B", means="order of passes")
        known = {name.lower(): name for name in SCHEDULES}
        if schedule.lower() not in known:
            part.note("pipeline_parallel_schedule", "not modelled", f"{schedule}: 1F1B is taken")
        schedule = known.get(schedule.lower(), "1F1B")
        virtual = 1 if schedule in ("1F1B", "GPipe") else 2  # distributed/pipeline_parallel.py: two where nothing says
        if any(part.get(name) is not None for name in (
                "module_fqns_per_model_part", "pipeline_parallel_layers_per_stage",
                "pipeline_parallel_first_stage_less_layers")):
            part.assume("pipeline_parallel_schedule", f"{schedule}, whose stages hold equally many blocks")
    if parallel.expert > 1:
        parallel = divide_each_expert(part, "expert_tensor_parallel_degree", parallel)
    elif parallel.tensor > 1 and has_experts:  # distributed/expert_parallel.py, `TensorParallel`
        part.assume("expert_tensor_parallel_degree", f"experts are whole, on {parallel.tensor} ranks that divide "
                    "tensors: as many bytes, and tokens are sent in the place of sums")
        parallel = replace(parallel, expert=parallel.tensor)
    keeps = policy == "never" or policy == "default" and parallel.pipeline > 1
    if shard * parallel.context == 1:
        part.assume("data_parallel_shard_degree", "one rank of each part: passes in bfloat16, where torchtitan takes "
                    "float32 without ranks that shard (distributed/utils.py, `maybe_enable_amp`)")
    return replace(parallel, schedule=schedule, virtual=virtual, sharding=(
        "ddp" if shard * parallel.context == 1 else "fsdp_kept" if keeps else "fsdp"))


def _read_optimizer(part: Options) -> tuple[str, bool]:
    name = part.text("name", "AdamW", means="optimizer")
    how = part.text("implementation", "fused", choices=("fused", "foreach", "for-loop"))
    if name not in ("Adam", "AdamW"):
        raise part.fail("name", f"torchtitan has Adam and AdamW alone{find_close(name, ['Adam', 'AdamW'])}")
    in_backward = part.flag("early_step_in_backward")
    part.rest("lr eps beta1 beta2 weight_decay mu *")
    return ("adamw_fused" if how == "fused" else "adamw"), in_backward


def _read_checkpoints(options: Options) -> tuple[Checkpoints, int]:
    """How blocks are run again, and of how many one is (distributed/activation_checkpoint.py)."""
    part = options.section("activation_checkpoint")
    mode = part.text("mode", "selective", choices=("none", "selective", "full", "memory_budget"),
                     means="what is run again in backward")
    found: tuple[Checkpoints, int] = ("none" if mode == "none" else "blocks"), 1
    if mode == "selective" and part.get("selective_ac_option") == "op":
        part.note("selective_ac_option", "understood", "attention and every second product keep their results")
        found = "operators", 1
    elif mode == "selective":
        found = "blocks", part.count("selective_ac_option", 2, means="of so many blocks one is run again")
    elif mode == "memory_budget":
        part.note("mode", "not modelled", "all blocks are taken to be run again")
    part.rest("selective_ac_option early_stop preserve_rng_state determinism_check debug per_op_* memory_budget "
              "visualize_*")
    return found


def _read_compile(options: Options, training: Options) -> bool:
    found = training.flag("compile")
    if (part := options.part("compile")) is not None:
        components = part.words("components", ("model", "loss"))
        found = part.flag("enable") and "model" in components
        part.rest("*")
    return found


def _change_batch(options: Options, plan: TrainingPlan, wanted: int) -> list[Edit] | None:
    if plan.parallel is not None and plan.parallel.pipeline > 1:  # whose micro-batches are parts of that of a device
        return set_option("parallelism.pipeline_parallel_microbatch_size")(options, plan, wanted)
    if "batch_size" in (options.get("training") or {}):  # of versions that have no batch of all ranks
        return set_option("training.batch_size")(options, plan, wanted)
    return set_batch("training.local_batch_size", whole="training.global_batch_size")(options, plan, wanted)


def _is_file(data: Mapping[str, Any]) -> bool:
    model = data.get("model")
    return isinstance(model, Mapping) and "flavor" in model and bool({"training", "parallelism", "job"} & set(data))


TORCHTITAN = JobProgram(
    name="torchtitan", version="0.2.2", source="pytorch/torchtitan torchtitan/config/job_config.py", read=read,
    is_file=_is_file, commands=("torchtitan.train", "torchtitan/train.py"), config="job.config_file",
    changes={"batch": _change_batch, "checkpoints": set_option("activation_checkpoint.mode", "full"),
             "length": set_option("training.seq_len")})
