"""Models as litgpt builds them, for the published memory of its fine-tuning (`benchmarks.accuracy.published`).

Written anew from what its public code allocates (Lightning-AI/litgpt, lit_gpt/model.py and lora.py at the commit of
each row): a fused projection of query, key and value whose adapter is a convolution padded with zeros, rotary
embeddings in float32, a head called for 128 tokens at a time, and Lightning Fabric's conversion of logits to float32.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from analyzer.recipe.layer import ops
from analyzer.recipe.quantize import Nf4Linear

Tensor = torch.Tensor
HEAD_CHUNK = 128  # tokens: finetune/lora.py, lm_head_chunk_size; utils.py, chunked_cross_entropy


@dataclass(frozen=True)
class Shape:  # the fields of litgpt's config that memory depends on
    layers: int
    width: int
    heads: int
    vocab: int                                       #: padded
    hidden: int                                      #: of the MLP
    groups: int | None = None                        #: of queries; None: one a head
    head_size: int | None = None
    rotary: float = 1.0                              #: share of a head that is rotated
    parallel: bool = False                           #: attention and MLP beside each other
    shared_norm: bool = False
    bias: bool = False
    head_bias: bool = False
    norm: Literal["rms", "layer"] = "rms"
    mlp: Literal["gelu", "silu", "geglu"] = "silu"
    gemma: bool = False                              #: scaled embeddings, and norms whose weight is one more
    post_norms: bool = False
    softcap: bool = False                            #: of the scores of attention, which then is no fused kernel

    @property
    def size(self) -> int:  # channels of a head
        return self.head_size or self.width // self.heads


@dataclass(frozen=True)
class Code:  # what of litgpt changed with time
    norm: Literal["bf16", "cast", "fp32"]            #: of RMSNorm: all bfloat16; float32 but the weight; all float32
    pads_in_place: bool                              #: adapters of query and value, since f84b6109


@dataclass(frozen=True)
class Adapters:  # litgpt's LoRA: rank, dropout and which layers have one
    r: int
    dropout: float
    layers: frozenset[str]                           #: of query, key, value, projection, mlp, head


class RmsNorm(nn.Module):  # the three forms that litgpt's had
    def __init__(self, width: int, code: Code, offset: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.form, self.offset = code.norm, offset

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        if self.form != "bf16":
            x = x.float()
        normed = x * torch.rsqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-5)
        if self.form == "cast":
            normed = normed.to(dtype)
        weight = 1 + self.weight if self.offset else self.weight
        return (normed * (weight.float() if self.form == "fp32" else weight)).to(dtype)


class LoraLayer(nn.Module):  # a linear layer with or without an adapter in its own dtype
    def __init__(self, inputs: int, outputs: int, bias: bool, adapters: Adapters | None) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=bias)
        self.adapters = adapters
        if adapters is not None:
            self.lora_a = nn.Parameter(torch.empty(adapters.r, inputs))
            self.lora_b = nn.Parameter(torch.empty(outputs, adapters.r))
            self.dropout = nn.Dropout(adapters.dropout)

    def forward(self, x: Tensor) -> Tensor:
        pretrained: Tensor = self.linear(x)
        if self.adapters is None:
            return pretrained
        update: Tensor = self.dropout(x) @ self.lora_a.transpose(0, 1) @ self.lora_b.transpose(0, 1) * 2.0
        return pretrained + update


class FusedLayer(nn.Module):
    """The projection to query, key and value; adapters of some of the three are one convolution of groups."""

    def __init__(self, shape: Shape, code: Code, adapters: Adapters | None) -> None:
        super().__init__()
        size, groups = shape.size, shape.groups or shape.heads
        sizes = {"query": shape.heads * size, "key": groups * size, "value": groups * size}
        self.linear = nn.Linear(shape.width, sum(sizes.values()), bias=shape.bias)
        self.code, self.is_grouped = code, groups != shape.heads
        chosen = [sizes[name] for name in sizes if adapters is not None and name in adapters.layers]
        self.chosen, self.has_all = chosen, len(chosen) == len(sizes)
        if adapters is not None and chosen:
            self.lora_a = nn.Parameter(torch.empty(adapters.r * len(chosen), shape.width))
            self.lora_b = nn.Parameter(torch.empty(sum(chosen), adapters.r))
            self.dropout = nn.Dropout(adapters.dropout)

    def forward(self, x: Tensor) -> Tensor:
        pretrained: Tensor = self.linear(x)
        if not self.chosen:
            return pretrained
        low = functional.linear(self.dropout(x), self.lora_a).transpose(-2, -1)
        weight = self.lora_b.unsqueeze(-1)
        if self.is_grouped:
            parts = zip(low.chunk(len(self.chosen), dim=1), weight.split(self.chosen))
            high = torch.cat([functional.conv1d(a, b) for a, b in parts], dim=1)
        else:
            high = functional.conv1d(low, weight, groups=len(self.chosen))
        return pretrained + self.pad(high.transpose(-2, -1)) * 2.0

    def pad(self, x: Tensor) -> Tensor:  # zeros where there is no adapter
        if self.has_all:
            return x
        index = torch.arange(sum(self.chosen), device=x.device)
        outputs = self.linear.out_features
        if self.code.pads_in_place:
            return x.new_zeros(*x.shape[:-1], outputs).index_copy_(-1, index, x)
        x = x.transpose(0, 1)
        padded = x.new_zeros(*x.shape[:-1], outputs).view(-1, outputs)
        padded = padded.index_copy(1, index, x.reshape(-1, sum(self.chosen)))
        return padded.view(*x.shape[:-1], outputs).transpose(0, 1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding; the factors in float32 make it a float32 one until the end."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return ((x * cos) + (turned * sin)).to(x.dtype)


class Attention(nn.Module):  # causal attention; keys and values of groups are copied for each head
    def __init__(self, shape: Shape, code: Code, adapters: Adapters | None) -> None:
        super().__init__()
        self.shape = shape
        self.attn = FusedLayer(shape, code, adapters)
        self.proj = LoraLayer(shape.heads * shape.size, shape.width, shape.bias, pick(adapters, "projection"))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        shape, size, groups = self.shape, self.shape.size, self.shape.groups or self.shape.heads
        each = shape.heads // groups
        qkv = self.attn(x).view(batch, tokens, groups, each + 2, size).permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((each, 1, 1), dim=2)
        if groups != shape.heads:
            k, v = (t.expand(batch, groups, each, tokens, size) for t in (k, v))
        q, k, v = (t.reshape(batch, -1, tokens, size) for t in (q, k, v))
        turned = int(shape.rotary * size)
        q, k = (torch.cat((rotate(t[..., :turned], cos, sin), t[..., turned:]), dim=-1) for t in (q, k))
        y = self.attend_softcapped(q, k, v) if shape.softcap else functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=1 / math.sqrt(size))
        return self.proj(y.transpose(1, 2).reshape(batch, tokens, shape.heads * size))  # type: ignore[no-any-return]

    def attend_softcapped(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Gemma 2's: scores are there in full, and a mask a layer."""
        scores = torch.tanh(q @ k.mT * 0.0625 / 50.0) * 50.0
        mask = torch.ones(q.shape[2], q.shape[2], dtype=q.dtype, device=q.device).triu(diagonal=1)
        mask.masked_fill_(mask.bool(), torch.finfo(q.dtype).min)
        return functional.softmax(scores + mask, dim=-1, dtype=torch.float).to(q.dtype) @ v


class Mlp(nn.Module):  # of two layers, or of three with a gate
    def __init__(self, shape: Shape, adapters: Adapters | None) -> None:
        super().__init__()
        own = pick(adapters, "mlp")
        self.kind = shape.mlp
        self.fc_1 = LoraLayer(shape.width, shape.hidden, shape.bias, own)
        if shape.mlp != "gelu":
            self.fc_2 = LoraLayer(shape.width, shape.hidden, shape.bias, own)
        self.proj = LoraLayer(shape.hidden, shape.width, shape.bias, own)

    def forward(self, x: Tensor) -> Tensor:
        first = self.fc_1(x)
        if self.kind == "gelu":
            return self.proj(functional.gelu(first))  # type: ignore[no-any-return]
        gate = functional.silu if self.kind == "silu" else functional.gelu
        second = self.fc_2(x)
        return self.proj(gate(first) * second)  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, shape: Shape, code: Code, adapters: Adapters | None) -> None:
        super().__init__()
        self.shape = shape
        self.norm_1 = make_norm(shape, code)
        self.attn = Attention(shape, code, adapters)
        self.norm_2 = None if shape.shared_norm else make_norm(shape, code)
        self.mlp = Mlp(shape, adapters)
        self.after_attention, self.after_mlp = (
            make_norm(shape, code) if shape.post_norms else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.norm_1(x)
        attended = self.after_attention(self.attn(normed, cos, sin))
        if self.shape.parallel:
            beside: Tensor = self.mlp(normed if self.norm_2 is None else self.norm_2(x)) + attended + x
            return beside
        assert self.norm_2 is not None
        x = attended + x
        return self.after_mlp(self.mlp(self.norm_2(x))) + x  # type: ignore[no-any-return]


class Gpt(nn.Module):  # a model whose output is a list of logits of 128 tokens each, or all at once, in float32
    def __init__(self, shape: Shape, code: Code, adapters: Adapters | None, tokens: int) -> None:
        super().__init__()
        self.shape, self.in_chunks = shape, adapters is not None
        self.lm_head = LoraLayer(shape.width, shape.vocab, shape.head_bias, pick(adapters, "head"))
        self.wte = nn.Embedding(shape.vocab, shape.width)
        self.h = nn.ModuleList(Block(shape, code, adapters) for _ in range(shape.layers))
        self.ln_f = make_norm(shape, code)
        turned = int(shape.rotary * shape.size)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(tokens, turned, dtype=torch.float32), persistent=False)
        if adapters is not None:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_("lora_" in name)

    def forward(self, ids: Tensor) -> list[Tensor] | Tensor:
        cos, sin = (self.get_buffer(name)[:ids.shape[1]].float() for name in ("cos", "sin"))
        x = self.wte(ids)
        if self.shape.gemma:
            x = x * self.shape.width**0.5
        for block in self.h:
            x = block(x, cos, sin)
        x = self.ln_f(x)
        if self.in_chunks:
            chunks = [self.lm_head(part) for part in x.split(HEAD_CHUNK, dim=1)]
            return [chunk.float() for chunk in chunks]
        logits: Tensor = self.lm_head(x)
        return logits.float()


def pick(adapters: Adapters | None, layer: str) -> Adapters | None:  # the adapters, where that layer has one
    return adapters if adapters is not None and layer in adapters.layers else None


def make_norm(shape: Shape, code: Code) -> nn.Module:
    return nn.LayerNorm(shape.width) if shape.norm == "layer" else RmsNorm(shape.width, code, shape.gemma)


def compute_loss(logits: list[Tensor] | Tensor, targets: Tensor) -> Tensor:
    """Cross entropy in chunks, of the tokens that follow."""
    targets = targets[..., 1:]
    if isinstance(logits, list):
        logits[-1] = logits[-1][..., :-1, :]
        parts = list(zip([c.reshape(-1, c.shape[-1]) for c in logits],
                         [t.reshape(-1) for t in targets.split(logits[0].shape[1], dim=1)]))
    else:
        flat = logits[..., :-1, :].reshape(-1, logits.shape[-1])
        parts = list(zip(flat.split(HEAD_CHUNK), targets.reshape(-1).split(HEAD_CHUNK)))
    return torch.cat([functional.cross_entropy(a, b, reduction="none") for a, b in parts]).mean()


def run_step(micro_batches: int, model: nn.Module, optimizer: Any, ids: Tensor) -> None:
    """litgpt's loop: logits stay until the next ones are there."""
    for _ in range(micro_batches):
        logits = model(ids)
        loss = compute_loss(logits, ids)
        (loss / micro_batches).backward()
    optimizer.step()
    optimizer.zero_grad()


class OldNf4Linear(Nf4Linear):
    """bitsandbytes before 0.43: the input is kept for the backward pass, and not as a saved tensor, so it is held until
    the graph is let go; Lightning's plugin quantizes from float16, whatever it computes in. Scales are quantized again
    or not.
    """

    doubly = True

    def quantize(self, weight: Tensor) -> None:  # codes and scales, the latter in float32 where not quantized again
        super().quantize(weight)
        if not self.doubly:
            blocks = -(-weight.numel() // self.BLOCK)
            self.absmax = torch.empty(blocks, dtype=torch.float32, device=weight.device)
            del self.nested_absmax, self.nested_values, self.offset

    def dequantize(self, dtype: torch.dtype) -> Tensor:  # the weight in ``dtype``, by way of float16
        if self.doubly:
            return super().dequantize(torch.float16).to(dtype)
        weight: Tensor = ops.dequantize_4bit(self.weight, self.absmax, self.values, self.BLOCK, self.shape,
                                             torch.float16)
        return weight.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = _OldProduct.apply(x, self)  # type: ignore[no-untyped-call]
        return output


class PlainNf4Linear(OldNf4Linear):  # without the second quantization
    doubly = False


class _OldProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: OldNf4Linear) -> Tensor:
        ctx.layer = layer
        ctx.kept = x if ctx.needs_input_grad[0] else None
        return functional.linear(x, layer.dequantize(x.dtype), layer.bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.matmul(gradient, ctx.layer.dequantize(gradient.dtype)), None


def quantize_linear_layers(model: nn.Module, kind: type[OldNf4Linear]) -> None:
    """Every linear layer, the head's too, as Lightning's plugin replaces the class."""
    for module in model.modules():
        linear = getattr(module, "linear", None)
        if isinstance(linear, nn.Linear):
            module.linear = kind(linear)
