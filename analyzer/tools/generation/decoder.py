"""How a model reads tokens one pass after the other, run or stored."""
from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from analyzer.errors import InputError
from analyzer.zoo.causal_lm import KeyValueCache
from analyzer.zoo.transformers_models import spectrogram_shape

from .stored_cache import CacheForm, StoredLayer, StoredStateLayer, UnknownCacheError, attend_cache, make_stored_cache

# What tables of positions are called, not those of relative ones.
_POSITIONS = re.compile(r"(^|\.)(wpe|embed_positions?|position_embeddings?)$")
_CACHE_DEPTH = 6  # of objects and containers around the tensors of a cache


class TokenDecoder:
    """Reads tokens without keeping anything: every pass reads all tokens again."""

    cache_kind = "none"
    cache: Any = None  #: what holds the tensors that are kept

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.tokens: Tensor | None = None

    def read(self, tokens: Tensor) -> Tensor:
        """The logits (batch, tokens, vocabulary) after the next ``tokens``, (batch, tokens)."""
        self.tokens = tokens if self.tokens is None else torch.cat((self.tokens, tokens), dim=1)
        return find_logits(self.model(self.tokens))

    def skip(self, count: int) -> None:
        """Go on as if ``count`` more tokens had been read."""
        assert self.tokens is not None
        self.tokens = torch.cat((self.tokens, self.tokens.new_empty((self.tokens.shape[0], count))), dim=1)

    def bends(self) -> list[int]:
        """After how many tokens a pass stops to cost more with each one: where a window is full."""
        return []

    def used_bytes(self) -> int | None:
        """Of the cache, those of tokens that are there; None where that is not told apart."""
        return None


class CachedDecoder(TokenDecoder):
    """A model of this package, which takes its own cache."""

    def __init__(self, model: nn.Module, cache: str, tokens: int) -> None:
        super().__init__(model)
        self.cache_kind = cache
        self.cache = KeyValueCache(tokens if cache == "static" else None)

    def read(self, tokens: Tensor) -> Tensor:
        return find_logits(self.model(tokens, cache=self.cache))

    def skip(self, count: int) -> None:
        for layer in self.cache.layers:
            assert layer.keys is not None and layer.values is not None
            layer.extend(*(x.new_empty((*x.shape[:2], count, x.shape[3])) for x in (layer.keys, layer.values)))


class TransformersDecoder(TokenDecoder):
    """A model of transformers, called as its ``generate()`` calls it when it decodes greedily and nothing is padded."""

    def __init__(self, model: Any, cache: str, tokens: int) -> None:
        from transformers import DynamicCache, StaticCache

        super().__init__(model)
        self.cache_kind = cache
        parameters = inspect.signature(model.forward).parameters
        self.cache_name = "cache_params" if "cache_params" in parameters else "past_key_values"
        self.options: dict[str, Any] = {"use_cache": True}
        if "logits_to_keep" in parameters:
            self.options["logits_to_keep"] = 1
        config = model.config.get_text_config(decoder=True)
        self.own: Any = (StaticCache(config=config, max_cache_len=tokens) if cache == "static" else
                         DynamicCache(config=config))
        self.cache = self.own
        self.takes_positions = "position_ids" in parameters
        self.context = 0  # tokens read so far

    def read(self, tokens: Tensor) -> Tensor:
        options = dict(self.options)
        batch, count = tokens.shape
        if self.takes_positions:
            options["position_ids"] = torch.arange(self.context, self.context + count, device=tokens.device).repeat(
                batch, 1)
        self.context += count
        return find_logits(self.model(input_ids=tokens, **{self.cache_name: self.cache}, **options))

    def skip(self, count: int) -> None:
        self.context += count
        layers: Any = self.own.layers
        for layer in layers:
            keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
            if keys is not None and values is not None:
                layer.update(*(x.new_empty((*x.shape[:2], count, x.shape[3])) for x in (keys, values)))

    def bends(self) -> list[int]:
        layers: Any = self.own.layers
        windows = {getattr(layer, "sliding_window", None) or getattr(layer, "max_cache_len", None)
                   for layer in layers if getattr(layer, "is_sliding", False)}
        # the token that is read takes the last place
        return sorted({window - 1 for window in windows if isinstance(window, int)})


class EncoderDecoder(TransformersDecoder):
    """One with an encoder: it reads the prompt, and decoding begins with one token."""

    def __init__(self, model: Any, cache: str, tokens: int) -> None:
        from transformers import DynamicCache, EncoderDecoderCache

        super().__init__(model, cache, tokens)
        self.model: Any = model
        self.cache = EncoderDecoderCache(self.own, DynamicCache(config=model.config.get_text_config(decoder=True)))
        self.encoded: Any = None

    def read(self, tokens: Tensor) -> Tensor:
        if self.encoded is None:  # the prompt, or what else the encoder takes
            encoder: Any = self.model.get_encoder()
            self.encoded = encoder(tokens)
            tokens = torch.zeros((tokens.shape[0], 1), dtype=torch.int64, device=tokens.device)
        output = self.model(encoder_outputs=self.encoded, decoder_input_ids=tokens, past_key_values=self.cache,
                            use_cache=True)
        return find_logits(output)


def make_decoder(model: nn.Module, form: CacheForm, prompt_tokens: int, new_tokens: int) -> TokenDecoder:
    """What reads tokens with ``model`` over a cache of that form. Raises InputError for a model that cannot."""
    is_theirs, config = is_of_transformers(model), getattr(model, "config", None)
    if form.is_stored and not is_theirs:
        raise InputError(f"profile_generate(cache={form.kind!r}, cache_dtype={form.dtype}): {type(model).__name__} is "
                         "no model of transformers, and only those are run so; give 'dynamic' or 'static' and no "
                         "cache_dtype")
    if is_theirs and not form.is_stored and config.is_encoder_decoder:  # type: ignore[union-attr]
        # decoding begins with one token
        check_positions(model, f"profile_generate(new_tokens={new_tokens!r})", new_tokens)
        return EncoderDecoder(model, form.kind, 1 + new_tokens)
    # the last token is not read again
    check_positions(model, f"profile_generate(prompt_tokens={prompt_tokens!r}, new_tokens={new_tokens!r})",
                    prompt_tokens + new_tokens - 1)
    if form.is_stored:
        return StoredDecoder(model, form, prompt_tokens + new_tokens - 1)
    if is_theirs:
        return TransformersDecoder(model, form.kind, prompt_tokens + new_tokens)
    if "cache" in inspect.signature(model.forward).parameters:
        return CachedDecoder(model, form.kind, prompt_tokens + new_tokens)
    return TokenDecoder(model)


def prompt_shape(model: Any, prompt_tokens: int) -> tuple[tuple[int, ...], torch.dtype]:
    """Of a sequence that is read first: token indices, or the spectrogram (channels, frames) that a speech model is
    for. Raises InputError for an encoder of anything else.
    """
    main, config = getattr(model, "main_input_name", "input_ids"), getattr(model, "config", None)
    if main == "input_ids" or not getattr(config, "is_encoder_decoder", False):
        return (prompt_tokens,), torch.int64
    sizes = spectrogram_shape(config) if main == "input_features" else None
    if sizes is None:
        raise InputError(f"{type(model).__name__}: its encoder reads {main}, not tokens; call profile_generate from "
                         "Python with prompt=, a tensor of them")
    return sizes[1:], model.dtype


def is_of_transformers(model: nn.Module) -> bool:
    """Whether it is a model of transformers; raises InputError for one that cannot generate."""
    can_generate = getattr(model, "can_generate", None)
    if not callable(can_generate):
        return False
    if not can_generate():
        raise InputError(f"{type(model).__name__} cannot generate; give a class with a language-model head, e.g. "
                         "...ForCausalLM")
    return True


def check_positions(model: nn.Module, asked: str, tokens: int) -> None:
    """Raise InputError where the model has a learned table of positions for fewer ``tokens`` than ``asked`` takes."""
    # the tables of OPT and BART begin with `offset` rows that no position takes
    sizes = [table.num_embeddings - getattr(table, "offset", 0) for path, table in model.named_modules()
             if isinstance(table, nn.Embedding) and _POSITIONS.search(path)]
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):  # other tables are those of images or sounds
        said = next((size for name in ("max_position_embeddings", "max_target_positions")
                     if (size := getattr(config.get_text_config(decoder=True), name, None)) is not None), None)
        sizes = [size for size in sizes if size == said]
    if sizes and tokens > min(sizes):
        raise InputError(f"{asked}: {type(model).__name__} has {min(sizes):,} positions, and together these take "
                         f"{tokens:,}; give fewer")


def find_logits(output: Any) -> Tensor:
    """The logits in what a model returned. Raises InputError where there are none of three dimensions."""
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if found is None and isinstance(output, (tuple, list)):
        found = output[0]
    if not isinstance(found, Tensor) or found.dim() != 3:
        raise InputError(f"the model returned {type(output).__name__}, in which there are no logits (batch, tokens, "
                         "vocabulary)")
    return found


def tensors_kept(kept: object) -> Iterator[Tensor]:
    """The tensors in a cache: in its attributes, their containers and objects."""
    seen: set[int] = set()

    def walk(value: Any, depth: int) -> Iterator[Tensor]:
        if isinstance(value, Tensor):
            yield value
        elif depth and id(value) not in seen and not isinstance(value, (type, nn.Module, str)):
            seen.add(id(value))
            named = value if isinstance(value, dict) else getattr(value, "__dict__", {})
            for item in value if isinstance(value, (list, tuple)) else named.values():
                yield from walk(item, depth - 1)

    yield from walk(kept, _CACHE_DEPTH)


def kept_bytes(cache: object) -> int:
    """Bytes of the storages of a cache, each once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors_kept(cache)}.values())


ATTENTION = "analyzer_cached"  # its name among transformers' attention functions


class StoredDecoder(TransformersDecoder):
    """Reads tokens over a `StoredLayer` a layer, with room for ``sequences`` (None: for those that are first read).
    Raises InputError for a model whose attention cannot be that of an engine.
    """

    def __init__(self, model: Any, form: CacheForm, tokens: int, sequences: int | None = None) -> None:
        super().__init__(model, "dynamic", tokens)
        asked = f"cache={form.kind!r}" + (f", cache_dtype={form.dtype}" if form.dtype is not None else "")
        if model.config.is_encoder_decoder:
            raise InputError(f"{asked}: {type(model).__name__} has an encoder, and only models that are a decoder "
                             "alone are run so; give 'dynamic' or 'static' and no cache_dtype")
        self.cache_kind = form.kind
        self._make_cache = partial(make_stored_cache, model.config.get_text_config(decoder=True), form, tokens,
                                   sequences)
        self.cache = self.own = self._make_cache()
        if not model._can_set_attn_implementation():
            raise InputError(f"{asked}: the attention of {type(model).__name__} is its own code, not one of "
                             "transformers' attention functions; give 'dynamic' or 'static' and no cache_dtype")
        for module in model.modules():
            if hasattr(module, "kv_lora_rank") and hasattr(module, "kv_b_proj") and not hasattr(module, "expand_kv"):
                import transformers

                raise UnknownCacheError(
                    f"{asked}: {type(module).__name__} of transformers {transformers.__version__} hands its cache the "
                    "keys and values of all heads, where a server keeps latents; from 5.15 on it hands latents: "
                    "pip install 'transformers>=5.15'")
        self._has_indexer = any(hasattr(module, "indexer") for module in model.modules())  # which asks for a mask

    def read(self, tokens: Tensor) -> Tensor:
        if self._has_indexer:
            batch, count = tokens.shape
            self.options["attention_mask"] = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=tokens.device).expand(
                batch, 1, count, self.context + count)
        with self._attending():
            return super().read(tokens)

    def skip(self, count: int) -> None:
        self.context += count
        config: Any = self.model.config
        crossed = getattr(config.get_text_config(decoder=True), "cross_attention_layers", None) or ()
        for index, layer in enumerate(self.cache.layers):
            if isinstance(layer, StoredLayer) and index not in crossed:  # those read images, of which there are none
                layer.skip(count)

    @property
    def has_states(self) -> bool:
        """Whether some layers keep a state of one size, of linear attention or Mamba."""
        return any(type(layer) is not StoredLayer for layer in self.cache.layers)

    def start_over(self) -> Callable[[], None]:
        """Go on as if nothing had been read, in the same room but for states, which begin anew; the result puts those
        that were there back.
        """
        self.context = 0
        kept, new = list(self.cache.layers), self._make_cache().layers
        states = [getattr(layer, "states", None) for layer in kept]
        for layer, fresh in zip(kept, new):
            if isinstance(layer, StoredLayer):
                layer.tokens = 0
            if isinstance(layer, StoredStateLayer):
                layer.states = fresh.states
        self.cache.layers[:] = [old if isinstance(old, StoredLayer) else fresh for old, fresh in zip(kept, new)]

        def put_back() -> None:
            self.cache.layers[:] = kept
            for layer, held in zip(kept, states):
                if isinstance(layer, StoredStateLayer):
                    layer.states = held

        return put_back

    def layers(self) -> list[StoredLayer]:
        return [layer for layer in self.cache.layers if isinstance(layer, StoredLayer)]

    def used_bytes(self) -> int:
        return sum(layer.used_bytes() for layer in self.layers())

    @contextmanager
    def _attending(self) -> Iterator[None]:
        """The model with attention that reads the cache, and latents in it that are not expanded; it is as it was
        afterwards.
        """
        from transformers import AttentionInterface

        windows = {index: layer.sliding_window for index, layer in enumerate(self.cache.layers)
                   if isinstance(layer, StoredLayer) and layer.sliding_window}
        AttentionInterface.register(ATTENTION, partial(attend_cache, windows=windows))
        modules = list(self.model.modules())
        configs: dict[int, Any] = {id(c): c for m in modules if hasattr(c := getattr(m, "config", None),
                                                                        "_attn_implementation_internal")}
        before = [(config, config._attn_implementation_internal) for config in configs.values()]
        expanding: list[Any] = [module for module in modules if hasattr(module, "expand_kv")]
        try:
            for config, _ in before:
                config._attn_implementation_internal = ATTENTION
            for module in expanding:  # some expand before they store, others after
                module.__dict__["expand_kv"] = _keep_latents
            yield
        finally:
            for config, name in before:
                config._attn_implementation_internal = name
            for module in expanding:
                module.__dict__.pop("expand_kv", None)


def _keep_latents(latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    return latents, rotated
