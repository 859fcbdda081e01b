"""Bytes of LoRA, QLoRA and 8-bit optimizers of Llama 3.1 8B, derived by hand from its published sizes."""
from functools import partial

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from analyzer import profile
from analyzer.recipe import LoraSpec, Recipe
from analyzer.units import format_bytes

# config.json of meta-llama/Llama-3.1-8B, but for its 32 layers
HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, VOCAB = 4096, 14336, 4, 32, 8, 128256
KV = HIDDEN // HEADS * KV_HEADS
LINEAR = {"q": (HIDDEN, HIDDEN), "k": (KV, HIDDEN), "v": (KV, HIDDEN), "o": (HIDDEN, HIDDEN), "gate": (FFN, HIDDEN),
          "up": (FFN, HIDDEN), "down": (HIDDEN, FFN)}  # out, in
NORMS = (2 * LAYERS + 1) * HIDDEN
EMBEDDINGS = 2 * VOCAB * HIDDEN  # that of the input and the head
IN_LINEAR = LAYERS * sum(n * k for n, k in LINEAR.values())
BF16 = torch.bfloat16
ROPE = 2 * 64 * 2  # the frequencies of rotary embeddings, twice


def make() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=LAYERS,
                                        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, vocab_size=VOCAB))


def run(recipe: Recipe, tokens: int = 256):
    ids = torch.empty(1, tokens, dtype=torch.int64, device="meta")
    inputs = {"input_ids": ids, "labels": ids}
    return profile(partial(recipe.build, make), (), inputs, **recipe.profile_options("train"))


def adapters(rank: int, names=tuple(LINEAR)) -> int:
    return LAYERS * sum(rank * (LINEAR[name][0] + LINEAR[name][1]) for name in names)


def test_sizes_are_those_published():
    assert 8 * IN_LINEAR + EMBEDDINGS + 8 * (NORMS - HIDDEN) + HIDDEN == 8_030_261_248


@pytest.mark.parametrize(("text", "count", "bytes_each"), [
    ("r=16", adapters(16), 4),  # in float32 as peft makes them
    ("r=8,targets=q_proj+v_proj", adapters(8, ("q", "v")), 4),
    ("r=64,dtype=bf16", adapters(64), 2),
])
def test_lora(text, count, bytes_each):
    p = run(Recipe(dtype=BF16, lora=LoraSpec.parse(text), optimizer="adamw"))
    assert p.modules.trainable_params == count
    assert p.param_bytes == 2 * (IN_LINEAR + EMBEDDINGS + NORMS) + bytes_each * count
    assert p.optimizer_bytes == 2 * bytes_each * count


def nf4_bytes(n: int, k: int) -> tuple[int, int]:
    """Of codes; of a byte for each block of 64, 4 for each 256 of those, 16 and 256 values and an offset in float32."""
    blocks = n * k // 64
    return n * k // 2, blocks + 4 * (blocks // 256) + 4 * (16 + 256 + 1)


HELD = {"nf4": nf4_bytes, "int8": lambda n, k: (n * k, 4 * n), "fp8": lambda n, k: (n * k, 4 * n)}


@pytest.mark.parametrize("quantization", HELD)
def test_quantized_weights_and_adapters(quantization):
    p = run(Recipe(dtype=BF16, quantize=quantization, lora=LoraSpec(r=16), optimizer="adamw"))
    held = [HELD[quantization](n, k) for n, k in LINEAR.values()]
    assert p.param_bytes == LAYERS * sum(codes for codes, _ in held) + 2 * (EMBEDDINGS + NORMS) + 4 * adapters(16)
    assert p.buffer_bytes == LAYERS * sum(scales for _, scales in held) + ROPE
    assert p.optimizer_bytes == 8 * adapters(16)
    assert p.modules.trainable_params == adapters(16)


def test_4_bit_weights_for_inference():
    recipe = Recipe(dtype=BF16, quantize="int4")
    ids = torch.empty(1, 64, dtype=torch.int64, device="meta")
    p = profile(partial(recipe.build, make), (), {"input_ids": ids}, mode="infer", eval=True)
    assert p.param_bytes == IN_LINEAR // 2 + 2 * (EMBEDDINGS + NORMS)
    assert p.buffer_bytes == IN_LINEAR // 128 * 2 * 2 + ROPE  # a scale and a zero in bfloat16 for each 128


def test_8_bit_states():
    """A byte each for two states and 4 for each 256 of them; norms have 4,096, the least that is so held."""
    p = run(Recipe(dtype=BF16, optimizer="adamw8bit"))
    elements = IN_LINEAR + EMBEDDINGS + NORMS
    assert p.optimizer_bytes == 2 * elements + 2 * 4 * (elements // 256) + 2 * 4 * 256  # and the codes' values, once


def test_8_bit_states_are_updated_one_after_the_other():
    """A kernel takes a contiguous gradient: the copy of one is gone when that of the next is made."""
    model, weight = torch.nn.Module(), torch.ones(64, 64, 8, 8).to(memory_format=torch.channels_last)
    model.a, model.b = torch.nn.Parameter(weight), torch.nn.Parameter(weight.clone())
    model.forward = lambda x: (model.a * x).sum() + (model.b * x).sum()
    step = profile(model, (torch.ones(1),), optimizer="adamw8bit").phases["optimizer"]
    assert step.peak_allocated_bytes - step.allocated_bytes == 64**3 * 4


def test_the_fused_optimizer_counts_steps_on_the_device():
    p = run(Recipe(dtype=BF16, optimizer="adamw_fused"))  # 4 bytes a parameter
    assert p.optimizer_bytes == 4 * (IN_LINEAR + EMBEDDINGS + NORMS) + 4 * (LAYERS * 9 + 3)


class ReadsWeight(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.head = torch.nn.Linear(16, 16), torch.nn.Linear(16, 4)

    def forward(self, x):
        return self.head(torch.nn.functional.linear(x, self.fc.weight, self.fc.bias))


class Attends(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.head = torch.nn.MultiheadAttention(16, 2, batch_first=True), torch.nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.attention(x, x, x, need_weights=False)[0])


def encoder():
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0)
    return torch.nn.Sequential(torch.nn.TransformerEncoder(layer, 2), torch.nn.Linear(16, 4))


@pytest.mark.parametrize(("make", "own", "adapters", "reader"), [
    (ReadsWeight, 8 * 16 * (16 + 4), 2 * 16 * 4, "ReadsWeight"),
    # q, k and v together, the products of 2 sequences of 4, the output's, the head's
    (Attends, 8 * 16 * 48 + 2 * 2 * 4 * 4 * 16 + 8 * 16 * 16 + 8 * 16 * 4, 2 * 16 * 4, "MultiheadAttention"),
], ids=["weight", "attention"])
def test_an_adapter_is_passed_by_where_code_reads_the_weight(make, own, adapters, reader):
    """As peft's is: `BaseTunerLayer.weight` gives the layer's own."""
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(2, 4, 16)
    wanted = model(x)
    p = profile(lambda: Recipe(lora=LoraSpec(4)).build(make), (x,), mode="infer")
    assert p.fwd_macs == own
    assert p.assumptions[0].startswith(f"lora: forward of {reader} reads the weight of a layer with an adapter; where")
    assert p.params == sum(q.numel() for q in model.parameters()) + adapters
    torch.testing.assert_close(Recipe(lora=LoraSpec(4)).build(lambda: model)(x), wanted)  # by the fused kernel


def test_encoder_layers_take_adapters():
    """The two linear layers run theirs; that of the attention's output is passed by, and gets no gradient."""
    model, x = Recipe(lora=LoraSpec(4)).build(encoder), torch.randn(2, 4, 16)
    model(x).sum().backward()
    with_gradients = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    assert len(with_gradients) == 2 * 2 * 2
    for reuse in (True, False):
        p = profile(lambda: Recipe(lora=LoraSpec(4)).build(encoder), (x,), reuse=reuse)
        assert p.bwd_flops > 0 and ["MultiheadAttention reads" in text for text in p.assumptions] == [True]


_FUSED = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_experts_that_are_one_parameter_stay_and_are_told_first(quantization):
    from transformers import (
        DbrxConfig,
        DbrxForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 128}
    ids = torch.zeros(2, 8, dtype=torch.int64)
    qwen = Qwen3MoeConfig(**shape, moe_intermediate_size=32, num_experts=8)
    dbrx = DbrxConfig(d_model=64, n_heads=4, n_layers=2, vocab_size=128, attn_config={"clip_qkv": 8, "rope_theta": 1e4},
                      ffn_config={"ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2})
    router = 2 * 8 * 64
    for make, experts, first in (
            (lambda: MixtralForCausalLM(MixtralConfig(**shape)), 2 * 8 * 3 * 64 * 128 + router, _FUSED),
            (lambda: Qwen3MoeForCausalLM(qwen), 2 * 8 * 3 * 64 * 32 + router, _FUSED),
            # w1, v1 and w2 of all experts, below each other
            (lambda: DbrxForCausalLM(dbrx), 2 * 3 * 4 * 128 * 64, "transformer.blocks.0.ffn.experts.mlp.w1")):
        p = profile(partial(Recipe(quantize=quantization, dtype=torch.bfloat16).build, make), (ids,), mode="infer")
        assert p.assumptions[0] == (
            f"{quantization} weights: {format_bytes(2 * experts)} of 6 parameters that are in no nn.Linear or Conv1D "
            f"({first}, ...) are not quantized")
        assert p.param_bytes > 2 * experts
    dense = profile(lambda: Recipe(quantize=quantization).build(lambda: LlamaForCausalLM(LlamaConfig(**shape))), (ids,),
                    mode="infer")
    assert not any("not quantized" in text for text in dense.assumptions)


class Holds(torch.nn.Module):
    """Experts in a list of parameters, and a linear layer of a class of its own."""

    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ParameterList([torch.randn(16, 16) for _ in range(3)])
        self.normed = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(16, 16))
        self.fc, self.head = torch.nn.Linear(16, 16), torch.nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.normed(self.fc(x)) @ sum(self.experts))


@pytest.mark.parametrize(("make", "told"), [
    (Holds, f"{format_bytes(4 * (4 * 256 + 16))} of 5 parameters that are in no nn.Linear or Conv1D (experts.0, ...)"),
    # attention reads the weight of its out_proj itself: codes of it were refused by the product
    (encoder, f"{format_bytes(4 * 2 * (48 + 16) * 16)} of 4 parameters that are in no nn.Linear or Conv1D "
              "(0.layers.0.self_attn.in_proj_weight, ...)")])
def test_matrices_elsewhere_stay_whole_and_are_told(make, told):
    p = profile(partial(Recipe(quantize="nf4").build, make), (torch.randn(2, 4, 16),), mode="infer")
    assert p.assumptions[0] == f"nf4 weights: {told} are not quantized"
