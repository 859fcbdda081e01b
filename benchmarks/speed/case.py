"""The models that speed is measured on, all of which run on bare meta tensors, and what is timed on them: this package,
a bare step, and torch's FlopCounterMode around one.
"""
from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from analyzer import profile, symbolic_profile, symbolic_trace
from analyzer.record.eager import default_loss

Run = Callable[[], Any]


@dataclass(frozen=True)
class SpeedCase:  # a model to build and the shapes it is called with: float32 images, or named integer tensors
    name: str
    build: Callable[[], nn.Module]
    images: tuple[int, ...] | None = None
    tokens: tuple[int, ...] = ()
    names: tuple[str, ...] = ("input_ids", "labels")


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


def _vision(name: str) -> SpeedCase:
    def build() -> nn.Module:
        import torchvision

        found: nn.Module = getattr(torchvision.models, name)(weights=None)
        return found

    return SpeedCase(name, build, images=(8, 3, 224, 224))


def opt(layers: int, hidden: int = 1024, **settings: Any) -> Callable[[], nn.Module]:
    """An OPT of identical layers, 16 heads. Its default attention asks a mask for its values, which bare meta tensors
    do not have; the eager one does not."""
    return transformer("OPTForCausalLM", "OPTConfig", hidden_size=hidden, ffn_dim=4 * hidden, num_hidden_layers=layers,
                       num_attention_heads=16, attn_implementation="eager",
                       **{"word_embed_proj_dim": hidden, **settings})


def llama(layers: int) -> Callable[[], nn.Module]:  # a Llama of 1.2 billion parameters where it has 16 layers
    return transformer("LlamaForCausalLM", "LlamaConfig", hidden_size=2048, intermediate_size=8192,
                       num_hidden_layers=layers, num_key_value_heads=8)


TOKENS = (8, 512)
# Sizes of the published checkpoints: google/electra-base-discriminator, facebook/opt-350m, bigscience/bloom-560m.
CASES = [*map(_vision, ("resnet50", "resnet152", "densenet121", "vit_b_16", "swin_t", "efficientnet_v2_s")),
         SpeedCase("bert_base", transformer("BertForMaskedLM", "BertConfig"), tokens=TOKENS),
         SpeedCase("electra_base", transformer("ElectraForPreTraining", "ElectraConfig", embedding_size=768,
                                               hidden_size=768, num_attention_heads=12, intermediate_size=3072),
                   tokens=TOKENS), SpeedCase("opt_350m", opt(24, word_embed_proj_dim=512, do_layer_norm_before=False),
                                             tokens=TOKENS),
         SpeedCase("bloom_560m", transformer("BloomForCausalLM", "BloomConfig", hidden_size=1024, n_layer=24,
                                             n_head=16), tokens=TOKENS)]

def import_libraries() -> None:  # import what the cases need, so that no timing holds it
    from analyzer.zoo.torchvision_ops import define_torchvision_ops

    define_torchvision_ops()
    import torchvision  # noqa: F401
    import transformers

    for name in ("Bert", "Electra", "OPT", "Bloom"):  # loaded when first asked for
        getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}Model")


class Prepared:  # a case's model and its inputs, shared by the contenders so that all run the same module
    def __init__(self, case: SpeedCase, device: str = "meta") -> None:
        self.case = case
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        with torch.device(device):
            self.model = case.build().train()
            if case.images is not None:
                self.args = (torch.empty(case.images),)
            else:
                self.kwargs = {name: torch.zeros(case.tokens, dtype=torch.int64) for name in case.names}

    def step(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Forward, loss, backward, an update where there is an optimizer, and gradients dropped."""
        default_loss(self.model(*self.args, **self.kwargs)).backward()
        if optimizer is not None:
            optimizer.step()
        self.model.zero_grad()

    def profile(self, **settings: Any) -> Any:
        return profile(self.model, args=self.args, kwargs=self.kwargs, **settings)


def prepare_bare_adamw(on: Prepared) -> Run:
    """The optimizer has its states already: the least that a training step can cost."""
    optimizer = torch.optim.AdamW(on.model.parameters())
    on.step(optimizer)
    return lambda: on.step(optimizer)


def prepare_ours_read(on: Prepared) -> Run:
    """With every row: nodes, modules, operators, the timeline and its events are worked out when they are read."""
    def run() -> None:
        found = on.profile()
        for field in fields(found):
            getattr(found, field.name)

    return run


def prepare_ours_trace(on: Prepared) -> Run:
    bound = inspect.signature(on.model.forward).bind(*on.args, **on.kwargs)
    meta_args = dict(bound.arguments)
    bound.apply_defaults()
    return lambda: symbolic_profile(symbolic_trace(on.model, meta_args=meta_args), *bound.args)


def prepare_flop_counter(on: Prepared) -> Run:
    from torch.utils.flop_counter import FlopCounterMode

    def run() -> None:
        with FlopCounterMode(display=False):
            on.step()

    return run


CONTENDERS: dict[str, Callable[[Prepared], Run]] = {
    "bare": lambda on: on.step, "bare + AdamW": prepare_bare_adamw, "profile": lambda on: on.profile,
    "profile, all read": prepare_ours_read, "profile + AdamW": lambda on: lambda: on.profile(optimizer="adamw"),
    "trace + profile": prepare_ours_trace, "FlopCounterMode": prepare_flop_counter}
def prepare(name: str, on: Prepared) -> Run:
    """The function to time, after one call of it."""
    run = CONTENDERS[name](on)
    run()
    return run
