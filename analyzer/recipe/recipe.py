"""What is done to a model before a step: dtype, checkpoints, a loss in chunks, adapters, in their order."""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from analyzer.errors import InputError, is_count
from analyzer.record.eager import check_loss, default_loss
from analyzer.record.optimizer_step import takes_closure

from .lora import LoraSpec, add_lora
from .optimizer import find_optimizer, fold_optimizer
from .quantize import Quantization, find_layer, quantize


def checkpoint_blocks(model: nn.Module) -> None:
    """Let ``model`` recompute its blocks in backward: by its own switch (transformers, timm), else its repeated ones.
    Raises InputError where there is neither.
    """
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
    blocks = list(list_blocks(model))
    if not blocks:
        raise InputError(
            f"checkpointing: {name} has no repeated blocks (two or more modules of one class in a ModuleList or "
            f"Sequential, with modules of their own)")
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def list_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that repeat: they hold modules, in a list or sequence that holds another of their class."""
    children = [child for child in model.children()]
    kinds = [type(child) for child in children]
    for child, kind in zip(children, kinds):
        in_list = isinstance(model, (nn.ModuleList, nn.Sequential))
        is_container = issubclass(kind, (nn.ModuleList, nn.Sequential, nn.ModuleDict))
        if in_list and not is_container and kinds.count(kind) > 1 and next(child.children(), None) is not None:
            yield child
        else:
            yield from list_blocks(child)


Tensor = torch.Tensor
IGNORED = -100  # of `torch.nn.functional.cross_entropy`


class HeadInLoss(nn.Module):
    """In the place of the output head, which the loss calls: what goes into the head is what comes out."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: Tensor) -> Tensor:
        """``hidden`` as it is."""
        return hidden


def chunk_loss(model: nn.Module, chunks: int) -> None:
    """Compute the next-token loss of a causal language model of transformers in ``chunks``, each run again in the
    backward pass; its output's ``logits`` are then the hidden states. Raises InputError for other models.
    """
    if not is_count(chunks, 1):
        raise InputError(f"loss_chunks={chunks!r}: must be a whole number of at least 1")
    name = type(model).__name__
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) and name.endswith(("ForCausalLM", "LMHeadModel")) else None
    place = next((path for path, module in model.named_modules() if module is head), None)
    softcap = getattr(getattr(model, "config", None), "final_logit_softcapping", None)
    if head is None or place is None or softcap is not None:
        raise InputError(f"loss_chunks={chunks}: {name} is no causal language model of transformers whose logits are "
                         "its head's")
    model.set_submodule(place, HeadInLoss(head))

    def chunk(hidden: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(head(hidden).float(), labels, ignore_index=IGNORED, reduction="sum")

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
    compile: bool = False                             #: wrap the model by `torch.compile`
    optimizer: str | None = None
    accumulate: int = 1                               #: micro-batches of a step, each of the inputs' size

    def __post_init__(self) -> None:
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise InputError(f"dtype={self.dtype!r}: must be a floating torch.dtype such as torch.bfloat16, or None")
        if self.quantize is not None:
            find_layer(self.quantize)
        if not is_count(self.accumulate, 1):
            raise InputError(f"accumulate={self.accumulate!r}: must be a whole number of at least 1")
        if self.lora is not None and not isinstance(self.lora, LoraSpec):
            raise InputError(f"lora={self.lora!r}: must be an analyzer.recipe.LoraSpec, e.g. LoraSpec(r=16), or None")
        object.__setattr__(self, "optimizer", fold_optimizer(self.optimizer))
        find_optimizer(self.optimizer)

    def apply(self, model: nn.Module) -> nn.Module:
        """``model``, changed in place, or what wraps it."""
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
        return torch.compile(model) if self.compile else model  # type: ignore[return-value]

    def build(self, factory: Callable[[], nn.Module]) -> nn.Module:
        """The model that ``factory`` builds, with this recipe applied."""
        return self.apply(factory())

    def profile_options(self, mode: str, loss_fn: Callable[[Any], torch.Tensor] | None = None) -> dict[str, Any]:
        """The arguments of `analyzer.profile` that a step by this recipe takes; of several micro-batches each has the
        loss ``loss_fn``, by default as `analyzer.profile` has it.
        """
        if mode == "infer":
            return {"mode": mode}
        step = None if self.accumulate == 1 else partial(_accumulate, self.accumulate, loss_fn or default_loss)
        return {"mode": mode, "optimizer": self.optimizer, "step": step}

    def __str__(self) -> str:
        said = {"dtype": str(self.dtype).removeprefix("torch."), "attention": f"{self.attention} attention",
                "quantize": f"{self.quantize} weights", "checkpointing": "checkpointing", "compile": "compiled",
                "lora": "" if self.lora is None else f"LoRA r={self.lora.r}", "optimizer": str(self.optimizer),
                "loss_chunks": f"loss in {self.loss_chunks} chunks", "accumulate": f"{self.accumulate} micro-batches"}
        return ", ".join(said[f.name] for f in fields(self) if getattr(self, f.name) != f.default) or "as it is"


def _accumulate(count: int, loss_fn: Callable[[Any], torch.Tensor], model: nn.Module,
                optimizer: torch.optim.Optimizer | None, *args: Any, **kwargs: Any) -> None:
    """A training step whose gradients are sums over micro-batches."""
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
