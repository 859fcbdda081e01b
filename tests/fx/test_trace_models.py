"""Models of torchvision, timm and transformers, small: traced, they give their own results and gradients."""
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

torchvision = pytest.importorskip("torchvision")
timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")

IDS, OTHER_IDS = torch.arange(3, 19).reshape(2, 8), torch.arange(20, 4, -1).reshape(2, 8)
MASK = torch.ones(2, 8, dtype=torch.int64)
MASK[1, 5:] = 0
SMALL: dict[str, Any] = dict(
    vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
    max_position_embeddings=32, bos_token_id=1, eos_token_id=2, pad_token_id=0)
HEADS: dict[str, Any] = dict(num_key_value_heads=1)

VISION: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "resnet18": (lambda: torchvision.models.resnet18(num_classes=5), 64),
    "vit_b_16": (lambda: torchvision.models.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=5), 32),
    "swin_t": (
        lambda: torchvision.models.swin_transformer.SwinTransformer([4, 4], 8, [2, 2], [2, 2], [4, 4], num_classes=5),
        64),
    "timm convnext": (lambda: timm.create_model("convnext_atto", depths=(1, 1, 1, 1), num_classes=5), 64),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", VISION)
@pytest.mark.parametrize("train", [True, False])
def test_vision(traced_like: Any, name: str, train: bool) -> None:
    make, size = VISION[name]
    torch.manual_seed(0)
    model = make().train(train).double()
    x, other = torch.rand(2, 2, 3, size, size, dtype=torch.float64)
    traced_like(model, {"x": x}, other={"x": other})


WHISPER: dict[str, Any] = dict(
    vocab_size=60, num_mel_bins=8, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
    decoder_attention_heads=2, d_model=16, encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=10,
    max_target_positions=20, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    begin_suppress_tokens=None, suppress_tokens=None)
#: class, settings and inputs besides ids
TEXT: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "bert": ("BertForSequenceClassification", SMALL, {"attention_mask": MASK, "labels": torch.tensor([0, 1])}),
    "gpt2": ("GPT2LMHeadModel", dict(vocab_size=60, n_embd=16, n_layer=2, n_head=2, n_positions=32),
             {"attention_mask": MASK, "labels": IDS}),
    "llama": ("LlamaForCausalLM", {**SMALL, **HEADS, "output_hidden_states": True},
              {"attention_mask": MASK, "labels": IDS}),
    "t5": ("T5ForConditionalGeneration", dict(vocab_size=60, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
                                              decoder_start_token_id=0), {"labels": IDS}),
    "mixtral": ("MixtralForCausalLM", {**SMALL, **HEADS, "num_local_experts": 4}, {}),
    "deberta": ("DebertaV2Model", {**SMALL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
                {"attention_mask": MASK}),
    "mamba": ("MambaForCausalLM", dict(vocab_size=60, hidden_size=16, num_hidden_layers=2, state_size=4), {}),
    "whisper": ("WhisperForConditionalGeneration", WHISPER, {"labels": IDS}),
}


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", TEXT)
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_text(traced_like: Any, name: str, train: bool) -> None:
    kind, settings, inputs = TEXT[name]
    torch.manual_seed(0)
    kind = getattr(transformers, kind)
    model = kind(kind.config_class(**settings)).train(train)
    if name == "whisper":
        given, other = ({"input_features": torch.rand(2, 8, 20), **inputs} for _ in range(2))
    else:
        given, other = {"input_ids": IDS, **inputs}, {"input_ids": OTHER_IDS, **inputs}
    gm = traced_like(model, given, other=other)
    assert any(n.meta["module_path"].count(".") > 2 for n in gm.graph.nodes)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_of_transformers(traced_like: Any, reentrant: bool) -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **HEADS, use_cache=False))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    gm = traced_like(model.train(), {"input_ids": IDS}, other={"input_ids": OTHER_IDS}, trace_act_ckpt=True)
    assert gm.code.count("torch.utils.checkpoint.checkpoint(") == 2
