"""One rank of a Llama of 8 billion parameters' shape, cut to a few layers, split in the ways that PyTorch has.

    python -m benchmarks.parallel.rank CASE

runs rank 0 on one GPU, in a process group that moves no data (torch's ``fake`` backend), and prints what the allocator
says of each of three steps, as JSON: kernels, tensors and streams are those of a real rank. The allocator is set by the
environment (``PYTORCH_CUDA_ALLOC_CONF``). The same job is profiled by ``benchmarks.accuracy.rank``.
"""
from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.parallel.titan import cross_entropy, keep_every_second_product

WIDTH, WIDE, HEADS, KEYS, WORDS = 4096, 14336, 32, 8, 128256
SIZE = WIDTH // HEADS
STEPS, RANKS = 3, 8


class Case(NamedTuple):  # how the model is split and trained
    layers: int = 4
    seq_len: int = 8192
    batch: int = 1
    tensor_parallel: int = 1
    checkpointing: str = "none"                      #: full, or sac: every other product and attention are kept
    reshard: bool | int | None = None                #: ``reshard_after_forward``; None: FSDP2's default
    optimizer: str = "fused"                         #: or foreach
    loss: str = "plain"                              #: chunks: of logits; linear: with the last product, in chunks
    float8: str = ""                                 #: torchao's recipe; gathers: tensorwise, gathered in float8
    compiled: bool = False                           #: each block
    compiled_loss: bool = False
    wrapper: str = "fsdp2"                           #: hsdp, fsdp1, or none
    micro_batches: int = 1
    syncs: bool = True                               #: whether each micro-batch's gradients are scattered
    expandable: bool = True                          #: segments of the allocator


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, n * SIZE, bias=False)
                                              for n in (HEADS, KEYS, KEYS, HEADS))

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (project(x).view(batch, length, -1, SIZE) for project in (self.wq, self.wk, self.wv))
        q, k = (torch.view_as_real(torch.view_as_complex(t.float().reshape(*t.shape[:-1], -1, 2))
                                   * turns[:length].view(1, length, 1, -1)).flatten(3).type_as(t) for t in (q, k))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        result: Tensor = self.wo(out.transpose(1, 2).contiguous().view(batch, length, -1))
        return result


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, WIDE, bias=False), nn.Linear(WIDTH, WIDE, bias=False)
        self.w2 = nn.Linear(WIDE, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        h: Tensor = x + self.attention(self.attention_norm(x), turns)
        out: Tensor = h + self.feed_forward(self.ffn_norm(h))
        return out


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(case.layers)})
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        turns = torch.zeros(case.seq_len, SIZE // 2, dtype=torch.complex64)
        self.register_buffer("turns", turns, persistent=False)
        self.ends_in_logits = case.loss == "plain"

    def forward(self, ids: Tensor) -> Tensor:
        h = self.tok_embeddings(ids)
        for layer in self.layers.values():
            h = layer(h, self.turns)
        h = self.norm(h)
        out: Tensor = self.output(h) if self.ends_in_logits else h
        return out


def loss_of_chunks(logits: list[Tensor], labels: Tensor) -> Tensor:  # torchtune's `CEWithChunkedOutputLoss`
    parts = zip(logits, labels.chunk(len(logits), dim=1))
    total = [F.cross_entropy(x.reshape(-1, x.size(-1)).float(), y.reshape(-1), reduction="sum") for x, y in parts]
    return torch.stack(total).sum() / labels.numel()


class LinearLoss(torch.autograd.Function):  # the last product and its loss in chunks, gradients at once: as Liger's
    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, labels: Tensor, chunks: int) -> Tensor:
        rows, targets = h.flatten(0, 1), labels.flatten()
        to_h, to_weight = torch.zeros_like(rows), torch.zeros_like(weight)
        total = torch.zeros((), device=h.device)
        for part, target, gradient in zip(*(t.chunk(chunks) for t in (rows, targets, to_h))):
            logits = part @ weight.t()
            wide = logits.float()
            total += F.cross_entropy(wide, target, reduction="sum")
            shares = torch.softmax(wide, -1)
            shares[torch.arange(shares.shape[0], device=shares.device), target] -= 1
            narrow = shares.to(h.dtype)
            gradient.copy_(narrow @ weight)
            to_weight.addmm_(narrow.t(), part)
        ctx.save_for_backward(to_h.view_as(h), to_weight)
        return total / targets.numel()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        to_h, to_weight = ctx.saved_tensors
        return to_h * gradient, to_weight * gradient, None, None


def split_tensors(model: Any, mesh: Any) -> None:  # with the sequence between layers split too
    parallelize_module(model, mesh, {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)})
    for block in model.layers.values():
        parallelize_module(block, mesh, {
            "attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
            "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
            **{f"feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")},
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1))})


def use_float8(model: Any, recipe: str) -> None:  # in every layer but the last
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # type: ignore[import-untyped]
    config = (Float8LinearConfig(enable_fsdp_float8_all_gather=True) if recipe == "gathers"
              else Float8LinearConfig.from_recipe_name(recipe))
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name != "output")


def wrap_blocks(model: Any, case: Case) -> None:
    for name, block in list(model.layers.items()):
        if case.checkpointing == "full":
            block = checkpoint_wrapper(block, preserve_rng_state=False)
        elif case.checkpointing == "sac":
            block = checkpoint_wrapper(block, context_fn=keep_every_second_product, preserve_rng_state=False)
        model.layers[name] = torch.compile(block, fullgraph=True) if case.compiled else block


class Job:  # a rank: its model, and a step of it
    def __init__(self, case: Case) -> None:
        self.case = case
        self.loss: Any = torch.compile(cross_entropy) if case.compiled_loss else cross_entropy

    def build(self) -> nn.Module:
        case = self.case
        with torch.device("meta"):
            model: Any = Model(case)
        if case.wrapper == "none":
            model = model.to(torch.bfloat16)
        if case.float8:
            use_float8(model, case.float8)
        mesh: Any = None
        data = RANKS // case.tensor_parallel
        if case.tensor_parallel > 1:
            both = init_device_mesh("cuda", (data, case.tensor_parallel), mesh_dim_names=("data", "tensor"))
            mesh = both["data"]
            split_tensors(model, both["tensor"])
        elif case.wrapper == "hsdp":
            mesh = init_device_mesh("cuda", (2, data // 2), mesh_dim_names=("copies", "shards"))
        elif case.wrapper == "fsdp2":
            mesh = init_device_mesh("cuda", (data,))
        wrap_blocks(model, case)
        if case.wrapper in ("fsdp2", "hsdp") and data > 1:
            options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
            if case.reshard is not None:
                options["reshard_after_forward"] = case.reshard
            for module in (*model.layers.values(), model):
                fully_shard(module, **options)
        model.to_empty(device="cuda")
        with torch.no_grad():
            for parameter in model.parameters():
                (parameter.to_local() if hasattr(parameter, "to_local") else parameter).normal_(0, 0.02)
        if case.wrapper == "fsdp1":
            model = FullyShardedDataParallel(
                model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.cuda.current_device(),
                use_orig_params=True, mixed_precision=MixedPrecision(torch.bfloat16, torch.float32))
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=case.optimizer == "fused",
                                           foreach=case.optimizer == "foreach")
        return nn.ModuleList([model])

    def run_micro_batch(self) -> None:
        case = self.case
        ids = torch.zeros(case.batch, case.seq_len, dtype=torch.int64, device="cuda")
        labels = torch.zeros_like(ids)
        result = self.model(ids)
        if case.loss == "plain":
            loss = self.loss(result, labels)
        elif case.loss == "chunks":
            logits = [self.model.output(x) for x in result.chunk(8, dim=1)]
            del result
            loss = loss_of_chunks(logits, labels)
            result = logits = []
        else:
            loss = LinearLoss.apply(  # type: ignore[no-untyped-call]
                result, self.model.output.weight, labels, 8)
        del result
        loss.backward()

    def step(self) -> None:
        case = self.case
        self.optimizer.zero_grad()
        for number in range(case.micro_batches):
            if not case.syncs:
                self.model.set_requires_gradient_sync(number == case.micro_batches - 1)
            with loss_parallel() if case.tensor_parallel > 1 else nullcontext():
                self.run_micro_batch()
        if case.wrapper != "fsdp1":
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()


CASES = {name: Case(**given) for name, given in json.loads(Path(__file__).with_suffix(".json").read_text()).items()}


def main() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore
    case = CASES[sys.argv[1]]
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    job = Job(case)
    job.build()
    peaks = []
    for _ in range(STEPS):
        torch.cuda.reset_peak_memory_stats()
        job.step()
        torch.cuda.synchronize()
        peaks.append([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()])
    print(json.dumps({"case": sys.argv[1], "torch": torch.__version__, "peaks": peaks}))


if __name__ == "__main__":
    main()
