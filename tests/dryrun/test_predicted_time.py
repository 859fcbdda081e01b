"""Times in a run without data: predicted for the device, or said to be none of the device's."""
import re
import textwrap

import pytest
import torch
from torch import nn

from analyzer import MetaTensorMode, profile
from analyzer.tools.dryrun.script import dry_run, reads_clock

HEAD = """
import sys
import torch
from torch import nn
model = nn.Sequential(nn.Linear(2048, 2048), nn.ReLU()).cuda()
x = torch.rand(512, 2048, device="cuda")
"""


@pytest.fixture
def script(tmp_path, capsys):
    """What a script prints, and its profile."""
    def run(body: str, *arguments: str, device: str = "h200"):
        path = tmp_path / "script.py"
        path.write_text(HEAD + body)
        found = dry_run(path, arguments, device=device)
        assert found.error is None, found.format_error()
        return capsys.readouterr().out, found.profile
    return run


EVENTS = """
def pair(run, make=lambda: torch.cuda.Event(enable_timing=True)):
    start, end = make(), make()
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)
with torch.no_grad():
    print("once", pair(lambda: model(x)))
    print("twice", pair(lambda: (model(x), model(x))))
    print("nothing", pair(lambda: None))
    print("host", pair(lambda: torch.ones(64) + 1))
    print("generic", pair(lambda: model(x), lambda: torch.Event("cuda", enable_timing=True)))
"""


@pytest.mark.parametrize("device", ["h200", "t4"])
def test_events_tell_predicted_times(script, device):
    out, found = script(EVENTS, device=device)
    told = {name: float(value) for name, value in (line.split() for line in out.splitlines())}
    model = nn.Sequential(nn.Linear(2048, 2048), nn.ReLU())
    kernels = profile(model, torch.empty(512, 2048), mode="infer", device=device).kernel_seconds
    assert told["once"] == pytest.approx(1e3 * kernels) == told["generic"]
    assert told["twice"] == pytest.approx(2 * told["once"])
    assert told["nothing"] == told["host"] == 5e-4  # the resolution of events
    assert any(f"elapsed_time answers times predicted for {device}" in line for line in found.assumptions)
    assert not any("Python" in line for line in found.assumptions)


def test_durations_on_modules_are_predicted(script):
    out, _ = script("""
from analyzer.dropins.deepspeed import FlopsProfiler
prof = FlopsProfiler(model)
prof.start_profile()
with torch.no_grad():
    model(x)
print(model.__duration__, model[0].__duration__ + model[1].__duration__)
prof.end_profile()
""")
    whole, parts = map(float, out.split())
    kernels = profile(nn.Sequential(nn.Linear(2048, 2048), nn.ReLU()), torch.empty(512, 2048), mode="infer",
                      device="h200").kernel_seconds
    assert whole == pytest.approx(parts) == pytest.approx(kernels)


def test_events_that_were_not_recorded_answer_a_placeholder(script):
    out, found = script("start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))\n"
                        "print(start.elapsed_time(end))\n")
    assert out.split() == ["1.0"] and any("answers 1.0 ms: nothing runs" in line for line in found.assumptions)


def test_an_event_outside_of_a_dry_run_says_that_nothing_runs():
    with MetaTensorMode() as mode:
        start, end = torch.cuda.Event(enable_timing=True), torch.Event("cuda", enable_timing=True)
        start.record()
        end.record()
        assert start.elapsed_time(end) == 1.0
        assert any("nothing runs" in line for line in mode.state.assumptions)


@pytest.mark.parametrize(("body", "said"), [
    ("import time\nstart = time.perf_counter()\nmodel(x)\nprint(time.perf_counter() - start)", "reads Python's clock"),
    ("from torch.utils import benchmark\nprint(benchmark.Timer('model(x)', globals=globals()).timeit(2))",
     "torch.utils.benchmark.utils.timer.Timer told the time that Python takes"),
    ("with torch.profiler.profile() as p:\n    model(x)", "torch.profiler.profiler.profile told the time that Python"),
])
def test_clocks_of_the_host_are_named_as_such(script, body, said):
    _, found = script(body)
    assert any(said in line for line in found.assumptions), found.assumptions


@pytest.mark.parametrize(("text", "reads"), [
    ("t = time.time()", True), ("from time import sleep, time", True), ("time.perf_counter_ns()", True),
    ("import timeit", True), ("start = monotonic()", False), ("import time\ntime.sleep(1)", False), ("", False),
])
def test_which_scripts_read_a_clock(tmp_path, text, reads):
    path = tmp_path / "s.py"
    path.write_text(text)
    assert reads_clock(path) is reads


DROP_INS = {
    "deepspeed": "from analyzer.dropins.deepspeed import get_model_profile as run\nrun(model, args=(x,))",
    "flops-profiler": "from analyzer.dropins.flops_profiler import get_model_profile as run\nrun(model, args=(x,))",
    "tids": """
from analyzer.tools.runtime import TIDSProfiler
prof = TIDSProfiler(model)
prof.start_profile()
model(x)
print(prof.generate_profile())
prof.end_profile()
""",
    "torchinfo": """
from analyzer.tools.runtime import measure
print(measure(model, (x,), mode="infer").report("torchinfo", col_names=("output_size", "fwd_seconds")))
""",
    "measure": "from analyzer.tools.runtime import measure\nprint(measure(model, (x,), mode='infer').summary())",
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", DROP_INS)
def test_what_the_drop_ins_print_is_called_predicted_or_names_no_time(script, name):
    out, _ = script(DROP_INS[name])
    assert "predicted for h200" in out and not re.search(r"measured on|host clock|not calibrated", out), out
    out, _ = script("model, x = model.cpu(), x.cpu()\n" + DROP_INS[name])
    assert not re.search(r"predicted|measured on|host clock|\d ?[mu]s\b|\d [TGMK]?FLOPS\b", out), out


def test_torchs_profiler_writes_no_warnings(tmp_path, capfd):
    """It watches the host alone: of a device that is not there each operator would be a warning of many lines."""
    (path := tmp_path / "train.py").write_text(textwrap.dedent("""
        import torch
        from torch.profiler import ProfilerActivity, profile
        model = torch.nn.Linear(64, 64).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], profile_memory=True) as seen:
            for _ in range(2):
                model(torch.rand(8, 64, device="cuda")).sum().backward()
                optimizer.step()
                seen.step()
        assert "aten::rand" in seen.key_averages().table()
        with profile(activities=[ProfilerActivity.CUDA]):
            model(torch.rand(8, 64, device="cuda"))
    """))
    run = dry_run(path, steps=9)
    assert run.error is None and run.steps == 2
    out, err = capfd.readouterr()
    assert "Failed to record" not in out + err and len((out + err).splitlines()) < 20
    assert any("torch.profiler.profiler.profile told the time that Python takes" in a for a in run.profile.assumptions)
