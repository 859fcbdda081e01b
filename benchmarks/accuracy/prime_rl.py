"""A rank of prime-rl's trainer as its commit d8f290ef builds it (files below are of ``src/prime_rl/trainer``): weights
in 32 bits, a head whose words are taken in chunks (RL) or logits in 32 bits (SFT), adapters of several runs, blocks
that run again and are compiled, FSDP2 over all ranks.

What a log cannot tell is taken so: experts have equally many tokens each; attention is PyTorch's FlashAttention 2,
also where version 3 was used, whose memory is taken to be the same.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from analyzer.api.argument import build_model
from analyzer.api.profile import profile
from analyzer.hardware import DeviceSpec
from analyzer.hardware.kernel_time.attention import attention_time
from analyzer.zoo.target import Target

CHUNK = 2048  # words of a chunk of the head: rl/config.py, auto_setup_fused_lm_head_chunk_size
ADAPTERS = 4  # benchmarks/scripts/run_single_benchmark.py, MAX_LORAS
_LOOKS = 64   # at positions, by which the time of one is told
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # config.py, LoRAConfig


class ChunkedScores(torch.autograd.Function):
    """Log probabilities of a head whose words are taken in chunks, each computed again in backward
    (models/layers/lm_head.py, `_ChunkedLogProbEntropyFn`; entries of single words, which are small, are left out).
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        most, total, mean = (hidden.new_zeros(len(hidden), dtype=torch.float32) for _ in range(3))
        for begin in range(0, len(weight), CHUNK):
            wide = (hidden @ weight[begin:begin + CHUNK].t()).to(torch.float32).mul_(1.0)
            now = torch.maximum(most, torch.amax(wide, dim=-1))
            old = torch.exp(most - now)
            chances = torch.exp(wide - now.unsqueeze(-1))
            total, mean = total * old + chances.sum(dim=-1), mean * old + (chances * wide).sum(dim=-1)
            most = now
        ctx.save_for_backward(hidden, weight, most + torch.log(total))
        return most - total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight, norm = ctx.saved_tensors
        of_hidden, of_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for begin in range(0, len(weight), CHUNK):
            part = weight[begin:begin + CHUNK]
            logits = hidden @ part.t()
            wide = logits.to(torch.float32).mul_(1.0)
            chances = torch.exp(wide - norm.unsqueeze(-1))
            own = -grads[0].unsqueeze(-1) * chances
            own.mul_(1.0)
            of_hidden.add_(own.to(hidden.dtype) @ part)
            of_weight[begin:begin + CHUNK].add_(own.to(weight.dtype).t() @ hidden)
        return of_hidden, of_weight


class ChunkedHead(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        scores: Any = ChunkedScores
        found: Tensor = scores.apply(hidden.reshape(-1, hidden.shape[-1]).contiguous(), self.weight)
        return found.reshape(hidden.shape[:-1])


class Adapters(nn.Module):
    """Adapters of several runs beside a linear layer (models/layers/lora/multi_linear.py): all tokens are of the first
    one, by grouped products on Hopper alone.
    """

    def __init__(self, base: nn.Linear, rank: int, is_grouped: bool) -> None:
        super().__init__()
        self.base_layer, self.is_grouped = base, is_grouped
        self.lora_A, self.lora_B = (nn.ParameterList([nn.Parameter(torch.empty(size)) for _ in range(ADAPTERS)])
                                    for size in ((rank, base.in_features), (base.out_features, rank)))

    def forward(self, x: Tensor) -> Tensor:
        shape, x = x.shape, x.view(-1, x.shape[-1])
        out = self.base_layer(x)
        down, up = torch.stack(list(self.lora_A)), torch.stack(list(self.lora_B))
        if self.is_grouped:
            offsets = torch.full((ADAPTERS,), len(x), dtype=torch.int32, device=x.device)
            more = torch._grouped_mm(torch._grouped_mm(x, down.transpose(-2, -1), offsets), up.transpose(-2, -1),
                                     offsets)
        else:
            parts = [x, *[x[:0]] * (ADAPTERS - 1)]
            more = torch.cat([part @ down[i].t() @ up[i].t() for i, part in enumerate(parts)])
        scale = torch.ones(len(x), 1, dtype=x.dtype, device=x.device)
        found: Tensor = (out + scale * more).view(*shape[:-1], -1)
        return found


class Experts(nn.Module):
    """Experts in three weights, by grouped products or, of adapters elsewhere than on Hopper, one after the other
    (models/layers/moe.py, `GroupedExperts`; models/layers/lora/multi_moe.py).
    """

    def __init__(self, number: int, width: int, inner: int, rank: int | None, is_grouped: bool) -> None:
        super().__init__()
        self.is_grouped, self.rank = is_grouped, rank
        sizes = {"w1": (inner, width), "w2": (width, inner), "w3": (inner, width)}
        for name, (rows, columns) in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(number, rows, columns)))
            for end, size in (("A", (rank, columns)), ("B", (rows, rank))) if rank is not None else ():
                self.add_module(f"{name}_lora_{end}", nn.ParameterList(
                    [nn.Parameter(torch.empty(number, *size)) for _ in range(ADAPTERS)]))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        if self.rank is not None:  # data tell which adapter it is, by whose number a list is read
            torch._dynamo.graph_break()
        number = len(self.get_parameter("w1"))
        if not self.is_grouped:
            each = len(x) // number
            return torch.cat([self._run(x[i * each:(i + 1) * each], partial(self._pick, place=i), torch.matmul)
                              for i in range(number)])
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        return self._run(x, self._pick, lambda a, b: torch._grouped_mm(a, b, ends))

    def _pick(self, name: str, place: int | None = None) -> Any:
        found: Any = getattr(self, name)[0] if "lora" in name else getattr(self, name)
        return found if place is None else found[place]

    def _run(self, x: Tensor, pick: Callable[[str], Tensor], times: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        def product(given: Tensor, name: str) -> Tensor:
            out = times(given, pick(name).transpose(-2, -1))
            if self.rank is None:
                return out
            down = times(given, pick(f"{name}_lora_A").transpose(-2, -1))
            return out + 2.0 * times(down, pick(f"{name}_lora_B").transpose(-2, -1))

        return product(functional.silu(product(x, "w1")) * product(x, "w3"), "w2")


class Mixture(nn.Module):
    """Tokens to experts and back (models/layers/moe.py, `MoE`): sorted by expert, weighed behind the experts in 32
    bits.
    """

    def __init__(self, found: Any, config: Any, rank: int | None, is_grouped: bool) -> None:
        super().__init__()
        self.number, self.top = found.experts.num_experts, config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, self.number, bias=False)
        self.experts = Experts(self.number, config.hidden_size, config.moe_intermediate_size, rank, is_grouped)
        self.shared = getattr(found, "shared_experts", None)
        self.register_buffer("expert_bias", torch.zeros(self.number))

    def forward(self, x: Tensor) -> Tensor:
        shape, x = x.shape, x.view(-1, x.shape[-1])
        scores, bias = functional.softmax(self.gate(x).to(torch.float32), dim=1), self.get_buffer("expert_bias")
        _, chosen = torch.topk(scores + bias, k=self.top, dim=1)
        weights = scores.gather(dim=1, index=chosen)
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * 1.0
        counts = torch.histc(chosen.view(-1).float(), bins=self.number, min=0, max=self.number)
        order = torch.argsort(chosen.view(-1), stable=True)
        ordered = weights.view(-1)[order]
        index = (order // self.top).reshape(-1, 1).expand(-1, x.shape[-1])
        out = self.experts(torch.gather(x, 0, index), counts)
        out = (out.to(torch.float32) * ordered.reshape(-1, 1)).to(x.dtype)
        base = torch.zeros_like(x) if self.shared is None else self.shared(x)
        return base.scatter_add(0, index, out).reshape(shape)


def _look(_model: Any, _optimizer: Any, positions: Tensor) -> None:
    for i in range(1, len(positions)):
        if positions[i] == 0:
            return


def _leave(saved: Tensor) -> Tensor:
    """To the host, but parameters and what is small (src/prime_rl/utils/act_offloading.py, without streams)."""
    if isinstance(saved, nn.Parameter) or saved.nbytes < 1024:
        return saved
    return torch.empty_like(saved, device="cpu", pin_memory=True).copy_(saved, non_blocking=True)


def _return(saved: Tensor) -> Tensor:
    return saved.to("cuda", non_blocking=True)


class PrimeRank:
    """A rank of a run of ``benchmarks/scripts``, as `analyzer.profile` takes it. ``config`` is the run's own."""

    def __init__(self, target: Target, config: Mapping[str, Any], is_hopper: bool) -> None:
        self.target, self.is_hopper = target, is_hopper
        self.is_rl, self.lora = config["type"] == "rl", config["lora_rank"]
        self.offloads, self.count = config["ac"] == "Offload", config["micro_batches"]
        self.sequence = config["seq_len"]
        self.out: Any = None

    def build(self) -> nn.Module:
        """Head, adapters, checkpoints, compilation, FSDP, in the order of model.py, ``setup_model``."""
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        with torch.device("meta"):
            model: Any = build_model(self.target.build)
            for block in model.model.layers:
                if hasattr(block.mlp, "experts"):
                    block.mlp = Mixture(block.mlp, model.config, self.lora, self.lora is None or self.is_hopper)
            if self.is_rl:
                head = ChunkedHead(model.lm_head.in_features, model.lm_head.out_features, bias=False)
                head.weight = model.lm_head.weight
                model.lm_head = head
            if self.lora is not None:
                self._adapt(model)
        model.float()
        for i, block in enumerate(model.model.layers):
            wrapped = model.model.layers[i] = checkpoint_wrapper(block, preserve_rng_state=False)
            breaks = self.lora is not None and isinstance(block.mlp, Mixture)
            (block if breaks else wrapped).compile()  # a checkpoint that has a break is run as it is written
        self._shard(model)
        return model.to_empty(device="cuda")  # type: ignore[no-any-return]

    def _adapt(self, model: Any) -> None:
        model.requires_grad_(False)
        for path, layer in [*model.named_modules()]:
            owner, _, name = path.rpartition(".")
            if name in _TARGETS and isinstance(layer, nn.Linear):
                setattr(model.get_submodule(owner), name, Adapters(layer, self.lora, self.is_hopper))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)

    @staticmethod
    def _shard(model: Any) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        given: dict[str, Any] = {
            "mesh": init_device_mesh("cuda", (torch.distributed.get_world_size(),)),
            "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
        for block in model.model.layers:
            fully_shard(block, reshard_after_forward=True, **given)
        if not model.config.tie_word_embeddings:
            fully_shard(model.model.embed_tokens, reshard_after_forward=True, **given)
            fully_shard([model.lm_head, model.model.norm], reshard_after_forward=False, **given)
        fully_shard(model, reshard_after_forward=True, **given)
        model.forward = lambda ids: model.lm_head(model.model(ids, use_cache=False).last_hidden_state)

    def more_seconds(self, device: DeviceSpec, is_third: bool) -> float:
        """What a step takes beside `step`: the host looks at the position of each token, one after the other (utils.py,
        ``get_response_lengths``, of RL); and, below 0, what version 3 of FlashAttention saves on Hopper, taken to be as
        fast as cuDNN's attention, whose instructions it has.
        """
        looks = profile(nn.Linear(1, 1), (torch.arange(1, _LOOKS + 1), ), step=_look, device=device)
        found = float(looks.step_seconds or 0.0) / _LOOKS * self.sequence * self.is_rl
        config: Any = build_model(self.target.build).config
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        for backward, count in ((False, 2), (True, 1)) if is_third and self.is_hopper else ():
            times = [attention_time(kernel, 1, config.num_attention_heads, config.num_key_value_heads, self.sequence,
                                    self.sequence, head, head, "bf16", device, causal=True, backward=backward)
                     for kernel in ("flash", "cudnn")]
            second, third = (time.seconds for time in times if time is not None)
            found += (third - second) * count * config.num_hidden_layers
        return float(found * self.count)

    def inputs(self) -> tuple[Tensor, ...]:
        return (torch.zeros(self.count, self.sequence, dtype=torch.int64), )

    @staticmethod
    def _run(model: Any, ids: Tensor) -> Any:
        """model.py, ``forward``: what the micro-batch before gave is there until this one has ended."""
        return model(ids).float().contiguous()

    def step(self, model: Any, optimizer: Any, ids: Tensor) -> None:
        """rl/train.py and sft/train.py. Of adapters no run is there in a benchmark, so that none is updated and
        gradients add up (optim.py, `MultiLoRAOptimizer`).
        """
        for i in range(self.count):
            here = ids[i:i + 1]
            with saved_tensors_hooks(_leave, _return) if self.offloads else nullcontext():
                self.out = self._run(model, here)
            if self.is_rl:
                loss = (torch.exp(self.out - self.out.detach()) * self.out).sum()
            else:
                logits = self.out.view(-1, self.out.shape[-1])
                loss = functional.cross_entropy(logits, here.flatten(), reduction="none").mean()
                del logits
            (loss / self.count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if self.lora is None:
            optimizer.step()
            optimizer.zero_grad()
