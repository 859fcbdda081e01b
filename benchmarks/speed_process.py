"""What must be measured in a process of its own: first runs, resident memory, imports.

    python -m benchmarks.speed_process cold ROUNDS MODEL...
    python -m benchmarks.speed_process depth ROUNDS LAYERS...
    python -m benchmarks.speed_process memory MODEL bare|profile|whole
    python -m benchmarks.speed_process records LAYERS...

Each prints JSON lines.
"""
from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from .page import ROOT  # noqa: E402

COLD = ("bare", "profile", "trace + profile")
Line = dict[str, Any]


def run_worker(*arguments: str) -> list[Line]:
    """The lines that a fresh process of this file prints. Raises RuntimeError with its complaint where it fails."""
    done = subprocess.run([sys.executable, "-m", "benchmarks.speed_process", *arguments], cwd=ROOT, capture_output=True,
                          text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stderr.strip().splitlines()[-1:] or done.returncode}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


_IMPORTS = """
import json, time
clocks = lambda: (time.perf_counter(), time.process_time())
start = clocks()
import torch
middle = clocks()
import analyzer
print(json.dumps([[b - a for a, b in zip(*pair)] for pair in ((start, middle), (middle, clocks()))]))
"""


def time_imports(rounds: int) -> list[list[tuple[float, float]]]:
    """(wall, processor) seconds in which a fresh process imports torch, and then analyzer, for each of ``rounds``."""
    command = [sys.executable, "-c", _IMPORTS]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)  # not counted: it brings files into memory
    return [
        json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
        for _ in range(rounds)
    ]


def in_fork(work: Callable[[], Iterator[Line]]) -> Iterator[Line]:
    """What ``work`` gives in a copy of this process."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(out)
        code = 1
        try:
            with os.fdopen(into, "w") as file:
                for line in work():
                    print(json.dumps(line), file=file, flush=True)
            code = 0
        finally:
            os._exit(code)
    os.close(into)
    with os.fdopen(out) as file:
        for text in file:
            yield json.loads(text)
    _, status = os.waitpid(child, 0)
    if status != 0:
        raise RuntimeError(f"a measuring process ended with status {status}")


def measure_cold(rounds: int, names: Sequence[str]) -> Iterator[Line]:
    """First runs. A process that has imported everything and run nothing is copied for each: as a fresh one, less its
    imports.
    """
    import torch

    from .speed_case import find_case, import_libraries
    from .speed_contender import OURS, Prepared
    from .speed_table import time_once

    torch.set_num_threads(1)
    import_libraries()

    def of_model(name: str) -> Iterator[Line]:
        on = Prepared(find_case(name))
        for index in range(rounds):
            for what in COLD:
                def once(what: str = what, index: int = index) -> Iterator[Line]:
                    yield {"model": name, "what": what, "round": index, "timing": time_once(OURS[what](on))}

                yield from in_fork(once)

    for name in names:
        yield from in_fork(partial(of_model, name))


def measure_depth(rounds: int, depths: Sequence[int]) -> Iterator[Line]:
    """Steps and profiles of OPTs of identical layers, in turn."""
    import torch

    from .speed_case import SpeedCase, import_libraries, opt
    from .speed_contender import Prepared, prepare
    from .speed_table import time_in_turn

    torch.set_num_threads(1)
    import_libraries()
    models = {layers: Prepared(SpeedCase("opt", opt(layers), tokens=(1, 128))) for layers in depths}
    for pair in (("bare", "profile"), ("bare + AdamW", "profile + AdamW")):
        runs: dict[tuple[str, int], Callable[[], Any]] = {}
        for layers, on in models.items():
            for what in pair:
                run = prepare(what, on)
                if isinstance(run, str):
                    raise RuntimeError(f"OPT of {layers} layers: {what}: {run}")
                runs[what, layers] = run
        for (what, layers), taken in time_in_turn(runs, rounds).items():
            for timing in taken:
                yield {"what": what, "layers": layers, "timing": timing}


def resident_bytes(field: str = "VmRSS") -> int:
    """What /proc says of this process; "VmHWM" for the most there ever was (getrusage would count the process that
    started this one).
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def measure_memory(name: str, what: str) -> Line:
    """Resident memory of one first run in this process: of a bare step, of a profile, or of one with reuse=False
    ("whole").
    """
    import torch

    from analyzer import profile
    from analyzer.zoo import MODELS

    from .speed_contender import Prepared, step

    torch.set_num_threads(1)
    if name == "llama_405b":  # built by a callable, which counts
        ids = torch.empty(1, 4096, dtype=torch.int64, device="meta")
        before, start = resident_bytes(), time.perf_counter()
        if what == "bare":
            with torch.device("meta"):
                model = MODELS[name].factory()
            step(model, (ids,), {})
        else:
            profile(MODELS[name].factory, args=(ids,), reuse=what == "profile")
    else:
        from .speed_case import find_case, import_libraries

        import_libraries()
        on = Prepared(find_case(name))
        before, start = resident_bytes(), time.perf_counter()
        if what == "bare":
            step(on.model, on.args, on.kwargs)
        else:
            profile(on.model, args=on.args, kwargs=on.kwargs, reuse=what == "profile")
    seconds = time.perf_counter() - start
    return {
        "model": name, "what": what, "seconds": seconds, "before_bytes": before, "peak_bytes": resident_bytes("VmHWM")
    }


def measure_records(layers: Sequence[int]) -> Iterator[Line]:
    """Operator calls in the log and the most memory that Python held during a profile, by depth."""
    import torch

    from analyzer import profile
    from analyzer.profilers.annotation import Annotation

    from .speed_case import SpeedCase, import_libraries, opt
    from .speed_contender import Prepared

    torch.set_num_threads(1)
    import_libraries()
    for count in layers:
        on = Prepared(SpeedCase("opt", opt(count, hidden=256), tokens=(1, 64)))
        for reuse in (True, False):
            calls: list[int] = []

            def count_calls(log: Any, calls: list[int] = calls) -> Annotation:
                calls.append(len(log.calls))
                return Annotation()

            def run(on: Prepared = on, reuse: bool = reuse, count_calls: Any = count_calls) -> None:
                profile(on.model, args=on.args, kwargs=on.kwargs, reuse=reuse, profilers=[count_calls])

            run()
            tracemalloc.start()
            run()
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            yield {"layers": count, "reuse": reuse, "calls": calls[-1], "peak_bytes": peak}


def main(arguments: Sequence[str]) -> None:
    command, *rest = arguments
    if command == "cold":
        lines = measure_cold(int(rest[0]), rest[1:])
    elif command == "depth":
        lines = measure_depth(int(rest[0]), [int(word) for word in rest[1:]])
    elif command == "memory":
        lines = iter([measure_memory(*rest)])
    else:
        lines = measure_records([int(word) for word in rest])
    for line in lines:
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
