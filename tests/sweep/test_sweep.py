"""Sweeps: the grid, the rows, what survives, and the executors that run them."""
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from analyzer import profile
from analyzer.api import model_run
from analyzer.cli import main
from analyzer.errors import InputError, TargetError, UnknownDeviceError
from analyzer.hardware import DeviceSpec
from analyzer.recipe import list_blocks
from analyzer.recipe.recipe import checkpoint_blocks
from analyzer.tools.sweep import Configuration, SweepInterrupted, expand_grid, sweep
from analyzer.tools.sweep import run as job_room
from analyzer.tools.sweep import run as workers_room
from analyzer.tools.sweep.configuration import resolve_inputs
from analyzer.tools.sweep.result import COLUMNS
from analyzer.tools.sweep.run import list_jobs
from analyzer.tools.sweep.worker import interrupts_wait
from analyzer.zoo.input_spec import InputSpec, LabelRule, Target

INPUTS = ["{batch}x16"]
BUILT: list[int] = []


def build_tiny():
    BUILT.append(os.getpid())
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


class Fragile(nn.Module):
    """Fails for a batch of 3, and kills its process for one of 13."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x):
        if len(x) == 3:
            raise ValueError("three is too many")
        if len(x) == 13:
            os._exit(1)
        return self.layer(x)


def here(name):
    """A TARGET that a fresh process finds too, where this file lies."""
    return f"test_sweep:{name}"


@pytest.fixture(autouse=True)
def interrupts_are_heard():
    """Also where the tests run in the background of a shell, which has them ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def importable(monkeypatch):
    folder, root = Path(__file__).parent, Path(__file__).parents[2]
    monkeypatch.syspath_prepend(str(folder))  # spawned processes get sys.path
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(root)]))  # and Dask's workers this
    yield
    sys.modules.pop("test_sweep", None)


@pytest.fixture(autouse=True)
def nothing_built():
    job_room.find_model.cache_clear()
    BUILT.clear()


@given(st.lists(st.integers(1, 64), min_size=1, max_size=4),
       st.lists(st.sampled_from(["sgd", "adamw", None]), min_size=1, max_size=3),
       st.lists(st.sampled_from(["h200", "H200", "t4"]), min_size=1, max_size=3))
def test_a_grid_is_the_product_of_its_axes_without_repeats(batches, optimizers, devices):
    found = expand_grid({"batch": batches, "optimizer": optimizers, "device": devices})
    names = {"h200": "h200", "H200": "h200", "t4": "t4"}
    want = [(b, o, d) for b in dict.fromkeys(batches) for o in dict.fromkeys(optimizers)
            for d in dict.fromkeys(names[d] for d in devices)]
    assert sorted(map(str, want)) == sorted(str((c.batch, c.optimizer, c.device_spec.name)) for c in found)
    assert len(set(found)) == len(found)


def test_inference_runs_once_for_what_only_training_uses():
    found = expand_grid({"mode": ["infer", "train"], "optimizer": ["sgd", "adamw"], "checkpointing": [False, True]})
    assert [c.mode for c in found] == ["infer"] + 4 * ["train"]


@pytest.mark.parametrize(("grid", "kind", "text"), [
    ({"batches": [1]}, InputError, "did you mean 'batch'"),
    ({"batch": []}, InputError, "holds no values"),
    ({"batch": 0}, InputError, "batch=0"),
    ({"sequence": [1.5]}, InputError, "sequence=1.5"),
    ({"mode": "training"}, InputError, "mode='training'"),
    ({"dtype": "int64"}, InputError, "dtype='int64'"),
    ({"autocast": "float32"}, InputError, "bfloat16 or float16"),
    ({"optimizer": "adamx"}, InputError, "adamx"),
    ({"optimizer": torch.optim.SGD}, InputError, "name of an optimizer"),
    ({"checkpointing": "yes"}, InputError, "True or False"),
    ({"device": "h2000"}, UnknownDeviceError, "h200"),
    ({"device": [DeviceSpec("mine", memory_bytes=1), DeviceSpec("mine", memory_bytes=2)]}, InputError, "'mine'"),
])
def test_a_grid_that_cannot_be_is_refused(grid, kind, text):
    with pytest.raises(kind, match=text.replace("(", r"\(")):
        expand_grid(grid)


TEXT = Target("text", nn.Identity,
              (InputSpec("ids", torch.int64,
                         (8, 128)), InputSpec("mask", torch.bool,
                                              (8, 128)), InputSpec("image", torch.float32, (8, 3, 32, 32))),
              (LabelRule("labels", like="ids"), ))


@pytest.mark.parametrize(("target", "texts", "configuration", "want"), [
    (TEXT, (), Configuration(), "ids=int64:8x128 mask=bool:8x128 image=float32:8x3x32x32 labels=int64:8x128"),
    (TEXT, (), Configuration(batch=2, sequence=64, mode="infer"),
     "ids=int64:2x64 mask=bool:2x64 image=float32:2x3x32x32"),
    (TEXT, (), Configuration(batch=2, dtype="bf16"),
     "ids=int64:2x128 mask=bool:2x128 image=bfloat16:2x3x32x32 labels=int64:2x128"),
    (TEXT, ["ids=int64:4x16"], Configuration(sequence=32),
     "ids=int64:4x32 mask=bool:4x32 image=float32:4x3x32x32 labels=int64:4x32"),
    (Target("bare", nn.Identity), ["{sequence}x{batch}x5"], Configuration(batch=2, sequence=9), "float32:9x2x5"),
    (Target("bare", nn.Identity), ["x={batch}x5", "scale=scalar"], Configuration(batch=2),
     "x=float32:2x5 scale=float32:scalar"),
])
def test_sizes_go_where_they_belong(target, texts, configuration, want):
    assert " ".join(map(str, resolve_inputs(target, texts, configuration))) == want


@pytest.mark.parametrize(("texts", "configuration", "text"), [
    ((), Configuration(batch=2), "its inputs are not known"),
    (["8x3x32x32"], Configuration(sequence=64), "none of its inputs float32:8x3x32x32 has a sequence dimension"),
    (["{batch}x5"], Configuration(), "the grid, which has none for batch"),
    (["{bath}x5"], Configuration(batch=1), "is no shape"),
])
def test_a_size_without_a_place_is_refused(texts, configuration, text):
    with pytest.raises(InputError, match=text):
        resolve_inputs(Target("bare", nn.Identity), texts, configuration)


def test_a_row_holds_what_profile_gives():
    found = sweep(build_tiny, {"batch": [2, 4], "optimizer": "adamw", "autocast": [None, "bf16"]}, inputs=INPUTS,
                  workers=0)
    assert [(r["batch"], r["autocast"]) for r in found.rows] == [(2, None), (2, "bfloat16"), (4, None), (4, "bfloat16")]
    want = profile(build_tiny(), torch.empty(4, 16), optimizer="adamw", autocast=torch.bfloat16)
    row = found.rows[3]
    for name in ("params", "param_bytes", "optimizer_bytes", "peak_allocated_bytes", "peak_reserved_bytes", "fwd_flops",
                 "bwd_flops", "fwd_macs", "fwd_seconds", "step_seconds"):
        assert row[name] == getattr(want, name) is not None, name
    assert row["backward_peak_allocated_bytes"] == want.phases["backward"].peak_allocated_bytes
    assert (row["fits"], row["free_bytes"]) == (True, want.fits().free_bytes)
    assert (row["error"], row["target"]) == (None, f"{__name__}:build_tiny")
    assert list(row) == list(COLUMNS)


def test_a_model_is_built_once_for_all_configurations_that_can_share_it():
    found = sweep(build_tiny, {"batch": [1, 2, 3], "device": ["h200", "t4"], "mode": ["train", "infer"]}, inputs=INPUTS,
                  workers=0)
    assert (len(found.rows), found.failed, len(BUILT)) == (12, (), 1)
    sweep(build_tiny, {"batch": [1, 2], "dtype": ["bf16", "float32", "fp16"]}, inputs=INPUTS, workers=0)
    assert len(BUILT) == 4  # one a dtype


def test_the_dtype_is_that_of_parameters_and_inputs():
    rows = sweep(build_tiny, {"dtype": [None, "bf16", "float64"]}, inputs=["2x16"], workers=0).rows
    assert [r["param_bytes"] for r in rows] == [4 * 676, 2 * 676, 8 * 676]  # 16*32 + 32 + 32*4 + 4 elements
    assert [r["inputs"] for r in rows] == ["float32:2x16", "bfloat16:2x16", "float64:2x16"]


def test_checkpointing_saves_memory_and_repeats_the_blocks():
    rows = sweep("gpt2", {"batch": 8, "sequence": 512, "checkpointing": [False, True]}, workers=0).rows
    plain, recomputing = rows
    assert plain["recompute_flops"] == 0
    # Each of 12 blocks has 12 h^2 weights in its matrix products, a multiply-add of each a token; attention comes on
    # top.
    assert recomputing["recompute_flops"] > 12 * 2 * (8 * 512) * 12 * 768**2
    assert recomputing["backward_peak_allocated_bytes"] < plain["backward_peak_allocated_bytes"]


@pytest.mark.parametrize(("model", "count"), [
    (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 0),
    (nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 3, enable_nested_tensor=False), 3),
    (nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))), 0),
])
def test_blocks_are_the_outermost_modules_that_repeat(model, count):
    assert len(list(list_blocks(model))) == count


def test_a_model_without_blocks_is_no_model_to_checkpoint():
    with pytest.raises(InputError, match="Sequential has no repeated blocks"):
        checkpoint_blocks(build_tiny())


def test_a_checkpointed_model_gives_the_same_gradients():
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, dropout=0.0), 2, enable_nested_tensor=False)
    x = torch.randn(3, 1, 8)
    model(x).sum().backward()
    want = [p.grad for p in model.parameters()]
    model.zero_grad()
    checkpoint_blocks(model)
    model(x).sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(want, model.parameters()))


def test_failures_are_rows():
    found = sweep(Fragile, {"batch": [2, 3, 4]}, inputs=INPUTS, workers=0)
    assert [r["error"] for r in found.rows] == [None, "ValueError: three is too many", None]
    assert found.failed[0]["peak_allocated_bytes"] is None
    assert found.failed[0]["profile_seconds"] > 0


def figures(result):
    return [{k: v for k, v in row.items() if k != "profile_seconds"} for row in result.rows]


def test_processes_give_the_same_rows_and_outlive_one_that_dies(importable):
    grid = {"batch": [1, 13, 3]}
    seen = []
    found = sweep(here("Fragile"), grid, inputs=INPUTS, workers=1, progress=lambda done, total, row: seen.append(
        (done, total)))
    survivors = sweep(here("Fragile"), {"batch": [1, 3]}, inputs=INPUTS, workers=0)
    assert [r for r in figures(found) if r["batch"] != 13] == figures(survivors)
    assert [r["batch"] for r in found.rows] == [1, 13, 3]
    assert "the worker process died" in found.rows[1]["error"]
    assert seen == [(i, 3) for i in range(1, 4)]


@pytest.mark.parametrize("deadly", [(), (4,), (1, 2, 3, 7), tuple(range(8))])
def test_jobs_that_ran_when_a_process_died_run_again_one_by_one(monkeypatch, deadly):
    jobs = list_jobs(build_tiny, {"batch": [b + 1 for b in range(8)]}, INPUTS)
    ran: Counter = Counter()

    def run_until_death(queue, workers):
        while queue:
            batch = [queue.popleft() for _ in range(min(workers, len(queue)))]
            ran.update(batch)
            if any(jobs.index(job) in deadly for job in batch):
                return batch
            yield from ((job, {"batch": job.configuration.batch}) for job in batch)
        return []

    monkeypatch.setattr(workers_room, "_run_until_death", run_until_death)
    rows = dict(workers_room.run_in_processes(jobs, 2))
    assert [i for i, job in enumerate(jobs) if "error" in rows[job]] == list(deadly)
    assert max(ran.values()) <= 2


def test_threads_take_turns():
    with ThreadPoolExecutor(3) as executor:
        found = sweep(build_tiny, {"batch": list(range(1, 13))}, inputs=INPUTS, executor=executor)
    assert figures(found) == figures(sweep(build_tiny, {"batch": list(range(1, 13))}, inputs=INPUTS, workers=0))
    assert found.failed == ()


def test_a_dask_cluster_runs_it(importable, capsys):
    dask, distributed = pytest.importorskip("dask"), pytest.importorskip("distributed")
    grid = {"batch": [1, 3, 5], "optimizer": ["sgd", "adamw"]}
    with dask.config.set({"distributed.worker.profile.enabled": False}), \
            distributed.LocalCluster(n_workers=1, threads_per_worker=2, processes=True,
                                     dashboard_address=None) as cluster, \
            distributed.Client(cluster) as client:
        with client.get_executor() as executor:
            found = sweep(here("Fragile"), grid, inputs=INPUTS, executor=executor)
        code, text, _ = run(capsys, here("Fragile"), "--input", "{batch}x16", "--batch", "1,3", "--dask",
                            cluster.scheduler_address)
    assert figures(found) == figures(sweep(here("Fragile"), grid, inputs=INPUTS, workers=0))
    assert len(found.failed) == 2
    assert (code, len(text.splitlines()), text.count("three is too many")) == (0, 4, 1)


class Losing(ThreadPoolExecutor):
    """An executor that loses its first job."""

    def submit(self, function, job):
        if job.configuration.batch == 1:
            lost: Future = Future()
            lost.set_exception(RuntimeError("worker lost"))
            return lost
        return super().submit(function, job)


def test_what_the_executor_raises_for_a_job_is_its_error():
    with Losing(1) as executor:
        found = sweep(build_tiny, {"batch": [1, 2]}, inputs=INPUTS, executor=executor)
    assert [r["error"] for r in found.rows] == ["RuntimeError: worker lost", None]


def test_what_cannot_travel_is_said_before_the_work():
    with pytest.raises(InputError, match="cannot be sent to another process.*workers=0"):
        sweep(lambda: build_tiny(), {"batch": [1]}, inputs=INPUTS, workers=1)


@pytest.mark.parametrize(("target", "options", "kind", "text"), [
    ("resnet19", {}, TargetError, "resnet18"),
    (nn.Linear, {}, InputError, "its inputs are not known"),
    (3, {}, InputError, "sweep.target=3."),
    ("resnet18", {"workers": -1}, InputError, "workers=-1"),
])
def test_bad_calls_are_refused_before_any_work(target, options, kind, text):
    with pytest.raises(kind, match=text):
        sweep(target, {"batch": [1]}, **options)


def test_an_interrupt_keeps_what_is_done(importable):
    def interrupt(done, total, row):
        if done == 2:
            signal.raise_signal(signal.SIGINT)

    assert threading.current_thread() is threading.main_thread()
    with pytest.raises(SweepInterrupted, match="2 of 4") as caught:
        sweep(here("Fragile"), {"batch": [1, 2, 4, 5]}, inputs=INPUTS, workers=0, progress=interrupt)
    assert [r["batch"] for r in caught.value.result.rows] == [1, 2]


@pytest.fixture(scope="module")
def result():
    return sweep(Fragile, {"batch": [2, 3]}, inputs=INPUTS, workers=0)


def test_a_dataframe_keeps_integers_exact_beside_unknowns(result):
    frame = result.to_dataframe()
    assert list(frame.columns) == list(COLUMNS)
    assert frame["params"].tolist()[0] == 68
    assert str(frame["params"].dtype) == "Int64"
    assert frame["params"].isna().tolist() == [False, True]


def test_csv_and_jsonl_hold_every_row(result, tmp_path):
    result.write(tmp_path / "rows.csv")
    result.write(tmp_path / "rows.jsonl")
    assert [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()] == list(result.rows)
    header, first, second = (tmp_path / "rows.csv").read_text().splitlines()
    assert header.split(",") == list(COLUMNS)
    assert "ValueError: three is too many" in second


def run(capsys, *argv):
    code = main(["sweep", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command_prints_what_varies_and_writes_the_table(capsys, tmp_path, importable):
    out = tmp_path / "rows.csv"
    code, text, err = run(capsys, here("Fragile"), "--input", "{batch}x16", "--batch", "2,3", "--optimizer",
                          "none,adamw", "--device", "t4", "--autocast", "bf16", "--out", str(out), "--workers", "0")
    assert (code, err) == (0, "")
    lines = text.splitlines()
    assert sorted(f"{lines[0]} {lines[1]}".split()) == sorted([
        "batch", "optimizer", "Peak", "reserved", "Free", "Fits", "Fwd", "FLOPs", "Bwd", "FLOPs", "Step", "MFU",
        "Error"])
    assert lines[3].split()[:2] == ["2", "none"]
    assert lines[5].endswith("ValueError: three is too many")
    assert len(out.read_text().splitlines()) == 5
    assert list(tmp_path.iterdir()) == [out]


def test_the_command_keeps_the_rows_of_a_sweep_that_is_interrupted(capsys, tmp_path, importable, monkeypatch):
    out = tmp_path / "rows.csv"
    monkeypatch.setattr("analyzer.tools.sweep.run.ProgressBar.__call__",
                        lambda bar, share, what: signal.raise_signal(signal.SIGINT))
    code, text, err = run(capsys, here("Fragile"), "--input", "{batch}x16", "--batch", "1,2,4", "--out", str(out),
                          "--workers", "0")
    assert code == 130 and "1 of 3 configurations were done" in err
    assert len(text.splitlines()) == 3 and len(out.read_text().splitlines()) == 2


def test_an_interrupt_waits_until_a_worker_has_started():
    """A process that is started meanwhile inherits that it waits, and this thread hears of it behind the block."""
    with pytest.raises(KeyboardInterrupt), interrupts_wait():
        signal.raise_signal(signal.SIGINT)
        told = subprocess.run([sys.executable, "-c", "import signal; print(signal.pthread_sigmask(0, ()))"],
                              capture_output=True, text=True, check=True).stdout
    assert "SIGINT" in told and signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.parametrize(("argv", "code", "text"), [
    (["resnet18"], 2, "nothing varies"),
    (["resnet18", "--batch", "1,x"], 2, "--batch 1,x: 'x' is not a whole number"),
    (["resnet18", "--checkpointing", "maybe"], 2, "neither 'no' nor 'yes'"),
    (["resnet18", "--batch", "1", "--out", "rows.xlsx"], 2, "must end in .csv or .jsonl"),
    (["resnet18", "--batch", "1", "--out", "/nowhere/rows.csv"], 2, "/nowhere does not exist"),
    (["resnet18", "--sequence", "64"], 2, "has a sequence dimension"),
    (["resnet18", "--batch", "1", "--device", "h2000"], 2, "h200"),
    (["resnet18", "--batch", "1", "--dask", "nonsense"], 2, "--dask nonsense"),
])
def test_a_command_line_that_cannot_be_used_exits_with_2(capsys, argv, code, text):
    got, out, err = run(capsys, *argv)
    assert (got, out) == (code, "")
    assert text in err
    assert "Traceback" not in err


def test_a_folder_named_distributed_is_not_dask(capsys, tmp_path, monkeypatch):
    (tmp_path / "distributed").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "distributed", raising=False)
    code, out, err = run(capsys, "resnet18", "--batch", "1", "--dask", "nonsense")
    assert (code, out) == (2, "")
    assert "--dask nonsense" in err and "Traceback" not in err


def test_it_exits_with_1_where_everything_failed(capsys, importable):
    code, out, _ = run(capsys, here("Fragile"), "--input", "3x16", "--device", "h200,t4", "--workers", "0")
    assert code == 1
    assert out.count("three is too many") == 2


def test_devices_share_a_run_and_have_the_rows_that_they_have_alone(monkeypatch):
    devices = ["h100_sxm", "h800", "a100_80gb", "t4", "cpu"]
    runs, run = [], model_run.run_repeating
    monkeypatch.setattr(model_run, "run_repeating", lambda session, *rest: (runs.append(session.spec.name),
                                                                             run(session, *rest))[1])
    found = sweep(build_tiny, {"batch": [2, 5], "device": devices}, inputs=INPUTS, workers=0)
    assert len(runs) < 2 * len(devices)
    alone = [sweep(build_tiny, {"batch": batch, "device": device}, inputs=INPUTS, workers=0)
             for batch in (2, 5) for device in devices]
    assert figures(found) == [row for one in alone for row in figures(one)]


class OnlyLarge(nn.Linear):
    def forward(self, x):
        if torch.cuda.get_device_properties(0).total_memory < 32 << 30:
            raise ValueError("too small")
        return super().forward(x)


def test_what_fails_on_one_device_fails_there_alone():
    found = sweep(lambda: OnlyLarge(16, 16), {"device": ["h100_sxm", "t4", "h200"]}, inputs=["4x16"], workers=0)
    assert [row["error"] for row in found.rows] == [None, "ValueError: too small", None]
