"""Megatron-LM's functional tests, rebuilt around the models, optimizers and schedules of `megatron-core`.

``pretrain_gpt.py`` itself is in no package, so what it does between them is written here: the batch, the loss, the
wrapping and the order of a step (megatron/training/training.py, `train_step` and `get_model`).
"""
from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from analyzer.meta.value.expectation import expected_counts
from benchmarks.parallel import megatron_encoder, megatron_hybrid, transformer_engine

VOCABULARY = 50257  # of GPT-2, whose files the tests read
PATTERN, LAYOUT = "--hybrid-layer-pattern", "--pipeline-model-parallel-layout"
Settings = dict[str, Any]


#: Megatron's arguments of the runs of ``benchmarks/truth/megatron_b200.json``
_B200 = {"--swiglu": True, "--normalization": "RMSNorm", "--disable-bias-linear": True, "--num-query-groups": "8",
         "--untie-embeddings-and-output-weights": True, "--position-embedding-type": "rope", "--vocab-size": "128256",
         "--ffn-hidden-size": "28672", "--hidden-dropout": "0", "--attention-dropout": "0",
         "--use-distributed-optimizer": True, "--cross-entropy-loss-fusion": True, "--cross-entropy-fusion-impl": "te"}


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
                     "deterministic": False, "transformer_impl": "transformer_engine", "other_args": _B200,
                     "env": {"CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8"}},
        "parallel": {"tp": tp, "pp": pp, "cp": 1, "ep": 1, "sp": tp > 1, "fsdp": {"degree": 8 // tp // pp}},
        "measured": {"memory_gib": told["peak_allocated_gib"]}}


#: Of Megatron-Bridge's recipe moonlight_16b_pretrain_8gpu_h100_bf16_config (at 600d069), and of the model's config.json
_MOONLIGHT = {
    "--swiglu": True, "--normalization": "RMSNorm", "--disable-bias-linear": True, "--hidden-dropout": "0",
    "--untie-embeddings-and-output-weights": True, "--position-embedding-type": "rope", "--attention-dropout": "0",
    "--vocab-size": "163840", "--make-vocab-size-divisible-by": 1280, "--ffn-hidden-size": "11264",
    "--no-create-attention-mask-in-dataloader": True, "--cross-entropy-loss-fusion": True,
    "--cross-entropy-fusion-impl": "te", "--use-distributed-optimizer": True, "--overlap-grad-reduce": True,
    "--overlap-param-gather": True, "--ddp-average-in-collective": True, "--grad-reduce-in-bf16": True,
    "--use-precision-aware-optimizer": True, "--multi-latent-attention": True, "--qk-layernorm": True,
    "--fp8-recipe": "tensorwise",  # by default, also in 16 bits, where the optimizer takes it for parameters of 8
    "--kv-lora-rank": "512", "--qk-head-dim": "128", "--qk-pos-emb-head-dim": "64", "--v-head-dim": "128",
    "--rope-type": "rope", "--no-rope-fusion": True, "--num-experts": "64", "--moe-layer-freq": "([0]*1+[1]*26)",
    "--moe-ffn-hidden-size": "1408", "--moe-shared-expert-intermediate-size": "2816", "--moe-router-topk": "6",
    "--moe-shared-expert-overlap": True, "--moe-token-dispatcher-type": "alltoall", "--moe-grouped-gemm": True,
    "--moe-router-pre-softmax": True, "--moe-router-topk-scaling-factor": "2.446", "--moe-router-dtype": "fp32",
    "--moe-router-score-function": "sigmoid", "--moe-router-enable-expert-bias": True,
    "--expert-tensor-parallel-size": "1", "--recompute-granularity": "selective", "--recompute-modules": "core_attn"}


def with_recipe(row: Settings) -> Settings:  # a row, with what its recipe says where it is one of Megatron-Bridge
    if row["source"]["repo"] != "NVIDIA-NeMo/Megatron-Bridge":
        return row
    told = {"other_args": _MOONLIGHT, "transformer_impl": "transformer_engine", "deterministic": False}
    return {**row, "training": {**row["training"], **told}}


def padded_vocabulary(arguments: Settings, tp: int, words: int = VOCABULARY) -> int:
    """Rows of the embedding: a multiple of 128 for every rank (megatron/training/vocab_utils.py)."""
    size = int(arguments.get("--vocab-size", words)) + int(arguments.get("--vocab-extra-ids", 0))
    multiple = int(arguments.get("--make-vocab-size-divisible-by", 128)) * tp
    return -(-size // multiple) * multiple


def count_layers(row: Settings) -> tuple[int, int | None]:  # of the model, and the parts of it that each rank holds
    given, pp, layers = row["training"]["other_args"], row["parallel"]["pp"], row["model"]["layers"]
    if PATTERN in given:
        stages = megatron_hybrid.stages_of(given[PATTERN], pp)
        return sum(map(len, stages)), None if len(stages) == pp else len(stages) // pp
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
    family = model["family"].split()[0]
    if family in megatron_encoder.WORDS:
        build = {"bert": megatron_encoder.build_bert, "t5": megatron_encoder.build_t5}[family]
        return [build(row, config, padded_vocabulary(given, parallel["tp"], megatron_encoder.WORDS[family]))]
    chunks: list[nn.Module] = []
    for stage in range(config.virtual_pipeline_model_parallel_size or 1):
        if PATTERN in given:
            chunks.append(megatron_hybrid.build_hybrid(row, config, padded_vocabulary(given, parallel["tp"]), stage))
            continue
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


def wrap(row: Settings, config: Any, chunks: list[nn.Module]) -> tuple[list[Any], Any]:
    """Megatron's DDP around 16-bit modules, and its optimizer (megatron/training/training.py, `get_model`)."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    given = row["training"]["other_args"]
    muon = given.get("--optimizer") == "muon"
    distributed = "--use-distributed-optimizer" in given and not muon  # Muon's gives whole matrices to ranks
    overlap, sharded = "--overlap-grad-reduce" in given, "--use-megatron-fsdp" in given
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32="--fp16" not in given and "--grad-reduce-in-bf16" not in given,
        overlap_grad_reduce=overlap, use_distributed_optimizer=distributed,
        overlap_param_gather="--overlap-param-gather" in given,
        check_for_nan_in_grad=True, average_in_collective="--ddp-average-in-collective" in given,
        num_distributed_optimizer_instances=int(given.get("--num-distributed-optimizer-instances", 1)),
        use_megatron_fsdp=sharded, data_parallel_sharding_strategy="optim_grads_params" if sharded else "no_shard",
        bucket_size=40_000_000 if sharded and overlap else None)
    modules = [Float16Module(config, chunk.cuda()) for chunk in chunks]
    wrapper = FullyShardedDataParallel if sharded else DistributedDataParallel
    wrapped = [wrapper(config, ddp, module, disable_bucketing=number > 0)
               for number, module in enumerate(modules)]
    settings = OptimizerConfig(
        optimizer="adam", lr=1e-4, bf16=config.bf16, fp16=config.fp16, params_dtype=config.params_dtype,
        use_distributed_optimizer=distributed, clip_grad=1.0, log_num_zeros_in_grad=False,
        overlap_param_gather="--overlap-param-gather" in given)
    if "--use-precision-aware-optimizer" in given:
        half = torch.bfloat16
        settings = replace(settings, use_precision_aware_optimizer=True, main_grads_dtype=half, exp_avg_dtype=half,
                           exp_avg_sq_dtype=half, fp8_recipe=given["--fp8-recipe"])
    if muon:
        from megatron.core.optimizer.muon import get_megatron_muon_optimizer
        optimizer = get_megatron_muon_optimizer(
            settings, wrapped, layer_wise_distributed_optimizer="--use-distributed-optimizer" in given)
    else:
        optimizer = get_megatron_optimizer(settings, wrapped)
    if sharded and "_resume_" in row["source"]["path"]:  # states are made for what is loaded: load_checkpoint
        optimizer._init_optimizer_states_with_dummy_values()
    config.grad_scale_func = optimizer.scale_loss
    if overlap:
        syncs = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = syncs[0] if len(wrapped) == 1 else syncs
    if "--overlap-param-gather" in given:
        starts = [chunk.start_param_sync for chunk in wrapped]
        config.param_sync_func = starts[0] if len(wrapped) == 1 else starts
    from megatron.core.distributed import finalize_model_grads
    config.finalize_model_grads_func = finalize_model_grads
    return wrapped, optimizer


def note_backward(model: Any) -> None:
    """What Megatron-FSDP's first backward pass leaves since 41f3b6f308 (April 2026), which both of its rows run and the
    release does not: modules outside of layers, such as the last norm, gather no layers ahead any more.
    """
    from megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp import TrainingState
    from megatron.core.transformer.transformer_layer import TransformerLayer

    inside = {module for layer in model.modules() if isinstance(layer, TransformerLayer) for module in layer.modules()}
    for module in model.module.module.modules():
        if module not in inside:
            module._training_state = TrainingState.PRE_BACKWARD


def batches(row: Settings) -> Iterator[dict[str, Tensor]]:
    """What micro-batches put on the device, each of which its forward pass alone holds."""
    while True:
        yield make_batch(row)


def make_batch(row: Settings) -> dict[str, Tensor]:  # of a micro-batch; the mask is made by the data loader
    b, s = row["training"]["micro_batch"], row["model"]["seq_len"]
    s_local = s // row["parallel"]["cp"]
    whole = {name: torch.zeros(b, s, dtype=torch.int64, device="cuda") for name in ("tokens", "labels", "ids")}
    whole["loss_mask"] = torch.ones(b, s, dtype=torch.float32, device="cuda")
    if s_local != s:
        whole = {name: t[:, :s_local].contiguous() for name, t in whole.items()}
    if "--no-create-attention-mask-in-dataloader" not in row["training"]["other_args"]:
        whole["mask"] = torch.zeros(b, 1, s, s, dtype=torch.bool, device="cuda")[:, :, :s_local]
    return whole


def compute_loss(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """`loss_func` of pretrain_gpt.py."""
    losses = output.view(-1).float()
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses * mask)
    tokens = mask.sum().clone().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.clone().detach().view(1), tokens.view(1)])}


def forward_step(iterator: Iterator[dict[str, Tensor]], model: Any, plans: bool) -> tuple[Any, Callable[..., Any]]:
    """`forward_step` of pretrain_gpt.py; where it ``plans``, its layers run later, beside those of another batch."""
    batch = next(iterator)
    loss_mask = batch["loss_mask"]
    told = {"loss_mask": loss_mask} if model.config.mtp_num_layers else {}
    output = (model.build_schedule_plan if plans else model)(
        batch["tokens"], batch["ids"], batch.get("mask"), labels=batch["labels"], **told)
    return output, lambda out: compute_loss(loss_mask, out)


#: by how much of the mean the busiest expert is chosen more often than it, in training with an auxiliary loss (MaxVio
#: of a model of 1 billion parameters: Wang et al., Auxiliary-Loss-Free Load Balancing, arXiv 2408.15664, table 2)
UNEVEN = 0.72


def skew_of(experts: int, excess: float) -> float:
    """The exponent of Zipf's law by which the first of ``experts`` is chosen 1 + ``excess`` times as often as the mean.

    >>> round(skew_of(8, 0.72), 3), round(8 / sum(i ** -skew_of(8, 0.72) for i in range(1, 9)), 3)
    (0.444, 1.72)
    """
    low, high = 0.0, 8.0
    for _ in range(50):
        middle = (low + high) / 2
        above = experts / sum([(i + 1) ** -middle for i in range(experts)]) > 1 + excess
        low, high = (low, middle) if above else (middle, high)
    return low


def balanced_map(tokens: int, experts: int, k: int, device: Any, skew: float = 0.0) -> Tensor:
    """Which experts each token goes to: ``k`` of them in turn, or by Zipf's law of an exponent, no token twice to one.

    >>> balanced_map(4, 4, 2, "cpu").int().tolist()
    [[1, 1, 0, 0], [0, 0, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1]]
    >>> uneven = balanced_map(100, 4, 2, "cpu", -0.5)
    >>> uneven.sum(0).tolist(), set(uneven.sum(1).tolist())
    ([36, 41, 51, 72], {2})
    """
    if skew:
        counts = expected_counts(tokens * k, experts, skew=skew)
        ends = list(itertools.accumulate(counts))
        starts = torch.tensor([end - count for end, count in zip(ends, counts)], device=device)
        place = (torch.arange(tokens, device=device).unsqueeze(1) - starts.unsqueeze(0)) % tokens
        return place < torch.tensor(counts, device=device)
    first = torch.arange(tokens, device=device).unsqueeze(1) * k
    chosen = (torch.arange(experts, device=device).unsqueeze(0) - first) % experts
    return chosen < k


@contextmanager
def balanced_routing(skew: float = 0.0) -> Iterator[None]:
    """Megatron's routers with every expert given as many tokens, or by Zipf's law of the exponent ``skew``.
    Probabilities are computed as they are; which tokens go where depends on data and is told instead.
    """
    from megatron.core.transformer.moe import router

    choose = router.topk_routing_with_score_function
    sinkhorn = router.TopKRouter.sinkhorn_load_balancing

    def chosen(logits: Tensor, topk: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        probabilities, mapped = choose(logits, topk, *args, **kwargs)
        return probabilities, balanced_map(mapped.shape[0], mapped.shape[1], topk, mapped.device, skew)

    def balanced(self: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.sigmoid(logits) if self.topk == 1 else torch.softmax(logits, dim=-1, dtype=torch.float32)
        mapped = balanced_map(logits.shape[0], logits.shape[1], self.topk, logits.device, skew)
        return scores * mapped, mapped

    router.topk_routing_with_score_function = chosen
    router.TopKRouter.sinkhorn_load_balancing = balanced
    try:
        yield
    finally:
        router.topk_routing_with_score_function = choose
        router.TopKRouter.sinkhorn_load_balancing = sinkhorn


class Job:  # one rank of a test: its model, and a step of it
    def __init__(self, row: Settings, skew: float = 0.0) -> None:
        self.row, self.skew, self.passes = row, skew, 0

    def build(self) -> nn.Module:  # chunks wrapped; the optimizer holds float32 copies from here on
        from megatron.core import parallel_state, tensor_parallel
        parallel = self.row["parallel"]
        given = self.row["training"]["other_args"]
        parallel_state.destroy_model_parallel()
        config = transformer_config(self.row)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel["tp"], pipeline_model_parallel_size=parallel["pp"],
            virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
            context_parallel_size=parallel["cp"], expert_model_parallel_size=parallel["ep"],
            num_distributed_optimizer_instances=int(given.get("--num-distributed-optimizer-instances", 1)),
            expert_tensor_parallel_size=config.expert_tensor_parallel_size,
            order="tp-cp-ep-pp-dp" if "--use-tp-pp-dp-mapping" in given else "tp-cp-ep-dp-pp")
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        chunks = build_chunks(self.row, config)
        self.chunks, self.optimizer = wrap(self.row, config, chunks)
        self.config, self.iterator = config, batches(self.row)
        return nn.ModuleList(self.chunks)

    def forward(self, iterator: Any, model: Any, return_schedule_plan: bool = False) -> tuple[Any, Callable[..., Any]]:
        """`forward_step` of the test's script."""
        if self.passes and "--use-megatron-fsdp" in self.row["training"]["other_args"]:
            note_backward(model)
        self.passes += 1
        family = self.row["model"]["family"].split()[0]
        special = {"bert": megatron_encoder.forward_bert, "t5": megatron_encoder.forward_t5}.get(family)
        if special is not None:
            return special(self.row, model, compute_loss)
        return forward_step(iterator, model, return_schedule_plan)

    def step(self, *_: Any) -> None:  # `train_step` of megatron/training/training.py
        from megatron.core.pipeline_parallel import get_forward_backward_func
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        many = len(self.chunks) > 1
        with balanced_routing(self.skew):
            self.losses = get_forward_backward_func()(
                forward_step_func=self.forward,
                data_iterator=[self.iterator] * len(self.chunks) if many else self.iterator,
                model=self.chunks if many else self.chunks[0], forward_only=False,
                num_microbatches=self.row["training"]["micro_batches_per_step"],
                seq_length=self.row["model"]["seq_len"], micro_batch_size=self.row["training"]["micro_batch"])
        self.optimizer.step()


@contextmanager
def environment(row: Settings) -> Iterator[None]:
    """A block with the environment and the attention of the test, and Transformer Engine's stand-in."""
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in row["training"].get("env", {}).items()})
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):  # Megatron refuses to change its own
        os.environ.pop(name, None)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    try:
        with transformer_engine.fresh(row["training"]["other_args"].get("--attention-backend", "auto")):
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


prepare = Job
