"""Shortages of memory that PyTorch's allocator of a device does not tell of: of the host, of libraries and of servers.

Forms and their sources: ``c10/core/impl/alloc_cpu.cpp`` of PyTorch (the host; other words on Windows), of Linux
``mm/oom_kill.c``, ``torch/distributed/elastic/multiprocessing`` (exit codes and signals of ranks), Slurm's and
Kubernetes' words for a kill, cublas_api.h and its like (``*_STATUS_ALLOC_FAILED``), and of vLLM
``v1/core/kv_cache_utils.py`` (the cache), ``worker/worker.py`` before 0.11 (tokens that the cache holds)
and ``v1/worker`` (what is free at the start).
"""
from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from textwrap import fill

from analyzer.report.text_width import clean
from analyzer.units import format_bytes

from .oom_text import LONGEST_LINE, find_rank

_ROWS = 8
_GIB = 1 << 30
_LOOKED_AT = re.compile(r"DefaultCPUAllocator|ALLOC_FAILED|Killed process|exit ?code|SIGKILL|OOMKilled|oom[-_]kill "
                        r"event|KV cache memory|cache blocks|max seq len|Free memory on device", re.IGNORECASE)
# vLLM logs it before it gives up.
_LEFT = re.compile(r"Available KV cache memory: (-?[\d.]+) GiB")
_RESIDENT = re.compile(r"\b(?:anon|file|shmem)-rss:(\d+)kB")
_MORE_HOST = ("Fewer workers of data loaders, data that is read in parts, weights that are mapped and not copied, less "
              "that is moved to the host, or more memory for the machine, container or job would do.")
_MORE_CACHE = ("A larger --gpu-memory-utilization where the device has it free, --kv-cache-dtype fp8, weights of fewer "
               "bits or more devices (--tensor-parallel-size) would do")

Figures = dict[str, int | float]


@dataclass(frozen=True)
class ReportedShortage:
    """One shortage: ``what`` lacks memory, the text's ``figures`` by name, and all in words with what would do."""

    what: str
    line: int                        #: of the log, from 1
    rank: int | None
    figures: Figures
    said: str
    count: int = field(default=1, compare=False)  #: how often the log has it


def _tell_host(found: re.Match[str]) -> tuple[Figures, str]:
    asked = int(found[1])
    return {"requested_bytes": asked}, (
        f"{format_bytes(asked)} of the host's memory could not be had, not of the device's. {_MORE_HOST}")


def _tell_kernel(found: re.Match[str]) -> tuple[Figures, str]:
    held = sum(int(size) for size in _RESIDENT.findall(found[4])) << 10
    figures: Figures = {"process": int(found[2])}
    if held:
        figures["resident_bytes"] = held
    limit = ("the limit of its container or job (cgroup) was reached, whatever the machine has" if found[1] else
             "the machine had no memory left")
    return figures, (f"Linux killed process {found[2]} ({clean(found[3])[:40]})"
                     + (f", which held {format_bytes(held)} of the host's memory" if held else "")
                     + f": {limit}. {_MORE_HOST}")


def _tell_signal(found: re.Match[str]) -> tuple[Figures, str]:
    process = found[1] or found[2]
    return {} if process is None else {"process": int(process)}, (
        f"{'a process' if process is None else f'process {process}'} was killed by signal 9, which is mostly Linux' "
        f"OOM killer, for want of the host's memory: `dmesg` or `journalctl -k` of its host tells. {_MORE_HOST}")


def _tell_job(found: re.Match[str]) -> tuple[Figures, str]:
    return {}, f"the job or container was killed at its limit of the host's memory. {_MORE_HOST}"


def _tell_library(found: re.Match[str]) -> tuple[Figures, str]:
    call = f" in {found[2]}" if found[2] else ""
    return {}, (f"{found[1]}{call}: a library had no memory of the device for its own context or workspace, which lies "
                "beside what PyTorch allocates and caches. A smaller batch, a lower limit of PyTorch's share "
                "(torch.cuda.set_per_process_memory_fraction), or no other process on the device (nvidia-smi) would "
                "do. An earlier failed kernel may show as this error too: CUDA_LAUNCH_BLOCKING=1 tells.")


def _tell_no_cache(found: re.Match[str]) -> tuple[Figures, str]:
    return {}, ("vLLM: weights and the memory of a pass take all of its share of the device, so nothing is left for "
                f"the cache. {_MORE_CACHE}; so may a smaller --max-num-batched-tokens.")


def _tell_small_cache(found: re.Match[str]) -> tuple[Figures, str]:
    tokens, needed, left = int(found[1]), round(float(found[2]) * _GIB), round(float(found[3]) * _GIB)
    figures: Figures = {"tokens": tokens, "needed_bytes": needed, "available_bytes": left}
    shorter = f"--max-model-len {found[4]}" if found[4] else f"a --max-model-len below {tokens}"
    if found[4]:
        figures["fitting_tokens"] = int(found[4])
    return figures, (f"vLLM: the cache of one request of {tokens:,} tokens takes {format_bytes(needed)}, and "
                     f"{format_bytes(left)} are left for it. {_MORE_CACHE}; so would {shorter}.")


def _tell_few_tokens(found: re.Match[str]) -> tuple[Figures, str]:
    tokens, fitting = int(found[1]), int(found[2])
    return {"tokens": tokens, "fitting_tokens": fitting}, (
        f"vLLM: one request may have {tokens:,} tokens, and the cache has room for {fitting:,}. {_MORE_CACHE}; so "
        f"would --max-model-len {fitting}.")


def _tell_share(found: re.Match[str]) -> tuple[Figures, str]:
    free, whole, share, asked = float(found[1]), float(found[2]), float(found[3]), float(found[4])
    return {"free_bytes": round(free * _GIB), "capacity_bytes": round(whole * _GIB), "share": share,
            "requested_bytes": round(asked * _GIB)}, (
        f"vLLM: its share of the device ({share:g}) is {asked:g} GiB, and {free:g} of {whole:g} GiB are free, as other "
        "processes have the rest (nvidia-smi lists them). Ending them, or a --gpu-memory-utilization below "
        f"{free / whole if whole else 0:.2f} would do.")


_FORMS: Sequence[tuple[str, re.Pattern[str], Callable[[re.Match[str]], tuple[Figures, str]]]] = (
    ("host", re.compile(r"DefaultCPUAllocator: (?:can't allocate|not enough) memory: you tried to allocate (\d+) "
                        "bytes"), _tell_host),
    ("host", re.compile(r"\b(Memory cgroup )?out of memory: Killed process (\d+) \(([^)]*)\)(.*)", re.IGNORECASE),
     _tell_kernel),
    ("host", re.compile(r"\bexit ?code\s*:?\s*-9\b(?:.*?\(pid: (\d+)\))?|\bSignal 9 \(SIGKILL\) received by PID (\d+)",
                        re.IGNORECASE), _tell_signal),
    ("host", re.compile(r"\bOOMKilled\b(?![\"']?\s*[:=]\s*false)|Detected \d+ oom[-_]kill event"), _tell_job),
    ("library", re.compile(r"\b([A-Z]{4,12}_STATUS_ALLOC_FAILED)(?: when calling [`'\"]?(\w+))?"), _tell_library),
    ("cache", re.compile("No available memory for the cache blocks"), _tell_no_cache),
    ("cache", re.compile(r"max seq len \((\d+)\), \(?([\d.]+) GiB KV cache is needed, which is larger than the "
                         r"available KV cache memory \((-?[\d.]+) GiB\)"
                         r"(?:.{0,60}?estimated maximum model length is (\d+))?"), _tell_small_cache),
    ("cache", re.compile(r"max seq len \((\d+)\) is larger than the maximum number of tokens that can be stored in KV "
                         r"cache \((\d+)\)"), _tell_few_tokens),
    ("server's share", re.compile(r"Free memory on device\b[^(]{0,20}\(([\d.]+)/([\d.]+) GiB\) on startup is less than "
                                  r"desired GPU memory utilization \(([\d.]+), ([\d.]+) GiB\)"), _tell_share))


def find_shortages(lines: Iterable[str]) -> list[ReportedShortage]:
    """The shortages of a text, each once.

    >>> found, = find_shortages(["DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."])
    >>> found.what, found.figures
    ('host', {'requested_bytes': 4096})
    """
    found: dict[tuple[int | None, str], ReportedShortage] = {}
    left: float | None = None
    for number, line in enumerate(lines, 1):
        line = line[:LONGEST_LINE]
        if not _LOOKED_AT.search(line):
            continue
        if told := _LEFT.search(line):
            left = float(told[1])
        for what, pattern, tell in _FORMS:
            if (match := pattern.search(line)) is None:
                continue
            figures, said = tell(match)
            if tell is _tell_no_cache and left is not None and left < 0:
                figures["available_bytes"] = round(left * _GIB)
                said += f" {format_bytes(-figures['available_bytes'])} are missing before the first block."
            # A program's last line does not say again which rank it is.
            key = next((key for key in found if key[1] == said and find_rank(line) in (None, key[0])),
                       (find_rank(line), said))
            if key in found:
                object.__setattr__(found[key], "count", found[key].count + 1)
            else:
                found[key] = ReportedShortage(what, number, key[0], figures, said)
    return list(found.values())


def describe_shortages(name: str, shortages: Sequence[ReportedShortage]) -> str:
    """Each in words."""
    parts = [f"{clean(name)}: {len(shortages)} shortage{'s' * (len(shortages) > 1)} of memory that PyTorch's allocator "
             "of the device does not tell of"]
    parts += [f"line {one.line:,}" + ("" if one.rank is None else f", rank {one.rank}")
              + ("" if one.count == 1 else f", {one.count:,} times") + f": {one.said}" for one in shortages[:_ROWS]]
    parts += [f"and {len(shortages) - _ROWS} more"] * (len(shortages) > _ROWS)
    return "\n\n".join(fill(part, 120, subsequent_indent="  ", break_on_hyphens=False) for part in parts)
