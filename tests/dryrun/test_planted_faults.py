"""Faults that were planted in a training script: the first screen of its dry run names the line of each."""
import contextlib
import io
from pathlib import Path

import pytest

from analyzer.cli import main
from analyzer.tools.dryrun.script import dry_run

#: Lines that hold a fault have ``# FAULT``, which a sound script has in the place of ``# SOUND``.
SCRIPT = """\
import torch
from torch import nn
torch.manual_seed(0)
WIDE, WORDS, ROWS = 1024, 32768, 4096
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDE)
        self.blocks = nn.Sequential(nn.Linear(WIDE, WIDE), nn.GELU(), nn.Linear(WIDE, WIDE))
        self.head = nn.Linear(WIDE, WORDS, bias=False)
    def forward(self, x):
        return self.head(self.blocks(self.embed(x)))
class Momentum(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, dict(lr=0.1))
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p]["momentum"] = MOMENTUM
                self.state[p]["momentum"].mul_(0.9).add_(p.grad)
                p.add_(self.state[p]["momentum"].to(p.dtype), alpha=-group["lr"])
model = Net().to("cuda", torch.bfloat16)
optimizer = Momentum(model.parameters())
losses, cache = [], {}
for step in range(4):
    x = torch.randint(WORDS, (ROWS,), device="cuda")
    logits = LOGITS
    loss = nn.functional.cross_entropy(logits, x)
    KEEP
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    EVALUATE
    CACHE
"""
SOUND = {"MOMENTUM": "torch.zeros_like(p)", "LOGITS": "model(x)", "KEEP": "losses.append(loss.item())",
         "EVALUATE": "with torch.no_grad(): print(model(x).argmax(-1).shape)", "CACHE": "cache.clear()"}
#: Of each fault: what is in the place of what, and what the first screen says before the line, and of its bytes. Logits
#: have 4,096 x 32,768 elements, 256 MiB in bfloat16; the model 69,208,064 parameters.
FAULTS = {
    "a leak of losses": ("EVALUATE", "losses.append(nn.functional.cross_entropy(model(x), x))", "memory grows",
                         "more than the one before"),
    "a second copy of the logits": ("LOGITS", "model(x).float()", "activation at", "512.00 MiB"),
    "an optimizer in float32": ("MOMENTUM", "torch.zeros(p.shape, device=p.device)", "wide optimizer states",
                                "264.01 MiB, which would be 132.00 MiB in bfloat16"),
    "an evaluation without no_grad": ("EVALUATE", "print(model(x).argmax(-1).shape)", "evaluation with gradients",
                                      "kept up to"),
    "a cache that is kept": ("CACHE", "cache[step] = model.embed.weight.detach().float()", "memory grows",
                             "128.00 MiB"),
}


def write(folder: Path, **changed: str) -> tuple[Path, dict[str, int]]:
    """The script, and the line of each of its places."""
    lines = SCRIPT.splitlines()
    numbers = {name: next(i for i, line in enumerate(lines, 1) if name in line.split("= ")[-1]) for name in SOUND}
    text = SCRIPT
    for name, code in {**SOUND, **changed}.items():
        text = text.replace(name, code)
    path = folder / "train.py"
    path.write_text(text)
    return path, numbers


def read_screen(path: Path) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        main(["dryrun", str(path), "--steps", "4", "--no-advice"])
    lines = said.getvalue().splitlines()
    screen = lines[next(i for i, line in enumerate(lines) if line.startswith("train.py: ")):]
    assert len(screen) <= 40
    return "\n".join(screen)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_first_screen_names_the_line(fault: str, tmp_path: Path) -> None:
    place, code, said, size = FAULTS[fault]
    path, numbers = write(tmp_path, **{place: code})
    screen = read_screen(path)
    found = [" ".join(map(str.strip, pair)) for pair in zip(screen.splitlines(), [*screen.splitlines()[1:], ""])]
    assert any(said in line and f"train.py:{numbers[place]}" in line and size in line for line in found), screen


def test_of_a_sound_script_it_says_nothing(tmp_path: Path) -> None:
    path, _ = write(tmp_path)
    screen = read_screen(path)
    for _, _, said, _ in FAULTS.values():
        assert said == "activation at" or said not in screen


def test_a_state_of_another_shape_is_no_wide_one(tmp_path: Path) -> None:
    path, _ = write(tmp_path, MOMENTUM="torch.zeros(1, device=p.device)")
    assert not any("wide optimizer" in line for line in dry_run(path, steps=2).profile.assumptions)
