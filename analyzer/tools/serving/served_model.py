"""A model as a server runs it: the kernels of one pass, and what lies in memory."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

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
