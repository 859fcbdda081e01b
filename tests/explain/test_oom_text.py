"""Out-of-memory errors as programs write them: every figure, who has the memory, and what is the matter."""
import gzip
import json
import re
from pathlib import Path

import pytest

from analyzer.tools.explain.oom_screen import describe_errors, find_owners
from analyzer.tools.explain.oom_text import OutOfMemoryText, find_errors

SIZES = {"B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def _size(text: str) -> int:
    return round(float(text[:-1]) * SIZES[text[-1]])


def _read(fields: str, key: str) -> int | None:
    found = dict(part.split("=") for part in fields.split())
    return None if key not in found else _size(found[key])


_HINT = (" If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to "
         "avoid fragmentation.  See documentation for Memory Management  (https://pytorch.org/docs/stable/notes/cuda)")
_OLD_HINT = (" If reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation.  See "
             "documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF")

# Texts in the forms of PyTorch's sources, with figures that we made up; then what they say: sizes by the first letters
# of their fields (B, K, M, G, T: powers of 1024), others by the number of their process, and the cause.
TEXTS = {
    "1.13": ("RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 7.80 GiB total capacity; 6.19 GiB "
             "already allocated; 12.50 MiB free; 6.30 GiB reserved in total by PyTorch)" + _OLD_HINT,
             "requested=20M capacity=7.8G allocated=6.19G free=12.5M unallocated=0.11G device=0B", "fragmentation"),
    "1.13, limited": ("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 1; 23.69 GiB "
                      "total capacity; 3.00 GiB already allocated; 19.00 GiB free; 4.00 GiB allowed; 3.25 GiB reserved "
                      "in total by PyTorch)" + _OLD_HINT,
                      "requested=2G capacity=23.69G allocated=3G free=19G allowed=4G unallocated=0.25G device=1B",
                      "limit"),
    "2.0": ("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.17 GiB (GPU 0; 15.78 GiB total "
            "capacity; 13.96 GiB already allocated; 502.69 MiB free; 14.23 GiB reserved in total by PyTorch)"
            + _OLD_HINT,
            "requested=1.17G capacity=15.78G allocated=13.96G free=502.69M unallocated=0.27G device=0B", "too much"),
    "2.1, misspelt": ("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 55.57 GiB. GPU 0 has a total "
                      "capacty of 12.00 GiB of which 9.02 GiB is free. Of the allocated memory 984.52 MiB is allocated "
                      "by PyTorch, and 463.48 MiB is reserved by PyTorch but unallocated." + _HINT,
                      "requested=55.57G capacity=12G free=9.02G allocated=984.52M unallocated=463.48M device=0B",
                      "one tensor"),
    "2.1, in a container": ("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 496.00 MiB. GPU 0 has "
                            "a total capacty of 14.75 GiB of which 235.06 MiB is free. Process 20398 has 14.52 GiB "
                            "memory in use. Of the allocated memory 14.06 GiB is allocated by PyTorch, and 130.42 MiB "
                            "is reserved by PyTorch but unallocated." + _HINT,
                            "requested=496M capacity=14.75G free=235.06M allocated=14.06G unallocated=130.42M "
                            "device=0B p20398=14.52G", "too much"),
    "2.2, no number of the device": (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 224.00 MiB. GPU  has a total capacity of "
        "44.34 GiB of which 160.81 MiB is free. Process 47694 has 44.17 GiB memory in use. Of the allocated memory "
        "43.36 GiB is allocated by PyTorch, and 96.27 MiB is reserved by PyTorch but unallocated." + _HINT,
        "requested=224M capacity=44.34G free=160.81M allocated=43.36G unallocated=96.27M p47694=44.17G",
        "fragmentation"),
    "2.5, this process": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.78 GiB. GPU 0 has a total capacity of 31.47 "
        "GiB of which 12.73 GiB is free. Including non-PyTorch memory, this process has 18.73 GiB memory in use. Of "
        "the allocated memory 9.08 GiB is allocated by PyTorch, and 9.35 GiB is reserved by PyTorch but unallocated."
        + _HINT,
        "requested=22.78G capacity=31.47G free=12.73G process=18.73G allocated=9.08G unallocated=9.35G device=0B",
        "too much"),
    "in pieces": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 39.39 "
        "GiB of which 1.00 GiB is free. Including non-PyTorch memory, this process has 38.38 GiB memory in use. Of the "
        "allocated memory 29.00 GiB is allocated by PyTorch, and 8.90 GiB is reserved by PyTorch but unallocated."
        + _HINT,
        "requested=4G capacity=39.39G free=1G process=38.38G allocated=29G unallocated=8.9G device=0B",
        "fragmentation"),
    "five processes": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 42.00 MiB. GPU 0 has a total capacity of 47.27 "
        "GiB of which 9.38 MiB is free. Process 644963 has 5.59 MiB memory in use. Process 3053273 has 29.04 GiB "
        "memory in use. Process 3120922 has 14.74 GiB memory in use. Including non-PyTorch memory, this process has "
        "3.14 GiB memory in use. Of the allocated memory 2.92 GiB is allocated by PyTorch, and 34.62 MiB is reserved "
        "by PyTorch but unallocated." + _HINT,
        "requested=42M capacity=47.27G free=9.38M process=3.14G allocated=2.92G unallocated=34.62M device=0B "
        "p644963=5.59M p3053273=29.04G p3120922=14.74G", "another process"),
    "a fraction is set": (
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 996.00 MiB. GPU 0 has a total capacity of 44.43 GiB "
        "of which 9.06 GiB is free. Process 21 has 17.54 GiB memory in use. Including non-PyTorch memory, this process "
        "has 17.81 GiB memory in use. 17.69 GiB allowed; Of the allocated memory 17.44 GiB is allocated by PyTorch, "
        "and 59.88 MiB is reserved by PyTorch but unallocated." + _HINT,
        "requested=996M capacity=44.43G free=9.06G process=17.81G allowed=17.69G allocated=17.44G unallocated=59.88M "
        "device=0B p21=17.54G", "limit"),
    "private pools": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 50.00 MiB. GPU 0 has a total capacity of 23.56 "
        "GiB of which 21.75 MiB is free. Including non-PyTorch memory, this process has 23.50 GiB memory in use. Of "
        "the allocated memory 22.88 GiB is allocated by PyTorch, with 24.00 MiB allocated in private pools (e.g., CUDA "
        "Graphs), and 27.38 MiB is reserved by PyTorch but unallocated." + _HINT,
        "requested=50M capacity=23.56G free=21.75M process=23.5G allocated=22.88G private=24M unallocated=27.38M "
        "device=0B", "too much"),
    "nothing is free": (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 MiB. GPU 6 has a total capacity of "
        "44.53 GiB of which 0 bytes is free. Including non-PyTorch memory, this process has 44.52 GiB memory in use. "
        "Of the allocated memory 44.00 GiB is allocated by PyTorch, and 448.00 KiB is reserved by PyTorch but "
        "unallocated." + _HINT,
        "requested=2M capacity=44.53G free=0B process=44.52G allocated=44G unallocated=448K device=6B", "too much"),
    "Windows, where the driver does not know": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.98 GiB. GPU 0 has a total capacity of 31.84 "
        "GiB of which 16.30 GiB is free. Including non-PyTorch memory, this process has 17179869184.00 GiB memory in "
        "use. 17.51 GiB allowed; Of the allocated memory 12.74 GiB is allocated by PyTorch, and 1.02 GiB is reserved "
        "by PyTorch but unallocated." + _HINT,
        "requested=3.98G capacity=31.84G free=16.3G allowed=17.51G allocated=12.74G unallocated=1.02G device=0B",
        "limit"),
    "two cards' worth": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 TiB. GPU 0 has a total capacity of 139.81 "
        "GiB of which 63.24 GiB is free. Including non-PyTorch memory, this process has 76.56 GiB memory in use. Of "
        "the allocated memory 75.13 GiB is allocated by PyTorch, and 18.76 MiB is reserved by PyTorch but "
        "unallocated." + _HINT,
        "requested=1.5T capacity=139.81G free=63.24G process=76.56G allocated=75.13G unallocated=18.76M device=0B",
        "one tensor"),
    "ROCm": (
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 1.88 GiB. GPU 0 has a total capacity of 23.98 "
        "GiB of which 1.70 GiB is free. Of the allocated memory 21.65 GiB is allocated by PyTorch, and 79.78 MiB is "
        "reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_HIP_ALLOC_CONF=expandable_segments:True to avoid fragmentation.",
        "requested=1.88G capacity=23.98G free=1.7G allocated=21.65G unallocated=79.78M device=0B backend=HIP",
        "too much"),
    "ROCm, in pieces": (
        "!!! Exception during processing !!! HIP out of memory. Tried to allocate 6.64 GiB. GPU 0 has a total capacity "
        "of 19.92 GiB of which 6.22 GiB is free. Of the allocated memory 5.34 GiB is allocated by PyTorch, and 7.10 "
        "GiB is reserved by PyTorch but unallocated." + _HINT,
        "requested=6.64G capacity=19.92G free=6.22G allocated=5.34G unallocated=7.1G device=0B backend=HIP",
        "fragmentation"),
    "ROCm, free": (
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.50 GiB. GPU 7 has a total capacity of 287.98 "
        "GiB of which 203.49 GiB is free. Of the allocated memory 68.63 GiB is allocated by PyTorch, and 1.93 GiB is "
        "reserved by PyTorch but unallocated." + _HINT,
        "requested=2.5G capacity=287.98G free=203.49G allocated=68.63G unallocated=1.93G device=7B backend=HIP",
        "free but refused"),
    "ROCm, graphs": (
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 76.00 MiB. GPU 0 has a total capacity of 255.69 "
        "GiB of which 252.82 GiB is free. 1.20 GiB allowed; Of the allocated memory 1.14 GiB is allocated by PyTorch, "
        "with 17.00 MiB allocated in private pools (e.g., HIP Graphs), and 18.63 MiB is reserved by PyTorch but "
        "unallocated." + _HINT,
        "requested=76M capacity=255.69G free=252.82G allowed=1.2G allocated=1.14G private=17M unallocated=18.63M "
        "device=0B backend=HIP", "limit"),
    "ComfyUI, cudaMallocAsync": (
        "Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated     : 8.28 GiB\n"
        "Requested               : 8.01 GiB\nDevice limit            : 15.70 GiB\nFree (according to CUDA): 38.06 MiB\n"
        "PyTorch limit (set by user-supplied memory fraction)\n                        : 17179869184.00 GiB",
        "requested=8.01G capacity=15.7G free=38.06M allocated=8.28G device=0B", "too much"),
    "ComfyUI, quoted": (
        "> torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)\n> Currently "
        "allocated : 15.16 GiB\n> Requested : 512.00 KiB\n> Device limit : 15.99 GiB\n> Free (according to CUDA): 0 "
        "bytes\n> PyTorch limit (set by user-supplied memory fraction)\n> : 14.00 GiB",
        "requested=512K capacity=15.99G free=0B allocated=15.16G allowed=14G device=0B", "too much"),
    "torchrun": (
        "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.25 GiB. GPU 3 has a total capacity "
        "of 79.11 GiB of which 644.81 MiB is free. Including non-PyTorch memory, this process has 78.46 GiB memory in "
        "use. Of the allocated memory 75.02 GiB is allocated by PyTorch, and 512.20 MiB is reserved by PyTorch but "
        "unallocated." + _HINT,
        "requested=1.25G capacity=79.11G free=644.81M process=78.46G allocated=75.02G unallocated=512.2M device=3B "
        "rank=3B", "too much"),
    "vLLM": (
        "(EngineCore pid=112) ERROR 05-01 14:39:06 [core.py:1131] torch.OutOfMemoryError: CUDA out of memory. Tried to "
        "allocate 50.00 MiB. GPU 0 has a total capacity of 23.56 GiB of which 21.75 MiB is free. Including non-PyTorch "
        "memory, this process has 23.50 GiB memory in use. Of the allocated memory 22.88 GiB is allocated by PyTorch, "
        "with 24.00 MiB allocated in private pools (e.g., CUDA Graphs), and 275.38 MiB is reserved by PyTorch but "
        "unallocated." + _HINT,
        "requested=50M capacity=23.56G free=21.75M process=23.5G allocated=22.88G private=24M unallocated=275.38M "
        "device=0B", "fragmentation"),
    "vLLM, a worker": (
        "(VllmWorker rank=5 pid=1090) ERROR 06-05 06:18:13 [multiproc_executor.py:470] torch.OutOfMemoryError: CUDA "
        "out of memory. Tried to allocate 2.00 GiB. GPU 5 has a total capacity of 79.15 GiB of which 1.19 GiB is free. "
        "Including non-PyTorch memory, this process has 77.95 GiB memory in use. Of the allocated memory 74.00 GiB is "
        "allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated." + _HINT,
        "requested=2G capacity=79.15G free=1.19G process=77.95G allocated=74G unallocated=1G device=5B rank=5B",
        "fragmentation"),
    "vLLM, a newer worker": (
        "(Worker_TP1 pid=9260) ERROR 12-13 11:54:35 [multiproc_executor.py:826] torch.OutOfMemoryError: CUDA out of "
        "memory. Tried to allocate 896.00 MiB. GPU 1 has a total capacity of 22.03 GiB of which 411.12 MiB is free. "
        "Including non-PyTorch memory, this process has 21.62 GiB memory in use. Of the allocated memory 21.00 GiB is "
        "allocated by PyTorch, and 96.00 MiB is reserved by PyTorch but unallocated." + _HINT,
        "requested=896M capacity=22.03G free=411.12M process=21.62G allocated=21G unallocated=96M device=1B rank=1B",
        "too much"),
    "SGLang": (
        "[2025-05-19 23:22:28 TP3] Scheduler hit an exception: torch.OutOfMemoryError: CUDA out of memory. Tried to "
        "allocate 1.16 GiB. GPU 3 has a total capacity of 94.97 GiB of which 16.88 MiB is free. Process 560 has 71.95 "
        "GiB memory in use. Including non-PyTorch memory, this process has 22.93 GiB memory in use. Of the allocated "
        "memory 21.24 GiB is allocated by PyTorch, and 14.48 MiB is reserved by PyTorch but unallocated." + _HINT,
        "requested=1.16G capacity=94.97G free=16.88M process=22.93G allocated=21.24G unallocated=14.48M device=3B "
        "rank=3B p560=71.95G", "another process"),
    "pytest": (
        "E       torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 16.00 GiB. GPU 0 has a total capacity "
        "of 140.06 GiB of which 3.12 GiB is free. Process 28 has 136.94 GiB memory in use. Of the allocated memory "
        "128.03 GiB is allocated by PyTorch, and 216.00 MiB is reserved by PyTorch but unallocated." + _HINT,
        "requested=16G capacity=140.06G free=3.12G allocated=128.03G unallocated=216M device=0B p28=136.94G",
        "too much"),
    "broken into lines": (
        "> **OutOfMemoryError: CUDA out of memory.**\n> Tried to allocate 128.00 MiB. GPU 0 has a total capacity of "
        "14.56 GiB of which 111.81 MiB is free.\n> Including non-PyTorch memory, this process has 14.45 GiB memory in "
        "use.\n> Of the allocated memory 14.25 GiB is allocated by PyTorch, and 60.81 MiB is\n> reserved by PyTorch "
        "but unallocated.",
        "requested=128M capacity=14.56G free=111.81M process=14.45G allocated=14.25G unallocated=60.81M device=0B",
        "fragmentation"),
    "Lightning's bar before it": (
        "Epoch 0:  12%|#2        | 21/170 [00:31<03:41,  0.67it/s, v_num=3]torch.OutOfMemoryError: CUDA out of memory. "
        "Tried to allocate 734.00 MiB. GPU 2 has a total capacity of 31.73 GiB of which 305.00 MiB is free. Process "
        "1725961 has 1.32 GiB memory in use. Process 47377 has 14.96 GiB memory in use. Including non-PyTorch memory, "
        "this process has 15.13 GiB memory in use. Of the allocated memory 14.50 GiB is allocated by PyTorch, and "
        "76.32 MiB is reserved by PyTorch but unallocated." + _HINT,
        "requested=734M capacity=31.73G free=305M process=15.13G allocated=14.5G unallocated=76.32M device=2B "
        "p1725961=1.32G p47377=14.96G", "another process"),
    "Apple": (
        "RuntimeError: MPS backend out of memory (MPS allocated: 17.36 GB, other allocations: 613.56 MB, max allowed: "
        "18.13 GB). Tried to allocate 192.00 MB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable",
        "requested=192M process=17.96G allocated=17.36G allowed=18.13G backend=MPS", "limit"),
    "Apple, GiB": (
        "RuntimeError: MPS backend out of memory (MPS allocated: 42.28 GiB, other allocations: 720.00 KiB, max "
        "allowed: 42.43 GiB). Tried to allocate 384.00 MiB on shared pool.",
        "requested=384M process=42.28G allocated=42.28G allowed=42.43G backend=MPS", "limit"),
    "Intel": (
        "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 11.60 "
        "GiB. Of the allocated memory 9.00 GiB is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but "
        "unallocated. Please use `empty_cache` to release all unoccupied cached memory.",
        "requested=2G capacity=11.6G allocated=9G unallocated=100M device=0B backend=XPU", "too much"),
    "CUDA's own": ("RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at "
                   "some other API call, so the stacktrace below might be incorrect.", "", "no figures")}

FIELDS = ("requested", "capacity", "free", "process", "allowed", "allocated", "private", "unallocated")


@pytest.mark.parametrize("name", TEXTS)
def test_every_figure_of_a_text(name: str) -> None:
    text, fields, cause = TEXTS[name]
    error, = find_errors(f"step 3\n{text}\nbye".splitlines())
    named = dict(part.split("=") for part in fields.split())
    close = {field: _read(fields, field) for field in FIELDS if field in named}
    found = {field: size for field in FIELDS if (size := getattr(error, f"{field}_bytes")) is not None}
    # Sums and differences of two rounded figures are as exact as these: half a hundredth of a GiB each.
    assert found == pytest.approx(close, abs=1 << 23 if {"2.0", "1.13", "1.13, limited"} & {name} or "Apple" in name
                                  else 0)
    assert error.others == {int(key[1:]): _size(size) for key, size in named.items()
                            if key.startswith("p") and key[1:].isdecimal()}
    assert (error.device, error.rank) == (_of(named, "device"), _of(named, "rank"))
    assert error.backend == named.get("backend", "CUDA")
    assert find_owners(error).cause == cause
    assert max(map(len, describe_errors("a.log", [error]).splitlines())) <= 120


def _of(named: dict[str, str], key: str) -> int | None:
    return int(named[key][:-1]) if key in named else None


def test_who_has_the_memory() -> None:
    error, = find_errors([TEXTS["five processes"][0]])
    owners = find_owners(error)
    assert owners.other_bytes == _size("5.59M") + _size("29.04G") + _size("14.74G")
    assert owners.outside_bytes == _size("3.14G") - _size("2.92G") - _size("34.62M")
    assert not owners.is_guessed
    hidden, = find_errors([TEXTS["2.1, in a container"][0]])
    owners = find_owners(hidden)
    assert (owners.own_bytes, owners.other_bytes, owners.is_guessed) == (_size("14.52G"), 0, True)
    # 496 asked for; 235.06 free and 130.42 cached
    assert owners.lacking_bytes == _size("496M") - _size("235.06M") - _size("130.42M")


def test_ranks_and_their_tracebacks_are_kept_apart() -> None:
    error = TEXTS["torchrun"][0]
    text = "\n".join([
        "[rank3]: Traceback (most recent call last):", "[rank0]: Traceback (most recent call last):",
        '[rank3]:   File "/home/me/train.py", line 31, in main', "[rank3]:     loss.backward()",
        '[rank0]:   File "/home/me/train.py", line 12, in main',
        '[rank3]:   File "/env/lib/python3.12/site-packages/torch/_tensor.py", line 648, in backward',
        error, error.replace("[rank3]", "[rank0]"), "elastic: rank 3 failed", error.replace("[rank3]: ", "")])
    first, second = find_errors(text.splitlines())
    assert [(frame.name, frame.line) for frame in first.frames] == [("backward", 648), ("main", 31)]
    assert [(frame.name, frame.line) for frame in second.frames] == [("main", 12)]
    assert (first.rank, second.rank, first.count) == (3, 0, 2)
    said = describe_errors("a.log", [first, second])
    assert "2 out-of-memory errors, of ranks 0, 3" in said and "at me/train.py:31 main" in said


@pytest.mark.parametrize(("marks", "ranks"), [
    (("[default0]:", "[default10]:"), (0, 10)), (("[trainer1]:", "[trainer11]:"), (1, 11)),
    (("[default0]:[rank8]: ", "[default1]:[rank9]: "), (8, 9)), (("0: ", "10: "), (0, 10)),
    ((" 0: ", "10: "), (0, 10))])
def test_marks_of_torchrun_and_srun(marks: tuple[str, str], ranks: tuple[int, int]) -> None:
    """Lines of two ranks between each other, as `torchrun --tee 3` and `srun --label` write them."""
    texts = [["Traceback (most recent call last):", f'  File "/home/me/train.py", line {line}, in main',
              TEXTS["in pieces"][0]] for line in (31, 12)]
    lines = [mark + text for pair in zip(*texts) for mark, text in zip(marks, pair)]
    found = find_errors(lines)
    assert tuple(error.rank for error in found) == ranks
    assert [[frame.line for frame in error.frames] for error in found] == [[31], [12]]


@pytest.mark.parametrize(("file", "said", "left_out"), [
    ("/home/me/train.py", "expandable_segments:True avoids most of it", "Windows"),
    ("C:\\ComfyUI\\execution.py", "On Windows PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:512", "segments:True")])
def test_settings_of_the_allocator_are_those_of_the_platform(file: str, said: str, left_out: str) -> None:
    error, = find_errors(["Traceback (most recent call last):", f'  File "{file}", line 31, in main',
                          TEXTS["in pieces"][0]])
    text = " ".join(describe_errors("a.log", [error]).split())
    assert said in text and left_out not in text, text


def test_talk_of_memory_is_no_error(tmp_path: Path, run) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "a.log").write_text("If you run out of memory, try a smaller batch\n")
    code, _, complaint = run("explain", str(tmp_path / "a.log"))
    assert code == 2 and "without an out-of-memory error" in " ".join(complaint.split())


def test_the_command_reads_a_log(tmp_path: Path, run) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "a.log").write_text("x\r1\r" + TEXTS["five processes"][0] + "\n")
    code, out, _ = run("explain", str(tmp_path / "a.log"))
    assert code == 0 and "Another process: others hold 43.79 GiB" in out, out


def test_a_text_that_says_little() -> None:
    assert find_owners(OutOfMemoryText("CUDA", 1, None, None, None, None, {}, None, None, None, None)) == (
        find_owners(find_errors(["CUDA error: out of memory"])[0]))


def test_a_text_that_was_cut_off_blames_nobody() -> None:
    text = TEXTS["2.5, this process"][0]
    error, = find_errors([text[:text.index(" is free") + len(" is free")]])
    assert (error.free_bytes, error.allocated_bytes) == (_size("12.73G"), None)
    assert find_owners(error).cause == "no figures"


def test_what_is_not_known_of_mps_is_not_said() -> None:
    error, = find_errors(["RuntimeError: MPS backend out of memory (MPS allocated: 17.32 GB, other allocations: 1.05 "
                          "GB, max allowed: 18.13 GB). Tried to allocate 256.00 MB on private pool."])
    said = describe_errors("a.log", [error])
    assert find_owners(error).other_bytes is None
    assert "other processes" not in said and "free" not in said, said


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_encodings_and_colours_of_terminals(encoding: str, tmp_path: Path, run) -> None:  # type: ignore[no-untyped-def]
    """PowerShell writes UTF-16, Python 3.13 colours tracebacks, and rich colours each number."""
    colours = [re.sub(r"(\d+\.\d+|\b\d+\b)", "\x1b[1;36m\\1\x1b[0m", TEXTS["five processes"][0]),
               '  File \x1b[35m"/home/me/train.py"\x1b[0m, line \x1b[35m12\x1b[0m, in \x1b[35mmain\x1b[0m']
    data = "\r\n".join(["Traceback (most recent call last):", *colours[::-1], ""]).encode(encoding)
    for name, written in (("a.log", data), ("a.log.gz", gzip.compress(data))):
        (tmp_path / name).write_bytes(written)
        code, out, complaint = run("explain", str(tmp_path / name))
        assert code == 0 and "Another process: others hold 43.79 GiB" in out, complaint
        assert "at me/train.py:12 main" in out, out


def test_a_packed_log_that_was_cut_off(tmp_path: Path, run) -> None:  # type: ignore[no-untyped-def]
    packed = gzip.compress("".join(f"step {step}, {hash((step, 1))}\n" for step in range(9000)).encode())
    (tmp_path / "a.log.gz").write_bytes(packed[:len(packed) // 2])
    code, _, complaint = run("explain", str(tmp_path / "a.log.gz"))
    assert code == 2 and "damaged or cut off: Compressed file ended" in " ".join(complaint.split())


def test_what_a_log_does_not_show(tmp_path: Path, run) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "a.log").write_text(TEXTS["five processes"][0])
    code, _, complaint = run("explain", str(tmp_path / "a.log"), "--show", "reserved")
    assert code == 2 and "--show reserved: tells of a memory snapshot, and this is a log" in complaint


def test_a_log_of_json_lines(tmp_path: Path, run) -> None:  # type: ignore[no-untyped-def]
    """Docker's json-file driver writes an object for each line, and so do programs that log for machines."""
    texts = ["step 1", TEXTS["five processes"][0], "bye"]
    (tmp_path / "a.log").write_text("".join(json.dumps({"log": text, "stream": "stderr"}) + "\n" for text in texts))
    code, out, complaint = run("explain", str(tmp_path / "a.log"))
    assert code == 0 and "line 2, device 0" in out and "others hold 43.79 GiB" in out, out + complaint
