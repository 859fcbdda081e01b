"""Recipes take what the libraries take that they stand for, which run without data beside them."""
import functools

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from analyzer import profile
from analyzer.recipe import LoraSpec, Recipe

peft = pytest.importorskip("peft")
bitsandbytes = pytest.importorskip("bitsandbytes")
BF16 = torch.bfloat16
IDS = torch.empty(2, 512, dtype=torch.int64, device="meta")


def make() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=3, vocab_size=32000,
                                        num_attention_heads=8, num_key_value_heads=8)).to(BF16)


def make_by_libraries(quantization: str | None):
    """The model with peft's adapters, on layers of bitsandbytes where it is quantized."""
    model = make()
    for name, linear in list(model.named_modules()) if quantization else ():
        if not isinstance(linear, torch.nn.Linear) or name == "lm_head":
            continue
        sizes = linear.in_features, linear.out_features
        if quantization == "nf4":
            layer = bitsandbytes.nn.Linear4bit(*sizes, bias=False, compute_dtype=BF16, quant_type="nf4")
            layer.weight = bitsandbytes.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4",
                                                      compress_statistics=True, module=layer)
        else:
            layer = bitsandbytes.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False, threshold=6.0)
            layer.weight = bitsandbytes.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
        model.set_submodule(name, layer)
    return peft.get_peft_model(model.cuda(), peft.LoraConfig(r=16, target_modules="all-linear"))


# How much of the peak may differ: which kernel bitsandbytes takes depends on the device and the shape.
@pytest.mark.sweep(1)
@pytest.mark.parametrize(("quantization", "tolerance"), [(None, 0), ("nf4", 1e-3), ("int8", 2e-3)])
def test_adapters_and_quantized_weights(quantization, tolerance):
    recipe = Recipe(dtype=BF16, quantize=quantization, lora=LoraSpec(16), optimizer="adamw")
    inputs = {"input_ids": IDS, "labels": IDS}
    ours = profile(lambda: recipe.build(make), (), inputs, **recipe.profile_options("train"))
    theirs = profile(functools.partial(make_by_libraries, quantization), (), inputs, optimizer="adamw")
    same = ("param_bytes", "buffer_bytes", "optimizer_bytes", "params", "fwd_macs", "bwd_macs")
    assert {name: getattr(ours, name) for name in same} == {name: getattr(theirs, name) for name in same}
    assert ours.peak_allocated_bytes == pytest.approx(theirs.peak_allocated_bytes, rel=tolerance, abs=0)


def test_eight_bit_states():
    inputs = {"input_ids": IDS, "labels": IDS}
    ours = profile(make, (), inputs, optimizer="adamw8bit")
    theirs = profile(make, (), inputs, optimizer=lambda params: bitsandbytes.optim.AdamW8bit(params, weight_decay=0.01))
    for name in ("optimizer_bytes", "peak_allocated_bytes", "optimizer_flops"):
        assert getattr(ours, name) == getattr(theirs, name), name
