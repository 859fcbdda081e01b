"""Recipes on data: quantized products, adapters, optimizers and losses compute what they stand for."""
import copy

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from analyzer import profile
from analyzer.errors import InputError
from analyzer.recipe import LoraSpec, Recipe
from analyzer.recipe.optimizer import (
    AdamW8bit,
    LowRankAdamW,
    OffloadedAdamW,
    PagedAdamW,
    PagedAdamW8bit,
    find_optimizer,
)
from analyzer.recipe.quantize import Fp8Linear, Int8Linear, Nf4Linear


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=2, vocab_size=512,
                                        num_attention_heads=4, num_key_value_heads=4))


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("kind", "error"), [(Nf4Linear, 0.15), (Int8Linear, 0.02), (Fp8Linear, 0.06)])
def test_quantized_products_are_near_those_of_the_weight(kind, error, bias, rows):
    """Relative errors of normal weights: half a step of 16 quantiles, of 127 steps, of 3 bits of mantissa."""
    torch.manual_seed(0)
    linear = nn.Linear(256, 192, bias=bias)
    nn.init.normal_(linear.weight)
    quantized = kind(linear)
    x, y = (torch.randn(rows, 256) for _ in range(2))
    y = x.clone().requires_grad_()
    x.requires_grad_()
    expected = linear(x)
    found = quantized(y)
    assert (found - expected).norm() / expected.norm() < error
    expected.sum().backward()
    found.sum().backward()
    assert (y.grad - x.grad).norm() / x.grad.norm() < error


def test_adapters_change_nothing_at_first_and_alone_are_trained():
    model, ids = llama(), torch.randint(512, (2, 16))
    expected = model(ids).logits
    Recipe(lora=LoraSpec(r=4)).apply(model)
    assert torch.allclose(model(ids).logits, expected, atol=1e-5)
    model(input_ids=ids, labels=ids).loss.backward()
    assert {name.rpartition(".")[0].rpartition(".")[2] for name, p in model.named_parameters()
            if p.grad is not None} == {"lora_A", "lora_B"}


def test_transposed_layers_of_gpt2_get_adapters_and_are_quantized():
    model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=256))
    Recipe(lora=LoraSpec(r=4, targets=("c_attn",)), quantize="int8").apply(model)
    adapter = model.transformer.h[0].attn.c_attn
    assert (tuple(adapter.lora_A.weight.shape), tuple(adapter.lora_B.weight.shape)) == ((4, 64), (192, 4))
    assert model.transformer.h[0].mlp.c_fc.weight.dtype is torch.int8


def test_what_is_shared_and_the_head_stay():
    model = llama()
    shared = model.model.layers[0].mlp
    model.model.layers[1].mlp = shared
    Recipe(quantize="int8").apply(model)
    assert type(model.lm_head) is nn.Linear and model.model.layers[1].mlp.up_proj is shared.up_proj
    assert shared.up_proj.weight.dtype is torch.int8


def gemma2() -> Gemma2ForCausalLM:
    return Gemma2ForCausalLM(Gemma2Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, vocab_size=512, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, final_logit_softcapping=0.5))


def gemma3() -> Gemma3ForConditionalGeneration:
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 512, "head_dim": 16,
            "num_attention_heads": 2, "num_key_value_heads": 2}
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
             "image_size": 28, "patch_size": 14}
    return Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=tower, mm_tokens_per_image=4,
                                                       image_token_id=500))


@pytest.mark.parametrize("make", [llama, gemma2, gemma3])
def test_a_loss_in_chunks_is_the_loss(make):
    torch.manual_seed(0)
    model, ids = make(), torch.randint(499, (3, 17))
    before = model.config.get_text_config().to_dict()
    chunked = Recipe(loss_chunks=4).apply(copy.deepcopy(model))
    expected, found = (m(input_ids=ids, labels=ids).loss for m in (model, chunked))
    assert torch.allclose(expected, found, atol=1e-6)
    expected.backward()
    found.backward()
    for one, other in zip(model.parameters(), chunked.parameters(), strict=True):
        assert one.grad is other.grad is None or torch.allclose(one.grad, other.grad, atol=1e-6)
    assert model.config.get_text_config().to_dict() == before


@pytest.mark.parametrize("kind", [AdamW8bit, PagedAdamW8bit])
def test_eight_bit_states_follow_adamw(kind):
    torch.manual_seed(0)
    one, other = (nn.Parameter(torch.ones(64, 128)) for _ in range(2))
    exact, coarse = torch.optim.AdamW([one], lr=1e-2), kind([other], lr=1e-2)
    for _ in range(5):
        gradient = torch.randn(64, 128)
        for parameter, optimizer in ((one, exact), (other, coarse)):
            parameter.grad = gradient.clone()
            optimizer.step()
    assert coarse.state[other]["state1"].dtype is torch.uint8
    assert (one - other).abs().mean() < 0.25 * (one - 1).abs().mean()


@pytest.mark.parametrize("kind", [OffloadedAdamW, PagedAdamW])
@pytest.mark.parametrize("numel", [16, 8192])
def test_states_on_the_host_follow_adamw(numel, kind):
    one, other = (nn.Parameter(torch.ones(numel)) for _ in range(2))
    exact, offloaded = torch.optim.AdamW([one], lr=1e-2), kind([other], lr=1e-2)
    for step in range(3):
        for parameter, optimizer in ((one, exact), (other, offloaded)):
            parameter.grad = torch.full((numel,), 0.5 + step)
            optimizer.step()
    assert torch.allclose(one, other)


@pytest.mark.parametrize("count", [1, 4])
def test_micro_batches(count):
    recipe = Recipe(optimizer="sgd", accumulate=count)
    model, ids = llama(), torch.randint(512, (2, 16))
    p = profile(model, (), {"input_ids": ids, "labels": ids}, **recipe.profile_options("train"))
    once = profile(model, (), {"input_ids": ids, "labels": ids}, optimizer="sgd")
    assert p.batch_size == 2 * count
    assert p.fwd_flops - count * once.fwd_flops == (count if count > 1 else 0)  # the loss is divided
    assert p.optimizer_flops == once.optimizer_flops


@pytest.mark.parametrize(("make", "text"), [
    (lambda: Recipe(dtype="bf16"), "dtype='bf16': must be a floating torch.dtype such as torch.bfloat16, or None"),
    (lambda: Recipe(quantize="int3"), "quantize='int3': not one of int8, int4, nf4, fp8"),
    (lambda: Recipe(accumulate=0), "accumulate=0: must be a whole number of at least 1"),
    (lambda: Recipe(lora="r=4"), "lora='r=4': must be an analyzer.recipe.LoraSpec, e.g. LoraSpec(r=16), or None"),
    (lambda: LoraSpec.parse("rank=4"), "--lora rank=4: 'rank=4' is not one of r=16, targets=q_proj+v_proj (or "
     "all-linear), dropout=0.05, dtype=bf16"),
    (lambda: LoraSpec.parse("r=0"), "lora: r=0: must be a whole number of at least 1"),
    (lambda: LoraSpec(dropout=1.0), "lora: dropout=1.0: must be at least 0 and below 1"),
    (lambda: LoraSpec(dtype="int8"), "lora: dtype='int8': not one of bf16, fp16, fp32, fp64, bfloat16, float16, "
     "float32, float64"),
    (lambda: Recipe(lora=LoraSpec(targets=("wq",))).apply(llama()), "lora: LlamaForCausalLM has no linear layer named "
     "wq; it has down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"),
    (lambda: Recipe(lora=LoraSpec()).apply(nn.Sequential(nn.ReLU())),
     "lora: Sequential has no linear layers besides its head"),
    (lambda: Recipe(quantize="nf4").apply(nn.Sequential(nn.Linear(2, 2))),
     "quantize='nf4': Sequential has no linear layers besides its head"),
    (lambda: Recipe(loss_chunks=4).apply(BertModel(BertConfig(num_hidden_layers=1))), "loss_chunks=4: BertModel is no "
     "causal language model of transformers whose logits are its head's"),
    (lambda: Recipe(attention="sdpa").apply(nn.Linear(2, 2)), "attention='sdpa': Linear has no attention to choose; it "
     "is no model of transformers"),
    (lambda: find_optimizer("torch.optim:Nothing"), "optimizer='torch.optim:Nothing': torch.optim has no class or "
     "function 'Nothing'; give module:Class, e.g. torch.optim:RAdam"),
    (lambda: find_optimizer("adamv"), "optimizer='adamv': did you mean adam? give one of sgd, momentum, adam, adamw, "
     "adamw_fused, adamw8bit, adamw_offloaded, or module:Class, e.g. torch.optim:RAdam; "
     "in Python also a function that makes a torch.optim.Optimizer of parameters"),
])
def test_errors(make, text):
    with pytest.raises(InputError) as caught:
        make()
    assert str(caught.value) == text


def test_an_unknown_attention_is_refused():
    with pytest.raises(InputError, match="attention='sdpb': LlamaForCausalLM cannot take it: "):
        Recipe(attention="sdpb").apply(llama())


def test_4_bit_products_are_not_trained():
    recipe = Recipe(quantize="int4", lora=LoraSpec(r=4))
    ids = torch.zeros(1, 8, dtype=torch.int64)
    with pytest.raises(InputError, match="quantize='int4': its product has no backward pass"):
        profile(lambda: recipe.build(llama), (), {"input_ids": ids, "labels": ids})


@pytest.mark.parametrize("quantization", ["nf4", "int8", "fp8"])
def test_quantized_layers_run_on_meta(quantization):
    """Where there is no autocast."""
    with torch.device("meta"):
        model = Recipe(quantize=quantization).apply(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)))
        assert model(torch.empty(4, 64, dtype=torch.bfloat16)).shape == (4, 32)


def test_matrices_of_blocks_are_updated_by_muon():
    torch.manual_seed(0)
    table, matrix, norm = (nn.Parameter(torch.randn(size)) for size in ((64, 8), (16, 8), (8,)))
    optimizer = find_optimizer("analyzer.recipe.optimizer:MuonWithAdamW")([table, matrix, norm])
    for parameter in (table, matrix, norm):
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    kept = [sorted(name for name, value in optimizer.state[p].items() if value.numel() == p.numel()) for p in (
        table, matrix, norm)]
    assert kept == [["exp_avg", "exp_avg_sq"], ["momentum_buffer"], ["exp_avg", "exp_avg_sq"]]


@pytest.mark.parametrize("decomposes", [True, False])
def test_states_of_projected_gradients(decomposes):
    """Of a tall matrix 16 x 2 numbers each, of a wide one 2 x 24, beside what projects: 2 x 8, 6 x 2."""
    torch.manual_seed(0)
    sizes = ((64, 8), (16, 8), (6, 24), (8,))
    parameters = [nn.Parameter(torch.randn(size)) for size in sizes]
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer = LowRankAdamW(parameters, rank=2, decomposes=decomposes)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    kept = [{name: tuple(value.shape) for name, value in optimizer.state[p].items()} for p in parameters]
    whole = [{"exp_avg": size, "exp_avg_sq": size} for size in sizes]
    assert kept == [whole[0], {"projector": (2, 8), "exp_avg": (16, 2), "exp_avg_sq": (16, 2)},
                    {"projector": (6, 2), "exp_avg": (2, 24), "exp_avg_sq": (2, 24)}, whole[3]]
    changes = [(old - new).detach() for old, new in zip(before, parameters)]
    assert all(change.abs().sum() > 0 for change in changes)
    assert torch.linalg.matrix_rank(changes[1], atol=1e-4) == (2 if decomposes else 8)
