"""torchtune: its YAML, and ``tune run [torchrun's options] RECIPE --config FILE key=value``."""
from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..options import Options
from ..plan import Adapter, Checkpoints, FakeQuantization, Sharding, Task, TrainingPlan
from ..program import JobLaunch, JobProgram, set_batch, set_option
from .omegaconf import resolve_references
from .trainer import PAGED, PAGED_ADAMW, PAGED_ADAMW8BIT, divide_model, reference_of

# torchtune 0.7.0, recipes/*.py, torchtune/models/*/_model_builders.py and torchtune/modules/

#: What builders make, without lora_ and qlora_ before and _base or _instruct behind.
_MODELS = {
    "llama2_7b": "meta-llama/Llama-2-7b-hf", "llama2_13b": "meta-llama/Llama-2-13b-hf",
    "llama2_70b": "meta-llama/Llama-2-70b-hf", "code_llama2_7b": "codellama/CodeLlama-7b-hf",
    "llama3_8b": "meta-llama/Meta-Llama-3-8B", "llama3_70b": "meta-llama/Meta-Llama-3-70B",
    "llama3_1_8b": "meta-llama/Llama-3.1-8B", "llama3_1_70b": "meta-llama/Llama-3.1-70B",
    "llama3_1_405b": "meta-llama/Llama-3.1-405B", "llama3_2_1b": "meta-llama/Llama-3.2-1B",
    "llama3_2_3b": "meta-llama/Llama-3.2-3B", "llama3_3_70b": "meta-llama/Llama-3.3-70B-Instruct",
    "llama4_scout_17b_16e": "meta-llama/Llama-4-Scout-17B-16E",
    "llama4_maverick_17b_128e": "meta-llama/Llama-4-Maverick-17B-128E",
    "llama3_2_vision_11b": "meta-llama/Llama-3.2-11B-Vision", "llama3_2_vision_90b": "meta-llama/Llama-3.2-90B-Vision",
    "gemma_2b": "google/gemma-2b", "gemma_7b": "google/gemma-7b", "gemma2_2b": "google/gemma-2-2b",
    "gemma2_9b": "google/gemma-2-9b", "gemma2_27b": "google/gemma-2-27b", "mistral_7b": "mistralai/Mistral-7B-v0.1",
    "phi3_mini": "microsoft/Phi-3-mini-4k-instruct", "phi4_14b": "microsoft/phi-4", "qwen2_0_5b": "Qwen/Qwen2-0.5B",
    "qwen2_1_5b": "Qwen/Qwen2-1.5B", "qwen2_7b": "Qwen/Qwen2-7B",
    **{f"qwen2_5_{size.lower().replace('.', '_')}": f"Qwen/Qwen2.5-{size}"
       for size in ("0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B")},
    **{f"qwen3_{size.lower().replace('.', '_')}": f"Qwen/Qwen3-{size}"
       for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")}}
#: Models that are written out by their sizes: of which shape those are.
_WRITTEN = {(22, 32, 4, 2048): "TinyLlama/TinyLlama_v1.1", (32, 32, 32, 4096): "meta-llama/Llama-2-7b-hf"}
_TARGETS = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
_MLP = ("gate_proj", "up_proj", "down_proj")
_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj",
          "up_proj": "gate_up_proj"}  # of Phi, in transformers
_LENGTH = 4096  # where nothing bounds the rows of a data set

_EIGHT = "its states of 8 bits, as those of bitsandbytes"
_OPTIMIZERS = {
    "torch.optim.AdamW": ("adamw", ""), "torch.optim.Adam": ("adam", ""), "torch.optim.SGD": ("sgd", ""),
    "torch.optim.adamw.AdamW": ("adamw", ""),
    "bitsandbytes.optim.PagedAdamW8bit": (PAGED_ADAMW8BIT, PAGED), "bitsandbytes.optim.AdamW8bit": ("adamw8bit", ""),
    "bitsandbytes.optim.PagedAdamW": (PAGED_ADAMW, PAGED), "bitsandbytes.optim.AdamW": ("adamw_fused", ""),
    "bitsandbytes.optim.PagedAdamW32bit": (PAGED_ADAMW, PAGED),
    "torchao.optim.AdamW8bit": ("adamw8bit", _EIGHT), "torchao.optim.AdamW4bit": (
        "adamw8bit", "its states have 4 bits; those of 8 are an upper bound"),
    "torchao.optim.AdamWFp8": ("adamw8bit", _EIGHT),
    "torchao.prototype.low_bit_optim.AdamW8bit": ("adamw8bit", _EIGHT),
    "torchao.prototype.low_bit_optim.CPUOffloadOptimizer": ("adamw_offloaded", "its states and gradients on the host"),
    "torchao.optim.CPUOffloadOptimizer": ("adamw_offloaded", "its states and gradients on the host")}
_TASKS: dict[str, Task] = {"DPOLoss": "dpo", "RSOLoss": "dpo", "SimPOLoss": "simpo", "PPOLoss": "policy",
                           "GRPOLoss": "policy", "GRPOSimpleLoss": "policy", "GRPOWithChunkedOutputLoss": "policy",
                           "GRPOCompletionLoss": "policy", "LinearGRPOLoss": "policy"}


def read(options: Options, launch: JobLaunch) -> TrainingPlan:
    """The plan of a recipe. Raises JobError for what torchtune refuses, and for what has no training step."""
    options.layers = [(document, _read_word(values) if document.form == "command" else values)
                      for document, values in options.layers]
    resolve_references(options)
    name = "policy_model" if options.get("policy_model") is not None else "model"
    model, quantize, adapter = _read_model(options, name)
    if options.get("optimizer") is None:
        raise options.fail("optimizer", "is not there: a configuration of generation, evaluation or quantization has "
                           "no training step")
    task, chunks = _read_loss(options)
    dtype = options.text("dtype", "bf16", choices=("bf16", "fp32", "fp16"), means="of weights and passes")
    if dtype == "fp16":
        raise options.fail("dtype", "torchtune's recipes refuse fp16; give bf16 or fp32")
    optimizer, in_backward = _read_optimizer(options)
    batch = options.count("batch_size", 1, means="sequences of a pass of one device")
    accumulate = options.count("gradient_accumulation_steps", 1, means="passes of a step")
    if in_backward and accumulate > 1:
        raise options.fail("gradient_accumulation_steps", "torchtune refuses more than 1 with optimizer_in_bwd, which "
                           "frees each gradient at once")
    clips = options.get("clip_grad_norm") is not None and options.fraction("clip_grad_norm", 0.0) > 0
    if clips and in_backward:
        raise options.fail("clip_grad_norm", "torchtune refuses it with optimizer_in_bwd, which frees each gradient at "
                           "once")
    length, checkpoints = _read_length(options), _read_checkpoints(options)
    compiles = _read_compile(options)
    sharding = _read_sharding(options, launch)
    fakes, parallel = _read_fake_quantization(options), divide_model(options, launch, sharding, {
        name: f"{name}_parallel_dim" for name in ("tensor", "context", "expert")})
    options.finish("torchtune")
    return TrainingPlan(
        model=model, task=task, reference=reference_of(task, adapter),
        micro_batch=batch, accumulate=accumulate, length=length, dtype=dtype, quantize=quantize,
        unpacks=quantize is not None and not compiles,
        adapter=None if adapter is None else replace(adapter, dtype=dtype), checkpoints=checkpoints, loss_chunks=chunks,
        optimizer=optimizer, updates_in_backward=in_backward, clips=clips, compiles=compiles,
        fake_quantization=fakes, ranks=launch.size, sharding=sharding, parallel=parallel)


def _read_word(value: Any) -> Any:
    """A value of a command, which OmegaConf reads as YAML."""
    if isinstance(value, Mapping):
        return {name: _read_word(inner) for name, inner in value.items()}
    if not isinstance(value, str) or not (value.startswith("[") or value in ("True", "False", "None", "null")):
        return value
    try:
        return None if value == "null" else ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return [word.strip() for word in value.strip("[]").split(",") if word.strip()]


def _component(options: Options) -> str:
    return options.text("_component_", "")


def _read_model(options: Options, name: str) -> tuple[str, str | None, Adapter | None]:
    """The model, how frozen weights are held, and the adapters."""
    part = options.part(name)
    if part is None:
        raise options.fail(name, "is not there, and a recipe needs it: model: {_component_: "
                           "torchtune.models.llama3_1.llama3_1_8b}")
    path = _component(part)
    if path == "torchtune.modules.classifier_model" and part.get("base_model_path") is not None:
        path = part.text("base_model_path") or path
        part.assume("base_model_path", "the model's own head in the place of a classifier's")
    builder = path.rsplit(".", 1)[-1]
    plain = re.sub(r"^q?lora_|_(?:base|instruct)$", "", builder).replace("_reward", "")
    plain = re.sub(r"_(?:base|instruct)$", "", plain)
    sizes = tuple(part.get(key) for key in ("num_layers", "num_heads", "num_kv_heads", "embed_dim"))
    model = _MODELS.get(plain) or _WRITTEN.get(sizes)
    if model is None:
        known = ", ".join(list(_MODELS)[:3])
        raise part.fail("_component_", f"no builder of a model that is known: {known} ... and lora_, qlora_ before "
                        "them; it is not called")
    part.note("_component_", "understood", f"the shape of {model}")
    is_lora = builder.startswith(("lora_", "qlora_")) or part.get("lora_rank") is not None
    adapter = _read_adapter(part, plain) if is_lora else None
    quantize = "nf4" if part.flag("quantize_base") or builder.startswith("qlora_") else None
    if "vision" in plain or "llama4" in plain:
        part.leave_out("encoder_trainable decoder_trainable fusion_trainable", "which parts train is left out")
    part.rest("max_seq_len attn_dropout norm_eps vocab_size num_* embed_dim intermediate_dim rope_* lora_alpha "
              "image_size decoder_trainable encoder_trainable fusion_trainable num_classes scale_factor head_dim "
              "attn_bias")
    return model, quantize, adapter


def _read_adapter(part: Options, plain: str) -> Adapter:
    rank = part.count("lora_rank", 8, means="rank of adapters")
    names = part.words("lora_attn_modules", means="layers of attention with adapters")
    unknown = [name for name in names if name not in _TARGETS]
    if unknown:
        raise part.fail("lora_attn_modules", f"{unknown[0]} is none of {', '.join(_TARGETS)}")
    targets = [_TARGETS[name] for name in names]
    if part.flag("apply_lora_to_mlp", means="adapters in the MLP"):
        targets += _MLP
    if plain.startswith("phi"):
        targets = [_FUSED.get(name, name) for name in targets]
        part.assume("lora_attn_modules", "one adapter for each fused product, of which transformers' Phi has two")
    if part.flag("apply_lora_to_output"):
        targets.append("lm_head")
    part.number("lora_alpha")
    dropout = part.fraction("lora_dropout", 0.0)
    if not targets:
        raise part.fail("lora_attn_modules", "is empty, and no adapters are in the MLP: torchtune refuses it")
    return Adapter(r=rank, targets=tuple(dict.fromkeys(targets)), dropout=dropout)


def _read_loss(options: Options) -> tuple[Task, int | None]:
    """What a step trains for, and in how many parts the loss is computed (modules/loss/cross_entropy_loss.py: 8)."""
    part = options.section("loss")
    kind = _component(part).rsplit(".", 1)[-1]
    chunks = part.number("num_output_chunks", 8, least=1)
    part.rest("beta label_smoothing epsilon kl_coeff value_clip_range value_coeff ignore_index gamma *_coeff "
              "mask_ignored_tokens")
    if (task := _TASKS.get(kind)) is not None:
        if task == "policy":
            options.note("loss", "not modelled", f"{kind}: the rollout, rewards and values are left out; what is "
                         "profiled is the update")
        return task, None
    if kind == "LinearCrossEntropyLoss":
        options.note("loss", "understood", f"computed with the head in {chunks} parts")
        return "sft", chunks
    if "Chunked" in kind:
        options.assume("loss", f"{kind}: computed with the head in {chunks} parts; logits of 16 bits, which it keeps, "
                       "are left out")
        return "sft", chunks
    options.note("loss", "understood", "of all logits at once")
    return "sft", None


def _read_optimizer(options: Options) -> tuple[str, bool]:
    part = options.section("optimizer")
    kind = _component(part)
    if kind not in _OPTIMIZERS:
        raise part.fail("_component_", f"none of the optimizers that are known: {', '.join(_OPTIMIZERS)}; it is not "
                        "called")
    name, assumed = _OPTIMIZERS[kind]
    part.note("_component_", "assumed" if assumed else "understood", assumed or "optimizer")
    if part.flag("fused") and name == "adamw":
        name = "adamw_fused"
    part.rest("lr weight_decay betas eps momentum amsgrad foreach offload_gradients minimize optimizer_class nesterov "
              "dampening capturable block_size")
    return name, options.flag("optimizer_in_bwd", means="each parameter is updated as its gradient comes, then freed")


def _read_length(options: Options) -> int:
    tokenizer, data = options.section("tokenizer"), options.section("dataset")
    found = tokenizer.number("max_seq_len", least=1, means="tokens of a sequence at most")
    packed = data.flag("packed")
    for part in (tokenizer, data):
        part.rest("*")
    if found is not None:
        if not packed:
            options.assume("dataset", f"every row has {found:,} tokens: what the data set has is not known")
        return found
    if packed:
        raise options.fail("tokenizer", "torchtune refuses dataset.packed without tokenizer.max_seq_len")
    options.assume("tokenizer", f"every row has {_LENGTH:,} tokens: nothing bounds them (max_seq_len), and what the "
                   "data set has is not known")
    return _LENGTH


def _read_checkpoints(options: Options) -> Checkpoints:
    blocks = options.flag("enable_activation_checkpointing", means="blocks are run again in backward")
    if options.flag("enable_activation_offloading"):
        if not blocks:
            raise options.fail("enable_activation_offloading", "torchtune refuses it without "
                               "enable_activation_checkpointing: true")
        return "offloaded"
    if options.get("ac_mode") is not None:
        options.note("ac_mode", "not modelled", "all blocks are taken to be run again, or none")
        options.number("ac_option")
    return "blocks" if blocks else "none"


def _read_compile(options: Options) -> bool:
    if isinstance(options.get("compile"), Mapping):
        part = options.section("compile")
        compiles = part.flag("model", True)
        part.rest("loss optimizer_step scale_grads")
        return compiles
    return options.flag("compile")


def _read_sharding(options: Options, launch: JobLaunch) -> Sharding | None:
    """training/_distributed.py, `shard_model`: each layer by itself, the rest with the root, which stays whole."""
    reshards = options.flag("fsdp_reshard_after_forward", True)
    offloads = options.flag("fsdp_cpu_offload")
    layers = options.words("custom_sharded_layers")
    replicas = options.count("data_parallel_replicate_dim", 1)
    options.number("data_parallel_shard_dim", -1, least=-1)
    old = options.section("fsdp")
    offloads = old.flag("cpu_offload") or offloads
    old.rest("*")
    if launch.size == 1:
        return None
    return Sharding(kind="fsdp", reshards=reshards, offloads=offloads, replicas=replicas,
                    shares_ends="output" in layers or "tok_embeddings" in layers)


def _read_fake_quantization(options: Options) -> FakeQuantization | None:
    """training/quantization.py; recipes/qat_distributed.py prepares all linear layers."""
    part = options.part("quantizer")
    if part is None:
        return None
    name = part.text("_component_", means="weights are rounded to 4 bits and back in each pass") or ""
    group = part.count("groupsize", 256)
    part.rest("padding_allowed precision scales_precision inner_k_tiles")
    options.number("fake_quant_after_n_steps")
    if "Int4Weight" not in name:
        part.note("_component_", "not modelled", "weights and inputs are taken as they are")
        return None
    return FakeQuantization(group=group, activations="Int8DynAct" in name)


def _eight_bits(options: Options) -> str | None:
    """Bitsandbytes takes no ``fused``, and an edit takes nothing away."""
    return None if "fused" in (options.get("optimizer") or {}) else "bitsandbytes.optim.PagedAdamW8bit"


def _four_bits(options: Options) -> str | None:
    head, _, builder = str((options.get("model") or {}).get("_component_", "")).rpartition(".")
    plain = builder.removeprefix("lora_")
    has_one = plain != builder and not plain.startswith("qwen") and (head or None)  # Qwen's builders have no qlora_
    return f"{head}.qlora_{plain}" if has_one else None


def _is_file(data: Mapping[str, Any]) -> bool:
    parts = [data.get(name) for name in ("model", "policy_model", "tokenizer", "checkpointer")]
    named = [str(part.get("_component_", "")) for part in parts if isinstance(part, Mapping)]
    return any(name.startswith("torchtune.") for name in named)


TORCHTUNE = JobProgram(
    refuses_repeats=True,
    name="torchtune", version="0.7.0", source="pytorch/torchtune recipes", read=read, is_file=_is_file,
    commands=("tune run", "tune_run"), argument="recipe",
    config_names=("{}", "{}.yaml", "recipes/configs/{}.yaml"),
    config_copy="`tune cp {} FILE.yaml` copies it from torchtune",
    changes={"batch": set_batch("batch_size", "gradient_accumulation_steps"),
             "checkpoints": set_option("enable_activation_checkpointing", True),
             "loss": set_option("loss._component_", "torchtune.modules.loss.LinearCrossEntropyLoss"),
             "optimizer": set_option("optimizer._component_", _eight_bits),
             "quantize": set_option("model._component_", _four_bits),
             "length": set_option("tokenizer.max_seq_len")})
