"""Galvatron's memory profiles: a Llama of few layers, whose layers are Megatron's tensor-parallel ones, under FSDP1.

What its modules keep is written here around `megatron-core` (galvatron/core/runtime of the row's commit:
models/modules, parallel, redistribute and transformer). Its profiler subtracts the bytes after the backward pass from
the peak of forward and backward pass, and the row adds them again. Three things are read from the figures: sequences
are of 4096 tokens, not of the 2048 that the row tells (the cached angles of one layer are 2 MiB, the buffer of gathered
sequences is 32 MiB a sequence); the workspaces of cuBLAS are those of GPUs before Hopper (16.25 MiB); and the compiled
steps of the loss hold two tensors of the logits' size beside them.
"""
from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.parallel import transformer_engine

SEQUENCE = 4096
Settings = dict[str, Any]


class Exchange(torch.autograd.Function):
    """Activations (sequence, batch, width) between modules of which one holds whole sequences, and the other a part of
    the sequences of every rank of a group (redistribute.py)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, divides: bool) -> Tensor:
        ctx.group, ctx.divides = group, divides
        return (divide_sequences if divides else divide_batch)(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return (divide_batch if ctx.divides else divide_sequences)(gradient, ctx.group), None, None


def gather(x: Tensor, group: Any) -> Tensor:  # along the first dimension
    out = torch.empty(x.shape[0] * dist.get_world_size(group), *x.shape[1:], dtype=x.dtype, device=x.device)
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def part_of(x: Tensor, group: Any) -> Tensor:  # of this rank, of the first dimension
    return x.chunk(dist.get_world_size(group))[dist.get_rank(group)].contiguous()


def divide_sequences(x: Tensor, group: Any) -> Tensor:
    return part_of(gather(x.transpose(0, 1), group).transpose(0, 1), group)


def divide_batch(x: Tensor, group: Any) -> Tensor:
    return part_of(gather(x, group).transpose(0, 1), group).transpose(0, 1).contiguous()


class CrossEntropy(torch.autograd.Function):
    """Of 16-bit logits, over which exponentials and then gradients are written (transformer/fused_kernels.py)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: Any) -> Tensor:
        highest = logits.max(dim=-1)[0]
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        lower = logits - highest.unsqueeze(-1)
        chosen, exponentials = lower.gather(-1, target.unsqueeze(-1)).squeeze(-1), lower.exp()
        sums = torch.cat([chosen, exponentials.sum(-1)])
        logits.copy_(exponentials)
        del lower, exponentials
        dist.all_reduce(sums, group=group)
        chosen, total = sums.chunk(2)
        logits.copy_(logits / total.unsqueeze(-1))
        ctx.save_for_backward(logits, target)
        return total.log() - chosen

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        shares, target = ctx.saved_tensors
        shares.scatter_add_(-1, target.unsqueeze(-1), torch.full_like(target.unsqueeze(-1), -1, dtype=shares.dtype))
        return shares.mul_(gradient.unsqueeze(-1)), None, None


class Embedding(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        from megatron.core.tensor_parallel import VocabParallelEmbedding
        self.words = VocabParallelEmbedding(
            job.row["model"]["vocab"], job.row["model"]["hidden"], init_method=nn.init.normal_,
            reduce_scatter_embeddings=job.vocab_config.sequence_parallel, config=job.vocab_config,
            tp_group=job.vocab_group)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.words(ids)
        return x if self.words.reduce_scatter_embeddings else x.transpose(0, 1).contiguous()


class Layer(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
        model = job.row["model"]
        width, wide, self.heads = model["hidden"], model["ffn"], model["heads"] // job.row["parallel"]["tp"]
        options: Settings = dict(config=job.config, init_method=nn.init.normal_, bias=False, skip_bias_add=True,
                                 tp_group=job.group)
        self.norm, self.ffn_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = ColumnParallelLinear(width, 3 * width, **options)
        self.out = RowParallelLinear(width, width, input_is_parallel=True, **options)
        self.wide = ColumnParallelLinear(width, 2 * wide, **options)
        self.narrow = RowParallelLinear(wide, width, input_is_parallel=True, **options)
        self.angles: Tensor | None = None            # of every position, kept from the first step on
        self.size = width // model["heads"]

    def attend(self, x: Tensor) -> Tensor:
        if self.angles is None:
            self.angles = torch.zeros(SEQUENCE, 1, 1, self.size, device=x.device)
        mixed = self.qkv(x)[0]
        q, k, v = mixed.view(*mixed.shape[:2], self.heads, -1).split(self.size, dim=-1)
        q, k = (transformer_engine.apply_rotary_pos_emb(t, self.angles) for t in (q, k))
        q, k, v = (t.transpose(0, 1).contiguous().transpose(1, 2) for t in (q, k, v))
        del mixed
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(found.permute(2, 0, 1, 3).flatten(2).contiguous())[0]
        return result

    def forward(self, x: Tensor) -> Tensor:
        from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
        x = self.attend(self.norm(x)) + x
        out: Tensor = self.narrow(bias_swiglu_impl(self.wide(self.ffn_norm(x))[0], None))[0] + x
        return out


class Head(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        from megatron.core.tensor_parallel import ColumnParallelLinear
        model, self.group = job.row["model"], job.vocab_group
        self.words = ColumnParallelLinear(model["hidden"], model["vocab"], config=job.vocab_config, bias=False,
                                          init_method=nn.init.normal_, tp_group=job.vocab_group)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        losses: Tensor = CrossEntropy.apply(self.words(x)[0], labels, self.group)  # type: ignore[no-untyped-call]
        return losses


class Model(nn.Module):  # of the first stage of a pipeline, which is all of it where there is one
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.embedding = Embedding(job)
        stages = job.row["parallel"]["pp"]
        self.layers = nn.ModuleList(Layer(job) for _ in range(job.row["model"]["layers"] // stages))
        self.group = job.group if job.config.sequence_parallel and not job.vocab_config.sequence_parallel else None
        self.ends = stages == 1
        if self.ends:
            self.norm, self.head = nn.RMSNorm(job.row["model"]["hidden"]), Head(job)

    def exchange(self, x: Tensor, divides: bool) -> Tensor:
        if self.group is None:
            return x
        moved: Tensor = Exchange.apply(x, self.group, divides)  # type: ignore[no-untyped-call]
        return moved

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.exchange(self.embedding(ids), True)
        for layer in self.layers:
            x = layer(x)
        if not self.ends:
            return x
        losses: Tensor = self.head(self.norm(self.exchange(x, False)), labels)
        return losses


def make_weights(module: nn.Module) -> None:
    module.to_empty(device=torch.device("cuda"), recurse=False)


class Job:  # rank 0 of a row: its model, and a step of it
    def __init__(self, row: Settings) -> None:
        self.row = row

    def build(self) -> nn.Module:
        from megatron.core import parallel_state
        from megatron.core.model_parallel_config import ModelParallelConfig
        from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

        parallel = self.row["parallel"]
        tp, vocab_tp = parallel["tp"], parallel["vocab_tp"]
        self.ranks = self.row["hardware"]["gpus"] // parallel["pp"]  # of a stage
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
        self.config, self.vocab_config = (ModelParallelConfig(
            tensor_model_parallel_size=size, sequence_parallel=size > 1, gradient_accumulation_fusion=False,
            params_dtype=torch.float32, perform_initialization=False, use_cpu_initialization=True)
            for size in (tp, vocab_tp))
        self.group, self.vocab_group = dist.new_group(range(tp)), dist.new_group(range(vocab_tp))
        shards, vocab_shards = (dist.new_group(range(0, self.ranks, size)) for size in (tp, vocab_tp))
        with torch.device("meta"):
            model = Model(self)
        bf16 = torch.bfloat16
        shard = functools.partial(
            FullyShardedDataParallel, forward_prefetch=True, limit_all_gathers=True,
            mixed_precision=MixedPrecision(bf16, bf16, bf16), device_id=torch.cuda.current_device(),
            param_init_fn=make_weights)
        for name, group in ("embedding", vocab_shards), ("norm", vocab_shards), ("head", vocab_shards):
            if hasattr(model, name):
                setattr(model, name, shard(getattr(model, name), process_group=group))
        model.layers = nn.ModuleList(shard(layer, process_group=shards) for layer in model.layers)
        self.model = shard(model, process_group=vocab_shards)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=6e-4, fused=True)
        return self.model

    def step(self, *_: Any) -> None:  # with one micro-batch, whose gradient the next stage sends
        training, vocab_tp = self.row["training"], self.row["parallel"]["vocab_tp"]
        ids = torch.zeros(training["global_batch"] * vocab_tp // self.ranks, SEQUENCE, dtype=torch.int64, device="cuda")
        out = self.model(ids, ids.transpose(0, 1).contiguous())
        if self.row["parallel"]["pp"] == 1:
            out.mean().backward()
        else:
            out.backward(torch.empty_like(out))
        self.optimizer.step()
        self.optimizer.zero_grad()


def environment(row: Settings) -> AbstractContextManager[None]:  # megatron-core is imported as Megatron's rows do
    return transformer_engine.fresh("auto")


prepare = Job
