"""An engine that samples on a device where a model trains too: its bytes awake, asleep, while weights are written."""
from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from analyzer.errors import InputError
from analyzer.units import format_bytes

from .deployment import Deployment
from .engine import captured_sequences

# Names of vLLM, device_allocator/cumem.py and v1/worker/gpu_worker.py; of SGLang, srt/constants.py.
WEIGHTS = "weights"  #: the tag of an engine's weights
CACHE = "kv_cache"  #: the tag of the pool in which it keeps requests
GRAPHS = "cuda_graph"  #: the tag of captured passes, where they can be given back
#: In which order trainers wake an engine: weights, which are then written, later the cache. TRL's
#: generation/vllm_generation.py, ms-swift's rlhf_trainers/rollout_mixin.py, verl's fsdp_vllm.py.
WAKING = (WEIGHTS, CACHE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedEngine:
    """What an engine has on one device that it shares with a trainer, in bytes; from `share_device`.

    - ``cache_bytes``: of the pool in which requests are kept, of a fixed size since the start; ``pass_bytes``: what the
      largest pass takes besides, while it runs. None: the device's memory is not known.
    - ``graph_bytes``: of the memory pool of captured passes. What the driver keeps for each graph is not in it.
    - ``level``: of sleep while the model trains. 0: it stays awake; 1: weights go to the host; 2: they are dropped.
    - ``stays``: what no sleep frees: graphs, unless SGLang's allocator has them (``SGLANG_MEMORY_SAVER_CUDA_GRAPH``).

    Where a trainer writes weights, they are awake, and it holds ``gathered_bytes`` of its own besides: of one parameter
    with TRL, whole where it was sharded; of all of them where adapters are merged under ZeRO-3; a bucket with verl. The
    engine copies into what it has.
    """

    weight_bytes: int
    cache_bytes: int | None
    pass_bytes: int
    graph_bytes: int
    level: int = 0
    stays: tuple[str, ...] = (GRAPHS,)

    def held_bytes(self, awake: Collection[str] = WAKING) -> int | None:
        """Between passes, with these tags ``awake``; None where that is not known."""
        cache = self.cache_bytes if CACHE in awake else 0
        graphs = self.graph_bytes if GRAPHS in self.stays or set(WAKING) <= set(awake) else 0
        return None if cache is None else (self.weight_bytes if WEIGHTS in awake else 0) + cache + graphs

    @property
    def sampling_bytes(self) -> int | None:
        """At most while it samples."""
        held = self.held_bytes()
        return None if held is None else held + self.pass_bytes

    @property
    def resting_bytes(self) -> int | None:
        """While the model trains."""
        return self.held_bytes(() if self.level else WAKING)

    @property
    def host_bytes(self) -> int:
        """Pinned memory of the host while it sleeps: at level 1 all weights (cumem.py, ``sleep``)."""
        return self.weight_bytes if self.level == 1 else 0

    def copy_bytes(self, gathered_bytes: int = 0) -> int | None:
        """While the trainer writes weights: of the engine, and what is gathered for it. A cache that slept still
        does.
        """
        held = self.held_bytes((WEIGHTS,) if self.level else WAKING)
        return None if held is None else held + gathered_bytes

    def peaks(self, *, held_bytes: int, update_bytes: int, sampling_held_bytes: int | None = None,
              gathered_bytes: int = 0) -> dict[str, int | None]:
        """By phase, what is on the device at most; None where it is not known.

        ``held_bytes``: of the trainer between its phases; ``sampling_held_bytes``: of it while the engine samples,
        where parts of it leave the device meanwhile; ``update_bytes``: the peak of its update by itself.

        >>> engine = SharedEngine(weight_bytes=3, cache_bytes=5, pass_bytes=1, graph_bytes=1, level=2)
        >>> engine.peaks(held_bytes=10, update_bytes=30, gathered_bytes=2)
        {'sync': 16, 'rollout': 20, 'update': 31}
        """
        samples = held_bytes if sampling_held_bytes is None else sampling_held_bytes

        def add(engine: int | None, own: int) -> int | None:
            return None if engine is None else engine + own

        return {"sync": add(self.copy_bytes(gathered_bytes), held_bytes), "rollout": add(self.sampling_bytes, samples),
                "update": add(self.resting_bytes, update_bytes)}


def share_device(deployment: Deployment, *, held_bytes: int = 0, level: int = 0, is_captured: bool = True,
                 releases_graphs: bool = False) -> SharedEngine:
    """The engine of a deployment that starts where ``held_bytes`` are taken already. Raises InputError for a level that
    is none, of sleep with TensorRT-LLM, and where the engine would refuse to start (`refuse_start`).

    vLLM takes its share of the whole memory beside what is there (v1/worker/gpu_worker.py, ``init_device``, 0.9.2 and
    later; before, its share less what is there); SGLang its share of what was free (model_runner_kv_cache_mixin.py,
    ``_profile_available_bytes``).
    """
    name = deployment.engine.name
    if level not in (0, 1, 2):
        raise InputError(f"share_device(level={level!r}): an engine sleeps at level 1 or 2, or stays awake at 0")
    if level and name == "trtllm":
        raise InputError(f"share_device(level={level}): of TensorRT-LLM it is not known what stays while it sleeps")
    refusal = refuse_start(deployment, held_bytes)
    if refusal:
        raise InputError(f"share_device(held_bytes={held_bytes}): {refusal}")
    return SharedEngine(
        weight_bytes=deployment.weight_bytes(), cache_bytes=deployment.room_bytes(held_bytes),
        pass_bytes=deployment.activation_bytes(), level=level,
        graph_bytes=deployment.pass_bytes(_count_captured(deployment)) if is_captured else 0,
        stays=() if releases_graphs else (GRAPHS,))


def _count_captured(deployment: Deployment) -> int:
    """Tokens of the largest pass that is captured: vLLM's config/vllm.py, ``_set_cudagraph_sizes``; others replay what
    decodes.
    """
    engine, layout, memory = deployment.engine, deployment.layout, deployment.device.memory_bytes
    if engine.name == "vllm":
        return min(engine.graph_tokens, 2 * engine.sequences)
    return engine.sequences if memory is None or engine.name != "sglang" else min(
        engine.sequences, captured_sequences(memory, layout.tp * layout.dp))


def refuse_start(deployment: Deployment, held_bytes: int = 0) -> str:
    """Why an engine does not start beside so many bytes, in its own words; empty where it does or nothing is known."""
    memory, room = deployment.device.memory_bytes, deployment.room_bytes(held_bytes)
    if memory is None or room is None:
        return ""
    share, free = deployment.memory_share, memory - held_bytes
    if deployment.engine.name == "vllm" and share is not None and free < share * memory:
        return (f"Free memory on device ({format_bytes(free)}/{format_bytes(memory)}) on startup is less than desired "
                f"GPU memory utilization ({share:g}, {format_bytes(int(share * memory))})")
    return "no memory is left for the cache: raise the engine's share of the device" if room <= 0 else ""
