"""What servers differ in, by their versions: limits of a pass, memory, and how they schedule."""
from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

from analyzer.errors import InputError


class Engine(NamedTuple):
    """Defaults of a server. Times of a pass's host work are fitted constants: ``benchmarks/calibration/serving.py``.

    - ``name``: attention kernels have it too. ``chunk``: tokens of a pass at most. ``sequences``: at once at most.
    - ``memory_share``: of the device, or with ``of_free`` of what weights and activations leave, that a server may
      take; None: by `static_share`. ``activations_within``: whether activations are part of that share.
    - ``reserves``: whether a sequence begins only where its longest possible cache has room; others take pages as they
      go and start over where none is left.
    - ``overlaps``: whether the host prepares the next pass while this one runs. What comes meanwhile is then in the
      pass after the next at the earliest.
    - ``mixes``: whether prompts are read in passes that decode too; else in passes of their own, before others.
    - ``receive_interval``: passes of decoding alone after which the scheduler looks for new requests; it looks after
      every pass that reads a prompt, and while it has nothing to do.
    - ``stream_interval``: tokens that a stream sends at once. The first is sent by itself, except where a server
      ``holds_first``: it comes with those of the first interval.
    - ``graph_tokens``: of a pass that reads prompts, up to which it is replayed as CUDA graphs; the host launches the
      kernels of larger ones one by one.
    - ``splits``: whether a prompt that does not fit into the rest of a pass is split.
    - ``wait_passes``, ``wait_share``: while others decode, new prompts wait for more of them, at most so many passes,
      until their tokens are this share of ``chunk``.
    """

    name: str
    chunk: int
    sequences: int
    memory_share: float | None
    of_free: bool
    reserves: bool
    overlaps: bool
    activations_within: bool = True
    mixes: bool = True
    receive_interval: int = 1
    stream_interval: int = 1
    holds_first: bool = False
    graph_tokens: int = 0
    splits: bool = True
    wait_passes: int = 0
    wait_share: float = 0.0

    def check(self) -> None:
        """Raises InputError."""
        if self.memory_share is not None and not 0 < self.memory_share <= 1:
            raise InputError(f"--memory-share {self.memory_share:g}: a share lies above 0 and is at most 1")
        for name, value in (("receive-interval", self.receive_interval), ("stream-interval", self.stream_interval),
                            ("prefill-chunk", self.chunk)):
            if value < 1:
                raise InputError(f"--{name} {value}: must be 1 or more")
        if self.wait_passes < 0 or not 0 <= self.wait_share <= 1:
            raise InputError(f"--batch-wait {self.wait_passes}:{self.wait_share:g}: PASSES:SHARE, 0 passes or more, "
                             "and a share between 0 and 1")


_PUBLISHED = json.loads((Path(__file__).parents[2] / "zoo" / "published" / "servers" / "servers.json").read_text())
#: Which operators a server runs as one kernel, and where that is published. Told with every answer.
RULES = tuple(_PUBLISHED["rules"])
#: The newest versions known. Where each figure is published is beside it in the data.
ENGINES = {name: Engine(name, **{field: fields[field] for field in Engine._fields[1:] if field in fields})
           for name, fields in _PUBLISHED["engines"].items()}


def find_engine(name: str, version: str | None = None) -> Engine:
    """The defaults of a server, as they were in ``version``. Raises InputError for an unknown name or no version.

    >>> find_engine("vllm", "0.11.2").memory_share, find_engine("vllm").memory_share
    (0.9, 0.92)
    """
    if name not in ENGINES:
        raise InputError(f"find_engine({name!r}): must be one of {', '.join(ENGINES)}")
    engine = ENGINES[name]
    for earlier in _PUBLISHED["engines"][name]["earlier"] if version else ():
        if _number(version) < _number(earlier["until"]):
            changed: dict[str, Any] = {field: value for field, value in earlier.items() if field != "until"}
            return engine._replace(**changed)
    return engine


def _number(version: str | None) -> tuple[int, ...]:
    parts = (version or "").lstrip("v").split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        raise InputError(f"find_engine(version={version!r}): a version begins with two numbers, e.g. 0.14")
    return tuple(int(part) for part in itertools.takewhile(str.isdigit, parts[:3]))


def captured_sequences(memory_bytes: int, tp: int) -> int:
    """Sequences of the largest pass of decoding that SGLang captures (0.5.23, srt/arg_groups/memory_hook.py)."""
    size, few = memory_bytes / 2**30, tp < 4
    return 8 if size < 20 else (48 if few else 160) if size < 35 else (32 if few else 160) if size < 60 else (
        256 if few and size < 160 else 512)


def static_share(memory_bytes: int, chunk: int, tp: int, pp: int = 1, copies: int = 1,
                 sequences: int | None = None) -> float:
    """SGLang's ``mem_fraction_static`` where it is not given: the share of weights and cache, what is left beside a
    pass, other ranks and the graphs of decoding and of prompts (0.5.23, srt/arg_groups/memory_hook.py,
    ``handle_gpu_memory_settings`` and ``reserve_for_graph_mb``, of models without MLA; copies of attention as in 0.5.6,
    srt/server_args.py). ``tp``: ranks of a stage; ``copies``: of attention among them; ``sequences``: at once at most.

    >>> static_share(80 * 2**30, 8192, 1), static_share(80 * 2**30, 8192, 8)
    (0.83, 0.813)
    """
    memory = memory_bytes / 2**20
    size = memory / 1024
    decoding = captured_sequences(memory_bytes, tp)
    steps = (range(4, 33, 4), range(48, 257, 16), range(288, 513, 32), range(576, 1025, 64), range(1280, 4097, 256),
             range(4608, chunk + 1, 512))  # cuda_graph_hook.py, `generate_prefill_cuda_graph_batch_sizes`
    captured = min(decoding, sequences or decoding)
    reserved = 512 + 1.5 * max(chunk, 2048) + 1024 * tp * pp / 8 + 2 * captured + 8 * sum(
        each <= chunk for sizes in steps for each in sizes)
    if copies > 1:
        reserved += captured * copies * (4.5 if captured > 300 else 3)
    return round((memory - (max(reserved, 10240) if size > 60 else reserved)) / memory, 3)
