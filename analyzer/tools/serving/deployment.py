"""How a model is served: formats, ranks, engine; and what of it lies on one device."""
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from analyzer.errors import InputError, is_count
from analyzer.hardware import ClusterSpec, DeviceSpec
from analyzer.tools.generation.stored_cache import BLOCK_SIZE, CacheForm, index_bytes

from .engine import ENGINES, Engine, static_share
from .served_model import AttentionKernel, Product, ServedModel


class WeightFormat(NamedTuple):
    """How weights are held: ``bits`` of an element, scales included.

    - ``arithmetic``: torch's name of the format that products run in; None where the device multiplies in 16 bits, by
      which weights are expanded in registers.
    - ``is_scaled``: the input of a product has scales for parts of its rows, by a kernel of its own.
    - ``capability``: the first compute capability whose tensor cores take it; older ones expand to 16 bits.
    """

    bits: float
    arithmetic: str | None = None
    capability: tuple[int, int] = (0, 0)
    is_scaled: bool = False

    def is_native(self, device: DeviceSpec) -> bool:
        """Whether the device multiplies in it. AMD's CDNA 4 (9.5) does in MXFP4, and none in NVFP4 (AMD CDNA 4
        Architecture white paper, 2025, "OCP MXFP4").
        """
        found = device.compute_capability or (0, 0)
        if device.vendor == "AMD" and self.bits < 8:
            return self.arithmetic is not None and not self.is_scaled and found >= (9, 5)
        return self.arithmetic is not None and found >= self.capability


#: Names by the servers' own: vLLM --quantization, docs "Supported Hardware"; scales as in compressed-tensors and the
#: OCP Microscaling specification 1.0 (a byte for 32 elements), NVFP4 (a byte for 16): nvidia.com, "Introducing NVFP4".
WEIGHT_FORMATS = {
    "bf16": WeightFormat(16), "fp16": WeightFormat(16),
    "fp8": WeightFormat(8, "float8_e4m3fn", (8, 9)),
    # DeepSeek-V3: a float for 128 x 128; vLLM's fp8_utils.py and SGLang's fp8_kernel.py, per_token_group_quant_fp8
    "fp8-block": WeightFormat(8 + 32 / 128**2, "float8_e4m3fn", (8, 9), True),
    "int8": WeightFormat(8, "int8", (7, 5)),
    "int4": WeightFormat(4 + 16 / 128),                                   # AWQ, GPTQ: 16 bits for 128 elements
    "mxfp4": WeightFormat(4 + 8 / 32, "float8_e4m3fn", (10, 0)),
    "nvfp4": WeightFormat(4 + 8 / 16, "float8_e4m3fn", (10, 0), True)}  # vLLM's modelopt.py, scaled_fp4_quant
CACHE_BYTES = {"bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}


def stored_format(quantization: Any) -> tuple[str, str | None]:
    """The formats of weights and of experts, by a checkpoint's ``quantization_config``.

    >>> stored_format({"quant_method": "fp8", "weight_block_size": [128, 128]})
    ('fp8-block', None)
    """
    said: Mapping[str, Any] = quantization if isinstance(quantization, Mapping) else (
        quantization.to_dict() if hasattr(quantization, "to_dict") else {})
    method = str(said.get("quant_method", "")).lower()
    if method == "mxfp4":
        return "bf16", "mxfp4"
    if method in ("fp8", "fbgemm_fp8"):
        return ("fp8-block" if said.get("weight_block_size") else "fp8"), None
    if method == "compressed-tensors":
        groups = [group.get("weights") or {} for group in dict(said.get("config_groups") or {}).values()]
        bits, kind = (groups[0].get("num_bits"), groups[0].get("type")) if groups else (None, None)
        return {(8, "float"): "fp8", (8, "int"): "int8", (4, "int"): "int4", (4, "float"): "nvfp4"}.get(
            (bits, kind), "bf16"), None  # type: ignore[arg-type]
    if method == "modelopt":
        return ("nvfp4" if "FP4" in str(said.get("quant_algo", "")).upper() else "fp8"), None
    if method in ("awq", "gptq", "bitsandbytes", "auto-round"):
        return ("int8" if said.get("bits") == 8 or said.get("load_in_8bit") else "int4"), None
    return "bf16", None


@dataclass(frozen=True, slots=True)
class Layout:
    """How many ranks share a model. Attention is data parallel over ``dp``, experts are spread over ``ep`` ranks.

    - ``tp``: ranks that split heads and columns; ``pp``: stages; ``dp``: copies of attention, each with its own cache
      and requests; ``ep``: groups of ranks over which whole experts are spread. The ranks of a group, ``expert_tp``,
      split each expert's columns: with attention of ``dp`` copies too (vLLM's FusedMoEParallelConfig, SGLang's
      --enable-dp-attention, TensorRT-LLM's moe_tensor_parallel_size).
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1

    def check(self, model: ServedModel) -> None:
        for name in ("tp", "pp", "dp", "ep"):
            value = getattr(self, name)
            if not is_count(value, 1):
                raise InputError(f"--{name} {value!r}: must be 1 or more")
        if self.tp * self.dp % self.ep:
            raise InputError(f"--ep {self.ep}: does not divide the ranks of a stage, {self.tp * self.dp} of "
                             f"--tp {self.tp} --dp {self.dp}; give {self.tp * self.dp}, or 1 for none")
        if self.ep > 1 and not model.has_experts:
            raise InputError(f"--ep {self.ep}: {model.name} has no experts; leave it out")
        for kernel, _ in model.attentions:
            if kernel.heads % self.tp:
                near = max(n for n in range(1, self.tp + 1) if kernel.heads % n == 0)
                raise InputError(f"--tp {self.tp}: does not divide the {kernel.heads} heads of {model.name}; give "
                                 f"{near}")
        if self.pp > model.layers:
            raise InputError(f"--pp {self.pp}: {model.name} has {model.layers} layers")

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def expert_tp(self) -> int:
        """Ranks that split each expert."""
        return self.tp * self.dp // self.ep

    def __str__(self) -> str:
        ranks = (("tp", self.tp), ("pp", self.pp), ("dp", self.dp), ("ep", self.ep))
        return " ".join(f"{name}{value}" for name, value in ranks if value > 1) or "tp1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One replica: a model on devices.

    - ``weights``, ``experts``, ``cache``: names of `WEIGHT_FORMATS` and `CACHE_BYTES`; ``experts`` None: as weights.
    - ``is_share_given``: who asks chose the server's share of the memory, so it is not assumed.
    - ``skew``: how uneven experts are chosen, the exponent of Zipf's law; 0: evenly.
    """

    model: ServedModel
    device: DeviceSpec
    cluster: ClusterSpec
    layout: Layout = Layout()
    engine: Engine = ENGINES["vllm"]
    weights: str = "bf16"
    experts: str | None = None
    cache: str = "bf16"
    block_size: int = BLOCK_SIZE
    skew: float = 0.0
    is_share_given: bool = False

    @property
    def chunk(self) -> int:
        """Tokens that a pass of one copy of attention reads at most: SGLang's ``chunked_prefill_size`` is that of all
        copies that share experts (srt/server_args.py, ``_handle_data_parallelism``, after the memory's share was chosen
        by the whole).
        """
        copies = self.layout.dp if self.engine.name == "sglang" and self.model.has_experts else 1
        return max(1, self.engine.chunk // copies)

    @property
    def graph_tokens(self) -> int:
        """Tokens of a pass with prompts up to which it is replayed as CUDA graphs. SGLang has none with copies of
        attention or stages, nor with latents on Blackwell, whose kernel is trtllm_mla (cuda_graph_hook.py).
        """
        layout, engine = self.layout, self.engine
        has_latents = any(kernel.is_latent for kernel, _ in self.model.attentions)
        is_blackwell = (self.device.compute_capability or (0, 0)) >= (10, 0)
        if engine.name == "sglang" and (layout.dp > 1 or layout.pp > 1 or has_latents and is_blackwell):
            return 0
        return min(engine.graph_tokens, self.chunk)

    @property
    def has_triton_experts(self) -> bool:
        """TensorRT-LLM on Hopper has no kernels of its own for experts in MXFP4, and takes those of triton_kernels
        (examples/models/core/gpt_oss/README.md; _torch/modules/fused_moe/fused_moe_triton.py).
        """
        form = WEIGHT_FORMATS[self.experts or self.weights]
        return self.engine.name == "trtllm" and form.bits < 8 and form.arithmetic is not None and not form.is_native(
            self.device)

    def format_of(self, product: Product) -> WeightFormat:
        """Of weights: heads and routers stay in 16 bits (vLLM's and compressed-tensors' ``ignore`` lists)."""
        if not product.is_held:
            return WEIGHT_FORMATS["bf16"]
        return WEIGHT_FORMATS[self.experts or self.weights if product.experts else self.weights]

    def local_product(self, product: Product) -> Product:
        """What one rank has of a product, experts aside."""
        tp = self.layout.expert_tp if product.experts else self.layout.tp
        if product.split == "column":
            least = product.least or (1,) * len(product.parts)
            return replace(product, parts=tuple(max(-(-n // tp), min(m, n)) for n, m in zip(product.parts, least)))
        if product.split == "row":
            return replace(product, k=-(-product.k // tp))
        return replace(product, batch=-(-product.batch // tp)) if product.split == "heads" else product

    def weight_bytes(self) -> int:
        """On the fullest rank: its share of products with their scales, of the table of tokens (padded to 64 rows, as
        vLLM's VocabParallelEmbedding pads it), and all norms and biases. Stages share layers evenly, rounded up.
        """
        layout, total = self.layout, 0.0
        for product, count in self.model.products:
            if product.is_head:
                continue
            local = self.local_product(product)
            elements = local.batch * local.n * local.k
            if product.experts:
                elements *= math.ceil(product.experts / layout.ep)
            total += math.ceil(count / layout.pp) * elements * self.format_of(product).bits / 8
        for product, count in self.model.tower.products if self.model.tower else ():  # of the first stage
            local = self.local_product(product)
            total += count * local.n * local.k * 2
        vocabulary = -(-self.model.vocabulary // 64) * 64
        table = -(-vocabulary // layout.tp) * self.model.hidden * 2
        if layout.pp == 1:
            table *= 1 if self.model.shares_table else 2
        return math.ceil(total) + table + math.ceil(self.model.other_weights / layout.pp) * 2

    def cache_token_bytes(self) -> int:
        """Of one token on one rank, in all layers that keep every token: 2 x heads of keys x channels x bytes (vLLM's
        v1/kv_cache_interface.py, FullAttentionSpec); of latents one row, which every rank keeps (MLAAttentionSpec).
        Layers that read the cache of another one keep nothing.
        """
        return sum(self.layer_bytes(kernel) * self._local(count) for kernel, count in self.model.attentions
                   if not kernel.window and not kernel.keys and not kernel.is_shared)

    def cache_bytes(self, tokens: int) -> int:
        """Of one sequence on one rank: whole pages; of layers with a window a page more than it; states."""
        form, kept = CacheForm("paged", block_size=self.block_size), max(0, tokens - self.model.read_tokens)
        total = self.model.state_bytes // self.layout.tp
        for kernel, count in self.model.attentions:
            if kernel.is_shared:
                continue
            room = kernel.keys or form.room(kept, kernel.window or None)
            total += self.layer_bytes(kernel) * self._local(count) * room
        return total

    def _local(self, count: int) -> int:
        return math.ceil(count / self.layout.pp)

    def layer_bytes(self, kernel: AttentionKernel) -> int:
        """Of one token in the cache of one layer, on one rank; a latent is keys and values. Where an indexer chooses,
        vLLM and SGLang hold latents of 8 bits with a float for each 128 channels, and rotated channels in 16 bits
        (vLLM's kv_cache_interface.py, fp8_ds_mla: 656 bytes; SGLang's memory_pool.py, nsa_kv_cache_store_fp8).
        """
        if kernel.is_index:
            return index_bytes(kernel.head_dim)
        if kernel.selected and kernel.is_latent and self.cache == "fp8" and self.engine.name != "trtllm":
            return index_bytes(kernel.value_dim) + 2 * (kernel.head_dim - kernel.value_dim)
        heads = max(1, kernel.kv_heads // self.layout.tp)
        channels = kernel.head_dim if kernel.is_latent else heads * (kernel.head_dim + kernel.value_dim)
        return channels * CACHE_BYTES[self.cache]

    def activation_bytes(self) -> int:
        """What a pass of the most tokens holds besides: rows of the widest product, its input, logits in float32."""
        tokens = self.chunk
        logits = min(self.engine.sequences, tokens) * self.model.vocabulary * 4 // self.layout.tp
        return max(self.pass_bytes(tokens) + 2 * logits, self._tower_bytes())

    def _tower_bytes(self) -> int:
        """What the most pictures hold that are read at once: of a prompt; under vLLM, which tries it when it starts, as
        many of the largest ones as a pass has tokens for (multimodal/encoder_budget.py; v1/worker/gpu_model_runner.py,
        ``profile_run``).
        """
        tower = self.model.tower
        if tower is None:
            return 0
        rows = sum(batch.tokens for kernels, batch in tower.split(self.model.pictures) if kernels is tower.patches)
        largest = tower.largest() if self.engine.name == "vllm" else None
        if largest is not None:
            rows = max(rows, max(1, self.chunk // largest.tokens) * largest.groups * largest.patches)
        columns = [self.local_product(product) for product, _ in tower.products if product.split == "column"]
        widest, narrow = (max((getattr(product, side) for product in columns), default=0) for side in ("n", "k"))
        return rows * (2 * widest + 4 * narrow) * 2

    def pass_bytes(self, tokens: int) -> int:
        """What a pass of so many tokens holds besides, without logits."""
        widest = max((self.local_product(product).n * product.rows for product, _ in self.model.products
                      if not product.is_head), default=0)
        return tokens * (2 * widest + 4 * self.model.hidden) * 2

    def room_bytes(self, held_bytes: int = 0) -> int | None:
        """What is left for the cache on a rank; None where the device's memory is unknown, below 0 where none is.
        ``held_bytes`` were taken when the server started: it counts its share of all memory (vLLM), or of what was
        free.
        """
        memory = self.device.memory_bytes
        if memory is None:
            return None
        weights, activations = self.weight_bytes(), self.activation_bytes()
        share = self.memory_share
        assert share is not None  # since the memory is known
        if self.engine.of_free:
            return int(share * (memory - held_bytes - weights - activations))
        if not self.engine.activations_within:
            return int(share * (memory - held_bytes)) - weights
        return int(share * memory) - weights - activations

    @property
    def memory_share(self) -> float | None:
        """What the server may take of the device's memory; None where that depends on a memory that is unknown."""
        if self.engine.memory_share is not None or self.device.memory_bytes is None:
            return self.engine.memory_share
        layout = self.layout
        return static_share(self.device.memory_bytes, self.engine.chunk, layout.tp * layout.dp, layout.pp, layout.dp)

    def most_sequences(self, tokens: int) -> int | None:
        """Sequences of ``tokens`` that the cache has room for; None where the device's memory is unknown."""
        room = self.room_bytes()
        return None if room is None else max(0, min(self.engine.sequences, room // max(1, self.cache_bytes(tokens))))
