"""Of a row of Megatron-LM what its arguments make: the configuration of `megatron-core`, and the model of a rank."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

VOCABULARY = 50257  # of GPT-2, whose files the tests read
LAYOUT = "--pipeline-model-parallel-layout"
Settings = dict[str, Any]


#: Arguments of Megatron: of the runs of ``benchmarks/truth/megatron_b200.json``, and of Megatron-Bridge's recipe
#: moonlight_16b_pretrain_8gpu_h100_bf16_config (at 600d069) with the model's config.json. Its "--fp8-recipe" stands
#: there by default, also in 16 bits, where the optimizer takes it for parameters of 8.
_RECIPES: dict[str, Settings] = json.loads(Path(__file__).with_name("megatron_recipes.json").read_text())


def row_of_b200(told: Settings) -> Settings:
    """A run on 8 B200 as a row of the table of published runs. Its memory is that of any number of micro-batches from
    the depth of the pipeline on, as the source's figures show, so four of them run. The source tells PyTorch 2.10,
    whose workspaces of cuBLAS on Blackwell were those of older cards (pytorch/pytorch#175344 came after).
    """
    tp, pp = map(int, told["parallel"].removeprefix("tp").split("pp"))
    return {
        "id": f"b200-{told['case']}", "hardware": {"gpu": "B200 180GB", "gpus": 8, "gpus_per_node": 8},
        "source": {"repo": "MooreThreads/SimuMax", "commit": "4dcaae5", "date": "2026"},
        "model": {"family": "gpt", "layers": told["layers"], "hidden": 8192, "heads": 64, "seq_len": told["sequence"]},
        "training": {"micro_batch": told["micro_batch"], "micro_batches_per_step": min(4, told["micro_batches"]),
                     "deterministic": False, "transformer_impl": "transformer_engine", "other_args": _RECIPES["b200"],
                     "env": {"CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8"}},
        "parallel": {"tp": tp, "pp": pp, "cp": 1, "ep": 1, "sp": tp > 1, "fsdp": {"degree": 8 // tp // pp}},
        "measured": {"memory_gib": told["peak_allocated_gib"]}}


def with_recipe(row: Settings) -> Settings:  # a row, with what its recipe says where it is one of Megatron-Bridge
    if row["source"]["repo"] != "NVIDIA-NeMo/Megatron-Bridge":
        return row
    told = {"other_args": _RECIPES["moonlight"], "transformer_impl": "transformer_engine", "deterministic": False}
    return {**row, "training": {**row["training"], **told}}


def padded_vocabulary(arguments: Settings, tp: int) -> int:
    """Rows of the embedding: a multiple of 128 for every rank (megatron/training/vocab_utils.py)."""
    size = int(arguments.get("--vocab-size", VOCABULARY)) + int(arguments.get("--vocab-extra-ids", 0))
    multiple = int(arguments.get("--make-vocab-size-divisible-by", 128)) * tp
    return -(-size // multiple) * multiple


def count_layers(row: Settings) -> tuple[int, int | None]:  # of the model, and the parts of it that each rank holds
    given, pp, layers = row["training"]["other_args"], row["parallel"]["pp"], row["model"]["layers"]
    if LAYOUT in given:
        from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
        return layers, PipelineParallelLayerLayout.get_num_stages_from_str(given[LAYOUT]) // pp
    if "--num-layers-per-virtual-pipeline-stage" in given:
        return layers, layers // pp // int(given["--num-layers-per-virtual-pipeline-stage"])
    parts = given.get("--num-virtual-stages-per-pipeline-rank")
    return layers, None if parts is None else int(parts)


#: Arguments whose number is an option of the same name, or of another.
_COUNTS = ("--ffn-hidden-size", "--num-query-groups", "--kv-channels", "--expert-tensor-parallel-size",
           "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers", "--wgrad-deferral-limit",
           "--microbatch-group-size-per-virtual-pipeline-stage", "--recompute-num-layers", "--moe-router-group-topk",
           "--moe-router-num-groups", "--moe-ffn-hidden-size", "--moe-shared-expert-intermediate-size", "--q-lora-rank",
           "--kv-lora-rank", "--mtp-num-layers", "--qk-head-dim", "--qk-pos-emb-head-dim", "--v-head-dim")
_FACTORS = ("--moe-router-topk-scaling-factor", "--rotary-scaling-factor", "--mscale", "--mscale-all-dim")
_RENAMED = {"--microbatch-group-size-per-virtual-pipeline-stage": "microbatch_group_size_per_vp_stage",
            **{f"--decoder-{end}-pipeline-num-layers": f"num_layers_in_{end}_pipeline_stage"
               for end in ("first", "last")}}


def read_numbers(given: Settings) -> Settings:
    """
    >>> read_numbers({"--kv-channels": "128", "--decoder-last-pipeline-num-layers": 2, "--swiglu": True})
    {'kv_channels': 128, 'num_layers_in_last_pipeline_stage': 2}
    """
    return {_RENAMED.get(flag, flag.strip("-").replace("-", "_")): kind(given[flag])
            for kind, flags in ((int, _COUNTS), (float, _FACTORS)) for flag in flags if flag in given}


def transformer_config(row: Settings) -> Any:  # what `core_transformer_config_from_args` makes of the test's arguments
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig
    from torch.nn import functional

    model, parallel, given = row["model"], row["parallel"], row["training"]["other_args"]
    dtype = torch.float16 if "--fp16" in given else torch.bfloat16
    pp, (layers, virtual) = parallel["pp"], count_layers(row)
    options: Settings = dict(
        num_layers=layers, hidden_size=model["hidden"], num_attention_heads=model["heads"],
        tensor_model_parallel_size=parallel["tp"], pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=virtual if virtual and virtual > 1 else None,
        context_parallel_size=parallel["cp"], expert_model_parallel_size=parallel["ep"],
        sequence_parallel=bool(parallel["sp"]) and parallel["tp"] > 1,
        bf16=dtype is torch.bfloat16, fp16=dtype is torch.float16, params_dtype=dtype, pipeline_dtype=dtype,
        attention_softmax_in_fp32="--attention-softmax-in-fp32" in given,
        apply_query_key_layer_scaling="--apply-query-key-layer-scaling" in given,
        gradient_accumulation_fusion="--no-gradient-accumulation-fusion" not in given,
        perform_initialization=False, use_cpu_initialization=False,
        add_bias_linear="--disable-bias-linear" not in given,
        bias_activation_fusion="--no-bias-gelu-fusion" not in given and "--disable-bias-linear" not in given,
        bias_dropout_fusion=True, masked_softmax_fusion=True, persist_layer_norm=True,
        qk_layernorm="--qk-layernorm" in given, hidden_dropout=float(given.get("--hidden-dropout", 0.1)),
        attention_dropout=float(given.get("--attention-dropout", 0.1)),
        normalization=given.get("--normalization", "LayerNorm"), cp_comm_type="p2p",
        deterministic_mode=bool(row["training"]["deterministic"]), batch_p2p_comm=virtual is None,
        overlap_p2p_comm=bool(virtual and virtual > 1), deallocate_pipeline_outputs=True,
        cross_entropy_loss_fusion="--cross-entropy-loss-fusion" in given,
        cross_entropy_fusion_impl=given.get("--cross-entropy-fusion-impl", "native"),
        calculate_per_token_loss="--calculate-per-token-loss" in given,
        pipeline_model_parallel_layout=given.get(LAYOUT),
        fine_grained_activation_offloading="--fine-grained-activation-offloading" in given,
        # which the release cannot with Megatron-FSDP: a plan of layers calls none of its hooks
        overlap_moe_expert_parallel_comm="--overlap-moe-expert-parallel-comm" in given
        and "--use-megatron-fsdp" not in given,
        fp8=given.get("--fp8-format"), fp8_recipe=given.get("--fp8-recipe", "delayed"),
        fp8_param="--fp8-param-gather" in given,
        use_fused_weighted_squared_relu="--use-fused-weighted-squared-relu" in given,
        apply_rope_fusion="--no-rope-fusion" not in given, tp_comm_overlap="--tp-comm-overlap" in given,
        account_for_embedding_in_pipeline_split="--account-for-embedding-in-pipeline-split" in given,
        account_for_loss_in_pipeline_split="--account-for-loss-in-pipeline-split" in given,
        defer_embedding_wgrad_compute="--defer-embedding-wgrad-compute" in given,
        rotary_interleaved="--rotary-interleaved" in given, recompute_granularity=given.get("--recompute-granularity"),
        recompute_method=given.get("--recompute-method"), **read_numbers(given))
    if "--swiglu" in given:
        options.update(activation_func=functional.silu, gated_linear_unit=True,
                       bias_activation_fusion="--no-bias-swiglu-fusion" not in given)
        # arguments.py: two thirds of four times the width, in 64s
        options.setdefault("ffn_hidden_size", int(4 * model["hidden"] * 2 / 3 / 64) * 64)
    if "--squared-relu" in given:
        from megatron.core.activations import squared_relu
        options["activation_func"] = squared_relu
    for flag in ("--recompute-modules", "--offload-modules"):
        if flag in given:
            options[flag.strip("-").replace("-", "_")] = given[flag].strip("[]").split()
    if "--multi-latent-attention" in given:
        options = {"q_lora_rank": None, "rope_type": given.get("--rope-type", "yarn"), **options}
    if "--num-experts" in given:
        options.update(moe_options(given))
    return (MLATransformerConfig if "--multi-latent-attention" in given else TransformerConfig)(**options)


def moe_options(given: Settings) -> Settings:  # of a mixture of experts
    options: Settings = dict(
        num_moe_experts=int(given["--num-experts"]), moe_router_topk=int(given.get("--moe-router-topk", 2)),
        moe_grouped_gemm="--moe-grouped-gemm" in given,
        moe_token_dispatcher_type=given.get("--moe-token-dispatcher-type", "allgather"),
        moe_router_pre_softmax="--moe-router-pre-softmax" in given,
        moe_router_score_function=given.get("--moe-router-score-function", "softmax"),
        moe_router_enable_expert_bias="--moe-router-enable-expert-bias" in given,
        moe_router_dtype=given.get("--moe-router-dtype"), moe_permute_fusion=False,
        moe_shared_expert_overlap="--moe-shared-expert-overlap" in given)
    # the highest expert alone without its softmax has no gradient, so these tests balance by sinkhorn
    alone = options["moe_router_topk"] == 1 and not options["moe_router_pre_softmax"]
    options.update(moe_router_load_balancing_type="sinkhorn" if alone else "aux_loss", moe_aux_loss_coeff=1e-2)
    if options["moe_router_score_function"] == "sigmoid":
        options.update(moe_router_load_balancing_type="seq_aux_loss")
    if "--moe-layer-freq" in given:
        options["moe_layer_freq"] = eval(given["--moe-layer-freq"])  # a sum of lists, as Megatron reads it
    return options


def build_chunks(row: Settings, config: Any) -> list[nn.Module]:
    """The parts of a GPT model that this rank of the pipeline holds."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.models.gpt.gpt_model import GPTModel

    given, model, parallel = row["training"]["other_args"], row["model"], row["parallel"]
    te = row["training"]["transformer_impl"] == "transformer_engine"
    chunks: list[nn.Module] = []
    for stage in range(config.virtual_pipeline_model_parallel_size or 1):
        vp = stage if config.virtual_pipeline_model_parallel_size else None
        if config.num_moe_experts:
            spec = specs.get_gpt_decoder_block_spec(config, use_transformer_engine=te, vp_stage=vp)
        elif te:
            spec = specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
        else:
            spec = specs.get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
        mtp = None
        if config.mtp_num_layers:  # whose layer is like the decoder's last one, which another stage may have
            last = spec if spec.layer_specs else specs.get_gpt_layer_with_transformer_engine_spec(
                config.num_moe_experts, config.moe_grouped_gemm, config.qk_layernorm, config.multi_latent_attention)
            mtp = specs.get_gpt_mtp_block_spec(config, last, te, vp_stage=vp)
        chunk = GPTModel(
            config, spec, vocab_size=padded_vocabulary(given, parallel["tp"]), max_sequence_length=model["seq_len"],
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp),
            share_embeddings_and_output_weights="--untie-embeddings-and-output-weights" not in given,
            position_embedding_type=given.get("--position-embedding-type", "learned_absolute"),
            rotary_percent=float(given.get("--rotary-percent", 1.0)), mtp_block_spec=mtp, vp_stage=vp)
        chunks.append(chunk)
    return chunks
