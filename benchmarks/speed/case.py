"""The models that speed is measured on, all of which run on bare meta tensors, and what is timed on them: this package,
a bare step, and what others offer for the same questions.
"""
from __future__ import annotations

import contextlib
import inspect
import io
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
REUSE_CASES = [SpeedCase("llama", llama(16), tokens=(1, 512)),
               SpeedCase("gpt2", transformer("GPT2LMHeadModel", "GPT2Config"), tokens=(2, 512)),
               SpeedCase("gpt2 with its cache", transformer("GPT2LMHeadModel", "GPT2Config", use_cache=True),
                         tokens=(2, 512)), *map(_vision, ("vit_b_16", "resnet50", "swin_t")),
               SpeedCase("t5_base", transformer("T5ForConditionalGeneration", "T5Config", d_model=768, d_ff=3072,
                                                num_layers=12, num_heads=12, decoder_start_token_id=0, pad_token_id=0),
                         tokens=(2, 512))]


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


def prepare_mem_tracker(on: Prepared) -> Run:
    """On fake tensors that claim the host: ones that claim CUDA stop the process where torch is built without it."""
    from torch._subclasses import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    fake = FakeTensorMode()
    with fake:
        here = Prepared(on.case, "cpu")

    def run() -> None:
        tracker = MemTracker()
        with fake:
            tracker.track_external(here.model)
            with tracker:
                here.step()

    return run


def prepare_fx(on: Prepared) -> Run:
    from torch.fx.passes.shape_prop import ShapeProp

    return lambda: ShapeProp(torch.fx.symbolic_trace(on.model)).propagate(*on.args, *on.kwargs.values())


def prepare_torchinfo(on: Prepared) -> Run:
    import torchinfo

    data: Any = on.kwargs or on.args
    return lambda: torchinfo.summary(on.model, input_data=data, device="meta", verbose=0)


def prepare_fvcore(on: Prepared) -> Run:
    from fvcore.nn import FlopCountAnalysis

    def run() -> Any:
        analysis = FlopCountAnalysis(on.model, on.args or (on.kwargs["input_ids"],))
        analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False).tracer_warnings("none")
        return analysis.total()

    return run


def prepare_calflops(on: Prepared) -> Run:
    from calflops import calculate_flops

    given: dict[str, Any] = {"args": [], "kwargs": on.kwargs} if on.kwargs else {"input_shape": tuple(on.args[0].shape)}
    return lambda: calculate_flops(model=on.model, print_results=False, output_as_string=False, **given)


OURS: dict[str, Callable[[Prepared], Run]] = {
    "bare": lambda on: on.step, "bare + AdamW": prepare_bare_adamw, "profile": lambda on: on.profile,
    "profile, all read": prepare_ours_read, "profile + AdamW": lambda on: lambda: on.profile(optimizer="adamw"),
    "trace + profile": prepare_ours_trace, "FlopCounterMode": prepare_flop_counter}
OTHERS: dict[str, Callable[[Prepared], Run]] = {
    "MemTracker": prepare_mem_tracker,
    "torch.export": lambda on: lambda: torch.export.export(on.model, on.args, on.kwargs),
    "fx + ShapeProp": prepare_fx, "torchinfo": prepare_torchinfo, "fvcore": prepare_fvcore,
    "calflops": prepare_calflops}


def prepare(name: str, on: Prepared) -> Run | str:
    """The function to time, after one call of it; where it does not run, why, in one line."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            run = {**OURS, **OTHERS}[name](on)
            run()
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"
    except Exception as error:  # of another library, on a model it cannot read
        return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return run
