"""What is done to a model before a step: dtype, checkpoints, a loss in chunks, adapters, in their order."""
from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from analyzer.errors import InputError, is_count
from analyzer.meta.state import current
from analyzer.record.eager import check_loss, default_loss
from analyzer.record.optimizer_step import takes_closure

from .layer import blocks_of, find_linear, replace_layers
from .optimizer import find_optimizer, fold_optimizer
from .quantize import DTYPES, Quantization, QuantizedLinear, find_layer, quantize

# Low-rank adapters (LoRA), with the memory of peft's.

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class LoraSpec:
    """Which adapters a model gets: of rank ``r``, beside each linear layer whose path ends in one of ``targets``
    (empty: all but the output head), with ``dropout`` before them. ``dtype`` of half precision layers' adapters is
    float32, as peft makes them, unless it says otherwise; ``casts``: whether adapters get the layer's input in their
    own dtype, as peft's do, or as it is. Raises InputError for values that no adapter could have.

    >>> LoraSpec.parse("r=16,dropout=0.1,targets=q_proj+v_proj")
    LoraSpec(r=16, targets=('q_proj', 'v_proj'), dropout=0.1, dtype=None, casts=True)
    """

    r: int = 8
    targets: tuple[str, ...] = ()
    dropout: float = 0.0
    dtype: str | None = None
    casts: bool = True

    def __post_init__(self) -> None:
        if not is_count(self.r, 1):
            raise InputError(f"lora: r={self.r!r}: must be a whole number of at least 1")
        if not isinstance(self.dropout, (int, float)) or not 0 <= self.dropout < 1:
            raise InputError(f"lora: dropout={self.dropout!r}: must be at least 0 and below 1")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise InputError(f"lora: dtype={self.dtype!r}: not one of {', '.join(DTYPES)}")

    @classmethod
    def parse(cls, text: str) -> LoraSpec:
        """What ``--lora`` gives: ``r=16``, ``16``, or more settings after commas. Raises InputError for others."""
        settings: dict[str, Any] = {}
        for part in text.split(","):
            name, equals, value = (word.strip() for word in part.partition("="))
            if not equals:
                name, value = "r", name
            try:
                settings[name] = _READERS[name](value)
            except (KeyError, ValueError):
                raise InputError(f"--lora {text}: {part!r} is not one of r=16, targets=q_proj+v_proj (or all-linear), "
                                 "dropout=0.05, dtype=bf16") from None
        return cls(**settings)


_READERS: dict[str, Any] = {"r": int, "dropout": float, "dtype": str,
                            "targets": lambda text: () if text == "all-linear" else tuple(text.split("+"))}


class LoraLinear(nn.Module):
    """A linear layer and an adapter: y = layer(x) + B A dropout(x) (peft/tuners/lora/layer.py, `Linear.forward`)."""

    def __init__(self, base: nn.Module, spec: LoraSpec) -> None:
        super().__init__()
        dtype = base.dtype if isinstance(base, QuantizedLinear) else base.weight.dtype
        if spec.dtype is not None:
            dtype = DTYPES[spec.dtype]
        elif dtype in _HALF:
            dtype = torch.float32  # peft/tuners/tuners_utils.py, cast_adapter_dtype
        linear = base if isinstance(base, QuantizedLinear) else find_linear(base)
        assert linear is not None
        settings: dict[str, Any] = {"bias": False, "dtype": dtype, "device": base.weight.device}
        self.base_layer = base
        self.lora_A = nn.Linear(linear.in_features, spec.r, **settings)
        self.lora_B = nn.Linear(spec.r, linear.out_features, **settings)
        self.lora_dropout = nn.Dropout(spec.dropout) if spec.dropout else nn.Identity()
        self.scaling, self.casts = 1.0, spec.casts
        nn.init.zeros_(self.lora_B.weight)  # a new adapter changes nothing

    @property
    def weight(self) -> torch.Tensor:
        """The layer's own, which code may read (peft/tuners/tuners_utils.py, `BaseTunerLayer.weight`). Code that
        computes with it passes by the adapter: `nn.MultiheadAttention`, `nn.TransformerEncoderLayer` in inference.
        """
        state = current()
        if state is not None and state.recorder is not None and state.recorder.modules.runs_module():
            modules = state.recorder.modules
            state.assume(
                f"lora: forward of {modules.log.modules[modules.running()].type} reads the weight of a layer with an "
                "adapter; where it computes with that, the adapter is passed by and not trained, as peft's is")
        return self.base_layer.weight  # type: ignore[return-value]

    @property
    def bias(self) -> torch.Tensor | None:
        return getattr(self.base_layer, "bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output in its own dtype; the adapter computes in that of its weights."""
        result: torch.Tensor = self.base_layer(x)
        dtype = result.dtype
        own = self.lora_A.weight.dtype if self.casts else x.dtype  # the copy has no name: it is freed once it is read
        result = result + self.lora_B(self.lora_A(self.lora_dropout(x.to(own)))) * self.scaling
        return result.to(dtype)


def add_lora(model: nn.Module, spec: LoraSpec, layer: type[LoraLinear] = LoraLinear) -> None:
    """Freeze ``model`` and give its linear layers adapters. Raises InputError where none is a target."""
    model.requires_grad_(False)
    seen: list[str] = []

    def make(path: str, module: nn.Module) -> nn.Module | None:
        if not isinstance(module, QuantizedLinear) and find_linear(module) is None:
            return None
        seen.append(path)
        is_target = not spec.targets or f".{path}".endswith(tuple(f".{name}" for name in spec.targets))
        return layer(module, spec) if is_target else None

    if not replace_layers(model, make):
        names = sorted({path.rpartition(".")[2] for path in seen})
        raise InputError(f"lora: {type(model).__name__} has no linear layer named {' or '.join(spec.targets)}; it has "
                         f"{', '.join(names)}" if seen else
                         f"lora: {type(model).__name__} has no linear layers besides its head")


def checkpoint_blocks(model: nn.Module) -> None:
    """Let ``model`` recompute its blocks in backward: by its own switch, else the repeated ones. Raises InputError."""
    name = type(model).__name__
    enable = getattr(model, "gradient_checkpointing_enable", None)
    switch = getattr(model, "set_grad_checkpointing", None)
    try:
        if callable(enable):
            config: Any = getattr(model, "config", None)
            if getattr(config, "use_cache", False):
                config.use_cache = False  # transformers does so too, with a warning, in each forward pass
            enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            return
        if callable(switch):
            switch(True)
            return
    except (ValueError, AssertionError, NotImplementedError) as error:  # how these libraries say that a model cannot
        raise InputError(f"checkpointing: {name} does not support it: {error}") from error
    for block in blocks_of(model, "checkpointing"):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


Tensor = torch.Tensor
IGNORED = -100  # of `torch.nn.functional.cross_entropy`
#: Ends of names of classes whose loss is that of next tokens (transformers/loss/loss_utils.py, ``LOSS_MAPPING``).
_WITH_NEXT_TOKENS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


class HeadInLoss(nn.Module):
    """In the place of the output head, which the loss calls: what goes into the head is what comes out."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


def chunk_loss(model: nn.Module, chunks: int) -> None:
    """Let a causal model of transformers compute its loss in ``chunks``, run again in backward. Raises InputError."""
    if not is_count(chunks, 1):
        raise InputError(f"loss_chunks={chunks!r}: must be a whole number of at least 1")
    name = type(model).__name__
    get = getattr(model, "get_output_embeddings", None)
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    calls_loss = name.endswith(_WITH_NEXT_TOKENS) and code is not None and "loss_function" in code.co_names
    head = get() if callable(get) and calls_loss else None
    place = next((path for path, module in model.named_modules() if module is head), None)
    if head is None or place is None:
        raise InputError(f"loss_chunks={chunks}: {name} is no causal language model of transformers whose logits are "
                         "its head's")
    model.set_submodule(place, HeadInLoss(head))
    config: Any = copy.deepcopy(getattr(model, "config", None))  # others may be built of the one that it has
    inner = config.get_text_config()
    softcap = getattr(inner, "final_logit_softcapping", None)
    if softcap is not None:
        inner.final_logit_softcapping = None  # what goes into the head is not to be capped
        model.config = config

    def chunk(hidden: Tensor, labels: Tensor) -> Tensor:
        logits = head(hidden)
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        return functional.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")

    def compute_loss(logits: Tensor, labels: Tensor, vocab_size: int, *_: Any, **__: Any) -> Tensor:
        """As transformers/loss/loss_utils.py, `ForCausalLMLoss`: the labels of the tokens that follow."""
        shifted = functional.pad(labels, (0, 1), value=IGNORED)[..., 1:].contiguous().reshape(-1)
        parts = zip(logits.reshape(-1, logits.shape[-1]).chunk(chunks), shifted.chunk(chunks))
        total: Tensor | None = None
        for part, labels_of_part in parts:
            loss: Tensor = checkpoint(chunk, part, labels_of_part, use_reentrant=False)
            total = loss if total is None else total + loss
        assert total is not None
        return total / (shifted != IGNORED).sum()

    setattr(model, "loss_function", compute_loss)  # noqa: B010  # a property of transformers' models


COMPILED = "default"  #: the mode of ``torch.compile(model)``
_BLOCKS = "blocks"
#: The modes of ``torch.compile``, and each repeated block compiled by itself (regional compilation).
COMPILE_MODES = (COMPILED, "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", _BLOCKS)


@dataclass(frozen=True)
class Recipe:
    """Changes to a model and its step, each None or False where nothing changes; `apply` makes them in this order.

    >>> recipe = Recipe(dtype=torch.bfloat16, lora=LoraSpec(r=4), optimizer="adamw8bit")
    >>> str(recipe)
    'bfloat16, LoRA r=4, adamw8bit'
    >>> model = recipe.apply(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2)))
    >>> sum(p.numel() for p in model.parameters() if p.requires_grad)
    512

    Raises InputError for values that no model could take; `apply` raises it where this model cannot.
    """

    dtype: torch.dtype | None = None                  #: of floating parameters and buffers
    attention: str | None = None                      #: transformers' implementation: sdpa, eager, ...
    quantize: Quantization | None = None              #: how the weights of linear layers are held
    lora: LoraSpec | None = None                      #: train adapters instead of the model
    loss_chunks: int | None = None                    #: compute a language model's loss in so many parts
    checkpointing: bool = False                       #: run each block again in the backward pass
    compile: str | bool | None = None  #: one of `COMPILE_MODES`; True is that of `torch.compile(model)`
    optimizer: str | None = None
    accumulate: int = 1                               #: micro-batches of a step, each of the inputs' size

    def __post_init__(self) -> None:
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise InputError(f"dtype={self.dtype!r}: must be a floating torch.dtype such as torch.bfloat16, or None")
        if self.quantize is not None:
            find_layer(self.quantize)
        if self.compile in (True, False):
            object.__setattr__(self, "compile", COMPILED if self.compile else None)
        if self.compile not in (None, *COMPILE_MODES):
            raise InputError(f"compile={self.compile!r}: must be one of {', '.join(COMPILE_MODES)}, or True")
        if not is_count(self.accumulate, 1):
            raise InputError(f"accumulate={self.accumulate!r}: must be a whole number of at least 1")
        if self.lora is not None and not isinstance(self.lora, LoraSpec):
            raise InputError(f"lora={self.lora!r}: must be an analyzer.recipe.LoraSpec, e.g. LoraSpec(r=16), or None")
        object.__setattr__(self, "optimizer", fold_optimizer(self.optimizer))
        find_optimizer(self.optimizer)

    def apply(self, model: nn.Module) -> nn.Module:
        if self.dtype is not None:
            model.to(self.dtype)
        if self.attention is not None:
            choose, said = getattr(model, "set_attn_implementation", None), f"attention={self.attention!r}"
            if not callable(choose):
                raise InputError(f"{said}: {type(model).__name__} has no attention to choose; it is no model of "
                                 "transformers")
            try:
                choose(self.attention)
            except (ValueError, ImportError) as error:  # how transformers says that a model has none of that name
                raise InputError(f"{said}: {type(model).__name__} cannot take it: {error}") from error
        if self.quantize is not None:
            quantize(model, self.quantize)
        if self.lora is not None:
            add_lora(model, self.lora)
        if self.loss_chunks is not None:
            chunk_loss(model, self.loss_chunks)
        if self.checkpointing:
            checkpoint_blocks(model)
        if self.compile == _BLOCKS:
            for block in blocks_of(model, "compile='blocks'"):
                block.compile()
        elif self.compile is not None:
            model = torch.compile(model, mode=str(self.compile))  # type: ignore[assignment]
        return model

    def build(self, factory: Callable[[], nn.Module]) -> nn.Module:
        return self.apply(factory())

    def profile_options(self, mode: str, loss_fn: Callable[[Any], torch.Tensor] | None = None) -> dict[str, Any]:
        """The arguments of `analyzer.profile` of a step by this recipe; each micro-batch has the loss ``loss_fn``."""
        if mode == "infer":
            return {"mode": mode}
        step = None if self.accumulate == 1 else partial(_accumulate, self.accumulate, loss_fn or default_loss)
        return {"mode": mode, "optimizer": self.optimizer, "step": step}

    def __str__(self) -> str:
        said = {"dtype": str(self.dtype).removeprefix("torch."), "attention": f"{self.attention} attention",
                "quantize": f"{self.quantize} weights", "checkpointing": "checkpointing",
                "compile": f"compiled ({self.compile})", "optimizer": str(self.optimizer),
                "lora": "" if self.lora is None else f"LoRA r={self.lora.r}",
                "loss_chunks": f"loss in {self.loss_chunks} chunks", "accumulate": f"{self.accumulate} micro-batches"}
        return ", ".join(said[f.name] for f in fields(self) if getattr(self, f.name) != f.default) or "as it is"


def _accumulate(count: int, loss_fn: Callable[[Any], torch.Tensor], model: nn.Module,
                optimizer: torch.optim.Optimizer | None, *args: Any, **kwargs: Any) -> None:
    if optimizer is not None and takes_closure(optimizer):
        raise InputError(f"accumulate={count}: {type(optimizer).__name__} runs the model itself, as often as it likes; "
                         "give no accumulation, or a step of your own from Python")
    for _ in range(count):
        loss = loss_fn(model(*args, **kwargs))
        check_loss(loss)
        (loss / count).backward()
        del loss
    if optimizer is not None:
        optimizer.step()
    model.zero_grad()
