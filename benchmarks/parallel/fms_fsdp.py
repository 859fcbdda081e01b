"""Rows of fms-fsdp: Llama 2 by IBM's Foundation Model Stack under FSDP1 (github.com/foundation-model-stack/fms-fsdp,
main_training.py; its model: github.com/foundation-model-stack/foundation-model-stack, fms/models/llama.py, May 2024).
"""
from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Settings = dict[str, Any]

#: Hosts of the rows: "128 A100 GPUs with 400Gbps", with the settings of AWS in scripts/train.sh, and "H100 96 GPUs with
#: 800 Gbps": of a host of eight, as no GPU of the two had a network so fast.
CLUSTERS = {"A100": "aws_p4de", "H100": "dgx_h100,fabric=12.5e9"}


class Norm(nn.Module):  # `LayerNormParameterized`
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * wide.type_as(x)


class Block(nn.Module):  # `LLaMABlock`
    def __init__(self, model: Settings, turns: Tensor) -> None:
        super().__init__()
        width, self.heads, self.keys, self.turns = model["hidden"], model["heads"], model["kv_heads"], turns
        self.size = size = width // self.heads
        linear = functools.partial(nn.Linear, bias=False)
        self.query, self.key, self.value, self.dense = (
            linear(width, self.heads * size), linear(width, self.keys * size), linear(width, self.keys * size),
            linear(self.heads * size, width))
        wide = model["ffn"]
        self.wg, self.w1, self.w2 = linear(width, wide), linear(width, wide), linear(wide, width)
        self.ln, self.ff_ln = Norm(width), Norm(width)

    def rotate(self, x: Tensor, turns: Tensor) -> Tensor:
        pairs = x.float().view(*x.shape[:-1], -1, 2)
        return turns[:, :, None].mul(pairs.unsqueeze(-2)).sum(5).flatten(3).type_as(x)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        normed = self.ln(x)
        q, k, v = (part(normed).view(batch, length, -1, self.size) for part in (self.query, self.key, self.value))
        positions = torch.arange(length, device=x.device).repeat(batch, 1)
        turned = self.turns[positions].float()
        q, k = (self.rotate(part, turned).transpose(2, 1) for part in (q, k))
        v, many = v.transpose(2, 1), self.heads // self.keys
        if many > 1:
            k, v = (part.unsqueeze(2).expand(-1, -1, many, -1, -1).flatten(1, 2) for part in (k, v))
        attention = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dense(attention.transpose(2, 1).contiguous().view(batch, length, -1))
        normed = self.ff_ln(x)
        return x + self.w2(functional.silu(self.wg(normed)) * self.w1(normed))  # type: ignore[no-any-return]


class Llama(nn.Module):
    def __init__(self, model: Settings) -> None:
        super().__init__()
        turns = torch.zeros(model["seq_len"], model["hidden"] // model["heads"] // 2, 2, 2, device="cuda")
        self.embedding = nn.Embedding(model["vocab"], model["hidden"])
        self.layers = nn.ModuleList(Block(model, turns) for _ in range(model["layers"]))
        self.norm, self.head = Norm(model["hidden"]), nn.Linear(model["hidden"], model["vocab"], bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Job:  # one rank of a row: its model, and a step of it
    def __init__(self, row: Settings) -> None:
        self.row = row

    def build(self) -> nn.Module:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
        from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
        from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

        training, parallel = self.row["training"], self.row["parallel"]
        model = Llama(self.row["model"]).to("cuda")
        share = {"full": 1.0, "none": 0.0}.get(training["activation_checkpointing"], training.get("checkpointed_share"))
        self.model: Any = FullyShardedDataParallel(
            model, auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
            mixed_precision=MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16),
            sharding_strategy=ShardingStrategy[parallel["fsdp"]["kind"].split()[1]],
            use_orig_params=bool(training["compile"]), device_id=torch.cuda.current_device(), limit_all_gathers=True)
        reached = 0.5  # `apply_fsdp_checkpointing` of fms_fsdp/policies/ac_handler.py
        unit: Any
        for number, unit in enumerate(model.layers, 1):
            if number * share >= reached:
                reached += 1
                unit._fsdp_wrapped_module = checkpoint_wrapper(unit._fsdp_wrapped_module)
            if training["compile"]:  # of the whole model, whose graphs end where FSDP1's hooks are called
                unit._fsdp_wrapped_module.compile()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
        return self.model

    def step(self, *_: Any) -> None:  # `train` of fms_fsdp/utils/train_utils.py
        shape = self.row["training"]["micro_batch"], self.row["model"]["seq_len"]
        ids = torch.zeros(shape, dtype=torch.int64, device="cuda")
        self.optimizer.zero_grad()
        output = self.model(ids)
        loss = nn.CrossEntropyLoss()(output.view(-1, output.shape[-1]), ids.view(-1))
        loss.backward()
        self.model.clip_grad_norm_(1.0).item()
        self.optimizer.step()
        loss.item()


prepare = Job
