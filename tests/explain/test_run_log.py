"""Logs of runs: what each form tells, and what it does not."""
import argparse
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from analyzer import profile
from analyzer.cli import main
from analyzer.errors import InputError
from analyzer.tools.explain.command import run_explain
from analyzer.tools.explain.run.run_log import RunLog
from analyzer.tools.explain.run.run_screen import list_quantities
from analyzer.tools.explain.run.run_series import find_steady

GIB, MIB = 1 << 30, 1 << 20


def _explain(path: Path, content: str, **options: Any) -> dict[str, Any]:
    path.write_text(content)
    arguments = argparse.Namespace(**{"file": path, "json": path.with_suffix(".out"), "html": None, "show": None,
                                      "device": None, "against": None} | options)
    assert run_explain(arguments) == 0
    found: dict[str, Any] = json.loads(arguments.json.read_text())
    return found


def _figures(found: dict[str, Any]) -> dict[str, float]:
    return {row["name"]: row["run"] for row in found["quantities"]}


_TITAN = ("[rank0]:\x1b[0m[titan] 2026-01-05 10:00:{:06.3f} - root - INFO - \x1b[31mstep: {:2}  \x1b[32mloss:  8.1  "
          "\x1b[38;2;180;60;0mgrad_norm:  1.2  \x1b[36mmemory: {:5.2f}GiB(9.00%)  \x1b[34mtps: 1,000  "
          "\x1b[36mtflops: 1,024.50  \x1b[35mmfu: 41.25%\x1b[0m")


def _titan(*rows: tuple[float, int, float]) -> str:
    return "\n".join(_TITAN.format(*row).replace(".", ",", 1) for row in rows)


# A state as TrainerState.save_to_json writes it, with include_num_input_tokens_seen: the time so far is in each row.
def _state(*rows: dict[str, float], **known: Any) -> str:
    return json.dumps({"best_metric": None, "epoch": 1.0, "global_step": 30, "log_history": list(rows),
                       "max_steps": 30, **known}, indent=2)


_ENDED = {"epoch": 1.0, "step": 30, "total_flos": 1e12, "train_loss": 2.0, "train_runtime": 64.0,
          "train_samples_per_second": 7.5, "train_steps_per_second": 0.469}
_MEMORY = {"before_init_mem_cpu": 1, "before_init_mem_gpu": 1 * GIB, "init_mem_gpu_alloc_delta": 2 * GIB,
           "init_mem_gpu_peaked_delta": 0, "train_mem_gpu_alloc_delta": 3 * GIB, "train_mem_gpu_peaked_delta": 5 * GIB}

# content, figures, words of what is unknown
CASES: dict[str, tuple[str, dict[str, float], str]] = {
    "torchtitan": (
        _titan((1, 1, 20), (10, 10, 27.5), (12, 20, 27.25)),
        # 9 steps in 9 s and 10 in 2 s: of two values the median is their mean
        {"step_seconds": 0.6, "device_tokens_per_second": 1000, "flops_per_second": 1024.5e12, "mfu": 0.4125,
         "reserved_bytes": 27.5 * GIB}, ""),
    "torchtitan, several ranks": (
        _titan((1, 1, 20), (3, 2, 20)) + "\n" + _titan((1, 1, 30), (9, 2, 30)).replace("rank0", "rank7"),
        {"step_seconds": 2.0, "device_tokens_per_second": 1000, "flops_per_second": 1024.5e12, "mfu": 0.4125,
         "reserved_bytes": 30 * GIB}, ""),
    "torchtitan, without times": (
        "step:  1  loss:  8.1  memory: 20.00GiB(9.00%)  wps: 1,000  mfu: 41.25%\n"
        "validate step:  1  loss:  9.9  memory: 90.00GiB(99.00%)  tps: 5",
        {"device_tokens_per_second": 1000, "mfu": 0.4125, "reserved_bytes": 20 * GIB}, "times of steps"),
    "torchtitan, digits that are no date and no figure": (
        _titan((1, 1, 20), (3, 2, 20)).replace("-01-05", "-99-05") + "\n" + _titan((5, 3, 20)).replace(
            "memory: 20", "memory: " + "9" * 400).replace("tps: 1,000", "tps: ,,"),
        {"device_tokens_per_second": 1000, "flops_per_second": 1024.5e12, "mfu": 0.4125, "reserved_bytes": 20 * GIB},
        "times of steps"),
    "Trainer, time so far": (
        _state({"loss": 3.0, "step": 10, "train_runtime": 20.0, "num_input_tokens_seen": 1000},
               {"eval_loss": 3.0, "step": 10, "eval_runtime": 4.0, "eval_samples_per_second": 9.0},
               {"loss": 2.0, "step": 20, "train_runtime": 44.0, "num_input_tokens_seen": 5000}, _ENDED),
        # (44 - 20 - 4 of evaluation) / 10 steps; 1000 / 20 and 4000 / 20 tokens a second; in the end 60 s in 30 steps
        {"step_seconds": 2.0, "tokens_per_second": 125.0, "samples_per_second": 7.5}, "memory"),
    "Trainer, the mean alone": (
        _state({"loss": 3.0, "step": 10}, {"loss": 2.0, "step": 20}, _ENDED),
        {"step_seconds": 64 / 30, "samples_per_second": 7.5}, "single steps"),
    "Trainer, ended early": (
        _state({"loss": 3.0, "step": 10}, _ENDED, max_steps=100), {}, "divide the planned steps"),
    "results with memory": (
        json.dumps({"epoch": 1.0, **_ENDED, **_MEMORY}),
        {"step_seconds": 1 / 0.469, "samples_per_second": 7.5, "allocated_bytes": 11 * GIB}, "single steps"),
    "results, memory of training alone": (
        json.dumps({**_ENDED, **{key: value for key, value in _MEMORY.items() if key.startswith("train")}}),
        {"step_seconds": 1 / 0.469, "samples_per_second": 7.5}, "8.00 GiB more than was there before"),
    "printed, transformers 4 and 5": (
        "  5%|5         | 5/100\n{'loss': 2.5, 'grad_norm': 1.5, 'learning_rate': 5e-05, 'epoch': 0.5}\n"
        "{'train_runtime': '64', 'train_samples_per_second': '7.5', 'train_steps_per_second': '0.5', "
        "'train_loss': '2', 'epoch': '1'}", {"step_seconds": 2.0, "samples_per_second": 7.5}, "tokens"),
    "printed, with the time and the tokens so far": (
        "{'loss': '4.041', 'learning_rate': '2.5e-06', 'epoch': '1', 'num_input_tokens_seen': 1280, 'train_runtime': "
        "'0.3479', 'train_tokens_per_second': '3679'}\n{'eval_loss': '4.04', 'eval_runtime': '2', 'epoch': '1'}\n"
        "{'train_runtime': '12', 'train_steps_per_second': '2', 'train_loss': '4.056', 'epoch': '1'}",
        # 2 a second are 24 steps in 12 s, 2 of them evaluation
        {"step_seconds": 10 / 24, "tokens_per_second": 3679}, "memory"),
    "nvidia-smi": (
        "timestamp, name, index, utilization.gpu [%], memory.used [MiB], memory.total [MiB]\n"
        "2026/01/05 10:00:00.100, NVIDIA H200, 0, 3 %, 812 MiB, 143771 MiB\n"
        "2026/01/05 10:00:00.102, NVIDIA H200, 1, 0 %, 4 MiB, 143771 MiB\n"
        "2026/01/05 10:00:01.100, NVIDIA H200, 0, 97 %, 40536 MiB, 143771 MiB\n"
        "2026/01/05 10:00:01.102, NVIDIA H200, 1, [N/A], 4 MiB, 143771 MiB\n2026/01/05 10:0",
        {"used_bytes": 40536 * MIB, "utilization.gpu [%]": 50.0, "memory.total [MiB]": 143771}, "nvidia-smi does not"),
    "nvidia-smi, nounits": (
        "memory.used [MiB], power.draw [W]\n812, 70.5\n40536, [Not Supported]\n",
        {"used_bytes": 40536 * MIB, "power.draw [W]": 70.5}, "which device"),
    "nvidia-smi, noheader": (
        "2026/01/05 10:00:00.100, 98 %, 812 MiB\n2026/01/05 10:00:01.100, 96 %, 814 MiB\n",
        {"column 2 [%]": 97.0, "column 3 [MiB]": 813.0}, "what the columns are"),
}
_LIGHTNING = """\
DeviceStatsMonitor.on_train_batch_end/allocated_bytes.all.current,DeviceStatsMonitor.on_train_batch_end/allocated_bytes\
.all.peak,epoch,step,train/batches,train/device/samples_per_sec,train/time,train_loss
5,1000,0,9,,,,
,,0,9,10,,5.0,2.5
7,3000,1,19,,,,
,,1,19,20,80.0,9.0,2.0
"""
CASES |= {
    "Lightning": (_LIGHTNING, {"allocated_bytes": 3000, "device_samples_per_second": 80.0, "step_seconds": 0.45},
                  "tokens"),
    "Lightning, only losses": ("epoch,step,train_loss\n0,9,2.5\n", {}, "ThroughputMonitor"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_log_tells(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, figures, unknown = CASES[case]
    found = _explain(tmp_path / "log", content)
    assert _figures(found) == pytest.approx(figures)
    screen = capsys.readouterr().out
    assert len(screen.splitlines()) <= 40 and max(map(len, screen.splitlines())) <= 120
    if unknown:
        assert any(unknown in text for text in found["unknown"]) and "not in the log: " in screen
    else:
        assert found["unknown"] == []


# values, (warm-up, steps of outliers, drift)
SERIES: dict[str, tuple[list[float], tuple[int, list[int], float | None]]] = {
    "steady": ([1.0, 1.1, 0.9] * 8, (0, [], None)),
    "warm-up": ([30.0, 5.0] + [1.0, 1.1, 0.9] * 8, (2, [], None)),
    "outliers": ([1.0, 1.1, 0.9] * 4 + [7.0] + [1.0, 1.1, 0.9] * 4, (0, [12], None)),
    # thirds of 24 values 1.00 ... 1.23: medians 1.035 and 1.195
    "drift": ([1.0 + number / 100 for number in range(24)], (0, [], 1.195 / 1.035)),
    "too few": ([9.0, 1.0, 1.0], (0, [], None)),
    "all the same": ([2.0] * 12, (0, [], None)),
}


@pytest.mark.parametrize("case", SERIES)
def test_warm_up_outliers_and_drift_are_told_apart(case: str) -> None:
    values, (warm_up, outliers, drift) = SERIES[case]
    found = find_steady(list(enumerate(values)))
    assert (found.warm_up, [step for step, _ in found.outliers]) == (warm_up, outliers)
    assert found.drift == (None if drift is None else pytest.approx(drift))


def test_the_last_digit_is_no_outlier() -> None:
    values = [(step, 2.0) for step in range(12)] + [(12, 2.001)]
    assert find_steady(values, resolution=0.001).outliers == ()
    assert find_steady(values).outliers == ((12, 2.001),)


def test_a_run_beside_its_prediction(tmp_path: Path) -> None:
    """Tokens and samples are those of the whole job or of a device, as the log has them."""
    predicted = profile(nn.Linear(64, 64), torch.empty(32, 64, device="meta"), device="t4", optimizer="sgd")
    seconds = predicted.step_seconds
    assert seconds is not None and predicted.verdict is not None
    log = RunLog("test", series={"step_seconds": [(1, 2 * seconds)]}, figures={
        "samples_per_second": 16 / seconds, "device_samples_per_second": 8 / seconds, "tokens_per_second": 1.0,
        "reserved_bytes": predicted.peak_reserved_bytes or 0, "used_bytes": 2 * (predicted.verdict.needed_bytes or 0)})
    ratios = {row.name: row.ratio for row in list_quantities(log, predicted)}
    assert ratios == {"step_seconds": pytest.approx(2), "samples_per_second": pytest.approx(0.5),
                      "device_samples_per_second": pytest.approx(0.25), "tokens_per_second": None,
                      "reserved_bytes": 1.0, "used_bytes": 2.0}
    predicted.to_json(tmp_path / "saved.json")
    found = _explain(tmp_path / "log", _titan((1, 1, 20), (10, 10, 27.5)), against=str(tmp_path / "saved.json"))
    assert {row["name"]: row["predicted"] for row in found["quantities"]}["step_seconds"] == seconds


BAD = {
    "foreign JSON": ('{"a": 1}', "no known program"),
    "cut off": (_state({"loss": 1.0})[:-20], "damaged or was cut off"),
    "deep": ('{"log_history": ' + "[" * 200_000, "damaged or was cut off"),
    "text": ("hello\nworld\n", "without lines of a run"),
    "a saved profile": ('{"format": "analyzer.profile", "version": 15}', "a saved profile of analyzer, which is a "
                        "prediction, not what a run left behind; .*: analyzer explain RUN --against .*log"),
    "a saved plan": ('{"format": "analyzer.plan", "version": 1}', "a saved plan of analyzer, which is a prediction"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_foreign_file_is_one_error(case: str, tmp_path: Path) -> None:
    content, message = BAD[case]
    with pytest.raises(InputError, match=message) as raised:
        _explain(tmp_path / "log", content)
    assert str(tmp_path / "log") in str(raised.value)


def test_the_command_reads_a_packed_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trainer_state.json.gz"
    path.write_bytes(gzip.compress(_state({"loss": 3.0, "step": 10}, _ENDED).encode()))
    assert main(["explain", str(path)]) == 0
    assert "2.13 s" in capsys.readouterr().out  # 64 s in 30 steps
    path.write_bytes(path.read_bytes()[:-12])
    assert main(["explain", str(path)]) == 2
    assert "end-of-stream" in capsys.readouterr().err


def test_what_lightning_writes_is_read(tmp_path: Path) -> None:
    """The file of the installed logger, with the keys of its own Throughput."""
    from lightning.fabric.utilities.throughput import Throughput
    from lightning.pytorch.loggers import CSVLogger

    logger, throughput = CSVLogger(tmp_path), Throughput(window_size=2)
    for step in range(4):
        throughput.update(time=2.0 * (step + 1), batches=step + 1, samples=8 * (step + 1))
        logger.log_metrics({f"train{throughput.separator}{key}": value for key, value in throughput.compute().items()},
                           step)
    logger.save()
    content = (Path(logger.log_dir) / "metrics.csv").read_text()
    assert _figures(_explain(tmp_path / "log", content)) == {"step_seconds": 2.0, "device_samples_per_second": 4.0}
