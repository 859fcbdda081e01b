"""Models that people use, from their own libraries, with no change to their code: both modes, nothing uncounted."""
import subprocess
import sys

import pytest
import torch

from analyzer import profile

IMAGE = torch.empty(2, 3, 224, 224, device="meta")
IDS = torch.ones(2, 32, dtype=torch.int64)
SMALL = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4)

TRANSFORMERS = {
    "bert": ("BertForMaskedLM", "BertConfig", SMALL),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", dict(n_layer=3, n_embd=128, n_head=4)),
    "llama": ("LlamaForCausalLM", "LlamaConfig", dict(**SMALL, num_key_value_heads=2)),
    "t5": ("T5ForConditionalGeneration", "T5Config",
           dict(d_model=64, d_kv=16, d_ff=128, num_layers=3, decoder_start_token_id=0, pad_token_id=0)),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", dict(**SMALL, num_key_value_heads=2)),
}


def build(name):
    library, _, model = name.partition(":")
    if library == "torchvision":
        return getattr(pytest.importorskip("torchvision.models"), model)
    if library == "timm":
        return lambda: pytest.importorskip("timm").create_model(model)
    transformers = pytest.importorskip("transformers")
    cls, config, kwargs = TRANSFORMERS[model]
    return lambda: getattr(transformers, cls)(getattr(transformers, config)(**kwargs))


NAMES = [
    *(f"torchvision:{n}" for n in ("resnet18", "resnet50", "vit_b_16", "swin_t", "regnet_y_1_6gf")),
    "timm:vit_small_patch16_224", "timm:convnext_tiny", *(f"transformers:{n}" for n in TRANSFORMERS)
]


@pytest.mark.sweep(8)
@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("name", NAMES)
def test_profiles_in_both_modes(name, mode):
    inputs = {"input_ids": IDS, "labels": IDS} if name.startswith("transformers") else {"x": IMAGE}
    p = profile(build(name), kwargs=inputs, mode=mode, optimizer="adamw" if mode == "train" else None)
    assert p.uncounted == ()
    assert p.fwd_macs > 0
    # a product has two gradients, less where the input wants none
    assert (p.bwd_macs > 1.5 * p.fwd_macs) == (mode == "train")
    assert sum(p.peak_by_category.values()) == p.peak_allocated_bytes


def test_a_405_billion_parameter_llama_is_profiled_within_a_gigabyte():
    code = """
import re, torch
from analyzer import profile
from analyzer.zoo import MODELS
p = profile(MODELS["llama_405b"].factory, args=(torch.empty(1, 4096, dtype=torch.int64, device="meta"),))
# ru_maxrss would be the parent's, if larger
print(p.params, p.fwd_macs, re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    params, macs, kibibytes = map(int, done.stdout.split())
    assert params == 405_853_388_800
    # every weight but the embedding's is multiplied once for each of 4096 tokens; attention adds scores and their sum,
    # twice 128 heads of 128
    assert macs == 4096 * (params - 128256 * 16384 - (2 * 126 + 1) * 16384) + 126 * 2 * 4096 * 4096 * 16384
    assert kibibytes * 1024 < 10**9
