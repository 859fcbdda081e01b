"""Rows of fms-acceleration: transformers' models trained whole or by LoRA under FSDP1, as accelerate wraps them.

accelerate wraps decoder layers, and for adapters each trainable leaf by itself (peft, `fsdp_auto_wrap_policy`);
parameters are 16-bit throughout, layers are checkpointed, the loss is on a shifted float32 copy of the logits
(transformers 4.48, `ForCausalLMLoss`).
"""
from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from analyzer.recipe import LoraSpec, Recipe
from analyzer.zoo.torchvision_ops import define_torchvision_ops

Settings = dict[str, Any]


def causal_lm_loss(logits: Tensor, labels: Tensor) -> Tensor:  # `ForCausalLMLoss` of transformers 4.48
    logits = logits.float()
    shifted = logits[..., :-1, :].contiguous()
    targets = labels[..., 1:].contiguous()
    return nn.functional.cross_entropy(shifted.view(-1, logits.shape[-1]), targets.view(-1))


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
            lora = LoraSpec(r=16, dropout=0.1, dtype="bf16", targets=("q_proj", "k_proj", "v_proj", "o_proj"))
        recipe = Recipe(dtype=torch.bfloat16, lora=lora, checkpointing=True)
        config = self.config()
        config.use_cache = False
        model = recipe.apply(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to("cuda"))
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
            backward_prefetch=BackwardPrefetch.BACKWARD_PRE, use_orig_params=False, limit_all_gathers=True,
            device_id=torch.cuda.current_device())
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-4)
        return self.model

    def step(self, *_: Any) -> None:
        ids = torch.zeros(self.row["training"]["micro_batch"], self.row["model"]["seq_len"], dtype=torch.int64,
                          device="cuda")
        logits = self.model(input_ids=ids).logits
        loss = causal_lm_loss(logits, ids)
        loss.backward()
        self.model.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


prepare = Job
