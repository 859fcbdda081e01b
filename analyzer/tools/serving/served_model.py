"""A model as a server runs it: the kernels of one pass, and what lies in memory."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from analyzer.errors import InputError

from .batch import Batch, Chunk
from .picture import Pictured, Size, count_pictured

Split = Literal["column", "row", "heads", "none"]


@dataclass(frozen=True, slots=True)
class Product:
    """A product by weights [k, n]; ``parts`` are the merged columns. ``rows``: of a token (of a sequence for the head).

    - ``split``: how tensor parallelism divides it; ``heads``: ``batch`` products, one a head.
    - ``least``: the columns of each part that a rank keeps at least: whole heads of keys.
    - ``is_added``: its result is added to that of experts, so ranks reduce both at once (vLLM's and SGLang's
      deepseek_v2.py, TensorRT-LLM's modeling_deepseekv3.py: shared experts, whose ``reduce_results`` is false).
    - ``experts``: 0 where it is dense. ``is_held``: whether a format of weights applies (not to heads and routers).
    """

    parts: tuple[int, ...]
    k: int
    rows: int = 1
    split: Split = "none"
    least: tuple[int, ...] = ()
    experts: int = 0
    batch: int = 1
    is_held: bool = True
    is_head: bool = False
    is_added: bool = False

    @property
    def n(self) -> int:
        return sum(self.parts)

    @property
    def elements(self) -> int:
        """Of the weights."""
        return max(self.experts, 1) * self.batch * self.n * self.k


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """Attention of new tokens to the cache.

    - ``keys``: how many it reads where these do not grow (an encoder's); ``selected``: how many an indexer chooses for
      each token at most (0: it reads all).
    - ``is_index``: the scores by which an indexer chooses, of keys that it keeps itself.
    - ``is_shared``: it reads the cache of an earlier layer, and keeps nothing.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int = 0
    is_latent: bool = False
    expanded: tuple[int, int] = (0, 0)  #: of latent attention, channels of a query and of a value in a prompt
    keys: int = 0
    selected: int = 0
    is_index: bool = False
    is_shared: bool = False

    @property
    def window_of_work(self) -> int:
        """How many keys a token sees at most: those of a window, or those that were chosen; 0: all."""
        return self.window or self.selected


@dataclass(frozen=True, slots=True)
class PassKernel:
    """A kernel that moves bytes: of each token (or sequence), and of weights."""

    name: str
    token_bytes: int
    weight_bytes: int = 0
    is_split: bool = False
    kernels: int = 1
    sorts: int = 0  #: of ``kernels``, those that choose or count


Kernel = Product | AttentionKernel | PassKernel


@dataclass(frozen=True, slots=True)
class Tower:
    """What reads pictures for a model of language. Kernels of ``patches`` run for each patch of a picture; those of
    ``windows`` look at parts of it; those of ``tokens`` run for each token that the model of language gets. Weights are
    held in 16 bits. ``config``: the whole model's.
    """

    patches: Mapping[Kernel, int]
    windows: Mapping[Kernel, int]
    tokens: Mapping[Kernel, int]
    config: Any

    @property
    def products(self) -> list[tuple[Product, int]]:
        return [(kernel, count) for part in (self.patches, self.tokens) for kernel, count in part.items()
                if isinstance(kernel, Product)]

    def split(self, pictures: Iterable[tuple[int, Size]]) -> list[tuple[Mapping[Kernel, int], Batch]]:
        """Its kernels, with what they read of a prompt's ``pictures``, numbers of each size."""
        found: list[tuple[Mapping[Kernel, int], Batch]] = []
        for number, size in pictures:
            each = count_pictured(self.config, size)
            for kernels, parts, tokens in ((self.patches, each.groups, each.patches),
                                           (self.windows, each.windows, each.window_patches),
                                           (self.tokens, 1, each.rows)):
                if kernels:
                    found.append((kernels, Batch(0, 1, (Chunk(tokens, tokens),) * (number * parts))))
        return found

    def largest(self) -> Pictured | None:
        """Of the largest picture that the model takes, as vLLM runs it when it starts; None where that is not known."""
        try:  # more pixels than any rule leaves, in shapes of which tiles are made
            sizes = Size(8192, 8192), Size(8192, 6144)
            return max((count_pictured(self.config, size) for size in sizes), key=lambda each: each.tokens)
        except InputError:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The kernels of a pass, how often each, and what lies in memory."""

    name: str
    repository: str = ""                    #: where its config says that its weights lie: on the hub, or in a folder
    kernels: Mapping[Kernel, int]
    hidden: int
    vocabulary: int
    top_k: int = 0
    other_weights: int = 0                 #: elements of weights that no product has: norms, biases, tables
    table: int = 0                         #: elements of the table of tokens
    shares_table: bool = False             #: whether the head's weights are the table's
    state_bytes: int = 0                   #: of a sequence, whatever its length
    encoder: Mapping[Kernel, int] | None = None
    prompt_tokens: int | None = None       #: what the encoder reads, where that is not said by the caller
    notes: tuple[str, ...] = ()            #: what is not sure of its cache
    stored: tuple[str, str | None] | None = None  #: formats of weights and experts that its config tells
    tower: Tower | None = None             #: what reads pictures
    pictures: tuple[tuple[int, Size], ...] = ()   #: of each prompt: how many of which size
    picture_tokens: int = 0                #: of a prompt, those of its pictures

    def with_pictures(self, images: int = 0, size: tuple[int, int] = (1024, 1024),
                      video_frames: int = 0) -> ServedModel:
        """The same for prompts that have so many pictures of a width and height, or a video of so many frames, beside
        their text. Raises InputError for a model that reads none.
        """
        if images < 0 or video_frames < 0:
            raise InputError(f"images={images}, video_frames={video_frames}: 0 or more")
        if not images and not video_frames:
            return self
        if self.tower is None:
            raise InputError(f"images={images}, video_frames={video_frames}: {self.name} reads no pictures, or its "
                             "tower is not known here; leave them out")
        pictures = [(images, Size(*size))] * bool(images) + [(1, Size(*size, video_frames))] * bool(video_frames)
        return replace(self, pictures=tuple(pictures), picture_tokens=sum(
            number * count_pictured(self.tower.config, each).tokens for number, each in pictures))

    def with_prompt(self, tokens: int) -> ServedModel:
        """The same for prompts of so many tokens, which an encoder reads and every new token looks at."""
        if self.encoder is None:
            return self
        kernels = {replace(kernel, keys=tokens) if isinstance(kernel, AttentionKernel) and kernel.keys else kernel:
                   count for kernel, count in self.kernels.items()}
        return replace(self, kernels=kernels, prompt_tokens=tokens)

    @property
    def read_tokens(self) -> int:
        """Of a prompt, those that are not in the cache of the decoder's own tokens."""
        return 0 if self.encoder is None else self.prompt_tokens or 0

    @property
    def attentions(self) -> list[tuple[AttentionKernel, int]]:
        return [(kernel, count) for kernel, count in self.kernels.items() if isinstance(kernel, AttentionKernel)]

    @property
    def products(self) -> list[tuple[Product, int]]:
        return [(kernel, count) for kernel, count in self.kernels.items() if isinstance(kernel, Product)]

    @property
    def layers(self) -> int:
        """Of attention; 1 at least."""
        return max(1, sum(count for kernel, count in self.attentions if not kernel.keys and not kernel.is_index))

    @property
    def has_experts(self) -> bool:
        return any(product.experts for product, _ in self.products)
