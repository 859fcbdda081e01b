"""What a device does in the passes of a server, and what that takes."""
from __future__ import annotations

from analyzer.hardware.kernel_time.estimate import find_constants
from analyzer.hardware.power import Work, add_work, watts_of

from .batch import Batch, Chunk
from .deployment import WEIGHT_FORMATS, Deployment
from .pass_time import PassTimer, choose_experts, split_pass, split_pictures
from .product_time import find_format_peak
from .served_model import Kernel, PassKernel, Product
from .simulation import Timeline


def find_watts(deployment: Deployment, timer: PassTimer, line: Timeline, decode: Batch, mixed: Batch) -> float | None:
    """Of one device, over passes that decode and those that read prompts as often as they did."""
    share = min(1.0, line.prompt_tokens / mixed.prompt_tokens) if mixed.prompt_tokens else 0.0
    work = add_work([(1 - share, find_work(timer, decode)), (share, find_work(timer, mixed))])
    return watts_of(work, deployment.device, find_constants("power", deployment.device))


def find_work(timer: PassTimer, batch: Batch) -> Work:
    """What the device does in a pass. Before it worked ahead, vLLM sorted all logits of each sequence on the device to
    sample (v1/sample/ops/topk_topp_sampler.py): in that part of its host's time kernels run.
    """
    time, engine, deployment = timer.time(batch), timer.deployment.engine, timer.deployment
    sorting = 0.0
    if not engine.overlaps:
        sorting = min(time.host_seconds, batch.sequences * timer.constants["sequence_seconds"])
    model, tp, bandwidth = deployment.model, deployment.layout.tp, timer.device.memory_bandwidth
    products, nbytes = 0.0, 2 * 4 * batch.sampled * model.vocabulary / tp  # logits in float32, read and written
    for kernels, part, sees_all in [*split_pass(model, batch), *split_pictures(model, batch)]:
        for kernel, count in kernels.items():
            seconds, moved = _load(deployment, kernel, part, sees_all)
            products += count * seconds
            nbytes += count * moved
    assert bandwidth is not None  # else the pass had no time
    return Work({**time.bounds, "sorting": sorting, "host": time.host_seconds - sorting}, products, nbytes / bandwidth)


def _load(deployment: Deployment, kernel: Kernel, batch: Batch, sees_all: bool) -> tuple[float, float]:
    """Seconds that a kernel's products take at their peak rate, and the bytes that it moves. ``sees_all``: tokens of a
    prompt see those behind them too, as in encoders.
    """
    tp, device = deployment.layout.tp, deployment.device
    if isinstance(kernel, PassKernel):
        return 0.0, batch.tokens * kernel.token_bytes / (tp if kernel.is_split else 1) + kernel.weight_bytes
    if isinstance(kernel, Product):
        local, form = deployment.local_product(kernel), deployment.format_of(kernel)
        number, rows = choose_experts(deployment, kernel, batch) if kernel.experts else (
            local.batch, batch.sampled if kernel.is_head else batch.tokens * kernel.rows)
        weights = number * local.n * local.k
        flops, moved = 2.0 * rows * weights, weights * form.bits / 8 + 2 * number * rows * (local.n + local.k)
    else:
        form, flops, moved = WEIGHT_FORMATS["bf16"], 0.0, 0.0
        heads = kernel.heads if kernel.is_index else -(-kernel.heads // tp)  # every rank chooses keys for itself
        width = heads * (kernel.head_dim + kernel.value_dim)
        decoding = [(batch.sequences, Chunk(batch.drafted, batch.context))] if batch.sequences else []
        for count, chunk in [*decoding, *((1, chunk) for chunk in batch.chunks)]:
            keys = kernel.keys or max(1, chunk.context - (0 if sees_all else deployment.model.read_tokens))
            seen = keys if sees_all or kernel.keys else keys - (chunk.tokens - 1) / 2
            window = kernel.window_of_work or keys
            flops += 2 * count * chunk.tokens * min(seen, window) * width
            moved += count * min(keys, window) * deployment.layer_bytes(kernel)
    peak = find_format_peak(form, device)
    assert peak is not None  # else the pass had no time
    return flops / peak, moved
