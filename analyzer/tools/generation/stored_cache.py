"""Caches of keys and values, and attention to them."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from analyzer.errors import InputError, is_count
from analyzer.meta.operator_info import register_shape_impl
from analyzer.profilers.flop_registry import FlopCount, register_flop_impl
from analyzer.profilers.operator.attention import AttentionWork, Window

CACHES = ("dynamic", "static", "paged")
BLOCK_SIZE = 16  # tokens of a page, vLLM's default (vllm/config/cache.py)
SCALE_BYTES = 4  # a float for the keys, and one for the values, of each token and head, beside what is int8


def scale_bytes(dtype: torch.dtype) -> int:
    """Bytes beside the channels of a token and head, as in vLLM's v1/kv_cache_interface.py: int8 has scales of its own,
    fp8 one for a whole layer, which is not counted.
    """
    return SCALE_BYTES if dtype == torch.int8 else 0


@dataclass(frozen=True, slots=True)
class CacheForm:
    """How a cache is kept: which kind, its type (None: the model's), and the tokens of a page."""

    kind: str = "dynamic"
    dtype: torch.dtype | None = None
    block_size: int = BLOCK_SIZE

    @property
    def is_stored(self) -> bool:
        """Whether attention is to read the cache as it lies; else the model's own code and cache are run."""
        return self.kind == "paged" or self.dtype is not None

    def check(self, caller: str) -> None:
        if self.kind not in CACHES:
            raise InputError(f"{caller}(cache={self.kind!r}): must be one of {', '.join(map(repr, CACHES))}")
        if self.kind == "dynamic" and self.dtype is not None:
            raise InputError(f"{caller}(cache='dynamic', cache_dtype={self.dtype}): what grows has the model's own "
                             "type; give 'paged' or 'static'")
        if not is_count(self.block_size, 1):
            raise InputError(f"{caller}(block_size={self.block_size!r}): must be 1 token or more")

    def room(self, tokens: int, window: int | None) -> int:
        """Tokens of a sequence that a layer has room for where ``tokens`` are the most that it sees.

        Pages are whole. A window need not begin where a page does, so it takes one more (vLLM's
        v1/kv_cache_interface.py, SlidingWindowSpec).
        """
        if self.kind != "paged":
            return tokens if window is None else min(tokens, window)
        pages = -(-tokens // self.block_size)
        return self.block_size * (pages if window is None else min(pages, -(-window // self.block_size) + 1))


class StoredLayer:
    """Keys and values of one layer in the cache's type, (sequences, tokens, heads, channels): what transformers takes
    for a layer of its caches. ``sequences`` are those that there is room for, None for as many as are first given.
    Where an indexer chooses the keys that attention reads, its own keys are kept beside them.
    """

    is_compileable = is_croppable = supports_early_init = False

    def __init__(self, form: CacheForm, tokens: int, window: int | None, sequences: int | None = None) -> None:
        self.form, self.sliding_window, self.sequences = form, window, sequences
        self.capacity = form.room(tokens, window)
        self.is_sliding = window is not None
        self.tokens = 0                      #: read so far
        self.is_fresh = True                 #: whether the last states given were the first ones
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.index: Tensor | None = None     #: keys of the indexer, in 8 bits with a scale

    @property
    def is_initialized(self) -> bool:
        return self.keys is not None

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store those of the next tokens, (batch, heads, tokens, channels). The result is what they attend to: the
        first ones to each other as they are, later ones to what is in the cache.
        """
        self.is_fresh, new = self.tokens == 0, keys.shape[2]
        self.tokens += new
        seen = self.tokens if self.sliding_window is None else min(self.tokens, self.sliding_window - 1 + new)
        self.keys, whole_keys = self._store(self.keys, keys, seen)
        self.values, whole_values = self._store(self.values, values, seen)
        return (keys, values) if self.is_fresh else (whole_keys, whole_values)

    def update_indexer(self, keys: Tensor) -> Tensor:
        """Store the indexer's keys of the tokens that were stored last, (batch, tokens, channels); the result is all of
        them, which its scores are made with.
        """
        batch, channels = keys.shape[0], keys.shape[2]
        self.index, seen = self._store(self.index, keys.unsqueeze(1), self.tokens, torch.float8_e4m3fn,
                                       index_bytes(channels) - channels)
        return torch.ops.analyzer.read_index(seen.transpose(1, 2)[:batch, :, 0], keys)  # type: ignore[no-any-return]

    def _store(self, kept: Tensor | None, states: Tensor, seen: int, dtype: torch.dtype | None = None,
               beside: int | None = None) -> tuple[Tensor, Tensor]:
        """What is kept after ``states``, and the last ``seen`` tokens of it as attention takes them; ``beside`` are
        bytes of scales.
        """
        states, dtype = states.transpose(1, 2), dtype or self.form.dtype or states.dtype
        batch, new = states.shape[:2]
        channels = states.shape[3]
        width = channels + (scale_bytes(dtype) if beside is None else beside)
        if kept is None:
            kept = states.new_empty((self.sequences or batch, self.capacity, states.shape[2], width), dtype=dtype)
        stored = min(new, self.capacity)
        start = min(self.tokens - stored, self.capacity - stored)
        kept[:batch, start:start + stored, :, :channels].copy_(states[:, new - stored:])
        return kept, kept[:batch, :min(seen, self.capacity)].transpose(1, 2)

    def skip(self, count: int) -> None:
        self.tokens += count

    def used_bytes(self) -> int:
        """Of the tokens that are there; the rest is room that was taken for more."""
        there = self.tokens if self.sliding_window is None else min(self.tokens, self.sliding_window)
        return sum(there * kept.shape[0] * kept[0, 0].numel() * kept.itemsize for kept in self.tensors())

    def tensors(self) -> list[Tensor]:
        """What is kept of tokens."""
        return [kept for kept in (self.keys, self.values, self.index) if kept is not None]

    def get_seq_length(self) -> int:
        return self.tokens

    def get_max_length(self) -> int:
        return self.capacity

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.tokens + query_length, 0  # masks are the kernel's own here


class StoredStateLayer(StoredLayer):
    """Keys and values beside states of linear attention (``states``, a layer of transformers), as of Falcon-H1."""

    def __init__(self, states: Any, form: CacheForm, tokens: int, window: int | None,
                 sequences: int | None = None) -> None:
        super().__init__(form, tokens, window, sequences)
        self.states = states

    def __getattr__(self, name: str) -> Any:
        if name == "states":  # before there are any
            raise AttributeError(name)
        return getattr(self.states, name)


class UnknownCacheError(InputError):
    """A layer keeps something whose bytes are not known."""


def make_stored_cache(config: Any, form: CacheForm, tokens: int, sequences: int | None = None) -> Any:
    """A cache of transformers for a model of this config, whose layers of attention are `StoredLayer`; those of other
    kinds (states of linear attention) are its own. Raises UnknownCacheError where a layer keeps more than keys, values,
    states and the keys of an indexer.
    """
    from transformers import cache_utils

    theirs: Any = cache_utils
    theirs.CacheLayerMixin.register(StoredLayer)
    if hasattr(theirs, "LinearAttentionCacheLayerMixin"):  # not yet in transformers 5.0
        theirs.LinearAttentionCacheLayerMixin.register(StoredStateLayer)
    cache = theirs.DynamicCache(config=config)
    layers: list[Any] = cache.layers
    for index, layer in enumerate(layers):
        window: Any = getattr(layer, "sliding_window", None)
        found, kind = layer, type(layer).__name__
        if kind in ("DynamicLayer", "DynamicSlidingWindowLayer", "DynamicIndexedLayer"):
            found = StoredLayer(form, tokens, window, sequences)
        elif kind in ("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer"):
            count = getattr(layer, "number_of_states", None)  # of one layer, of which earlier versions know one alone
            states = theirs.LinearAttentionLayer() if count is None else theirs.LinearAttentionLayer(count)
            found = StoredStateLayer(states, form, tokens, window, sequences)
        elif kind != "LinearAttentionLayer":
            raise UnknownCacheError(
                f"cache={form.kind!r}: layer {index} keeps a {kind}, which is not known here, so the "
                "bytes of a token would be wrong; `analyzer generate --engine transformers --cache dynamic` runs the "
                "model's own code and cache")
        layers[index] = found
    return cache


# Attention of new tokens to a cache as serving engines run it: one kernel that reads the cache where and as it lies.
# Neither pages nor a narrow type of the cache make a copy of it: kernels look pages up and convert in registers.

_library = torch.library.Library("analyzer", "FRAGMENT")
_library.define("cached_attention(Tensor query, Tensor keys, Tensor values, int window, int scales) -> Tensor")
_library.define("latent_attention(Tensor query, Tensor latents, Tensor rotated, int rank, int selected=0) -> Tensor")
_library.define("read_index(Tensor kept, Tensor new) -> Tensor")

cached_attention = torch.ops.analyzer.cached_attention
"""Query (batch, new, heads, channels), keys and values (batch, tokens, key heads, channels) that end with those of the
new tokens, ``scales`` bytes wider where they are int8; a query sees ``window`` tokens (0: all). The result is (batch,
new, heads, channels of a value)."""
latent_attention = torch.ops.analyzer.latent_attention
"""Query (batch, new, heads, rank + rotated channels), latents (batch, tokens, 1, rank), which are keys and values, and
keys with positions (batch, tokens, 1, rotated channels), both wider by scales where they are int8. The result is
(batch, new, heads, rank). ``selected``: how many tokens an indexer chooses at most for each query (0: it sees all)."""
read_index = torch.ops.analyzer.read_index
"""Keys of an indexer (batch, tokens, channels) as its products take them, of ``kept`` ones with their scales, in the
type of the ``new`` ones."""


def index_bytes(channels: int) -> int:
    """Of a token in an indexer's cache, whatever the type of the cache beside it: 8 bits a channel, and a float for
    each 128 (vLLM's model_executor/models/deepseek_v2.py, Indexer; SGLang's mem_cache/memory_pool.py,
    index_k_with_scale_buffer; TensorRT-LLM's attention_backend/sparse/dsa.py).

    >>> index_bytes(128)
    132
    """
    return channels + -(-channels // 128) * 4


def _flops(query: Any, keys: Any, values: Any, window: int, scales: int, out: Any) -> FlopCount:
    """The two products, dense, and what the mask leaves as executed. A single token sees all that it is given."""
    seen = Window() if query[1] == 1 else Window(left=window - 1 if window else None, right=0, bottom_right=True)
    return AttentionWork(query[0] * query[2], query[1], keys[1], query[3], out[3]).forward(query, seen)


register_shape_impl(cached_attention, lambda query, keys, values, window, scales: query.new_empty(
    (*query.shape[:3], values.shape[3] - scales)))
register_shape_impl(latent_attention, lambda query, latents, rotated, rank, selected=0: query.new_empty(
    (*query.shape[:3], rank)))
register_shape_impl(read_index, lambda kept, new: new.new_empty((*kept.shape[:2], new.shape[2])))
register_flop_impl(read_index, lambda kept, new, out: 0)  # it converts
register_flop_impl(cached_attention, _flops)
# scores against latents and rotated keys, and the sum of latents
register_flop_impl(latent_attention, lambda query, latents, rotated, rank, selected=0, out=None: _flops(
    query, latents, rotated, 0, 0, out))


def attend_cache(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                 scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
                 windows: Mapping[int, int] = MappingProxyType({}), indices: Tensor | None = None,
                 **options: Any) -> tuple[Tensor, None]:
    """The attention function of transformers' interface, (batch, heads, tokens, channels) to (batch, new, heads,
    channels): PyTorch's own kernel where the tokens attend to each other alone, else the kernel that reads the cache.

    - ``windows``: by layer, the tokens that its cache keeps; chunked attention (Llama 4) gives its length there alone.
    - ``indices``: the tokens that an indexer has chosen for each query.

    Key and value are latents where the module expands them itself (``expand_kv``). Raises UnknownCacheError where an
    indexer chooses, and its config does not say how many.
    """
    new, tokens = query.shape[2], key.shape[2]
    window, selected = sliding_window or windows.get(getattr(module, "layer_idx", -1), 0), 0
    if indices is not None:
        selected = getattr(module.config, "index_topk", 0)
        if not selected:
            raise UnknownCacheError(f"{type(module).__name__} reads the tokens that an indexer chooses, and its config "
                                    "has no index_topk, which says how many")
        if new < tokens:
            key, value = key[:, :, :selected], value[:, :, :selected]
    if hasattr(type(module), "expand_kv"):
        # a packed weight cannot be absorbed as it is
        if new < tokens and type(module.kv_b_proj) is nn.Linear:
            return attend_latents(module, query, key, value, selected), None
        dtype = module.kv_a_layernorm.weight.dtype
        key, value = type(module).expand_kv(module, *(
            x[..., :x.shape[3] - scale_bytes(x.dtype)].to(dtype) for x in (key, value)))
    beside = scale_bytes(key.dtype)
    if new == tokens and key.dtype == query.dtype and not (window and window < tokens):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        output, _ = sdpa_attention_forward(module, query, key, value, None, scaling=scaling)
        return output, None
    found: Tensor = cached_attention(*(x.transpose(1, 2) for x in (query, key, value)), window, beside)
    return found, None


def attend_latents(module: Any, query: Tensor, latents: Tensor, rotated: Tensor, selected: int) -> Tensor:
    """Multi-head latent attention with the projections of keys and values absorbed into query and output, so that the
    cache is read as it is (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1.2).
    """
    channels, rank = module.qk_nope_head_dim, module.kv_lora_rank
    weight = module.kv_b_proj.weight.view(query.shape[1], -1, rank)
    absorbed = torch.einsum("bhtc,hcr->bthr", query[..., :channels], weight[:, :channels])
    whole = torch.cat((absorbed, query[..., channels:].transpose(1, 2)), dim=-1)
    summed = latent_attention(whole, latents.transpose(1, 2), rotated.transpose(1, 2), rank, selected)
    return torch.einsum("bthr,hvr->bthv", summed, weight[:, channels:])
