"""The models that speed is measured on, all of which run on bare meta tensors."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class SpeedCase:
    """A model to build and the shapes it is called with: float32 images, or named integer tensors."""

    name: str
    build: Callable[[], nn.Module]
    images: tuple[int, ...] | None = None
    tokens: tuple[int, ...] = ()
    names: tuple[str, ...] = ("input_ids", "labels")

    def make_model(self, device: str = "meta") -> nn.Module:
        """The model in training mode."""
        with torch.device(device):
            return self.build().train()

    def make_inputs(self, device: str = "meta") -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and named arguments."""
        if self.images is not None:
            return (torch.empty(self.images, device=device),), {}
        return (), {name: torch.zeros(self.tokens, dtype=torch.int64, device=device) for name in self.names}


def transformer(model: str, config: str, use_cache: bool = False, **settings: Any) -> Callable[[], nn.Module]:
    """What builds a model of transformers by the names of its classes, with the config's defaults but for ``settings``.
    """
    def build() -> nn.Module:
        import transformers

        made = getattr(transformers, config)(**settings)
        made.use_cache = use_cache  # which is for generation; the library's default is True all the same
        found: nn.Module = getattr(transformers, model)._from_config(made)
        return found

    return build


def _vision(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import torchvision

        found: nn.Module = getattr(torchvision.models, name)(weights=None)
        return found

    return build


def opt(layers: int, hidden: int = 1024, **settings: Any) -> Callable[[], nn.Module]:
    """An OPT of identical layers, 16 heads. Its default attention asks a mask for its values, which bare meta tensors
    do not have; the eager one does not."""
    return transformer("OPTForCausalLM", "OPTConfig", hidden_size=hidden, ffn_dim=4 * hidden, num_hidden_layers=layers,
                       num_attention_heads=16, attn_implementation="eager",
                       **{"word_embed_proj_dim": hidden, **settings})


IMAGES, TOKENS = (8, 3, 224, 224), (8, 512)
# Sizes of the published checkpoints: google/electra-base-discriminator, facebook/opt-350m, bigscience/bloom-560m.
CASES = [
    *(SpeedCase(name, _vision(name), images=IMAGES)
      for name in ("resnet50", "resnet152", "densenet121", "vit_b_16", "swin_t", "efficientnet_v2_s")),
    SpeedCase("bert_base", transformer("BertForMaskedLM", "BertConfig"), tokens=TOKENS),
    SpeedCase(
        "electra_base",
        transformer("ElectraForPreTraining", "ElectraConfig", embedding_size=768, hidden_size=768,
                    num_attention_heads=12, intermediate_size=3072), tokens=TOKENS),
    SpeedCase("opt_350m", opt(24, word_embed_proj_dim=512, do_layer_norm_before=False), tokens=TOKENS),
    SpeedCase("bloom_560m", transformer("BloomForCausalLM", "BloomConfig", hidden_size=1024, n_layer=24, n_head=16),
              tokens=TOKENS),
]
REUSE_CASES = [
    SpeedCase(
        "llama",
        transformer("LlamaForCausalLM", "LlamaConfig", hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
                    num_key_value_heads=8), tokens=(1, 512)),
    SpeedCase("gpt2", transformer("GPT2LMHeadModel", "GPT2Config"), tokens=(2, 512)),
    SpeedCase("gpt2 with its cache", transformer("GPT2LMHeadModel", "GPT2Config", use_cache=True), tokens=(2, 512)),
    SpeedCase("vit_b_16", _vision("vit_b_16"), images=IMAGES),
    SpeedCase("resnet50", _vision("resnet50"), images=IMAGES),
    SpeedCase("swin_t", _vision("swin_t"), images=IMAGES),
    SpeedCase(
        "t5_base",
        transformer("T5ForConditionalGeneration", "T5Config", d_model=768, d_ff=3072, num_layers=12, num_heads=12,
                    decoder_start_token_id=0, pad_token_id=0), tokens=(2, 512)),
]


def find_case(name: str) -> SpeedCase:
    """The case of that name. Raises KeyError."""
    return {case.name: case for case in CASES}[name]


def import_libraries() -> None:
    """Import what the cases need, so that no timing holds it."""
    from analyzer.zoo.torchvision_ops import define_torchvision_ops

    define_torchvision_ops()
    import torchvision  # noqa: F401
    import transformers

    for name in ("Bert", "Electra", "OPT", "Bloom"):  # loaded when first asked for
        getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}Model")
