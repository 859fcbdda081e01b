"""A dry run goes on where memory runs out, says where it would have failed, and what would do."""
import textwrap
from pathlib import Path

import pytest

from analyzer import ProfileOptions
from analyzer.cli import main
from analyzer.tools.dryrun.change import EXPANDABLE, ScriptChange, find_least_change
from analyzer.tools.dryrun.script import DryRun, dry_run

GIB = 2**30
HEAD = """\
import torch
from torch import nn
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(1024, 4096), nn.Linear(4096, 1024)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))
torch.manual_seed(0)
model = nn.Sequential(*[Block() for _ in range(8)]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""  # 8 blocks keep 6 KiB floats a row of 1,024: 36 KiB a row and block with its input
LINES = HEAD.count("\n")


def write(folder: Path, body: str, head: str = HEAD) -> Path:
    path = folder / "train.py"
    path.write_text(head + textwrap.dedent(body).lstrip("\n"))
    return path


TRAIN = """
for _ in range(3):
    loss = model(torch.randn(ROWS, 1024, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DryRun]:
    """2**17 rows: each block keeps 2 GiB of its relu's result and 0.5 GiB of its own."""
    path = write(tmp_path_factory.mktemp("short"), TRAIN.replace("ROWS", "2**17"))
    return path, dry_run(path, device="t4")


def test_it_goes_on_as_on_a_larger_device(short: tuple[Path, DryRun]) -> None:
    path, run = short
    without_a_limit = ProfileOptions(unknown_value="placeholder")
    larger = dry_run(path, device="t4", options=without_a_limit).profile
    assert (run.steps, run.error, run.profile.out_of_memory) == (3, None, None)
    assert run.profile.peak_allocated_bytes == larger.peak_allocated_bytes and larger.first_shortage is None
    assert run.profile.verdict is not None and run.profile.verdict.fits is False


def test_the_first_point_at_which_it_would_have_failed(short: tuple[Path, DryRun]) -> None:
    """A T4 has 14.07 GiB for the allocator. A block makes what is up (2 GiB), relu's (2 GiB), which is kept, down (0.5
    GiB) and the sum (0.5 GiB): after three blocks 0.5 + 3 * 4.5 + parameters are there, of the fourth up is too much.
    """
    found = short[1].profile.first_shortage
    assert found is not None
    assert (found.phase, found.step, found.operator, found.requested_bytes) == (
        "forward", 0, "aten.addmm.default", 2 * GIB)
    assert found.module_path is not None and found.module_path.endswith(".up")
    assert found.source == f"train.py:{LINES + 2} > train.py:8" or found.source == "train.py:8"
    assert found.reserved_bytes is not None and found.capacity_bytes is not None
    assert found.short_bytes == found.reserved_bytes + 2 * GIB - found.capacity_bytes


def test_in_a_backward_pass_the_line_of_the_forward_pass(tmp_path: Path) -> None:
    run = dry_run(write(tmp_path, """
    x = torch.randn(2**19, 1024, device="cuda", requires_grad=True)      # 2 GiB
    for _ in range(3):
        small = model[0].down(x.view(2**17, 4096))                         # 0.5 GiB
        wide = torch.cat([small] * 10, 1)                                  # 5 GiB
        total = torch.softmax(wide, 1).sum()                               # as much again
        total.backward()                                                   # and again
        optimizer.step()
    """), device="t4")
    found = run.profile.first_shortage
    assert found is not None and found.phase == "backward"
    assert found.source is not None and found.source.startswith(f"train.py:{LINES + 6}")


def test_the_command_says_it_first_and_ends_with_3(
        short: tuple[Path, DryRun], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dryrun", str(short[0]), "--device", "t4", "--no-advice"]) == 3
    lines = capsys.readouterr().out.splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith("would fail first at train.py:"))
    said = " ".join(lines[place:place + 2])
    assert "in forward of step 1, module Sequential." in said and "more than there is" in said
    assert "3 optimizer steps, ended here" in lines[1]


def test_raised_as_cuda_does(short: tuple[Path, DryRun], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dryrun", str(short[0]), "--device", "t4", "--stop-at-oom", "--no-advice"]) == 3
    out, err = capsys.readouterr()
    assert "CUDA out of memory" in err and f'train.py", line {LINES + 2}' in err
    assert "/analyzer/" not in err.rpartition("\n  File")[0] and "Memory ran out: aten.addmm.default" in out
    assert "no optimizer step was taken, it ran out of memory" in out


WAITING = {
    "its name": "except torch.OutOfMemoryError:\n            rows //= 2",
    "its older name": "except torch.cuda.OutOfMemoryError as error:\n            rows //= 2",
    "its text": "except RuntimeError as e:\n            assert 'out of memory' in str(e)\n            rows //= 2",
    "a function": "except Exception as error:\n            assert is_oom(error)\n            rows //= 2",
}
CATCHING = """
is_oom = lambda error: "out of memory" in str(error)
rows, steps = 2**18, 0
while steps < 2:
    try:
        model(torch.randn(rows, 1024, device="cuda")).sum().backward()
        optimizer.step()
        steps += 1
    HANDLER
    optimizer.zero_grad()
print("rows", rows)
"""


@pytest.mark.parametrize("case", WAITING)
def test_code_that_waits_for_the_error_is_given_it(
        case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = dry_run(write(tmp_path, CATCHING.replace("HANDLER", WAITING[case])), device="t4", steps=5)
    assert run.error is None and run.profile.first_shortage is None
    assert capsys.readouterr().out == "rows 65536\n"  # 2**17 rows take more, as above
    line = next(line for line in run.profile.assumptions if line.startswith("out of memory was raised"))
    assert line.endswith("catches it (2 times)") and f"train.py:{LINES + 5}" in line


@pytest.mark.parametrize("handler", [
    "except Exception as error:\n            print(error)\n            raise",
    "except BaseException:\n            steps = 9", "finally:\n            pass"])
def test_handlers_of_all_errors_do_not_wait_for_it(handler: str, tmp_path: Path) -> None:
    run = dry_run(write(tmp_path, CATCHING.replace("HANDLER", handler)), device="t4", steps=5)
    assert run.error is None and run.steps == 2 and run.profile.first_shortage is not None


def test_a_block_that_suppresses_it(tmp_path: Path) -> None:
    run = dry_run(write(tmp_path, """
    import contextlib
    with contextlib.suppress(torch.OutOfMemoryError):
        torch.zeros(2**40, device="cuda")
    with contextlib.suppress(ValueError):
        torch.zeros(2**33, device="cuda")
    """), device="t4")
    assert run.error is None and run.profile.first_shortage is not None
    assert run.profile.first_shortage.requested_bytes == 2**35


ACCELERATE = """
from accelerate.utils import find_executable_batch_size
@find_executable_batch_size(starting_batch_size=2**18)
def train(rows):
    for _ in range(2):
        model(torch.randn(rows, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    print("rows", rows)
train()
"""
LIGHTNING = """
import lightning as L
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader, TensorDataset
class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.rows, self.net = 2, nn.Sequential(*[Block() for _ in range(8)])
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.zeros(2**10, 2**14, 1024)), batch_size=self.rows)
    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
module = Module()
trainer = L.Trainer(max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                    enable_model_summary=False)
Tuner(trainer).scale_batch_size(module, batch_arg_name="rows", steps_per_trial=1)
print("rows", module.rows)
"""


@pytest.mark.parametrize(("body", "place", "rows"), [
    (ACCELERATE, "accelerate/utils/memory.py", 2**16), (LIGHTNING, "tuner/batch_size_scaling.py", 4)],
    ids=["accelerate", "lightning"])
def test_known_finders_of_batch_sizes(body: str, place: str, rows: int, tmp_path: Path,
                                      capsys: pytest.CaptureFixture[str]) -> None:
    """Accelerate's multiplies by 0.9, up to versions of 2025 by a half."""
    pytest.importorskip(body.split()[1].partition(".")[0])
    path = write(tmp_path, body)
    assert main(["dryrun", str(path), "--device", "t4", "--steps", "50", "--no-advice", "--show", "brief"]) in (0, 1)
    out = capsys.readouterr().out
    found = int(next(line for line in out.splitlines() if line.startswith("rows")).split()[1])
    assert rows // 2 <= found <= 2 * rows
    assert any(line.startswith("out of memory was raised") and place in line for line in out.splitlines())


def test_a_rank_of_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "torch.distributed.init_process_group('nccl')\n"
                 "model = nn.parallel.DistributedDataParallel(model)" + TRAIN.replace("ROWS", "2**17"))
    assert main(["dryrun", str(path), "--device", "t4", "--world", "2", "--rank", "1", "--no-advice"]) == 3
    assert "would fail first at train.py:" in capsys.readouterr().out


# ---- what would do

LOADER = """
from torch.utils.data import DataLoader, TensorDataset
for x, in DataLoader(TensorDataset(torch.zeros(2**10, 2**11, 1024)), batch_size=64):
    model(x.cuda()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_least_change(tmp_path: Path) -> None:
    """Checkpoints keep 0.5 GiB of each block and what one takes. One block alone is no list of blocks: of 2**20 rows it
    takes 4 GiB of input, 16 GiB of relu's and twice as much of their gradients, 52 GiB, of which an eighth fits.
    """
    path = write(tmp_path, LOADER)
    tried: list[ScriptChange] = []

    def run(change: ScriptChange) -> object:
        tried.append(change)
        return dry_run(path, device="t4", change=change).profile

    found = find_least_change(run(ScriptChange()), run)  # type: ignore[arg-type]
    assert found is not None and found.fits and found.keeps_result
    assert found.changes == ("activation checkpointing (each block of Sequential)",)
    assert tried[1:] == [ScriptChange(checkpoints=True)]

    path.write_text(path.read_text().replace("nn.Sequential(*[Block() for _ in range(8)])", "nn.Sequential(Block())"
                                             ).replace("batch_size=64", "batch_size=512"))
    del tried[:]
    found = find_least_change(run(ScriptChange()), run)  # type: ignore[arg-type]
    assert found is not None and not found.keeps_result
    assert found.changes == ("batches of the script's loaders (64 in place of 512)",)
    assert [change.parts for change in tried] == [1, 1, 2, 8]  # with 4 it would take too much, as two runs tell


def test_batches_that_no_loader_makes_cannot_be_changed(short: tuple[Path, DryRun]) -> None:
    tried: list[ScriptChange] = []

    def run(change: ScriptChange) -> object:
        tried.append(change)
        return dry_run(short[0], device="t4", change=change).profile if change.parts > 1 else None

    assert find_least_change(short[1].profile, run) is None  # type: ignore[arg-type]
    assert tried == [ScriptChange(checkpoints=True), ScriptChange(parts=2)]


def test_fragmentation_is_mended_by_the_allocators_settings(tmp_path: Path) -> None:
    """Sixteen blocks of 0.75 GiB, of which each second one is freed, leave 6 GiB in pieces."""
    run = dry_run(write(tmp_path, """
    held = [torch.zeros(3 * 2**28, dtype=torch.uint8, device="cuda") for _ in range(16)]
    del held[::2]
    torch.zeros(3 * 2**29, dtype=torch.uint8, device="cuda")
    """), device="t4")
    assert run.profile.first_shortage is None  # idle segments are given back
    tried: list[ScriptChange] = []
    run = dry_run(write(tmp_path, """
    whole = torch.empty(0, device="cuda")
    held = []
    for _ in range(5):
        whole = torch.empty(5 * 2**29, dtype=torch.uint8, device="cuda")    # 2.5 GiB, all but 0.25 GiB of it freed
        del whole
        held.append(torch.empty(2**28, dtype=torch.uint8, device="cuda"))
        held.append(torch.empty(9 * 2**28, dtype=torch.uint8, device="cuda"))
    del held[1::2]
    torch.empty(3 * 2**30, dtype=torch.uint8, device="cuda")
    """), device="t4")
    assert run.profile.first_shortage is not None
    assert find_least_change(run.profile, lambda change: tried.append(change)) is None
    assert tried == [ScriptChange(alloc_conf=EXPANDABLE)]


def test_the_command_tells_the_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dryrun", str(write(tmp_path, LOADER)), "--device", "t4", "--steps", "1"]) == 3
    out = capsys.readouterr().out
    assert "the one change with which it fits on t4: activation checkpointing (each block of Sequential): " in out
