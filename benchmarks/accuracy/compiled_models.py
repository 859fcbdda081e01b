"""Models whose compiled steps were measured on a GPU, as their training scripts build them: each builder gives the
model, its inputs, and the forward pass that ends in the loss. Tensors are made on the default device.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from benchmarks.parallel import titan

Forward = Callable[..., Tensor]  # of the model, compiled or not, and its inputs: the loss
Built = tuple[nn.Module, tuple[Any, ...], Forward]


def in_half(forward: Forward) -> Forward:
    """The forward pass under autocast to bfloat16."""
    def run(*inputs: Any) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return forward(*inputs)

    return run


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(width), nn.GELU()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Attention(nn.Module):
    mask: Tensor

    def __init__(self, width: int, heads: int, positions: int, flash: bool) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.flash = heads, flash
        if not flash:
            self.register_buffer("mask", torch.tril(torch.ones(positions, positions)).view(1, 1, positions, positions))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (part.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
                   for part in self.c_attn(x).split(width, dim=2))
        if self.flash:
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * (1 / math.sqrt(k.shape[-1]))
            out = functional.softmax(scores.masked_fill(self.mask == 0, -math.inf), dim=-1) @ v
        return self.c_proj(out.transpose(1, 2).contiguous().view(batch, tokens, width))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, width: int, approximate: str, *attention: Any) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(width), Attention(width, *attention), nn.LayerNorm(width)
        self.c_fc, self.gelu = nn.Linear(width, 4 * width), nn.GELU(approximate)
        self.c_proj = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(self.gelu(self.c_fc(self.ln_2(x))))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """GPT-2 as nanoGPT writes it: 12 layers, dropout 0; logits and loss."""

    def __init__(self, vocabulary: int, flash: bool = True, approximate: str = "none", positions: int = 1024,
                 width: int = 768, heads: int = 12) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.h = nn.ModuleList(Layer(width, approximate, heads, positions, flash) for _ in range(12))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(ids) + self.wpe(torch.arange(0, ids.shape[1], dtype=torch.long, device=ids.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1), ignore_index=-1)


def build_mlp4(is_half: bool) -> Built:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()  # type: ignore[no-any-return]

    model = nn.Sequential(*[Residual(1024) for _ in range(4)])
    return model, (torch.randn(4096, 1024), ), in_half(forward) if is_half else forward


def build_gpt2(variant: str) -> Built:
    def forward(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
        return model(ids, targets)[1]  # type: ignore[no-any-return]

    vocabulary = 50257 if variant.endswith("50257") else 50304
    return (GPT(vocabulary), (torch.randint(vocabulary, (16, 1024)), torch.randint(vocabulary, (16, 1024))),
            in_half(forward) if "bf16" in variant else forward)


def build_llama_block(variant: str) -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=2048, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=4,
                         intermediate_size=5632, vocab_size=32000, max_position_embeddings=2048)
    config._attn_implementation = "sdpa"
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16)
    if variant == "compile_layers":
        for layer in model.model.layers:
            layer.compile()
    return (model, (torch.randint(config.vocab_size, (4, 2048)), ),
            lambda model, ids: model(input_ids=ids, labels=ids, use_cache=False).loss)


def build_bert() -> Built:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig()
    config._attn_implementation = "sdpa"

    ids = torch.randint(config.vocab_size, (32, 512))
    return (BertForMaskedLM(config), (ids, torch.ones_like(ids)),
            in_half(lambda model, ids, mask: model(input_ids=ids, attention_mask=mask, labels=ids).loss))


def build_titan(variant: str, is_8b: bool) -> Built:
    """Eight blocks on 4 x 2,048 tokens, or two of the 8B model on 8,192; weights in bfloat16, tables are not."""
    shape = titan.Shape(4096, 32, 8, 14336, 2, 8192) if is_8b else titan.Shape(2048, 16, 4, 5632, 8, 2048)
    model = titan.Llama(shape)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    parts = variant.split("_")
    compiles = parts[0] == "compile"
    titan.parallelize(model, "sac" if "sac" in parts else "full" if "fullac" in parts else "none", compiles,
                      "rowwise" if "rowwise" in parts else "tensorwise" if "fp8" in parts else "")
    loss: Any = torch.compile(titan.cross_entropy) if compiles else titan.cross_entropy
    ids = torch.randint(shape.words, (1 if is_8b else 4, shape.tokens))
    return model, (ids, ), lambda model, ids: loss(model(ids), ids)


def build_resnet50(is_half: bool) -> Built:
    """64 images; under autocast they are NHWC in memory, and so are the weights."""
    from torchvision import models

    model: Any = models.resnet50(weights=None)
    images, labels = torch.randn(64, 3, 224, 224), torch.randint(1000, (64, ))

    def forward(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(model(images), labels)

    if not is_half:
        return model, (images, labels), forward
    model.to(memory_format=torch.channels_last)
    return model, (images.contiguous(memory_format=torch.channels_last), labels), in_half(forward)


def build_images(name: str, count: int, is_last: bool) -> Built:
    """Of timm's models; ``is_last``: images and weights are NHWC in memory."""
    import timm

    model: Any = timm.create_model(name, pretrained=False)
    images, labels = torch.randn(count, 3, 224, 224), torch.randint(1000, (count, ))
    if is_last:
        model.to(memory_format=torch.channels_last)
        images = images.contiguous(memory_format=torch.channels_last)
    return (model, (images, labels),
            in_half(lambda model, images, labels: functional.cross_entropy(model(images), labels)))


def build_t5() -> Built:
    """The base model, 512 tokens to 128."""
    from transformers import T5Config, T5ForConditionalGeneration

    config: Any = T5Config(d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12)
    config.decoder_start_token_id = 0
    ids, labels = torch.randint(config.vocab_size, (16, 512)), torch.randint(config.vocab_size, (16, 128))
    return (T5ForConditionalGeneration(config), (ids, labels),
            in_half(lambda model, ids, labels: model(input_ids=ids, labels=labels).loss))


def build_whisper() -> Built:
    """The small model, 30 seconds of sound to 200 tokens."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(d_model=768, encoder_layers=12, decoder_layers=12, encoder_attention_heads=12,
                           decoder_attention_heads=12, encoder_ffn_dim=3072, decoder_ffn_dim=3072)
    sound, labels = torch.randn(8, 80, 3000), torch.randint(config.vocab_size, (8, 200))
    return (WhisperForConditionalGeneration(config), (sound, labels),
            in_half(lambda model, sound, labels: model(input_features=sound, labels=labels).loss))


def build_qwen3(has_checkpoints: bool) -> Built:
    """12 layers of the model of 0.6B, its weights in bfloat16."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(hidden_size=1024, num_hidden_layers=12, num_attention_heads=16, num_key_value_heads=8,
                         head_dim=128, intermediate_size=3072, vocab_size=151936, tie_word_embeddings=True)
    model: Any = Qwen3ForCausalLM(config)
    model.to(torch.bfloat16)
    if has_checkpoints:
        model.gradient_checkpointing_enable()
    ids = torch.randint(config.vocab_size, (4, 2048))
    return model, (ids, ), lambda model, ids: model(input_ids=ids, labels=ids, use_cache=False).loss


class FlexBlock(nn.Module):
    """A layer of a transformer whose attention is FlexAttention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm, self.ln = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        mixed: Any = flex_attention(q, k, v, block_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.ln(x))))  # type: ignore[no-any-return]


class Flex(nn.Module):
    """Four layers of 8 heads, each token sees those before it within 1,024."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FlexBlock(512, 8) for _ in range(4))

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        for block in self.blocks:
            x = block(x, mask)
        return x.float().square().mean()


def build_flex() -> Built:
    def is_seen(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q - k < 1024)

    mask = create_block_mask(is_seen, None, None, 8192, 8192, device="cuda")
    return Flex(), (torch.randn(4, 8192, 512), ), in_half(lambda model, x: model(x, mask))


class Recurrent(nn.Module):
    """Two layers of an LSTM, and a layer that reads what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(512, 1024, num_layers=2, batch_first=True, dropout=0.1), nn.Linear(1024, 1000)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.lstm(x)[0]).flatten(0, 1), labels.flatten())


def build_lstm() -> Built:
    return (Recurrent(), (torch.randn(64, 256, 512), torch.randint(1000, (64, 256))),
            lambda model, x, labels: model(x, labels))


def build_fsdp(variant: str) -> Built:
    """Four blocks of Llama 2 7B under fully_shard on one GPU, each a checkpoint, compiled after it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    shape = titan.Shape(4096, 32, 32, 11008, 4, 2048)
    model: Any = titan.Llama(shape)
    titan.parallelize(model, "full", variant == "compile_layers")
    mesh, policy = init_device_mesh("cuda", (1, )), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for module in (*model.layers.values(), model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    ids = torch.randint(shape.words, (8, shape.tokens))
    return model, (ids, ), lambda model, ids: titan.cross_entropy(model(ids), ids)


BUILDERS: dict[str, Callable[[str], Built]] = {  # of the variant
    "mlp4": lambda variant: build_mlp4(False), "mlp4_bf16": lambda variant: build_mlp4(True), "gpt2": build_gpt2,
    "llama_block": build_llama_block, "bert": lambda variant: build_bert(),
    "titan": lambda variant: build_titan(variant, False), "titan8b": lambda variant: build_titan(variant, True),
    "resnet50": lambda variant: build_resnet50(True), "resnet50_fp32": lambda variant: build_resnet50(False),
    "vit": lambda variant: build_images("vit_base_patch16_224", 64, False),
    "convnext": lambda variant: build_images("convnext_tiny", 64, False),
    "swin": lambda variant: build_images("swin_tiny_patch4_window7_224", 64, False),
    "efficientnet": lambda variant: build_images("efficientnet_b0", 128, True),
    "vit_infer": lambda variant: build_images("vit_base_patch16_224", 64, False),
    "t5": lambda variant: build_t5(), "whisper": lambda variant: build_whisper(),
    "qwen3": lambda variant: build_qwen3(variant.endswith("checkpoints")),
    "flex": lambda variant: build_flex(), "lstm": lambda variant: build_lstm(), "fsdp": build_fsdp}
