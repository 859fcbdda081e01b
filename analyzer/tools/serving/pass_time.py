"""The time of one pass of a server: kernels of a CUDA graph one after the other, collectives, and the host."""
from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from analyzer.errors import UnknownSpeedError
from analyzer.hardware import find_peak
from analyzer.hardware.kernel_time.attention import attention_time
from analyzer.hardware.kernel_time.collective import collective_time, find_path
from analyzer.hardware.kernel_time.estimate import ErrorSum, KernelTime, find_constants, join
from analyzer.hardware.kernel_time.pointwise import stream_time

from .batch import Batch, Chunk
from .deployment import CACHE_BYTES, WEIGHT_FORMATS, Deployment
from .product_time import busy_seconds, find_narrow, find_rate, product_time
from .served_model import AttentionKernel, Kernel, PassKernel, Product, ServedModel

#: Part of the tensor cores' 16-bit peak that latent attention reaches where arithmetic bounds it: 660 of 989 TFLOP/s on
#: an H800 (github.com/deepseek-ai/FlashMLA, README, "compute-bound configuration").
LATENT_SHARE = 660 / 989
#: The same where each token has keys of its own: 640 of a prompt, 410 of decoding tokens (README, "News", 2025.09.29).
SPARSE_SHARE, SPARSE_DECODE_SHARE = 640 / 989, 410 / 989
#: Bytes up to which all-reduce is a server's own kernel: vLLM custom_all_reduce.py, max_size of 8 MiB, on NVLink and up
#: to 8 ranks; and up to which it takes one shot: csrc/custom_all_reduce.cuh, 512 KiB of up to 4 ranks, 256 KiB of 8.
CUSTOM_BYTES, ONE_SHOT_BYTES = 8 << 20, {2: 8 << 20, 4: 512 << 10, 8: 256 << 10}


@dataclass(frozen=True, slots=True)
class PassTime:
    """Seconds of one pass: of its kernels by what they are and by what bounds them, and of the host that is waited for.
    ``spread``: nine in ten measured sums of kernels lie within this factor, see `KernelTime`.
    """

    kernel_seconds: float
    host_seconds: float
    parts: dict[str, tuple[int, float]] = field(default_factory=dict)   #: kernels and seconds, by name
    bounds: dict[str, float] = field(default_factory=dict)              #: seconds of kernels, by what bounds them
    spread: float = 0.0

    @property
    def seconds(self) -> float:
        return self.kernel_seconds + self.host_seconds

    def add(self, other: PassTime, times: int) -> PassTime:
        """Both passes one after the other, the ``other`` so many times."""
        parts = {name: (count + times * more[0], seconds + times * more[1])
                 for name in {**self.parts, **other.parts}
                 for (count, seconds), more in [(self.parts.get(name, (0, 0.0)), other.parts.get(name, (0, 0.0)))]}
        bounds = {name: self.bounds.get(name, 0.0) + times * other.bounds.get(name, 0.0)
                  for name in {**self.bounds, **other.bounds}}
        return PassTime(self.kernel_seconds + times * other.kernel_seconds,
                        self.host_seconds + times * other.host_seconds, parts, bounds, max(self.spread, other.spread))

    @property
    def bound(self) -> str:
        """What most of the pass waits for: the host, or what bounds most of its kernels' time."""
        longest = max({**self.bounds, "host": self.host_seconds}.items(), key=lambda item: item[1])
        return longest[0]


class PassTimer:
    """Times passes of one deployment; what was timed once is kept. ``constants`` stand in the place of those that are
    fitted to all measurements.
    """

    def __init__(self, deployment: Deployment, constants: Mapping[str, float] | None = None) -> None:
        self.deployment, self.device = deployment, deployment.device
        self.constants = {**find_constants("serving", self.device), **(constants or {})}
        self._seconds = functools.lru_cache(maxsize=100_000)(self._time_seconds)
        self._rest = functools.lru_cache(maxsize=10_000)(self._time_rest)

    def seconds(self, batch: Batch) -> float:
        """Of a pass, host included. Contexts and chunks are taken at steps of a sixteenth, so that most are known."""
        rounded = Batch(batch.sequences, _round(batch.context),
                        tuple(Chunk(chunk.tokens, _round(chunk.context)) for chunk in batch.chunks), batch.drafted)
        begun = _count_begun(batch) if self.deployment.model.pictures else 0
        return self._seconds(rounded) + (begun * self._pictures.seconds if begun else 0.0)

    @functools.cached_property
    def _pictures(self) -> PassTime:
        """Of the pictures of one prompt, whose kernels the host launches one by one."""
        tower, pictures = self.deployment.model.tower, self.deployment.model.pictures
        return self._sum([(name if name == "all-reduce" else "pictures", time, number * count)
                          for kernels, part in (tower.split(pictures) if tower else ())
                          for kernel, count in kernels.items()
                          for name, time, number in self._list_kernel(kernel, part, True)], None)

    def _time_seconds(self, batch: Batch) -> float:
        model = self.deployment.model
        if model.encoder is not None:
            return self.time(batch).seconds
        kernels, launches = self._rest(_round(batch.tokens, 6), batch.sampled)
        for kernel, count in model.attentions:
            time = _known(self._time_attention(kernel, batch))
            kernels, launches = kernels + count * time.seconds, launches + count * time.kernels
        return kernels + self._host_seconds(batch, kernels, launches)

    def _time_rest(self, tokens: int, sampled: int) -> tuple[float, int]:
        """Seconds and number of all kernels but attention, which so many tokens take, of whatever sequences."""
        read = max(1, tokens - sampled + 1)
        batch = Batch(sampled, 1) if tokens <= sampled else Batch(sampled - 1, 1, (Chunk(read, read),))
        seconds, launches = 0.0, 0
        for _, kernel, count in self._list_kernels(batch, attends=False):
            seconds, launches = seconds + count * kernel.seconds, launches + count * kernel.kernels
        return seconds, launches

    def time(self, batch: Batch) -> PassTime:
        """Raises UnknownSpeedError."""
        found = self._sum(self._list_kernels(batch), batch)
        begun = _count_begun(batch) if self.deployment.model.pictures else 0
        return found.add(self._pictures, begun) if begun else found

    def _sum(self, kernels: Iterable[tuple[str, KernelTime, int]], batch: Batch | None) -> PassTime:
        """Of kernels of a pass, or of its pictures (None)."""
        parts: dict[str, tuple[int, float]] = {}
        bounds: dict[str, float] = defaultdict(float)
        errors = ErrorSum()
        for name, kernel, count in kernels:
            number, seconds = parts.get(name, (0, 0.0))
            parts[name] = number + count * kernel.kernels, seconds + count * kernel.seconds
            bounds[kernel.bound] += count * kernel.seconds
            errors.add((name, kernel.seconds), count, kernel.seconds, kernel.spread)
        launches, total = (sum(column) for column in zip(*parts.values()))
        host = self._launch_seconds(total, int(launches)) if batch is None else self._host_seconds(
            batch, total, int(launches))
        return PassTime(total, host, parts, dict(bounds), errors.spread)

    def _launch_seconds(self, kernels: float, launches: int) -> float:
        """How much longer than kernels take the host needs to launch them one by one."""
        return max(0.0, launches * self.constants[f"{self.deployment.engine.name}.launch_seconds"] - kernels)

    def _host_seconds(self, batch: Batch, kernels: float, launches: int) -> float:
        """What a pass takes beside its kernels: what the device needs to start a graph, and scheduling and the handling
        of each sequence where the host does not work ahead (where it does, no measured pass waited for that). A pass
        that is no graph takes as long as the host needs to launch its kernels at least.
        """
        engine, constants = self.deployment.engine, self.constants
        seconds = constants["gap_seconds"]
        if not engine.overlaps:
            seconds += constants["pass_seconds"] + batch.sequences * constants["sequence_seconds"]
        if batch.chunks and batch.tokens > self.deployment.graph_tokens:
            seconds += self._launch_seconds(kernels, launches)
        return seconds

    # --- kernels ---

    def _list_kernels(self, batch: Batch, attends: bool = True) -> Iterator[tuple[str, KernelTime, int]]:
        layout, model = self.deployment.layout, self.deployment.model
        for kernels, part, sees_all in split_pass(model, batch):
            for kernel, count in kernels.items():
                if attends or not isinstance(kernel, AttentionKernel):
                    for name, time, number in self._list_kernel(kernel, part, sees_all):
                        yield "encoder" if sees_all and name != "all-reduce" else name, time, number * count
        logits = part.sampled * model.vocabulary * 4 // layout.tp
        yield "sampling", _known(stream_time(2 * logits, self.device, kernels=3)), 1  # to float32, softmax, choice
        if layout.pp > 1:
            sent = _known(self._collective("send", part.tokens * model.hidden * 2, 2))
            yield "sends between stages", sent, layout.pp - 1

    def _list_kernel(self, kernel: Kernel, batch: Batch, sees_all: bool) -> Iterator[tuple[str, KernelTime, int]]:
        if isinstance(kernel, Product):
            yield from self._list_product(kernel, batch)
        elif isinstance(kernel, AttentionKernel):
            name = "scores of the indexer" if kernel.is_index else "attention"
            yield name, _known(self._time_attention(kernel, batch, sees_all)), 1
        else:
            yield kernel.name, _known(self._time_fused(kernel, batch)), 1

    def _list_product(self, product: Product, batch: Batch) -> Iterator[tuple[str, KernelTime, int]]:
        """The product, and the collective that it ends in."""
        layout, local = self.deployment.layout, self.deployment.local_product(product)
        form = self.deployment.format_of(product)
        if form.is_scaled and not product.is_head and find_narrow(form, self.device) is not None:
            copies = layout.dp if product.experts else 1
            # experts' rows have their scales before they are copied to each
            rows = batch.tokens * copies * (product.rows if not product.experts or product.split == "row" else 1)
            yield "quantization", _known(stream_time(rows * local.k * (16 + form.bits) / 8, self.device)), 1
        if product.experts:
            yield "experts", _known(self._time_experts(product, local, batch)), 1
            if product.split == "row" and self.deployment.has_triton_experts:
                yield "routing of experts", KernelTime(self.constants["triton_seconds"], 0.0, "latency"), 1
        else:
            tokens = batch.sampled if product.is_head else batch.tokens * product.rows
            yield ("output head" if product.is_head else "products",
                   _known(product_time(local.batch, tokens, local.n, local.k, form, self.device)), 1)
        if product.is_head and layout.tp > 1:
            nbytes = batch.sampled * product.n * 2
            yield "gathering of logits", _known(self._collective("all_gather", nbytes, layout.tp)), 1
        elif product.split == "row" and product.experts and layout.dp > 1:
            yield from self._exchange_tokens(product, batch)
        elif product.split == "row" and layout.tp > 1 and not product.is_added:
            yield "all-reduce", self._all_reduce(product.n * 2 * batch.tokens), 1

    def _exchange_tokens(self, product: Product, batch: Batch) -> Iterator[tuple[str, KernelTime, int]]:
        """Of copies of attention, whose tokens go to the ranks of their experts and back; a token goes once to each.
        Where all ranks have the tokens anyway (one copy), sums are reduced as of other products (vLLM's
        FusedMoEParallelConfig.use_all2all_kernels), and where experts are split, each rank needs all tokens.
        """
        layout, hidden = self.deployment.layout, self.deployment.model.hidden
        if layout.expert_tp == 1:
            nbytes = batch.tokens * min(product.rows, layout.ep) * hidden * 2
            yield "all-to-all", _known(self._collective("all_to_all", nbytes, layout.ep)), 2
            return
        nbytes, ranks = batch.tokens * layout.dp * hidden * 2, layout.tp * layout.dp
        yield "gathering of tokens", _known(self._collective("all_gather", nbytes, ranks)), 1
        yield "scattering of sums", _known(self._collective("reduce_scatter", nbytes, ranks)), 1

    def _time_experts(self, product: Product, local: Product, batch: Batch) -> KernelTime | None:
        """Grouped products of the experts of one rank that tokens have chosen."""
        active, each = choose_experts(self.deployment, product, batch)
        form = self.deployment.format_of(product)
        found = product_time(active, each, local.n, local.k, form, self.device)
        rate = find_rate(form, self.device)
        if found is None or rate is None:
            return None
        # grouped kernels gather rows and pad each expert's to a tile: slower than one product of as many rows
        busy = busy_seconds(active, each, local.n, local.k, rate * self.constants["grouped_share"])
        return found if busy <= found.seconds else KernelTime(busy, found.spread, "arithmetic")

    def _time_attention(self, kernel: AttentionKernel, batch: Batch, sees_all: bool = False) -> KernelTime | None:
        """Of sequences that decode, and of each chunk; ``sees_all``: as in an encoder, which has no cache."""
        if kernel.is_index:
            return self._time_index(kernel, batch)
        tp, times = self.deployment.layout.tp, []
        heads, kv_heads = -(-kernel.heads // tp), max(1, kernel.kv_heads // tp)
        item = CACHE_BYTES[self.deployment.cache]
        if batch.sequences:
            times.append(self._decode_attention(kernel, heads, kv_heads, batch, item))
        # tiles and windows of an encoder are sequences of one kernel
        alike = Counter(batch.chunks).items() if sees_all else [(chunk, 1) for chunk in batch.chunks]
        for chunk, number in alike:
            if kernel.is_latent and kernel.selected:  # each token has keys of its own, so latents are not expanded
                pairs = chunk.tokens * chunk.count_seen(kernel.selected)
                times.append(self._latent_arithmetic(kernel, heads, pairs, SPARSE_SHARE))
                continue
            query, value = kernel.expanded if kernel.is_latent else (kernel.head_dim, kernel.value_dim)
            keys = chunk.tokens if sees_all else kernel.keys or chunk.context
            if kernel.window:
                keys = min(keys, kernel.window + chunk.tokens)
            times.append(attention_time(
                self.deployment.engine.name, number, heads, heads if kernel.is_latent else kv_heads, chunk.tokens,
                max(keys, chunk.tokens), query, value, "bfloat16", self.device, causal=not sees_all,
                window=kernel.window, kv_item_bytes=0 if kernel.is_latent or sees_all else item))
        return None if None in times else join(time for time in times if time is not None)

    def _decode_attention(self, kernel: AttentionKernel, heads: int, kv_heads: int, batch: Batch,
                          item: int) -> KernelTime | None:
        keys = kernel.keys or max(1, batch.context - self.deployment.model.read_tokens)
        keys = min(keys, kernel.selected or keys)
        library, count = self.deployment.engine.name, batch.sequences
        if not kernel.is_latent:
            grouped = heads * batch.drafted  # queries of drafts are more rows of the same tile
            return attention_time(library, count, grouped, kv_heads, 1, keys, kernel.head_dim, kernel.value_dim,
                                  "bfloat16", self.device, causal=True, window=kernel.window, kv_item_bytes=item)
        width = kernel.head_dim // 2  # a latent is read once, as keys and values
        found = attention_time(library, count, min(heads, 64), 1, 1, keys, width, kernel.head_dim - width, "bfloat16",
                               self.device, causal=True, kv_item_bytes=item)
        busy = self._latent_arithmetic(kernel, heads, count * batch.drafted * keys,
                                       SPARSE_DECODE_SHARE if kernel.selected else LATENT_SHARE)
        return found if found is None or busy is None or busy.seconds <= found.seconds else replace(
            busy, spread=found.spread)

    def _latent_arithmetic(self, kernel: AttentionKernel, heads: int, pairs: float,
                           share: float) -> KernelTime | None:
        """Of latent attention where arithmetic bounds it, by pairs of a token and a key that it sees."""
        peak = find_peak("bfloat16", self.device, True)
        flops = 2 * heads * pairs * (kernel.head_dim + kernel.value_dim)
        return None if peak is None else KernelTime(flops / (share * peak), 0.0, "arithmetic", 2)

    def _time_index(self, kernel: AttentionKernel, batch: Batch) -> KernelTime | None:
        """The scores of an indexer: products in 8 bits with all keys, on every rank, and scores in float32 that are
        written and read again to choose by (vLLM's fp8_mqa_logits and fp8_paged_mqa_logits, DeepGEMM's kernels).
        """
        read = batch.sequences * batch.context + sum(chunk.context for chunk in batch.chunks)
        pairs = batch.sequences * batch.drafted * batch.context + sum(
            chunk.tokens * chunk.count_seen() for chunk in batch.chunks)
        found = stream_time(read * self.deployment.layer_bytes(kernel) + 2 * 4 * pairs, self.device, kernels=2)
        rate = find_rate(WEIGHT_FORMATS["fp8"], self.device)
        if found is None or rate is None:
            return None
        busy = 2 * kernel.heads * kernel.head_dim * pairs / rate
        return found if busy <= found.seconds else replace(found, seconds=busy, bound="arithmetic")

    def _time_fused(self, kernel: PassKernel, batch: Batch) -> KernelTime | None:
        parts = self.deployment.layout.tp if kernel.is_split else 1
        found = stream_time(batch.tokens * kernel.token_bytes / parts + kernel.weight_bytes, self.device,
                            kernels=kernel.kernels)
        if found is None or not kernel.sorts:
            return found
        # choosing and counting are kernels of few blocks with several rounds, as those of CUB
        rounds = kernel.sorts * find_constants("memory_bound", self.device)["library_seconds"]
        bound = "latency" if rounds > found.seconds else found.bound
        return replace(found, seconds=found.seconds + rounds, bound=bound)

    # --- collectives ---

    def _collective(self, kind: str, nbytes: int, ranks: int) -> KernelTime | None:
        return collective_time(kind, nbytes, ranks, self.deployment.cluster)

    def _all_reduce(self, nbytes: int) -> KernelTime:
        """A server's own kernel where ranks reach each other's memory and bytes are few, else NCCL's."""
        ranks, cluster = self.deployment.layout.tp, self.deployment.cluster
        nccl = _known(self._collective("all_reduce", nbytes, ranks))
        path = find_path(cluster, ranks, min(ranks, cluster.devices_per_host))
        if path is None or path.medium != "nvlink" or ranks > max(ONE_SHOT_BYTES) or nbytes > CUSTOM_BYTES:
            return nccl
        common = find_constants("collective", self.device)
        hop, rate = path.hop_seconds or common["nvlink_hop_seconds"], common["nvlink_send_share"] * path.bandwidth
        limit = next(nbytes for most, nbytes in ONE_SHOT_BYTES.items() if ranks <= most)
        start = self.constants["all_reduce_seconds"]
        if nbytes <= limit:  # a barrier, everything read from everyone, a barrier
            seconds = start + 2 * hop + nbytes * (ranks - 1) / rate
        else:                # a part summed by each, a barrier more, and gathered
            seconds = start + 3 * hop + 2 * nbytes * (ranks - 1) / ranks / rate
        return min(KernelTime(seconds, nccl.spread, "communication"), nccl, key=lambda time: time.seconds)


def _count_begun(batch: Batch) -> int:
    """Prompts that a pass begins to read."""
    return sum(chunk.tokens == chunk.context for chunk in batch.chunks)


def split_pictures(model: ServedModel, batch: Batch) -> list[tuple[Mapping[Kernel, int], Batch, bool]]:
    """The kernels of the pictures of prompts that a pass begins to read, as those of `split_pass`."""
    found = [(kernels, part, True) for kernels, part in (model.tower.split(model.pictures) if model.tower else ())]
    return found * _count_begun(batch)


def split_pass(model: ServedModel, batch: Batch) -> list[tuple[Mapping[Kernel, int], Batch, bool]]:
    """The kernels of a pass and what they read of it. An encoder reads prompts, whose tokens all see each other (True),
    and the decoder, the last part, one token after each.
    """
    if model.encoder is None:
        return [(model.kernels, batch, False)]
    decoding = replace(batch, sequences=batch.sequences + len(batch.chunks), chunks=())
    return [*((model.encoder, Batch(0, 1, (chunk,)), True) for chunk in batch.chunks),
            (model.kernels, decoding, False)]


def _known(time: KernelTime | None) -> KernelTime:
    """Raises UnknownSpeedError."""
    if time is None:
        raise UnknownSpeedError("a figure of this device that kernels' times take is unknown (a peak rate, bandwidth "
                                "or a link); `analyzer devices NAME` lists them, DeviceSpec adds them")
    return time


def _round(tokens: int, bits: int = 5) -> int:
    """A number of tokens at steps of a sixteenth of its power of two, or finer ones.

    >>> [_round(tokens) for tokens in (5, 100, 1000, 5000)]
    [5, 100, 992, 5120]
    """
    step = max(1, 1 << max(0, tokens.bit_length() - bits))
    return round(tokens / step) * step


def choose_experts(deployment: Deployment, product: Product, batch: Batch) -> tuple[int, int]:
    """Experts of the busiest rank that the tokens of a pass choose, and the rows of each, in the mean."""
    layout = deployment.layout
    chosen = batch.tokens * layout.dp * product.rows  # copies of attention share the experts
    active, rows = spread_over_experts(product.experts, product.experts // layout.ep, chosen, deployment.skew)
    return active, max(1, round(rows / active))


def spread_over_experts(experts: int, local: int, chosen: int, skew: float) -> tuple[int, float]:
    """Experts of the busiest rank that tokens have chosen, in the mean, and the rows that they compute. ``chosen``
    pairs of token and expert fall on ``experts``, evenly or by Zipf's law; a rank has ``local`` of them, dealt in turn.

    >>> spread_over_experts(8, 8, 2, 0.0), spread_over_experts(256, 256, 100_000, 0.0)
    ((2, 2.0), (256, 100000.0))
    """
    weights = [1 / (rank + 1) ** skew for rank in range(experts)]
    total = sum(weights)
    held = weights[::max(1, experts // local)][:local]  # the busiest rank has the most popular one
    rows = chosen * sum(held) / total
    active = sum(1 - (1 - weight / total) ** chosen for weight in held)
    return max(1, round(active)), max(1.0, rows)
