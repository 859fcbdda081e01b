"""Megatron-LM: the commands and scripts of `pretrain_gpt.py`, whose arguments describe the model too."""
from __future__ import annotations

from typing import Any

from ..model_name import find_config
from ..options import Options
from ..plan import ModelParallel, TrainingPlan
from ..program import JobLaunch, JobProgram, set_option
from . import megatron
from .trainer import accumulate_of

# Megatron-LM core 0.16, megatron/training/arguments.py, core/transformer/transformer_config.py

#: Tokens that tokenizers have (training/tokenizer/tokenizer.py, and the files that they load).
_VOCABULARIES = {"GPT2BPETokenizer": 50_257, "Llama2Tokenizer": 32_000}


def read(options: Options, launch: JobLaunch) -> TrainingPlan:
    """The plan of a command. Raises JobError for what Megatron's own checks refuse."""
    ranks, parallel = megatron.read_parallel(options, launch)
    parallel = parallel or ModelParallel()
    config = _read_model(options, launch, parallel)
    data = ranks // parallel.size
    batch = options.count("micro_batch_size", 1, means="sequences of a pass of one device")
    accumulate = accumulate_of(options, "global_batch_size", batch, data) or 1
    length = options.number("seq_length", least=1, means="tokens of a sequence")
    if length is None:
        raise options.fail("seq_length", "is not there, and Megatron-LM needs it")
    bf16, fp16 = options.flag("bf16"), options.flag("fp16")
    if not bf16 and not fp16:
        options.assume("bf16", "not given, so that Megatron-LM computes in float32: weights of 16 bits are taken")
    options.flag("accumulate_allreduce_grads_in_fp32")
    sharding = megatron.read_sharding(options, divides=False)
    name = "full" if options.get("recompute_granularity") else "none"
    if options.flag("recompute_activations"):
        name = "selective"
    plan = TrainingPlan(
        model=f"gpt-{config['num_hidden_layers']}x{config['hidden_size']}", config=config, micro_batch=batch,
        accumulate=accumulate, length=length, dtype="fp16" if fp16 else "bf16",
        checkpoints=megatron.read_checkpoints(options, name), optimizer=megatron.read_optimizer(options),
        clips=options.fraction("clip_grad", 1.0) > 0, ranks=ranks, sharding=sharding,
        parallel=megatron.share_states(parallel, sharding, ranks))
    options.finish("megatron", "megatron_lm")
    return plan


def _read_model(options: Options, launch: JobLaunch, parallel: ModelParallel) -> dict[str, Any]:
    """The config of transformers' model of these sizes."""
    layers, width, heads = (options.number(name, least=1, means=means) for name, means in (
        ("num_layers", "blocks"), ("hidden_size", "channels"), ("num_attention_heads", "heads of attention")))
    for name, value in (("num_layers", layers), ("hidden_size", width), ("num_attention_heads", heads)):
        if value is None:
            raise options.fail(name, "is not there, and Megatron-LM needs it")
    assert layers and width and heads
    gated = options.flag("swiglu")
    usual = int(4 * width * 2 / 3 / 64) * 64 if gated else 4 * width
    inner = options.count("ffn_hidden_size", usual)
    groups = options.count("num_query_groups", 1) if options.flag("group_query_attention") else heads
    norm = options.text("normalization", "LayerNorm")
    config: dict[str, Any] = {
        "num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": groups,
        "head_dim": options.number("kv_channels", least=1) or width // heads, "intermediate_size": inner,
        "vocab_size": _read_vocabulary(options, launch, parallel.tensor), "max_position_embeddings": max(
            int(options.get("max_position_embeddings") or 0), int(options.get("seq_length") or 0)),
        "tie_word_embeddings": not options.flag("untie_embeddings_and_output_weights"), "use_cache": False,
        "attention_dropout": options.fraction("attention_dropout", 0.1)}
    dropout, has_bias = options.fraction("hidden_dropout", 0.1), not options.flag("disable_bias_linear")
    has_qk_norm, has_qkv_bias = options.flag("qk_layernorm"), options.flag("add_qkv_bias")
    positions = options.text("position_embedding_type", "learned_absolute")
    squared = options.flag("squared_relu")
    if (experts := options.number("num_experts", least=1)) is not None:
        return {**config, **_read_experts(options, experts, inner)}
    if gated:
        if norm != "RMSNorm":
            options.assume("normalization", f"{norm}: RMSNorm, which has no shift")
        kind = "qwen3" if has_qk_norm else "qwen2" if has_qkv_bias else "llama"
        return {**config, "model_type": kind, "hidden_act": "silu"}
    if positions == "learned_absolute":
        options.assume("position_embedding_type", "rotary positions in the place of a table of them")
    return {**config, "model_type": "starcoder2", "hidden_act": "relu2" if squared else "gelu_pytorch_tanh", "use_bias":
            has_bias, "residual_dropout": dropout, "embedding_dropout": dropout}


def _read_experts(options: Options, experts: int, inner: int) -> dict[str, Any]:
    each = options.count("moe_ffn_hidden_size", inner)
    shared = options.number("moe_shared_expert_intermediate_size", least=1)
    if str(options.get("moe_layer_freq") or 1) != "1":
        options.note("moe_layer_freq", "not modelled", "every block is taken to have experts")
    megatron.read_capacity(options)
    chosen = {"num_experts_per_tok": options.count("moe_router_topk", 2, means="experts of a token")}
    if shared is not None:
        return {**chosen, "model_type": "qwen2_moe", "num_experts": experts, "moe_intermediate_size": each,
                "shared_expert_intermediate_size": shared, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return {**chosen, "model_type": "mixtral", "num_local_experts": experts, "intermediate_size": each}


def _read_vocabulary(options: Options, launch: JobLaunch, tensor: int) -> int:
    """Tokens, filled up so that ranks divide them (training/utils/vocab.py, `calculate_padded_vocab_size`)."""
    padded = options.number("padded_vocab_size", least=1)
    if padded is not None:
        return padded
    kind = options.text("tokenizer_type", "GPT2BPETokenizer")
    size = options.number("vocab_size", least=1, means="tokens of the vocabulary") or _VOCABULARIES.get(kind)
    if size is None and options.get("tokenizer_model") is not None:
        size = find_config(str(options.get("tokenizer_model")), launch.files).get("vocab_size")
    if size is None:
        size = 128_000
        options.assume("vocab_size", f"{kind} of {size:,} tokens: nothing says how many it has; give --vocab-size")
    multiple = options.count("make_vocab_size_divisible_by", 128) * tensor
    return -(-size // multiple) * multiple


MEGATRON_LM = JobProgram(
    name="Megatron-LM", version="core 0.16", source="NVIDIA/Megatron-LM megatron/training/arguments.py", read=read,
    commands=("pretrain_gpt.py",), config="yaml_cfg",
    changes={"batch": megatron.CHANGE_BATCH, "checkpoints": megatron.set_checkpoints,
             "length": set_option("seq_length")})
