"""Time of fused attention: PyTorch's kernels and those of serving libraries, prefill, decode, encoder and backward."""
from __future__ import annotations

import functools

from analyzer.errors import InputError
from analyzer.hardware.device_spec import DeviceSpec

from .attention_tile import MMA, ONE_WARP_SHARE, TCGEN05, find_design, find_generation
from .attention_work import (
    TYPICAL_CLOCK_HERTZ,
    AttentionSize,
    Constants,
    count_bytes,
    decode_seconds,
    find_matrix_rate,
    memory_seconds,
    tile_seconds,
)
from .constants import find_constants
from .estimate import NO_TIME, KernelTime

#: Kernels of PyTorch's scaled_dot_product_attention.
FUSED_KERNELS = ("flash", "cudnn", "efficient")
#: Kernels of serving libraries, which write the new keys and values to a paged cache as well.
SERVING_KERNELS = ("sglang", "vllm", "trtllm")
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "bf16": 2, "fp16": 2, "float32": 4, "fp32": 4, "float8_e4m3fn": 1, "fp8": 1}
#: Products of a backward pass (scores again, gradients of values, weights, queries and keys) over those of a forward.
BACKWARD_PRODUCTS = 5 / 2
#: What a kernel takes that does nothing: 2.5 microseconds in a graph on an H100, A100 and H200.
KERNEL_CLOCKS = 5000.0


@functools.lru_cache(maxsize=256)
def find_group(kernel: str, phase: str, device: DeviceSpec) -> Constants | None:
    """The constants of one kernel in one phase: of its generation of tensor cores, else of any; None without any."""
    found = find_constants("attention", device)
    for generation in (find_design(kernel, device).generation, "any"):
        prefix = f"{kernel}.{generation}.{phase}."
        group = {name[len(prefix):]: value for name, value in found.items() if name.startswith(prefix)}
        if group:
            return group
    return None


def predict(size: AttentionSize, kernel: str, phase: str, device: DeviceSpec, c: Constants) -> KernelTime | None:
    """The time of one attention with given constants; None where the device lacks a figure that it takes.

    A floor of its kernels' latencies, in clocks; then arithmetic and memory, which overlap in part: their p-norm,
    where p of 1 is one after the other. Serving libraries also write the new keys and values to the cache, at
    ``write`` times what the bytes take at the memory's rate; TensorRT-LLM rotates the queries in the same kernel.
    """
    rate = find_matrix_rate(size.item_bytes, device)
    if rate is None or device.memory_bandwidth is None or device.multiprocessors is None:
        return None
    memory = memory_seconds(count_bytes(size), device, c)
    kernels, design = 1, find_design(kernel, device)
    if phase == "decode":
        arithmetic = decode_seconds(size, design, device, c)
        kernels = 2
    else:
        if phase == "backward":
            rate /= BACKWARD_PRODUCTS
            memory *= 2  # reads four of them and the gradient, writes three gradients
            kernels = 3
        if design.generation == MMA:
            rate *= ONE_WARP_SHARE[find_generation(device)]
        arithmetic = tile_seconds(size, design, device, rate, c)
    power = c["p"]
    seconds = (arithmetic ** power + memory ** power) ** (1 / power)
    floor = c["floor"]
    if not size.stores_keys:
        floor -= KERNEL_CLOCKS
    elif kernel in SERVING_KERNELS and size.causal:
        new_heads = 2 * size.kv_heads + (size.heads if kernel == "trtllm" else 0)
        new_bytes = 2 * size.batch * size.q_len * new_heads * size.head_dim * size.item_bytes
        seconds += c["write"] * new_bytes / device.memory_bandwidth
        kernels += 1
    floor /= (device.clock_hertz or TYPICAL_CLOCK_HERTZ)
    bound = "latency" if floor > seconds else "memory" if memory > arithmetic else "arithmetic"
    return KernelTime(floor + seconds, c.get("spread", 0.5), bound, kernels)


def attention_time(kernel: str, batch: int, heads: int, kv_heads: int, q_len: int, kv_len: int, head_dim: int,
                   value_dim: int, dtype: str, device: DeviceSpec, *, causal: bool, window: int = 0,
                   backward: bool = False, dropout: bool = False, masked: bool = False, kv_item_bytes: int = 0,
                   stores_keys: bool = True) -> KernelTime | None:
    """Kernel time of fused attention of ``batch`` sequences, None where the device or the dtype has no model.

    - ``kernel``: one of PyTorch's (``"flash" "cudnn" "efficient"``) or a serving library's (``"sglang" "vllm"
      "trtllm"``, ``"paged"`` for any), which writes the new keys and values to its cache too.
    - ``kv_len``: all keys, the new ones included; the queries are the last of them if ``causal``.
    - ``window``: keys before a query that it sees, 0 for all. ``masked``: an additive mask is read.
    - ``kv_item_bytes``: of a cache of another type than ``dtype``. ``stores_keys``: False where the new keys and values
      are written to the cache by another operator.
    - ``backward``: the gradients of queries, keys and values instead of the output.

    Work is counted as executed: tiles on the diagonal whole, padded heads, whole waves of tiles over the
    multiprocessors. Constants: ``benchmarks/calibration/attention.py``. Raises InputError for an unknown kernel.

    >>> from analyzer.hardware import find_device
    >>> sizes = dict(batch=8, heads=12, kv_heads=12, q_len=512, kv_len=512, head_dim=64, value_dim=64)
    >>> time = attention_time("cudnn", **sizes, dtype="bfloat16", device=find_device("h200"), causal=False)
    >>> 15e-6 < time.seconds < 25e-6  # measured: 20 microseconds
    True
    """
    if kernel not in FUSED_KERNELS + SERVING_KERNELS + ("paged",):
        raise InputError(f"attention_time(kernel={kernel!r}): unknown kernel; those known are "
                         f"{', '.join(FUSED_KERNELS + SERVING_KERNELS)} and paged")
    item_bytes = _ITEM_BYTES.get(dtype.removeprefix("torch."))
    if item_bytes is None or device.kind != "cuda":
        return None
    if 0 in (batch, heads, q_len, kv_len):
        return NO_TIME
    kernel = "vllm" if kernel == "paged" else kernel
    size = AttentionSize(batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim, item_bytes, causal, window,
                         dropout, masked, kv_item_bytes, stores_keys)
    phase = find_phase(kernel, size, device, backward)
    constants = find_group(kernel, phase, device)
    return None if constants is None else predict(size, kernel, phase, device, constants)


def find_phase(kernel: str, size: AttentionSize, device: DeviceSpec, backward: bool = False) -> str:
    """Which constants an attention takes: forward and backward of PyTorch's kernels, three phases of serving."""
    if backward:
        return "backward"
    if kernel in SERVING_KERNELS:
        if not size.causal:
            return "encoder"
        # of a sequence's first key TensorRT-LLM's kernels are those of a prompt, also in SGLang on Blackwell
        is_prompt = size.kv_len == 1 and (kernel == "trtllm" or
                                          kernel == "sglang" and find_generation(device) == TCGEN05)
        return "decode" if size.q_len == 1 and not is_prompt else "prefill"
    # FlashAttention splits the keys of a single query (flash_api.cpp); the others take a tile for it
    return "decode" if kernel == "flash" and size.q_len == 1 else "forward"
