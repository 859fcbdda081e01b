"""A model as a server runs it: the kernels of one pass, read off the model's own operators.

One decoding pass runs under the recorder, on tensors without data. Operators between two matrix products or attentions
become one kernel, as servers fuse them; products of one input become one product. What a kernel costs is in proportion
to the tokens (or sequences) of a pass, so one recording answers for every batch, context and chunk.
"""
from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from analyzer.api.argument import build_model, set_training
from analyzer.api.session import Session
from analyzer.errors import InputError
from analyzer.fx.surroundings import leaves_no_tensor
from analyzer.meta.spec import TensorSpec
from analyzer.profilers.kernel_time import is_view
from analyzer.record.call_table import OpCall
from analyzer.record.log import Log
from analyzer.tools.generation.decoder import Decoder, EncoderDecoder, StoredDecoder, is_of_transformers, kept_bytes
from analyzer.tools.generation.stored_cache import CacheForm
from analyzer.zoo.transformers_models import spectrogram_shape

#: Which operators a server runs as one kernel, and where that is published. Told with every answer.
RULES = (
    "a pass is one CUDA graph: no host time for an operator (vLLM docs, CUDA Graphs; SGLang --cuda-graph-max-bs; "
    "TensorRT-LLM cuda_graph_config)",
    "products of one input are one product: qkv, gate and up (vLLM QKVParallelLinear, MergedColumnParallelLinear)",
    "what lies between two products is one kernel: residual add with norm, norm of heads with rotary embedding, gated "
    "activation, quantization of the next product's input (vllm/compilation/fusion.py, csrc/layernorm_kernels.cu)",
    "attention reads the paged cache where it lies, and writes new keys and values (FlashAttention, FlashInfer, XQA)",
    "experts: routing, sorting tokens by expert, two grouped products, a weighted sum (vLLM fused_moe)",
    "a product of split input ends in an all-reduce: one or two shots over NVLink up to 8 MiB, NCCL above (vLLM "
    "csrc/custom_all_reduce.cuh)",
    "the output head and sampling run for one token of each sequence")

_TOKENS = 211  # a prime that is no size of a model, so that what is in proportion to the tokens shows

Split = Literal["column", "row", "heads", "none"]


@dataclass(frozen=True, slots=True)
class Product:
    """A product by weights [k, n]; ``parts`` are the merged columns. ``rows``: of a token (of a sequence for the head).

    - ``split``: how tensor parallelism divides it; ``heads``: ``batch`` products, one a head.
    - ``least``: the columns of each part that a rank keeps at least: whole heads of keys.
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
    has_bias: bool = False

    @property
    def n(self) -> int:
        return sum(self.parts)

    @property
    def elements(self) -> int:
        """Of the weights."""
        return max(self.experts, 1) * self.batch * self.n * self.k


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """Attention of new tokens to the cache. ``keys``: how many it reads where these do not grow (an encoder's)."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int = 0
    is_latent: bool = False
    expanded: tuple[int, int] = (0, 0)  #: of latent attention, channels of a query and of a value in a prompt
    keys: int = 0

    @property
    def cache_elements(self) -> int:
        """Of one token and layer; a latent is keys and values, beside its rotated channels."""
        return self.head_dim if self.is_latent else self.kv_heads * (self.head_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class FusedKernel:
    """A kernel that moves bytes: of each token (or sequence), and of weights."""

    name: str
    token_bytes: int
    weight_bytes: int = 0
    is_split: bool = False
    kernels: int = 1
    sorts: int = 0  #: of ``kernels``, those that choose or count


Kernel = Product | AttentionKernel | FusedKernel


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The kernels of a pass, how often each, and what lies in memory."""

    name: str
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
    parameters: int = 0

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
        return max(1, sum(count for kernel, count in self.attentions if not kernel.keys))

    @property
    def has_experts(self) -> bool:
        return any(product.experts for product, _ in self.products)


@leaves_no_tensor
def read_served_model(model: nn.Module | Callable[[], nn.Module], name: str = "model") -> ServedModel:
    """The kernels of a decoding pass of ``model``: of transformers, of this package, or any that gives logits (batch,
    tokens, vocabulary) for token indices (batch, tokens). Raises InputError for a model that does not decode.
    """
    module: Any = model if isinstance(model, nn.Module) else build_model(model)
    session = Session("h100_sxm", None)
    with set_training(module, False), session.open(module) as run:
        with run.recording() as recorder:
            theirs = is_of_transformers(module)
            encodes = theirs and module.config.is_encoder_decoder
            shape = (_TOKENS, 1) if theirs else (1, _TOKENS)
            (tokens,), _ = run.take_inputs((torch.ones(shape, dtype=torch.int64),), {}, ["tokens"])
            decoder = _make_decoder(run.root, theirs, encodes)
            if isinstance(decoder, StoredDecoder):
                decoder.skip(7)  # tokens that are there
            for step in range(3 if encodes else 1):  # an encoder's pass, the first token's, the next one's
                recorder.start_step(step, placeholders=step == 0)
                recorder.begin("forward")
                with torch.no_grad():
                    if isinstance(decoder, EncoderDecoder) and step == 0:
                        prompt = _make_prompt(module, tokens)
                        decoder.encoded = decoder.model.get_encoder()(prompt)
                    else:
                        decoder.read(tokens)
                recorder.end()
        log = recorder.log
        steps = [[call for call in log.calls if call.step == step and call.phase == "forward"]
                 for step in range(log.steps)]
        found = _Reading(log, steps[-1], cached=theirs).run()
        if isinstance(decoder, EncoderDecoder):
            found = _add_encoder(found, log, steps, decoder.encoded[0].shape[1], _frames_of(module))
        states = 0
        if isinstance(decoder, StoredDecoder):
            kept = sum(x.untyped_storage().nbytes() for layer in decoder.layers() for x in (layer.keys, layer.values)
                       if x is not None)
            states = (kept_bytes(decoder.cache) - kept) // _TOKENS
        total = sum(parameter.numel() for parameter in module.parameters())
        products = sum(count * product.elements for product, count in found.products)
        shared = found.vocabulary * found.hidden if found.shares_table else 0
        return replace(found, name=name, state_bytes=states, parameters=total,
                       other_weights=max(0, total - products - found.table + shared))


_PROMPT = 37  # tokens that an encoder of any number reads, a prime too


def _frames_of(module: Any) -> int | None:
    """Positions that an encoder of spectrograms gives; None where it reads tokens."""
    shape = spectrogram_shape(module.config) if module.main_input_name == "input_features" else None
    return None if shape is None else shape[2]


def _make_prompt(module: Any, tokens: torch.Tensor) -> torch.Tensor:
    """What the encoder reads. Raises InputError where it is neither tokens nor a spectrogram."""
    if module.main_input_name == "input_ids":
        return tokens.new_ones((_TOKENS, _PROMPT))
    shape = spectrogram_shape(module.config)
    if shape is None:
        raise InputError(f"{type(module).__name__}: its encoder reads {module.main_input_name}, which servers of text "
                         "and speech do not")
    return torch.zeros((_TOKENS, *shape[1:]), dtype=module.dtype, device=tokens.device)


def _add_encoder(found: ServedModel, log: Log, steps: list[list[OpCall]], positions: int,
                 frames: int | None) -> ServedModel:
    """The encoder's kernels, by position, and the keys and values that the decoder makes of what it gives, once."""
    encoder = _Reading(log, steps[0], cached=True, tokens=_TOKENS * positions).run(is_whole=False)
    kernels = Counter(dict(encoder.kernels))
    for product, count in _Reading(log, steps[1], cached=True).run().products:
        if product.rows == positions:
            kernels[replace(product, rows=1)] += count
    return replace(found, encoder=dict(kernels), prompt_tokens=None if frames is None else positions)


def _make_decoder(module: Any, theirs: bool, encodes: bool) -> Decoder:
    if encodes:
        return EncoderDecoder(module, "dynamic", 4)
    if theirs:
        try:
            return StoredDecoder(module, CacheForm("paged"), 8, _TOKENS)
        except InputError:  # its attention is its own code
            from analyzer.tools.generation.decoder import TransformersDecoder

            return TransformersDecoder(module, "dynamic", 8)
    return Decoder(module)


_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "linear", "matmul")
_REDUCTIONS = ("mean", "var", "var_mean", "native_layer_norm", "_fused_rms_norm", "rms_norm", "linalg_vector_norm")
_ACTIVATIONS = ("silu", "gelu", "sigmoid", "relu", "tanh", "clamp")


def _short_name(call: OpCall) -> str:
    return str(call.signature.op._schema.name).rpartition("::")[2].rstrip("_") if hasattr(
        call.signature.op, "_schema") else str(call.signature.op)


class _Reading:
    """Goes through the calls of one pass; storages tell what is made of what."""

    def __init__(self, log: Log, calls: list[OpCall], cached: bool, tokens: int = _TOKENS) -> None:
        self.log, self.calls, self.cached, self.tokens = log, calls, cached, tokens
        self.weights = {life.number for life in log.lifetimes_in("parameter")}
        self.items: list[Kernel] = []
        self.split: set[int] = set()               # storages whose last dimension ranks share
        self.origin: dict[int, tuple[int, int]] = {}  # storage to the product, and its part, that it comes from
        self.input_of: dict[int, int] = {}         # place of a product to the storage of its rows
        self.last_use: dict[int, int] = {}
        self.scores: AttentionKernel | None = None  # attention in the model's own code: between its two products
        self.groups: dict[int, list[tuple[int, OpCall]]] = {}  # place of a fused kernel to its calls
        self.group: list[tuple[int, OpCall]] = []  # calls of the one that is not closed yet
        self.free: set[int] = set()                # rows of weights that were looked up, and are read in passing
        self.following: list[OpCall] = []
        self.top_k = self.table = 0
        self.table_weight = -1
        grouped = [call.signature.inputs[1].shape[0] for call in calls if _short_name(call) == "_grouped_mm"]
        self.experts = max(grouped, default=0)
        self.maker = {storage: call for call in calls if not is_view(call) for storage in call.outputs}
        self.routers = self._find_routers()

    def run(self, is_whole: bool = True) -> ServedModel:
        """``is_whole``: the last product is the output head, and what follows chooses a token."""
        calls = [call for call in self.calls if not is_view(call)]
        for index, call in enumerate(calls):
            self.last_use.update(dict.fromkeys(call.inputs, index))
        for index, call in enumerate(calls):
            self.following = calls[index + 1:index + 13]
            kernel = self._read_anchor(call)
            if kernel is None:
                self.group.append((index, call))
                self._follow(call)
            elif kernel is not False:
                self._close()
                self._add(kernel, call)
        self._close()
        return self._build(is_whole)

    def _find_routers(self) -> set[int]:
        """The storages of scores of experts: products that a choice of the largest is made from."""
        found: set[int] = set()
        for call in self.calls if self.experts else ():
            if _short_name(call) == "topk":
                storage = call.inputs[0]
                while storage in self.maker and _short_name(self.maker[storage]) not in _PRODUCTS and self.maker[
                        storage].inputs:
                    storage = self.maker[storage].inputs[0]
                found.add(storage)
        return found

    # --- anchors ---

    def _read_anchor(self, call: OpCall) -> Kernel | Literal[False] | None:
        """The product or attention that a call is; False for a part of one that is there already, None for others."""
        name = _short_name(call)
        specs = call.signature.inputs
        if name in ("cached_attention", "latent_attention"):
            return self._read_cached(name, call)
        if name.startswith("_scaled_dot_product") or name == "scaled_dot_product_attention":
            query, keys, values = specs[:3]
            return self._attention(call, math.prod(query.shape[:-2]), query.shape[-2], keys.shape[-2], query.shape[-1],
                                   values.shape[-1])
        if name not in _PRODUCTS:
            return None
        held = [i for i, storage in enumerate(call.inputs) if storage in self.weights and specs[i].numel > 1
                and len(specs[i].shape) > 1]
        if not held:
            return self._read_scores(call) if name in ("bmm", "baddbmm", "matmul") else None
        return self._read_product(name, call, held[-1])

    def _read_product(self, name: str, call: OpCall, place: int) -> Product:
        weight = call.signature.inputs[place]
        rows = next(spec for i, spec in enumerate(call.signature.inputs) if i != place and len(spec.shape) > 1)
        out = call.signature.outputs[0]
        if name == "_grouped_mm":
            self.top_k = max(self.top_k, rows.shape[0] // self.tokens)
            return Product((out.shape[-1],), rows.shape[-1], max(1, rows.shape[0] // self.tokens),
                           experts=weight.shape[0])
        if name in ("bmm", "baddbmm") and len(weight.shape) == 3 and weight.shape[0] > 1:  # a product a head
            return Product((out.shape[-1],), rows.shape[-1], split="heads", batch=weight.shape[0])
        tokens = math.prod(rows.shape[:-1])
        return Product((out.shape[-1],), rows.shape[-1], max(1, tokens // self.tokens), has_bias=name == "addmm")

    def _read_cached(self, name: str, call: OpCall) -> AttentionKernel:
        query, keys, values = call.signature.inputs[:3]
        heads = query.shape[-2]
        if name == "latent_attention":
            return AttentionKernel(heads, 1, query.shape[-1], keys.shape[-1], is_latent=True)
        window = int(call.signature.named_arguments()["window"])
        return AttentionKernel(heads, keys.shape[2], query.shape[-1], values.shape[-1], window)

    def _attention(self, call: OpCall, batch_heads: int, new: int, keys: int, head_dim: int,
                   value_dim: int) -> AttentionKernel:
        """Attention of PyTorch's own: of keys that were expanded, their storage tells how many heads there are."""
        batch = _TOKENS if self.cached else 1
        heads = max(1, batch_heads // batch)
        spec = call.signature.inputs[1]
        storage, stored = call.inputs[1], math.inf
        while True:  # back to what was not repeated for each head of queries
            stored = min(stored, self.log.storages[storage].nbytes // spec.dtype.itemsize)
            maker = self.maker.get(storage)
            if maker is None or _short_name(maker) not in ("clone", "mul", "_to_copy") or not maker.inputs:
                break
            storage = maker.inputs[0]
        kv_heads = max(1, min(heads, int(stored) // max(1, batch * keys * head_dim)))
        fixed = keys if self.cached and keys > 4 else 0
        return AttentionKernel(heads, heads if heads % kv_heads else kv_heads, head_dim, value_dim, keys=fixed)

    def _read_scores(self, call: OpCall) -> AttentionKernel | Literal[False] | None:
        """Attention in the model's own code: a product of scores, and one that takes them."""
        first, out = call.signature.inputs[0], call.signature.outputs[0]
        if self.scores is not None:
            found, self.scores = self.scores, None
            return replace(found, value_dim=out.shape[-1])
        if not any(_short_name(later) in ("_softmax", "_safe_softmax")
                   and later.signature.inputs[0].shape[-1] == out.shape[-1] for later in self.following):
            return None
        self.scores = self._attention(call, math.prod(out.shape[:-2]), out.shape[-2], out.shape[-1], first.shape[-1],
                                      first.shape[-1])
        return False

    # --- what is made of what ---

    def _add(self, kernel: Kernel, call: OpCall) -> None:
        outputs = set(call.outputs)
        if isinstance(kernel, AttentionKernel):
            self._keep_heads(kernel)
            if self.split.intersection(call.inputs):
                self.split |= outputs
            self.items.append(kernel)
            return
        assert isinstance(kernel, Product)
        rows = next(storage for storage in call.inputs if storage not in self.weights)
        is_whole = bool(self.routers.intersection(outputs)) or kernel.n < 16  # routers and gates: no columns to split
        if kernel.split == "none" and not is_whole:
            kernel = replace(kernel, split="row" if rows in self.split else "column")
        if kernel.split in ("column", "heads"):
            self.split |= outputs
        before = self._find_merge(kernel, rows)
        if before is not None:
            earlier: Any = self.items[before]
            self.items[before] = replace(earlier, parts=earlier.parts + kernel.parts)
            self.origin.update(dict.fromkeys(outputs, (before, len(earlier.parts))))
            for place in [place for place in self.groups if place > before]:  # follows the merged product
                self.group += self.groups.pop(place)
                del self.items[place]
            return
        self.items.append(kernel)
        self.input_of[len(self.items) - 1] = rows
        self.origin.update(dict.fromkeys(outputs, (len(self.items) - 1, 0)))

    def _find_merge(self, kernel: Product, rows: int) -> int | None:
        """The place of an earlier product of the same rows and kind, with which a server merges this one."""
        for place in range(len(self.items) - 1, max(-1, len(self.items) - 8), -1):
            item = self.items[place]
            if isinstance(item, Product) and self.input_of.get(place) == rows:
                same = (item.k, item.split, item.experts, item.rows) == (
                    kernel.k, kernel.split, kernel.experts, kernel.rows)
                return place if same and kernel.split == "column" and not kernel.experts else None
        return None

    def _keep_heads(self, kernel: AttentionKernel) -> None:
        """Of the product of queries, keys and values, a rank keeps whole heads of keys."""
        widths = {kernel.kv_heads * kernel.head_dim: kernel.head_dim,
                  kernel.kv_heads * kernel.value_dim: kernel.value_dim}
        for place in range(len(self.items) - 1, -1, -1):
            item = self.items[place]
            if isinstance(item, Product):
                if item.split == "column" and not item.least:
                    self.items[place] = replace(item, least=tuple(widths.get(n, 1) for n in item.parts))
                return

    def _follow(self, call: OpCall) -> None:
        """What a kernel that is neither product nor attention makes is split if what it reads is."""
        name = _short_name(call)
        if name == "embedding":
            if call.signature.inputs[0].numel > self.table:
                self.table, self.table_weight = call.signature.inputs[0].numel, call.inputs[0]
        sources = [self.origin[storage] for storage in call.inputs if storage in self.origin]
        if name in _REDUCTIONS and sources and call.signature.inputs:
            spec = call.signature.inputs[0]
            if spec.numel // self.tokens == spec.shape[-1]:  # a norm of the whole row: every rank needs all of it
                for source in sources:
                    self._replicate(*source)
        if self.split.intersection(call.inputs):
            self.split.update(call.outputs)
        if sources:
            self.origin.update(dict.fromkeys(call.outputs, sources[-1]))

    def _replicate(self, place: int, part: int) -> None:
        """Every rank keeps all columns of a part of a product."""
        item = self.items[place]
        if isinstance(item, Product) and item.split == "column":
            least = list(item.least or [1] * len(item.parts))
            least += [1] * (len(item.parts) - len(least))
            least[part] = item.parts[part]
            self.items[place] = replace(item, least=tuple(least))
            self.split -= {storage for storage, origin in self.origin.items() if origin == (place, part)}

    # --- what lies between ---

    def _close(self) -> None:
        """One kernel of what lies between two anchors: it reads what it did not make, and writes what is used later."""
        group, self.group = self.group, []
        if not group:
            return
        made: set[int] = set()
        reads: dict[int, tuple[int, int]] = {}
        end, names = group[-1][0], Counter(_short_name(call) for _, call in group)
        writes: dict[int, int] = {}
        for _, call in group:
            is_lookup = _short_name(call) in ("embedding", "index", "index_select", "gather")
            if is_lookup and "embedding" not in names and self.weights.intersection(call.inputs) or _short_name(
                    call).startswith(("new_", "empty")):  # rows of weights; room in the cache
                self.free.update(call.outputs)
            for storage, spec in zip(call.inputs, call.signature.inputs):
                if storage not in made and storage not in self.free:
                    is_weight = storage in self.weights
                    nbytes = 0 if is_weight and is_lookup else self._bytes_of(spec)
                    reads[storage] = (0, nbytes) if is_weight else (max(nbytes, reads.get(storage, (0, 0))[0]), 0)
            for storage, spec in zip(call.outputs, call.signature.outputs):
                made.add(storage)
                if self.last_use.get(storage, 1 << 60) > end and storage not in self.free:
                    writes[storage] = max(writes.get(storage, 0), self._bytes_of(spec))
        moved = sum(token for token, _ in reads.values()) + sum(writes.values())
        if moved < self.tokens:  # tables of positions, which servers make once
            return
        name, kernels, sorts = self._name(names)
        self.groups[len(self.items)] = group
        is_split = bool(self.split.intersection(writes)) or bool(writes) and bool(self.split.intersection(reads))
        self.items.append(FusedKernel(name, moved // self.tokens, sum(weight for _, weight in reads.values()), is_split,
                                      kernels, sorts))

    @staticmethod
    def _bytes_of(spec: TensorSpec) -> int:
        """Of a tensor in 16 bits, as servers keep activations; one number where it is an expanded one."""
        numel = math.prod(size for size, stride in zip(spec.shape, spec.stride) if stride or size == 1)
        return numel * (2 if spec.dtype.is_floating_point else spec.dtype.itemsize)

    def _name(self, names: Counter[str]) -> tuple[str, int, int]:
        """What it is called, its kernels, and those of them that choose or count."""
        if "embedding" in names:
            return "embedding and norm", 2, 0
        if "sort" in names or "topk" in names:
            return "routing of experts", 3, 2  # top-k; counting by expert (moe_align_block_size); gathering
        if any(name in names for name in _REDUCTIONS):
            return "norm of heads and rotary embedding" if "cat" in names else "residual add and norm", 1, 0
        if any(name in names for name in _ACTIVATIONS):
            return "activation", 1, 0
        return "rotary embedding" if "cat" in names or "neg" in names else "pointwise", 1, 0

    def _build(self, is_whole: bool) -> ServedModel:
        items = self.items
        head = max((i for i, item in enumerate(items) if isinstance(item, Product)), default=None)
        if head is None or not any(isinstance(item, AttentionKernel) for item in items) and not self.table:
            raise InputError("a server runs models that decode: in this one there are no products by weights; give a "
                             "language model")
        kernels: Counter[Kernel] = Counter()
        for place, item in enumerate(items):
            if isinstance(item, Product):
                if place == head and is_whole:
                    item = replace(item, is_head=True, is_held=False, split="column", rows=1)
                elif item.split == "none":  # a router
                    item = replace(item, is_held=False)
            elif isinstance(item, AttentionKernel) and item.is_latent:
                item = self._expand(place, item)
            elif isinstance(item, FusedKernel) and place > head and is_whole:
                continue  # sampling, which servers do their own way
            kernels[item] += 1
        output: Any = items[head]
        return ServedModel(name="", kernels=dict(kernels), hidden=output.k, vocabulary=output.n, top_k=self.top_k,
                           table=self.table, shares_table=self.table_weight in self._head_weights())

    def _head_weights(self) -> Iterator[int]:
        for call in reversed(self.calls):
            if _short_name(call) in _PRODUCTS and not is_view(call):
                yield from (storage for storage in call.inputs if storage in self.weights)
                return

    def _expand(self, place: int, item: AttentionKernel) -> AttentionKernel:
        """Latent attention: what a query and a value of a head have in a prompt, by the products around it."""
        batched = [p for p in self.items[max(0, place - 6):place + 4] if isinstance(p, Product) and p.split == "heads"]
        if len(batched) < 2:
            return item
        rotated = item.head_dim - item.value_dim
        return replace(item, expanded=(batched[0].k + rotated, batched[-1].n))
