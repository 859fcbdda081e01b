"""Rows of modded-nanogpt: the training scripts that the logs of these runs hold, run dry as rank 0 of their 8 GPUs.

The scripts are in ``benchmarks/truth/speedrun.tar.xz``, with their licence, and run as they are but for fewer steps, in
which each stage of their schedules is, and one f-string that Python 3.11 does not read. What they print last, of the
allocator's counters with warm-up and evaluation passes in them, is the figure of the row and the prediction.
"""
from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from analyzer.errors import InputError
from benchmarks.truth.table import TRUTH

Settings = dict[str, Any]
#: Of counts that the scripts have as ``name = number``: steps of training and their schedules, and what lies between.
COUNTS = {"num_iterations": 4, "num_scheduled_iterations": 6, "num_extension_iterations": 1, "cooldown_iters": 1,
          "warmup_steps": 3, "val_loss_every": 4, "val_tokens": 2**21}
_NESTED = '.get("filename", "Unknown")'  # inside an f-string of the same quotes, which Python reads from 3.12 on
_KERNELS = f"{'-' * 40}\n# triton_kernels.py\n{'-' * 40}\n"  # before a second file in the log
_PEAK = re.compile(r"^peak memory allocated: (\d+) MiB reserved: (\d+) MiB$", re.MULTILINE)
#: What scripts import of kernels for a GPU, and what stands in for them.
_IMPORTS = {"import triton": "from benchmarks.parallel import kernel_launch as triton",
            "import triton.language as tl": "from benchmarks.parallel.kernel_launch import language as tl",
            "from triton.tools.tensor_descriptor import": "from benchmarks.parallel.kernel_launch import",
            "from kernels import": "from benchmarks.parallel.kernel_launch import",
            "from flash_attn_interface import": "from benchmarks.parallel.kernel_launch import"}
DOCUMENT = 512  #: tokens from where one begins to the next
BEGINS = 50256  #: the token
SHARDS = 40     #: files of data; a script that looks where documents begin reads one or more a step


#: Runs ``analyzer``. Before PyTorch 2.8 no collective kept its tensors for those who wait for its future alone
#: (``record_stream`` was called, torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp).
_RUN = "from analyzer.cli import main; raise SystemExit(main())"
_RUN_BEFORE_2_8 = ("from analyzer.distributed.collective import Collectives; "
                   f"Collectives._keep = lambda *args: None; {_RUN}")


def read_script(name: str) -> str:
    with tarfile.open(TRUTH / "speedrun.tar.xz") as archive:
        file = archive.extractfile(f"speedrun/{name}")
        assert file is not None, name
        return file.read().decode()


def shorten(script: str) -> str:
    """A script that takes fewer steps, and has kernels that run anywhere.

    >>> shorten("num_iterations: int = 1750 # steps")
    'num_iterations: int = 4 # steps'
    """
    for name, count in COUNTS.items():
        script = re.sub(rf"(\b{name}\b\s*(?::\s*int)?\s*=\s*\(?\s*)\d+", rf"\g<1>{count}", script)
    for name, instead in _IMPORTS.items():
        script = re.sub(rf"^{re.escape(name)}(?=$| )", instead, script, flags=re.MULTILINE)
    return script.replace(_NESTED, _NESTED.replace('"', "'"))


def write_tokens(path: Path, count: int) -> None:  # as data/cached_fineweb10B.py of the repository leaves them
    header = np.zeros(256, dtype=np.int32)
    header[:3] = 20240520, 1, count
    tokens = np.zeros(count, dtype=np.uint16)
    tokens[::DOCUMENT] = BEGINS
    path.write_bytes(header.tobytes() + tokens.tobytes())


def write_folder(name: str, folder: Path) -> Path:
    """Where a script can run: its data, beside it and one above, and what it imports and calls."""
    data, run = folder / "data" / "fineweb10B", folder / "run"
    for one in (data, folder / "bin", *(run / "logs" / part for part in ("", "yarn", "v1"))):
        one.mkdir(parents=True, exist_ok=True)
    (run / "data").symlink_to(folder / "data")
    for kind, count in (("train", 2**20), ("val", 3 * 2**21)):
        write_tokens(folder / f"{kind}.bin", count)
        for number in range(SHARDS):
            (data / f"fineweb_{kind}_{number:06}.bin").symlink_to(folder / f"{kind}.bin")
    script, _, kernels = shorten(read_script(f"{name}.py")).partition(_KERNELS)
    (run / "train.py").write_text(script)
    (run / "triton_kernels.py").write_text(kernels)
    (run / "muon.py").write_text(read_script("muon.py"))
    (folder / "bin" / "nvidia-smi").write_text("#!/bin/sh\n")  # which scripts write into their logs
    (folder / "bin" / "nvidia-smi").chmod(0o755)
    return run


def run(row: Settings, device: str) -> tuple[int, int]:
    """Bytes allocated and reserved at most, as the script of a row prints them. Raises InputError where it fails."""
    size = row["hardware"]["gpus"]
    with tempfile.TemporaryDirectory(prefix="speedrun-") as kept:
        folder = Path(kept)
        place = write_folder(row["id"].removeprefix("modded-nanogpt-"), folder)
        path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
        own = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
        is_old = tuple(map(int, row["software"]["torch"].split(".")[:2])) < (2, 8)
        words = ["dryrun", "--world", str(size), "--rank", "0", "--device", device, "--steps", "1000", "train.py"]
        made = subprocess.run([sys.executable, "-c", _RUN_BEFORE_2_8 if is_old else _RUN, *words], cwd=place,
                              env={**os.environ, "PATH": path, "PYTHONPATH": own}, capture_output=True, text=True)
        logs = [log.read_text() for log in place.glob("logs/*.txt")]  # where one says it alone
    told = _PEAK.findall("\n".join([*logs, made.stdout]))
    if not told:
        raise InputError(f"{row['id']}: its script did not end: {made.stderr[-2000:]}")
    allocated, reserved = map(int, told[-1])
    return allocated * 2**20, reserved * 2**20
