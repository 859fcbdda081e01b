"""`analyzer dryrun`: whole scripts, as people write them, on tensors without data."""
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from analyzer import ProfileOptions, profile
from analyzer.cli import main
from analyzer.errors import InputError, UnknownDeviceError
from analyzer.hardware import find_device
from analyzer.tools.dryrun.script import dry_run

HEAD = """
import torch, sys
from torch import nn
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 8)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
"""
PARAMETERS = 256 * 512 + 512 + 512 * 8 + 8


@pytest.fixture
def script(tmp_path):
    def write(text: str, head: str = HEAD, name: str = "train.py") -> Path:
        path = tmp_path / name
        path.write_text(head + textwrap.dedent(text))
        return path
    return write


PLAIN = """
for step in range(1000):
    x, y = torch.randn(64, 256, device="cuda"), torch.randint(8, (64,), device="cuda")
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, f"{loss.item():.2f}")
"""


def test_a_plain_loop_is_ended_after_the_steps_asked_for(script, capsys):
    run = dry_run(script(PLAIN), steps=3)
    assert (run.steps, run.is_stopped, run.error) == (3, True, None)
    assert capsys.readouterr().out == "0 1.00\n1 1.00\n"  # the third step ends the script before its line
    p = run.profile
    assert (p.name, p.mode, p.device, p.optimizer) == ("train.py", "train", "h200", "AdamW")
    assert p.params == PARAMETERS
    assert p.fwd_macs == 64 * (256 * 512 + 512 * 8)
    assert p.bwd_macs == 64 * 256 * 512 + 2 * 64 * 512 * 8  # the input asks for no gradient
    assert p.optimizer_bytes == 2 * 4 * PARAMETERS  # two moments each; the counts of steps are on the host
    assert any("unknown scalar (torch.float32) was taken as 1" in a and "train.py:13" in a for a in p.assumptions)
    assert list(p.first_step) == ["forward", "backward", "optimizer", "zero_grad"]
    assert {child.path: child.params for child in p.modules.children} == {"Sequential": PARAMETERS}


def test_the_steady_step_is_that_of_profile(script):
    """The same model, inputs and optimizer, once as a script and once as a model: the same bytes at the end of each
    phase.
    """
    text = """
    x, y = torch.randn(64, 256, device="cuda"), torch.randint(8, (64,), device="cuda")
    while True:
        out = model(x)
        loss = nn.functional.cross_entropy(out, y)
        del out
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()
    """
    dry = dry_run(script(text), steps=3).profile
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 8))

    class WithLabels(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x, y):
            return nn.functional.cross_entropy(self.model(x), y)

    direct = profile(WithLabels(), args=(torch.empty(64, 256), torch.zeros(64, dtype=torch.int64)), optimizer="adamw",
                     loss_fn=lambda loss: loss)
    for phase in ("forward", "backward", "optimizer"):
        mine, theirs = dry.phases[phase], direct.phases[phase]
        assert (mine.allocated_bytes, mine.peak_allocated_bytes) == (theirs.allocated_bytes,
                                                                     theirs.peak_allocated_bytes), phase
    assert dry.peak_by_category["parameter"] == direct.peak_by_category["parameter"]
    assert dry.peak_by_category["optimizer state"] == direct.peak_by_category["optimizer state"]
    assert sum(dry.peak_by_category.values()) == dry.peak_allocated_bytes


def test_mixed_precision_with_a_scaler_steps(script):
    run = dry_run(script("""
    scaler = torch.amp.GradScaler("cuda")
    for step in range(50):
        x, y = torch.randn(4096, 256, device="cuda"), torch.randint(8, (4096,), device="cuda")
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    """), steps=2)
    assert run.error is None and run.steps == 2, run.format_error()
    assert run.profile.fwd_macs == 4096 * (256 * 512 + 512 * 8)
    # unscaling and clipping stand between the passes: they are the optimizer's, and the forward pass ends with its
    # activations
    assert run.profile.phases["forward"].allocated_bytes > run.profile.phases["optimizer"].allocated_bytes


def test_an_error_of_the_scripts_own_is_told_with_its_own_traceback(script, capsys):
    path = script("""
    def forward(x):
        return model(x)
    forward(torch.randn(4, 255, device="cuda"))
    """)
    run = dry_run(path)
    text = run.format_error()
    assert isinstance(run.error, RuntimeError) and run.steps == 0
    assert text.startswith("Traceback (most recent call last):\n" + f'  File "{path}", line 9, in <module>')
    assert "runpy" not in text and "line 8, in forward" in text
    assert main(["dryrun", str(path)]) == 1
    shown = capsys.readouterr()
    assert "no optimizer step was taken, the script failed" in shown.out and f'File "{path}", line 9' in shown.err


def test_an_error_of_syntax_is_told_as_python_tells_it(script):
    path = script("def f(:")
    text = dry_run(path).format_error()
    assert text.startswith(f'  File "{path}", line ') and text.endswith("SyntaxError: invalid syntax\n")


def test_a_script_that_never_steps_is_profiled_whole(script, capsys):
    path = script("""
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(64, 256, device="cuda"))
    print("done")
    """)
    run = dry_run(path)
    assert (run.steps, run.is_stopped, run.error) == (0, False, None)
    assert run.profile.mode == "infer" and run.profile.optimizer is None
    assert run.profile.fwd_macs == 3 * 64 * (256 * 512 + 512 * 8)
    assert main(["dryrun", str(path)]) == 0
    out = capsys.readouterr().out
    assert "done\n" in out and "no optimizer step was taken, the script ended by itself" in out
    assert "are stand-ins" not in out  # it read no number
    assert main(["dryrun", str(script(PLAIN))]) == 0
    assert ", are stand-ins: there are no data\n" in capsys.readouterr().out


def test_what_a_script_does_where_it_is_ended_is_no_part_of_its_step(script):
    """As a trainer does that is interrupted: its model and states are taken to the host."""
    ended = script("try:" + textwrap.indent(PLAIN, "    ") + """
finally:
    model(torch.randn(64, 256, device="cuda"))
    states = [t.cpu() for state in optimizer.state.values() for t in state.values()]
    model.cpu()
""", name="interrupted.py")
    plain, run = dry_run(script(PLAIN), steps=2).profile, dry_run(ended, steps=2).profile
    assert run.kernel_seconds == plain.kernel_seconds and run.fwd_flops == plain.fwd_flops
    assert run.step_seconds == pytest.approx(plain.step_seconds, rel=0.05)  # frames of `try` are on the host
    assert run.peak_allocated_bytes == plain.peak_allocated_bytes and run.nodes[-1].op == plain.nodes[-1].op


def test_a_file_that_runs_no_model_is_told_what_else_to_call(tmp_path, capsys):
    (path := tmp_path / "net.py").write_text("import torch\n\n\nclass Classifier(torch.nn.Linear):\n    pass\n")
    assert main(["dryrun", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and f"for a class or function in it use analyzer profile {path}:Classifier --input SPEC" in err


LOADS = """
data = torch.utils.data.TensorDataset(torch.empty(ROWS, 256))
BEFORE
for x, in torch.utils.data.DataLoader(data, batch_size=4, drop_last=True):
    model(x.cuda()).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("rows", [0, 3])
def test_a_script_whose_loader_gives_no_batch_is_refused(script, capsys, rows):
    path = script(LOADS.replace("ROWS", str(rows)).replace("BEFORE", ""))
    with pytest.raises(InputError, match=rf"no step and no pass .* its TensorDataset of {rows} samples makes less than "
                                         "one, .* Give the loader data of the right shapes"):
        dry_run(path)
    assert main(["dryrun", str(path)]) == 2
    out, err = capsys.readouterr()
    assert "fits" not in out + err and "a DataLoader gave no batch" in err
    ran = dry_run(script(LOADS.replace("ROWS", str(rows)).replace("BEFORE", "model(torch.rand(8, 256).cuda())")))
    assert ran.steps == 0 and ran.profile.fwd_macs == 8 * (256 * 512 + 512 * 8)
    assert any("a DataLoader gave no batch" in text for text in ran.profile.assumptions)
    assert dry_run(script(LOADS.replace("ROWS", "4").replace("BEFORE", ""))).steps == 1


def test_a_script_that_ends_before_the_steps_asked_for(script):
    run = dry_run(script(PLAIN.replace("1000", "2")), steps=5)
    assert (run.steps, run.is_stopped, run.error) == (2, False, None)
    assert run.profile.fwd_macs == 64 * (256 * 512 + 512 * 8)  # the last whole step, not what came after it


def test_memory_that_runs_out_is_told(script, capsys):
    path = script("""
    for _ in range(3):
        model(torch.randn(1 << 27, 256, device="cuda")).sum().backward()  # 128 GiB of input
        optimizer.step()
    """)
    run = dry_run(path, stop_at_oom=True)
    short = run.profile.out_of_memory
    assert "CUDA out of memory" in run.format_error() and short is not None
    assert (short.phase, short.step, short.module_path) == ("forward", 0, "Sequential.0")
    assert short.requested_bytes == (1 << 27) * 512 * 4
    assert run.profile.holders[0].bytes == (1 << 27) * 256 * 4 and run.profile.holders[0].category == "input"
    assert main(["dryrun", str(path), "--stop-at-oom", "--no-advice"]) == 3
    assert "it ran out of memory" in capsys.readouterr().out


def test_arguments_working_directory_and_neighbours(script, tmp_path, monkeypatch, capsys):
    script("width = 3\n", head="", name="neighbour.py")
    path = script("""
    import argparse, neighbour, local
    print(sys.argv[1:], __name__, neighbour.width, local.depth)
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int)
    print(parser.parse_args().batch)
    """)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "local.py").write_text("depth = 4\n")
    monkeypatch.chdir(elsewhere)
    before = sys.argv, list(sys.path), sys.modules["__main__"]
    assert main(["dryrun", str(path), "--steps", "1", "--", "--batch", "7"]) == 0
    assert capsys.readouterr().out.startswith("['--batch', '7'] __main__ 3 4\n7\n")
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before


@pytest.mark.parametrize(("code", "result"), [("0", 0), ("", 0), ("3", 1), ("'no data'", 1)])
def test_exit_of_the_script(script, capsys, code, result):
    assert main(["dryrun", str(script(f"sys.exit({code})"))]) == result
    assert ("the script exited with" in capsys.readouterr().err) == bool(result)


def test_a_data_loader_with_workers_loads_in_the_scripts_own_process(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = dry_run(
        script("""
    from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler, random_split
    data = TensorDataset(torch.randn(100, 256), torch.randint(8, (100,)))
    train, test = random_split(data, [80, 20])
    assert sorted(train.indices + test.indices) == list(range(100))
    loader = DataLoader(train, 16, shuffle=True, num_workers=4, persistent_workers=True, prefetch_factor=2,
                        pin_memory=True)
    assert loader.num_workers == 0 and sorted(i for batch in loader.batch_sampler for i in batch) == list(range(80))
    assert len(list(DataLoader(test, 5, sampler=WeightedRandomSampler(torch.ones(20), 10)))) == 2
    order = torch.randperm(6)
    assert sorted(order.tolist()) == list(range(6))
    for epoch in range(2):
        for x, y in loader:
            nn.functional.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda()).backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.save(model.state_dict(), "model.pt")
    """), steps=7)
    assert run.error is None and run.steps == 7, run.format_error()
    assert not (tmp_path / "model.pt").exists()
    assert any("4 workers were not started" in a for a in run.profile.assumptions)
    assert "torch.save to 'model.pt' wrote nothing: there is no data" in run.profile.assumptions
    assert run.profile.inputs["input"].shape == (16, 256)


def test_what_is_compiled_runs_compiled_and_data_is_taken_as_finite(script):
    run = dry_run(script("""
    model.compile()
    model = torch.compile(model, mode="max-autotune")
    @torch.compile(dynamic=True)
    def loss_of(out):
        return out.square().mean()
    for _ in range(10):
        torch.compiler.cudagraph_mark_step_begin()
        loss = loss_of(model(torch.randn(4, 256, device="cuda")))
        if torch.isnan(loss) or not loss.isfinite().all():
            raise ValueError("diverged")
        loss.backward()
        optimizer.step()
    """), steps=2)
    assert run.error is None and run.steps == 2, run.format_error()
    kernels = [row.operator for row in run.profile.operators]
    assert any("fused" in name for name in kernels) and "aten.relu.default" not in kernels
    assert "unknown values were taken as finite" in run.profile.assumptions


def test_modules_that_transforms_of_torch_func_call_are_given_inputs(script):
    run = dry_run(script("""
    from torch.func import functional_call, grad, vmap
    of_each = vmap(grad(lambda weights, x: functional_call(model, weights, (x,)).sum()), in_dims=(None, 0))
    gradients = of_each(dict(model.named_parameters()), torch.randn(4, 256, device="cuda"))
    print([tuple(g.shape) for g in gradients.values()][0])
    """))
    assert run.error is None, run.format_error()
    assert [spec.shape for spec in run.profile.inputs.values()] == [(256,)]  # of one sample, as the module sees it


@pytest.mark.parametrize("arguments", [[], ["inner"]])
def test_graphs_that_break_in_what_a_module_calls_are_divided_from_the_first_call_on(arguments, script, capsys):
    """Each of two functions has two graphs; the module's own one ends where each is called. What it counts is once."""
    run = dry_run(script("""
    def half(module, x):
        x = module(x).relu()
        torch._dynamo.graph_break()
        return x.exp()
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.calls = nn.Linear(256, 8), nn.Linear(8, 8), []
        def forward(self, x):
            self.calls.append(x.shape)
            return half(self.second, half(self.first, x.sin()).cos()).tan()
    net = Net().cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    compiled = torch.compile(nn.Sequential(net) if "inner" in sys.argv else net)
    compiled(torch.randn(4, 256, device="cuda")).sum().backward()
    optimizer.step()
    print(len(net.calls))
    """), arguments, steps=2)
    assert run.error is None, run.format_error()
    assert [row.graphs for row in run.profile.compiled] == [7]
    assert capsys.readouterr().out.split() == ["1"]
    assert not any("from the next call on" in line for line in run.profile.assumptions)


def test_optimizers_that_step_in_turn_make_a_step_together(script):
    run = dry_run(script("""
    other = nn.Linear(8, 256).cuda()
    second = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(10):
        hidden = model(torch.randn(4, 256, device="cuda"))
        hidden.sum().backward()
        optimizer.step()
        other(hidden.detach()).sum().backward()
        second.step()
    """), steps=3)
    assert run.steps == 3 and run.profile.optimizer == "AdamW, SGD"
    assert run.profile.fwd_macs == 4 * (256 * 512 + 512 * 8) + 4 * 8 * 256
    assert {child.path for child in run.profile.modules.children} == {"Sequential", "Linear"}


def test_cuda_questions_are_answered_by_the_device_that_is_claimed(script, capsys):
    run = dry_run(script("""
    x = torch.empty(1 << 20, device="cuda")
    held = torch.cuda.memory_allocated()
    print(torch.cuda.is_available(), torch.cuda.device_count(), torch.cuda.get_device_name())
    print(torch.cuda.mem_get_info()[1] == torch.cuda.get_device_properties(0).total_memory, held >= 4 << 20)
    model(torch.randn(1 << 16, 256, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(torch.cuda.max_memory_allocated() >= (1 << 16) * 512 * 4)
    torch.cuda.reset_peak_memory_stats()
    print(torch.cuda.max_memory_allocated() < (1 << 16) * 512 * 4)
    """), steps=2)
    assert run.error is None, run.format_error()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("True 1 ") and lines[1:] == ["True True", "True", "True"]
    # the script's reset is not the profile's
    assert run.profile.peak_allocated_bytes >= (1 << 16) * 512 * 4


def test_torch_is_as_it_was(script):
    from torch.utils.data import DataLoader, RandomSampler

    watched = [(torch, "save"), (torch, "load"), (torch, "compile"), (torch, "randperm"), (torch, "isnan"),
               (torch.Tensor, "isnan"), (torch.nn.Module, "compile"), (DataLoader, "__init__"),
               (RandomSampler, "__iter__"), (torch.nn.Module, "__call__"), (torch.cuda, "is_available")]
    before = [getattr(*one) for one in watched]
    dry_run(script(PLAIN))
    dry_run(script("raise KeyError"))
    assert [getattr(*one) for one in watched] == before
    assert "isnan" not in vars(torch.Tensor) and not torch.cuda.is_available()
    assert torch.isnan(torch.tensor([float("nan")])).item() is True


def test_the_example_runs(capsys):
    assert main([
        "dryrun", "examples/train_loop.py", "--device", "t4", "--steps", "2", "--show", "summary,modules", "--",
        "--batch", "32"
    ]) == 0
    out = capsys.readouterr().out
    assert "2 optimizer steps, ended here" in out and "├─Sequential" in out


def test_wrong_calls_are_named(script, capsys, tmp_path):
    with pytest.raises(InputError, match="nowhere.py: no such file"):
        dry_run("nowhere.py")
    with pytest.raises(InputError, match="steps=0"):
        dry_run(script(PLAIN), steps=0)
    with pytest.raises(UnknownDeviceError, match="h2000"):
        dry_run(script(PLAIN), device="h2000")
    assert main(["dryrun", str(script(PLAIN)), "--show", "graph"]) == 2
    assert main(["dryrun", str(script(PLAIN)), "--json", str(tmp_path / "no" / "p.json")]) == 2
    assert "'graph' is no report" in capsys.readouterr().err


def test_options_of_the_callers_own(script):
    run = dry_run(script(PLAIN), options=ProfileOptions(unknown_value="error"))
    assert "aten.item" in run.format_error() and run.steps == 1


@pytest.mark.parametrize("catches", ["torch.cuda.OutOfMemoryError", "torch.OutOfMemoryError", "RuntimeError"])
def test_a_script_can_catch_that_memory_ran_out(script, capsys, catches):
    """An H200 holds rows of 256 + 512 + 512 + 8 floats, and their gradients, for less than 2**25 of them."""
    run = dry_run(script(f"""
    rows = 2**27
    steps = 0
    while steps < 2:
        try:
            optimizer.zero_grad()
            model(torch.empty(rows, 256, device="cuda")).sum().backward()
            optimizer.step()
            steps += 1
        except {catches} as error:
            assert "out of memory" in str(error)
            del error
            torch.cuda.empty_cache()
            rows //= 2
    print(rows)
    """), steps=5)
    assert run.error is None
    rows = int(capsys.readouterr().out)
    assert 2**23 <= rows < 2**26
    assert run.profile.out_of_memory is None and run.profile.peak_reserved_bytes <= find_device("h200").memory_bytes


@pytest.mark.parametrize("text", [
    "import bitsandbytes as bnb", "from peft import LoraConfig",
    "try:\n    import trl.trainer\nexcept ImportError as error:\n    raise RuntimeError('no trainer') from error"])
def test_a_package_that_is_missing_is_named_with_the_extra_that_has_it(script, monkeypatch, text):
    name = next(name for name in ("bitsandbytes", "peft", "trl") if name in text)
    monkeypatch.setitem(sys.modules, name, None)  # as where it is not installed
    error = dry_run(script(text)).format_error()
    assert error.count(f"{name} is not installed here; pip install -e '.[scripts]'") == 1
    other = dry_run(script("import no_such_package")).format_error()
    assert "No module named 'no_such_package'" in other and "pip install" not in other


VARYING = """
for step, rows in enumerate(ROWS):
    for part in range(PARTS):
        x = torch.randn(rows // (part + 1), 256, device="cuda")
        model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model(torch.randn(512, 256, device="cuda"))
"""


@pytest.mark.parametrize(("rows", "parts", "said"), [
    ((64, 256, 128), 1, "step 2, has input [256, 256] ([128, 256] in the step described)."),
    ((64, 256, 128), 2, "step 2, has input [256, 256] ([128, 256] in the step described)."),
    ((64, 128, 256), 1, "step 3, has input [256, 256]."), ((64, 64, 64), 3, None)])
def test_the_largest_batch_is_told_where_batches_differ(script, rows, parts, said):
    """Evaluation on larger batches, and micro-batches that differ in each step alike, are no such case."""
    p = dry_run(script(VARYING.replace("ROWS", str((*rows, 512))).replace("PARTS", str(parts))), steps=3).profile
    told = [a for a in p.assumptions if a.startswith("batches differ in size: the largest of the 3 steps seen")]
    assert bool(told) == (said is not None) and all(said in a for a in told)
    assert p.fwd_macs == sum(rows[-1] // (part + 1) for part in range(parts)) * (256 * 512 + 512 * 8)


def test_a_run_in_which_no_optimizer_steps_says_so_while_it_runs(script, capsys):
    path = script("""
    for i in range(520):
        with torch.no_grad():
            model(torch.randn(1, 256, device="cuda"))
        if i == 60:
            print("at 60", file=sys.stderr)
    """)
    dry_run(path)
    told = capsys.readouterr().err.splitlines()
    assert told == [
        "analyzer: 50 forward passes so far, and no optimizer has stepped: this ends after 3 optimizer steps, or when "
        "the script does", "at 60",
        "analyzer: 500 forward passes so far, and no optimizer has stepped: this ends after 3 optimizer steps, or when "
        "the script does"]
    dry_run(script(PLAIN), steps=60)
    assert capsys.readouterr().err == ""


def test_weights_of_all_modules_and_loose_ones_are_parameters(script):
    """Those of modules that are called later, of modules of which only a part is called, and of no module at all; an
    input that asks for a gradient is none, nor is what no optimizer steps.
    """
    p = dry_run(script("""
    whole, scale = nn.ModuleDict({"a": nn.Linear(8, 32), "b": nn.Linear(32, 32)}).cuda(), torch.ones(
        64, device="cuda", requires_grad=True)
    kept = torch.ones(64, 1024, device="cuda")
    optimizer = torch.optim.SGD([*model.parameters(), *whole.parameters(), scale], lr=0.1, momentum=0.9)
    for _ in range(9):
        x = torch.randn(64, 256, device="cuda", requires_grad=True)
        out = whole["b"](whole["a"](model(x)))
        (out.sum(1) * scale).sum().backward()
        x.grad.sign()
        optimizer.step()
        optimizer.zero_grad()
    """), steps=3).profile
    loose = PARAMETERS + 8 * 32 + 32 + 32 * 32 + 32 + 64
    assert (p.params, p.param_bytes, p.optimizer_bytes) == (loose, 4 * loose, 4 * loose)
    assert p.peak_by_category["held by the script"] == 4 * 64 * 1024  # the first input is gone by then
    assert [m.params for m in p.modules.children] == [PARAMETERS, 8 * 32 + 32, 32 * 32 + 32]
    assert p.peak_by_category["parameter"] >= 4 * loose
