"""The kernels of a pass, read off the calls of the model's own operators: what servers merge is one, what ranks split
is marked.
"""
from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any, Literal

from analyzer.errors import InputError
from analyzer.meta.spec import TensorSpec
from analyzer.profilers.kernel_time import is_view
from analyzer.profilers.operator.fused import name_of
from analyzer.record.call_table import OpCall
from analyzer.record.log import Log

from .served_model import AttentionKernel, Kernel, PassKernel, Product, ServedModel

TOKENS = 211  #: a prime that is no size of a model, so that what is in proportion to the tokens shows
_PRODUCTS = ("mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "_grouped_mm", "linear", "matmul")
_REDUCTIONS = ("mean", "var", "var_mean", "native_layer_norm", "_fused_rms_norm", "rms_norm", "linalg_vector_norm")
_ACTIVATIONS = ("silu", "gelu", "sigmoid", "relu", "tanh", "clamp")


def _short_name(call: OpCall) -> str:
    """The operator's name; one that writes in place is called as one that does not."""
    return name_of(call.signature).rstrip("_")


class PassReading:
    """Goes through the calls of one pass; storages tell what is made of what."""

    def __init__(self, log: Log, calls: list[OpCall], cached: bool, tokens: int = TOKENS) -> None:
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
        self.indexed: set[int] = set()             # storages of an indexer's scores
        self.cached_keys: set[int] = set()         # storages of keys that attention has read
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
        has_experts = any(_short_name(call) == "_grouped_mm" for call in self.calls)
        for call in self.calls:
            if has_experts and _short_name(call) == "topk":
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
            return self._share(self._read_cached(name, call), call)
        if name.startswith("_scaled_dot_product") or name == "scaled_dot_product_attention":
            query, keys, values = specs[:3]
            return self._share(self._attention(
                call, math.prod(query.shape[:-2]), keys.shape[-2], query.shape[-1], values.shape[-1]), call)
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
        return Product((out.shape[-1],), rows.shape[-1], max(1, tokens // self.tokens))

    def _read_cached(self, name: str, call: OpCall) -> AttentionKernel:
        query, keys, values = call.signature.inputs[:3]
        heads = query.shape[-2]
        if name == "latent_attention":
            return AttentionKernel(heads, 1, query.shape[-1], keys.shape[-1], is_latent=True,
                                   selected=int(call.signature.named_arguments().get("selected", 0)))
        window = int(call.signature.named_arguments()["window"])
        return AttentionKernel(heads, keys.shape[2], query.shape[-1], values.shape[-1], window)

    def _share(self, kernel: AttentionKernel, call: OpCall) -> AttentionKernel:
        """The kernel, which keeps nothing where an earlier one has read the same keys."""
        keys = call.inputs[1]
        is_shared = keys in self.cached_keys
        self.cached_keys.add(keys)
        return replace(kernel, is_shared=True) if is_shared else kernel

    def _attention(self, call: OpCall, batch_heads: int, keys: int, head_dim: int,
                   value_dim: int) -> AttentionKernel:
        """Attention of PyTorch's own: of keys that were expanded, their storage tells how many heads there are."""
        batch = TOKENS if self.cached else 1
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
        """Attention in the model's own code: a product of scores, and one that takes them; or scores of an indexer."""
        # the first input of baddbmm is what is added
        first, out = call.signature.inputs[_short_name(call) == "baddbmm"], call.signature.outputs[0]
        keys = [storage for storage in call.inputs if self._is_of_index(storage)]
        if keys:
            self.indexed.update(call.outputs)
            for storage in call.inputs:  # every rank chooses for itself (vLLM: ReplicatedLinear)
                if storage not in keys and storage in self.origin:
                    self._replicate(*self.origin[storage])
            return AttentionKernel(out.shape[-2], 1, first.shape[-1], 0, is_index=True)
        if self.scores is not None:
            found, self.scores = self.scores, None
            return replace(found, value_dim=out.shape[-1])
        if not any(_short_name(later) in ("_softmax", "_safe_softmax", "_masked_softmax")
                   and later.signature.inputs[0].shape[-1] == out.shape[-1] for later in self.following):
            return None
        self.scores = self._attention(call, math.prod(out.shape[:-2]), out.shape[-1], first.shape[-1], first.shape[-1])
        return False

    def _is_of_index(self, storage: int) -> bool:
        """Whether it holds the keys of an indexer, converted or not."""
        while (maker := self.maker.get(storage)) is not None:
            if _short_name(maker) == "read_index":
                return True
            if _short_name(maker) not in ("clone", "_to_copy") or not maker.inputs:
                return False
            storage = maker.inputs[0]
        return False

    # --- what is made of what ---

    def _add(self, kernel: Kernel, call: OpCall) -> None:
        outputs = set(call.outputs)
        if isinstance(kernel, AttentionKernel):
            if not kernel.is_index:
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
            for place in sorted((place for place in self.groups if place > before), reverse=True):
                self.group = self.groups.pop(place) + self.group  # follows the merged product
                self._remove(place)
            return
        self.items.append(kernel)
        self.input_of[len(self.items) - 1] = rows
        self.origin.update(dict.fromkeys(outputs, (len(self.items) - 1, 0)))

    def _remove(self, place: int) -> None:
        """Take an item out; those behind it move up."""
        del self.items[place]
        self.groups = {at - (at > place): group for at, group in self.groups.items()}
        self.input_of = {at - (at > place): storage for at, storage in self.input_of.items()}
        self.origin = {storage: (at - (at > place), part) for storage, (at, part) in self.origin.items()}

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
        if self.indexed.intersection(call.inputs):
            self.indexed.update(call.outputs)
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
        is_choice = "topk" in names and any(self.indexed.intersection(call.inputs) for _, call in group)
        name, kernels, sorts = ("choice of keys", 1, 1) if is_choice else self._name(names)
        self.groups[len(self.items)] = group
        is_split = bool(self.split.intersection(writes)) or bool(writes) and bool(self.split.intersection(reads))
        self.items.append(PassKernel(name, moved // self.tokens, sum(weight for _, weight in reads.values()), is_split,
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
        added = self._find_added()
        for place, item in enumerate(items):
            if isinstance(item, Product):
                item = replace(item, is_added=place in added)
                if place == head and is_whole:
                    item = replace(item, is_head=True, is_held=False, split="column", rows=1)
                elif item.split == "none":  # a router
                    item = replace(item, is_held=False)
            elif isinstance(item, AttentionKernel) and item.is_latent:
                item = self._expand(place, item)
            elif isinstance(item, PassKernel) and place > head and is_whole:
                continue  # sampling, which servers do their own way
            kernels[item] += 1
        output: Any = items[head]
        last = next(call for call in reversed(self.calls) if _short_name(call) in _PRODUCTS and not is_view(call))
        return ServedModel(name="", kernels=dict(kernels), hidden=output.k, vocabulary=output.n, top_k=self.top_k,
                           table=self.table, shares_table=self.table_weight in last.inputs)

    def _find_added(self) -> set[int]:
        """Places of products whose results are added to those of experts before the next norm: shared experts."""
        found: set[int] = set()
        block: list[int] = []
        attends = False
        for place, item in enumerate(self.items):
            if isinstance(item, Product) and item.split == "row":
                block += [] if attends else [place]  # the first one after attention is its own
                attends = False
            attends |= isinstance(item, AttentionKernel)
            if isinstance(item, PassKernel) and item.name.endswith("norm") or place == len(self.items) - 1:
                dense = {at for at in block if not getattr(self.items[at], "experts", 0)}
                found |= dense if len(dense) < len(block) else set()
                block = []
        return found

    def _expand(self, place: int, item: AttentionKernel) -> AttentionKernel:
        """Latent attention: what a query and a value of a head have in a prompt, by the products around it."""
        batched = [p for p in self.items[max(0, place - 6):place + 4] if isinstance(p, Product) and p.split == "heads"]
        if len(batched) < 2:
            return item
        rotated = item.head_dim - item.value_dim
        return replace(item, expanded=(batched[0].k + rotated, batched[-1].n))
