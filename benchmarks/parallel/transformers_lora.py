"""Rows of fms-acceleration: transformers' models trained whole or by LoRA under FSDP1, as accelerate wraps them.

accelerate wraps decoder layers, and for adapters each trainable leaf by itself (peft, `fsdp_auto_wrap_policy`), with
``use_orig_params``; the model is 16-bit and its adapters are float32, as peft makes them. The loss is the model's own,
on a shifted float32 copy of the logits (transformers 4.48, `ForCausalLMLoss`), and layers are run again by reentrant
checkpoints, which stand around what FSDP wraps (transformers 4.48, `MistralModel.forward`). So each layer's frozen
parameters are resharded by a hook on a tensor that the checkpoint made, which the hook holds: the inputs of all layers
and their gradients live until backward ends (torch/autograd/graph.py, `register_multi_grad_hook`).
"""
from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from analyzer.recipe import LoraSpec, Recipe
from analyzer.zoo.torchvision_ops import define_torchvision_ops

Settings = dict[str, Any]


def causal_lm_loss(logits: Tensor, labels: Tensor, *_: Any, **__: Any) -> Tensor:
    """`ForCausalLMLoss` of transformers 4.48."""
    logits = logits.float()
    shifted = logits[..., :-1, :].contiguous()
    targets = labels[..., 1:].contiguous()
    return nn.functional.cross_entropy(shifted.view(-1, logits.shape[-1]), targets.view(-1))


class Checkpointed(nn.Module):
    """A layer that is run again in backward, as transformers 4.48 calls it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor, **kwargs: Any) -> Tensor:
        out: Tensor = checkpoint(functools.partial(self.layer, **kwargs), hidden, use_reentrant=True)
        return out


class Expert(nn.Module):  # `MixtralBlockSparseTop2MLP` of transformers 4.48
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))
        return out


class Experts(nn.Module):
    """`MixtralSparseMoeBlock` of transformers 4.48: experts are called one by one."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, count = config.hidden_size, config.num_local_experts
        self.count, self.top_k = count, config.num_experts_per_tok
        self.gate = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList([Expert(width, config.intermediate_size) for _ in range(count)])

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.view(-1, hidden.shape[-1])
        shares = nn.functional.softmax(self.gate(tokens), dim=1, dtype=torch.float)
        weights, chosen = torch.topk(shares, self.top_k, dim=-1)
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(tokens.dtype)
        out = torch.zeros_like(tokens)
        marks = nn.functional.one_hot(chosen, num_classes=self.count).permute(2, 1, 0)
        for number, expert in enumerate(self.experts):
            place, token = torch.where(marks[number])
            part = expert(tokens[None, token].reshape(-1, tokens.shape[-1])) * weights[token, place, None]
            out.index_add_(0, token, part.to(tokens.dtype))
        return out.reshape(hidden.shape)


class Job:  # one rank of a row: its model, and a step of it
    def __init__(self, row: Settings) -> None:
        self.row = row

    def config(self) -> Any:
        define_torchvision_ops()  # transformers imports torchvision
        from transformers import MistralConfig, MixtralConfig
        model = self.row["model"]
        shape = dict(hidden_size=model["hidden"], intermediate_size=model["ffn"], num_hidden_layers=model["layers"],
                     num_attention_heads=model["heads"], num_key_value_heads=model["kv_heads"],
                     vocab_size=model["vocab"], sliding_window=None)
        return MixtralConfig(**shape) if model.get("moe") else MistralConfig(**shape)

    def build(self) -> nn.Module:
        from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, ShardingStrategy
        from torch.distributed.fsdp.wrap import _or_policy, lambda_auto_wrap_policy, transformer_auto_wrap_policy
        from transformers import AutoModelForCausalLM

        lora = None  # all parameters are trained
        if "lora" in self.row["id"]:
            lora = LoraSpec(r=16, dropout=0.1, targets=("q_proj", "k_proj", "v_proj", "o_proj"))
        config = self.config()
        config.use_cache = False
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        if self.row["model"].get("moe"):
            for block in model.model.layers:
                block.mlp = Experts(config)
        model = Recipe(dtype=torch.bfloat16, lora=lora).apply(model.to("cuda"))
        model.enable_input_require_grads()
        model.loss_function = causal_lm_loss
        layer = type(next(m for m in model.modules() if type(m).__name__.endswith("DecoderLayer")))

        def trainable(module: nn.Module) -> bool:
            weight = getattr(module, "weight", None)
            return not list(module.named_children()) and weight is not None and weight.requires_grad

        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={layer})
        if lora is not None:
            policy = functools.partial(_or_policy, policies=[
                functools.partial(lambda_auto_wrap_policy, lambda_fn=trainable), policy])
        self.model: Any = FullyShardedDataParallel(
            model, sharding_strategy=ShardingStrategy.FULL_SHARD, auto_wrap_policy=policy,
            backward_prefetch=BackwardPrefetch.BACKWARD_PRE, use_orig_params=True, limit_all_gathers=True,
            device_id=torch.cuda.current_device())
        model.model.layers = nn.ModuleList([Checkpointed(layer) for layer in model.model.layers])
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-4)
        return self.model

    def step(self, *_: Any) -> None:
        ids = torch.zeros(self.row["training"]["micro_batch"], self.row["model"]["seq_len"], dtype=torch.int64,
                          device="cuda")
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        self.model.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


prepare = Job
