"""Shortages of memory of the host, of libraries and of servers: what each text says, and what is told of it."""
import json
from pathlib import Path
from typing import Any

import pytest

from analyzer.tools.explain.shortage import find_shortages

GIB = 1 << 30

# Texts in the forms of the programs' sources, with figures that we made up; what is short, figures, words.
TEXTS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "Linux": ("RuntimeError: [enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: "
              "you tried to allocate 8589934592 bytes. Error code 12 (Cannot allocate memory)", "host",
              {"requested_bytes": 8 * GIB}, "8.00 GiB of the host's memory"),
    "Windows": ("RuntimeError: [enforce fail at alloc_cpu.cpp:114] data. DefaultCPUAllocator: not enough memory: you "
                "tried to allocate 1073741824 bytes.", "host", {"requested_bytes": GIB},
                "1.00 GiB of the host's memory"),
    "the kernel": ("[ 142.8] Out of memory: Killed process 123 (python) total-vm:9000000kB, anon-rss:2097152kB, "
                   "file-rss:1024kB, shmem-rss:1047552kB, UID:0 pgtables:48kB oom_score_adj:0", "host",
                   {"process": 123, "resident_bytes": 3 * GIB}, "process 123 (python), which held 3.00 GiB"),
    "a container": ("Memory cgroup out of memory: Killed process 7 (python3) total-vm:9kB, anon-rss:1048576kB, "
                    "file-rss:0kB", "host", {"process": 7, "resident_bytes": GIB},
                    "the limit of its container or job (cgroup)"),
    "torchrun": ("E0611 02:50:04.977000 37 torch/distributed/elastic/multiprocessing/api.py:914] failed (exitcode: -9) "
                 "local_rank: 0 (pid: 376) of binary: /opt/venv/bin/python", "host", {"process": 376},
                 "process 376 was killed by signal 9"),
    "an exit code": ("worker 3 died, exit code: -9", "host", {}, "a process was killed by signal 9"),
    "Slurm": ("slurmstepd: error: Detected 1 oom_kill event in StepId=12.0.", "host", {}, "killed at its limit"),
    "cuBLAS": ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "library",
               {}, "CUBLAS_STATUS_ALLOC_FAILED in cublasCreate"),
    "vLLM, no cache": ("Available KV cache memory: -0.50 GiB\nValueError: No available memory for the cache blocks. "
                       "Try increasing `gpu_memory_utilization` when initializing the engine.", "cache",
                       {"available_bytes": -GIB // 2}, "512.00 MiB are missing"),
    "vLLM, a small cache": (
        "(EngineCore_DP0 pid=71) ERROR ValueError: To serve at least one request with the models's max seq len "
        "(131072), (34.00 GiB KV cache is needed, which is larger than the available KV cache memory (21.50 GiB). "
        "Based on the available memory, the estimated maximum model length is 82880. Try increasing",
        "cache", {"tokens": 131072, "needed_bytes": 34 * GIB, "available_bytes": 43 * GIB // 2,
                  "fitting_tokens": 82880}, "--max-model-len 82880"),
    "vLLM, a small cache, newer": (
        "ValueError: To serve at least one request with the model's max seq len (4096), 0.50 GiB KV cache is needed, "
        "which is larger than the available KV cache memory (0.25 GiB).", "cache",
        {"tokens": 4096, "needed_bytes": GIB // 2, "available_bytes": GIB // 4}, "a --max-model-len below 4096"),
    "vLLM, older": ("ValueError: The model's max seq len (8192) is larger than the maximum number of tokens that can "
                    "be stored in KV cache (4096). Try", "cache", {"tokens": 8192, "fitting_tokens": 4096},
                    "room for 4,096"),
    "vLLM, its share": ("ValueError: Free memory on device cuda:0 (12.00/24.00 GiB) on startup is less than desired "
                        "GPU memory utilization (0.9, 21.60 GiB). Decrease", "server's share",
                        {"free_bytes": 12 * GIB, "capacity_bytes": 24 * GIB, "share": 0.9,
                         "requested_bytes": round(21.6 * GIB)}, "below 0.50"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_each_is_told_with_its_figures(case: str, tmp_path: Path, run: Any) -> None:
    text, what, figures, said = TEXTS[case]
    (tmp_path / "a.log").write_text(f"step 1\n{text}\n")
    code, out, complaint = run("explain", str(tmp_path / "a.log"), "--json", str(tmp_path / "a.json"))
    assert code == 0 and said in " ".join(out.split()), out + complaint
    found, = json.loads((tmp_path / "a.json").read_text())["shortages"]
    assert (found["what"], found["figures"]) == (what, figures)


def test_one_that_is_said_again_is_one() -> None:
    text = TEXTS["cuBLAS"][0]
    first, second = find_shortages([f"[rank1]: {text}", f"[rank2]: {text}", text])
    assert (first.rank, first.count, second.rank, second.count) == (1, 2, 2, 1)
    killed, = find_shortages([TEXTS["torchrun"][0], "  exitcode  : -9 (pid: 376)",
                              "  traceback : Signal 9 (SIGKILL) received by PID 376"])
    assert killed.count == 3


@pytest.mark.parametrize("line", [
    "exit code: 0", "Available KV cache memory: 7.04 GiB", '"OOMKilled": false,', "exitcode: -90",
    "max seq len (4096)"])
def test_other_lines_are_none(line: str) -> None:
    assert find_shortages([line]) == []


def test_beside_an_error_of_the_device_and_a_prediction(tmp_path: Path, run: Any) -> None:
    (tmp_path / "a.log").write_text("CUDA error: out of memory\n" + TEXTS["torchrun"][0])
    code, out, _ = run("explain", str(tmp_path / "a.log"))
    assert code == 0 and "mostly the driver's own" in out and "killed by signal 9" in out, out
    (tmp_path / "a.log").write_text(TEXTS["Linux"][0])
    code, _, complaint = run("explain", str(tmp_path / "a.log"), "--against", "hf:gpt2")
    assert code == 2 and "--against hf:gpt2: the shortages" in " ".join(complaint.split()), complaint
