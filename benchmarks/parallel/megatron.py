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
from benchmarks.parallel import transformer_engine
from benchmarks.parallel.megatron_model import Settings, build_chunks, transformer_config


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
        kinds = {"bf16": torch.bfloat16, "fp32": torch.float32}
        dtypes = {f"{part}-dtype".replace("-", "_"): kinds[given.get(f"--{part}-dtype", "fp32")]
                  for part in ("main-grads", "exp-avg", "exp-avg-sq")}
        settings = replace(settings, use_precision_aware_optimizer=True, fp8_recipe=given.get("--fp8-recipe"), **dtypes)
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
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
        parallel = self.row["parallel"]
        given = self.row["training"]["other_args"]
        parallel_state.destroy_model_parallel()
        get_moe_layer_wise_logging_tracker().clear()  # of another row, with as many layers
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
