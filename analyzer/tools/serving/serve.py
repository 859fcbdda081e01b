"""`profile_served`: how fast a server is, how many it serves at once, and what that costs."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from analyzer.errors import InputError, UnknownSpeedError
from analyzer.hardware import ClusterSpec, DeviceSpec, cluster_of, find_cluster, find_device
from analyzer.hardware.kernel_time.attention import WGMMA, find_generation
from analyzer.hardware.kernel_time.estimate import find_constants
from analyzer.hardware.power import JOULES_OF_KWH, joules_range
from analyzer.tools.generation.stored_cache import BLOCK_SIZE

from .batch import Batch, Chunk
from .deployment import CACHE_BYTES, WEIGHT_FORMATS, Deployment, Layout
from .engine import ENGINES, RULES, find_engine
from .pass_time import PassTimer
from .read_model import read_served_model
from .served_model import ServedModel
from .served_profile import PassPart, PassRow, Seconds, ServedProfile
from .simulation import Timeline, Traffic, simulate
from .watts import find_watts


def make_deployment(model: ServedModel, *, device: str | DeviceSpec = "h200", cluster: str | ClusterSpec | None = None,
                    layout: Layout | None = None, engine: str = "vllm", version: str | None = None,
                    memory_share: float | None = None, receive_interval: int | None = None,
                    stream_interval: int | None = None, prefill_chunk: int | None = None,
                    batch_wait: tuple[int, float] | None = None, weights: str | None = None,
                    experts: str | None = None, cache: str = "bf16", block_size: int = BLOCK_SIZE,
                    skew: float = 0.0) -> Deployment:
    """What is not given of an engine is its default, in its newest version or in ``version``; see `Engine`. ``weights``
    None: formats as the model's config has them, else 16 bits. Raises InputError for names and numbers that cannot be.
    """
    if weights is None:
        weights, stored = model.stored or ("bf16", None)
        experts = experts or stored
    for name, value, known in (("engine", engine, ENGINES), ("weights", weights, WEIGHT_FORMATS),
                               ("experts", experts or weights, WEIGHT_FORMATS), ("cache", cache, CACHE_BYTES)):
        if value not in known:
            raise InputError(f"profile_served({name}={value!r}): must be one of {', '.join(known)}")
    layout = layout or Layout()
    layout.check(model)
    server = find_engine(engine, version)
    passes, share = batch_wait or (None, None)
    given: dict[str, Any] = {
        "memory_share": memory_share, "receive_interval": receive_interval, "stream_interval": stream_interval,
        "chunk": prefill_chunk, "wait_passes": passes, "wait_share": share}
    server = server._replace(**{name: value for name, value in given.items() if value is not None})
    server.check()
    if engine == "vllm" and layout.ep not in (1, layout.tp * layout.dp):
        raise InputError(f"--ep {layout.ep}: vLLM spreads experts over all ranks of a stage, "
                         f"{layout.tp * layout.dp} of --tp {layout.tp} --dp {layout.dp}, or over none (1)")
    spec = find_device(device)
    if engine == "trtllm" and spec.vendor not in ("NVIDIA", None):
        raise InputError(f"--server trtllm: TensorRT-LLM runs on NVIDIA's devices, and {spec.name} is {spec.vendor}'s; "
                         "give vllm or sglang")
    hosts = cluster_of(spec) if cluster is None else find_cluster(cluster)
    return Deployment(model=model, device=spec, cluster=hosts, layout=layout, engine=server, weights=weights,
                      experts=experts, cache=cache, block_size=block_size, skew=skew,
                      is_share_given=memory_share is not None)


def profile_served(model: nn.Module | Callable[[], nn.Module] | ServedModel | Deployment, prompt_tokens: int = 1024,
                   new_tokens: int = 256, *, concurrency: int | None = None, rate: float | None = None,
                   bursts: bool = False, name: str = "model", price: float | None = None, carbon: float | None = None,
                   drafted: int = 0, acceptance: float = 0.7, images: int = 0,
                   image_size: tuple[int, int] = (1024, 1024), video_frames: int = 0,
                   **settings: object) -> ServedProfile:
    """Predict what a server of ``model`` gives: time to the first token, time of each, tokens a second, memory, watts.

    ``concurrency`` clients (by default 1) ask again as soon as they are answered, or requests come at ``rate`` a second
    by chance; with ``bursts`` clients begin all at once and ask ten times each, as benchmarks of servers do.
    ``settings`` are of `make_deployment`. ``price``: dollars of a GPU and hour; ``carbon``: grams of carbon
    dioxide of a kWh. ``drafted`` tokens are proposed for each and verified at once (speculative decoding), each kept
    with a chance of ``acceptance`` if those before it are. Beside its text a prompt has ``images`` of a width and
    height, or a video of ``video_frames`` of that size, whose tokens are added to ``prompt_tokens``. Raises NoRoomError
    where not even one sequence fits.
    """
    served = model.model if isinstance(model, Deployment) else (
        model if isinstance(model, ServedModel) else read_served_model(model, name))
    prompt_tokens = served.prompt_tokens or prompt_tokens  # a spectrogram has the length that the model is for
    served = served.with_prompt(prompt_tokens).with_pictures(images, image_size, video_frames)
    prompt_tokens += served.picture_tokens
    deployment = replace(model, model=served) if isinstance(model, Deployment) else (
        make_deployment(served, **settings))  # type: ignore[arg-type]
    if not 0 <= acceptance <= 1 or drafted < 0:
        raise InputError(f"profile_served(drafted={drafted!r}, acceptance={acceptance!r}): a number of tokens, and a "
                         "chance between 0 and 1")
    accepted = sum(acceptance ** place for place in range(1, drafted + 1))
    if concurrency is None and rate is None:
        concurrency = 1
    if bursts and concurrency is None:
        raise InputError(f"profile_served(bursts=True, rate={rate:g}): clients that begin at once have a concurrency")
    traffic = Traffic(prompt_tokens, new_tokens, concurrency, rate, bursts=bursts, drafted=drafted, accepted=accepted)
    try:
        timer = PassTimer(deployment)
        line = simulate(deployment, timer, traffic)
        return _describe(deployment, timer, traffic, line, price, carbon)
    except UnknownSpeedError as error:
        raise InputError(f"profile_served(device={deployment.device.name!r}): {error}") from error


def _describe(deployment: Deployment, timer: PassTimer, traffic: Traffic, line: Timeline, price: float | None,
              carbon: float | None) -> ServedProfile:
    layout, constants = deployment.layout, timer.constants
    running = max(1, round(line.running))
    decode = Batch(running, max(1, round(line.context)), drafted=1 + traffic.drafted)
    tokens = min(traffic.prompt_tokens, deployment.chunk)
    mixed = Batch(running, decode.context, (Chunk(tokens, tokens),), decode.drafted)
    copies = layout.dp * layout.pp
    throughput = line.tokens_per_second * copies
    watts = find_watts(deployment, timer, line, decode, mixed)
    joules = None if watts is None or not throughput else watts * layout.gpus / throughput
    whole = traffic.prompt_tokens + traffic.new_tokens
    each = _summarize(line, "token_seconds", constants["token_spread"])
    return ServedProfile(
        name=deployment.model.name, device=deployment.device.name, engine=deployment.engine.name, layout=layout,
        weights=deployment.weights, experts=deployment.experts, cache=deployment.cache,
        prompt_tokens=traffic.prompt_tokens, new_tokens=traffic.new_tokens,
        concurrency=traffic.concurrency, rate=traffic.rate,
        first_token=_summarize(line, "first_seconds", constants["first_spread"]),
        each_token=each,
        tokens_per_second=throughput, running=line.running * copies, is_full=line.is_full,
        is_stable=line.is_stable, decode=_row(timer, decode), prefill=_row(timer, mixed),
        weight_bytes=deployment.weight_bytes(), cache_token_bytes=deployment.cache_token_bytes(),
        sequence_bytes=deployment.cache_bytes(whole), room_bytes=deployment.room_bytes(),
        most_sequences=deployment.most_sequences(whole), watts=watts, joules_per_token=joules,
        joules_range=None if joules is None else joules_range(
            joules, find_constants("power", deployment.device), (each.mean, each.low, each.high)),
        grams_per_million=None if joules is None or carbon is None else 1e6 * joules / JOULES_OF_KWH * carbon,
        dollars_per_million=None if price is None or not throughput else (
            1e6 / throughput * layout.gpus * price / 3600),
        rules=RULES, assumptions=tuple(_list_assumptions(deployment, traffic)))


def _summarize(line: Timeline, name: str, spread: float) -> Seconds:
    mean = line.mean(name)
    return Seconds(mean, line.percentile(name, 0.5), line.percentile(name, 0.99), mean / (1 + spread),
                   mean * (1 + spread))


def _row(timer: PassTimer, batch: Batch) -> PassRow:
    time = timer.time(batch)
    parts = tuple(PassPart(name, count, seconds) for name, (count, seconds) in sorted(
        time.parts.items(), key=lambda item: -item[1][1]))
    return PassRow(batch.sequences, batch.context, batch.prompt_tokens, time.seconds, time.host_seconds, time.bound,
                   parts)


def _list_assumptions(deployment: Deployment, traffic: Traffic) -> list[str]:
    found = []
    model, device = deployment.model, deployment.device
    form = WEIGHT_FORMATS[deployment.experts or deployment.weights]
    if form.arithmetic is not None and not form.is_native(device):
        found.append(f"{device.name} has no products in {deployment.experts or deployment.weights}: weights are "
                     "expanded to 16 bits in registers (Marlin)")
    if not model.attentions and not model.state_bytes:
        found.append(f"{model.name} keeps nothing of the tokens before: no attention was found among its operators, so "
                     "the cache is 0 and a token takes as long after a long prompt as after a short one")
    found += model.notes
    if model.pictures:
        sizes = " and ".join(f"{number} of {size}" for number, size in model.pictures)
        found.append(f"prompts have pictures, {sizes}: {model.picture_tokens:,} of their {traffic.prompt_tokens:,} "
                     "tokens, read when a prompt begins; loading and resizing them on the host is not in the answer")
    chosen = next((kernel.selected for kernel, _ in model.attentions if kernel.selected), 0)
    if chosen:
        found.append(f"an indexer chooses {chosen:,} tokens that attention reads, by scores of all: its keys are held "
                     "in 8 bits with a scale, beside the cache, and every rank computes all scores")
    if model.state_bytes:
        found.append("states of linear attention are held in the types in which the model's own code keeps them "
                     "(vLLM --mamba-ssm-cache-dtype and SGLang SGLANG_MAMBA_SSM_DTYPE may say others)")
    if model.has_experts:
        how = "evenly" if not deployment.skew else f"by Zipf's law of exponent {deployment.skew:g}"
        found.append(f"tokens choose their {model.top_k} experts {how} (--skew)")
    share, engine = deployment.memory_share, deployment.engine
    if share is not None and not deployment.is_share_given:
        found.append(f"{engine.name} takes {share:.1%} of " + (
            "what weights and activations leave" if engine.of_free else "the device's memory"
            + ("" if engine.activations_within else ", activations and CUDA graphs aside")) + " (--memory-share)")
    if deployment.engine.name == "sglang":
        found.append("SGLang's host launches a kernel as fast as TensorRT-LLM's, a request takes beside its passes the "
                     "mean of those of TensorRT-LLM and vLLM, a pass 8,192 tokens of prompts on any device: none of it "
                     "was measured")
    if deployment.graph_tokens < min(traffic.prompt_tokens, deployment.chunk):
        found.append("passes that read more than " + (f"{deployment.graph_tokens:,} tokens of prompts"
                     if deployment.graph_tokens else "the next tokens") + " are no CUDA graphs: the host launches "
                     "their kernels one by one")
    if engine.wait_passes:
        found.append(f"prompts wait for others while some decode, at most {engine.wait_passes} passes, until they fill "
                     f"{engine.wait_share:.0%} of one (--batch-wait)")
    if device.vendor not in ("NVIDIA", None):
        found.append(f"kernels on {device.name} are timed by its data sheet and others' figures for the rates of "
                     f"products; attention, launches and all-reduce by NVIDIA's: nothing of {device.vendor} was "
                     "measured")
    if engine.name == "sglang" or find_generation(device) != WGMMA:
        found.append("ranges are not calibrated: they hold nine in ten measurements of vLLM and TensorRT-LLM on H100 "
                     f"and H200, and none of {engine.name} on {device.name} was among them")
    if engine.stream_interval > 1:
        first = "the last ones" if engine.holds_first else "the first and the last ones"
        found.append(f"a stream sends {engine.stream_interval} tokens at once, {first} without waiting for others: "
                     "that many times the time of a token lies between two messages")
    if traffic.drafted:
        found.append(f"{traffic.drafted} drafted tokens by a head of one layer; {traffic.accepted:.2f} are kept in the "
                     "mean (--acceptance)")
    return found
