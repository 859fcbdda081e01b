"""A model of transformers over a cache that attention reads as it lies, as a serving engine runs it."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from analyzer.errors import InputError

from .cached_attention import attend_cache
from .decoder import TransformersDecoder
from .stored_cache import CacheForm, StoredLayer, make_stored_cache, scale_bytes

ATTENTION = "analyzer_cached"  # its name among transformers' attention functions


class StoredDecoder(TransformersDecoder):
    """Reads tokens over a `StoredLayer` a layer, with room for ``sequences`` (None: for those that are first read)."""

    def __init__(self, model: Any, form: CacheForm, tokens: int, sequences: int | None = None) -> None:
        super().__init__(model, "dynamic", tokens, 0)
        check_backend(model, form)
        self.cache_kind = form.kind
        self._make_cache = partial(make_stored_cache, model.config.get_text_config(decoder=True), form, tokens,
                                   sequences)
        self.cache = self.own = self._make_cache()

    def read(self, tokens: Tensor, keep: int = 1) -> Tensor:
        """The logits (batch, ``keep``, vocabulary) after the last ``keep`` of the next ``tokens``."""
        if keep != 1 and "logits_to_keep" in self.options:
            self.options["logits_to_keep"] = keep
        with self._attending():
            return super().read(tokens)

    def skip(self, count: int) -> None:
        """Go on as if ``count`` more tokens had been read."""
        self.context += count
        for layer in self.layers():
            layer.skip(count)

    def rewind(self, count: int) -> None:
        """Go on as if the last ``count`` tokens had not been read; their room stays."""
        self.context -= count
        for layer in self.layers():
            layer.tokens -= count

    @property
    def has_states(self) -> bool:
        """Whether some layers keep a state of one size instead of keys and values: linear attention, Mamba."""
        return len(self.layers()) < len(self.cache.layers)

    def start_over(self) -> list[Any]:
        """Go on as if nothing had been read, while the room for keys and values stays; the result are the layers that
        keep states, whose place new ones have taken.
        """
        self.context = 0
        kept, new = list(self.cache.layers), self._make_cache().layers
        for layer in self.layers():
            layer.tokens = 0
        self.cache.layers[:] = [old if isinstance(old, StoredLayer) else fresh for old, fresh in zip(kept, new)]
        return kept

    def take_back(self, kept: list[Any]) -> None:
        """Put the layers that `start_over` gave in their place again."""
        self.cache.layers[:] = kept

    def layers(self) -> list[StoredLayer]:
        """The layers that keep keys and values."""
        return [layer for layer in self.cache.layers if isinstance(layer, StoredLayer)]

    def used_bytes(self) -> int:
        """Of the tokens that are in the cache."""
        return sum(layer.used_bytes() for layer in self.layers())

    def bends(self) -> list[int]:
        """After how many tokens a window is full."""
        return sorted({layer.sliding_window - 1 for layer in self.layers() if layer.sliding_window is not None})

    @contextmanager
    def _attending(self) -> Iterator[None]:
        """The model with attention that reads the cache; it is as it was afterwards."""
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION, attend_cache)
        modules = list(self.model.modules())
        configs: dict[int, Any] = {id(c): c for m in modules if hasattr(c := getattr(m, "config", None),
                                                                        "_attn_implementation_internal")}
        before = [(config, config._attn_implementation_internal) for config in configs.values()]
        expanding: list[Any] = [module for module in modules if hasattr(module, "expand_kv")]
        try:
            for config, _ in before:
                config._attn_implementation_internal = ATTENTION
            for module in expanding:
                module.__dict__["expand_kv"] = partial(self._expand, module, module.expand_kv)
            yield
        finally:
            for config, name in before:
                config._attn_implementation_internal = name
            for module in expanding:
                module.__dict__.pop("expand_kv", None)

    def _expand(self, module: Any, expand: Any, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of latents: those of the first tokens, while those in the cache are read as they are."""
        is_plain = type(module.kv_b_proj) is nn.Linear  # else its weight is packed, and cannot be absorbed as it is
        if self.cache.layers[module.layer_idx].is_fresh or not is_plain:
            dtype = module.kv_a_layernorm.weight.dtype
            expanded: tuple[Tensor, Tensor] = expand(*(
                x[..., :x.shape[3] - scale_bytes(x.dtype)].to(dtype) for x in (latents, rotated)))
            return expanded
        return latents, rotated


def check_backend(model: Any, form: CacheForm) -> None:
    """Raise InputError for a model whose attention cannot be that of an engine."""
    asked = f"cache={form.kind!r}" + (f", cache_dtype={form.dtype}" if form.dtype is not None else "")
    if model.config.is_encoder_decoder:
        raise InputError(f"{asked}: {type(model).__name__} has an encoder, and only models that are a decoder alone "
                         "are run so; give 'dynamic' or 'static' and no cache_dtype")
    if not model._can_set_attn_implementation():
        raise InputError(f"{asked}: the attention of {type(model).__name__} is its own code, not one of transformers' "
                         "attention functions; give 'dynamic' or 'static' and no cache_dtype")

