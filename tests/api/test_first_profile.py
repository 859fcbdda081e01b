"""The first profile of a process is like those after it: what torch and the output cache keep shows in nothing."""
import subprocess
import sys

import torch
from torch import nn

from analyzer import profile

_PROGRAM = """
import gc, torch, torch.autograd.forward_ad as forward_ad, warnings
from torch import nn

disable, before = gc.disable, gc.get_threshold()
gc.disable = lambda: 1 / 0  # other threads rely on it
from analyzer import profile
assert gc.isenabled() and gc.get_threshold() == before
gc.disable = disable
warnings.filterwarnings("error", "tensors without data")

# torch's first layer norm on meta imports numpy's generator, which was taken for one that had changed
rows = profile(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), torch.ones(4, 8)).replay.rows
print(rows)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x):
        return run(self, x)

def jvp(self, x):
    return torch.func.jvp(lambda t: (self.a(t).sin() ** 2).sum(), (x,), (torch.ones_like(x),))[1]

def hessian(self, x):
    return torch.func.hessian(lambda t: (self.a(t).sin() ** 2).sum())(x[0])

def dual(self, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(self.a(forward_ad.make_dual(x, torch.ones_like(x))).sin()).tangent

def nested(self, x):
    rows = torch.nested.as_nested_tensor([x[0, :4], x[1, :2]], layout=torch.jagged)
    return self.a(x) + torch.nested.to_padded_tensor(rows, 0.).sum()

for run in dual, nested, jvp, hessian:
    found = [profile(Net(), torch.rand(3, 6), mode="infer", device="h100", reuse=False) for _ in range(3)]
    assert found[0] == found[1] == found[2], run
    saved = [[t.storage for n in p.nodes for t in n.saved_tensors] for p in found]
    assert saved[0] == saved[1], run
"""


def test_the_first_profile_of_a_process_is_that_of_the_second(replaying_torch):
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", _PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "replayed=True" in done.stdout and "generators" not in done.stdout


class Keeping(nn.Module):
    """Reads in one step what the step before it made."""

    def __init__(self):
        super().__init__()
        self.a, self.kept = nn.Linear(4, 4), None

    def forward(self, x):
        before = x.exp() if self.kept is None else self.kept
        self.kept = x.exp()
        return self.a(x) * before


def test_names_of_storages_are_of_the_profile():
    found = [profile(Keeping(), torch.rand(2, 4), device="cpu", reuse=False) for _ in range(2)]
    names = [{t.storage for n in p.nodes for t in n.saved_tensors if t.kind == "activation"} for p in found]
    assert names[0] == names[1] and found[0] == found[1]
    assert all(int(name.rpartition(":")[2]) < 3 for name in names[0]) and names[0]
