"""What a script lets go of is freed in a dry run as in PyTorch, and its modules have their rows wherever they ran."""
import gc
import json
import os
import sys
import textwrap
import weakref

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from analyzer.tools.dryrun.script import dry_run

HEAD = """
import gc, json, torch
from torch import nn
class Scale(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(rows, 256, device=DEVICE))
        self.register_buffer("seen", torch.zeros(rows, 256, device=DEVICE))
    def forward(self, x):
        return (x * self.weight).sum(0)
class Chain(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)
    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x
told = []
def mark():
    gc.collect()
    told.append(allocated())
x = torch.ones(256, device=DEVICE)
"""
MODULES, OPTIMIZERS, RESULTS, PARAMETERS = ["m0", "m1", "m2"], ["o0", "o1"], ["r0", "r1"], ["p0"]


@st.composite
def programs(draw):
    """Lines that make, call, train, keep, replace and delete modules, optimizers, results and parameters."""
    lines, alive = [], set()

    def one_of(names):
        known = [name for name in names if name in alive]
        return draw(st.sampled_from(known)) if known else None

    for _ in range(draw(st.integers(4, 16))):
        kind = draw(st.sampled_from(["make", "chain", "call", "train", "optimizer", "step", "zero", "loose", "delete"]))
        module, optimizer = one_of(MODULES), one_of(OPTIMIZERS)
        if kind == "make" or module is None:
            name, rows = draw(st.sampled_from(MODULES)), draw(st.integers(1, 8))
            lines.append(f"{name} = Scale({rows})")
            alive.add(name)
        elif kind == "chain":
            name = draw(st.sampled_from(MODULES))
            lines.append(f"{name} = Chain({module}, Scale(2))")
            alive.add(name)
        elif kind == "call":
            name = draw(st.sampled_from(RESULTS))
            lines.append(f"{name} = {module}(x)")
            alive.add(name)
        elif kind == "train":
            lines.append(f"{module}(x).sum().backward()")
        elif kind == "optimizer":
            name, held = draw(st.sampled_from(OPTIMIZERS)), one_of(PARAMETERS)
            more = f"[*{module}.parameters(), {held}]" if held else f"{module}.parameters()"
            made = draw(st.sampled_from(["SGD({}, 0.1, momentum=0.9)", "AdamW({}, fused=True)"])).format(more)
            lines.append(f"{name} = torch.optim.{made}")
            alive.add(name)
        elif kind == "loose":
            lines.append("p0 = torch.ones(3, 256, device=DEVICE, requires_grad=True)")
            lines.append(f"({module}(x) * p0).sum().backward()")
            alive.add("p0")
        elif kind in ("step", "zero") and optimizer:
            lines.append(f"{optimizer}.{'step' if kind == 'step' else 'zero_grad'}()")
        elif kind == "delete":
            name = one_of([*MODULES, *OPTIMIZERS, *RESULTS, *PARAMETERS])
            lines.append(f"del {name}")
            alive.remove(name)
    return lines


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of the storages that are alive, each in blocks of 512, as CUDA's allocator gives them."""

    def __init__(self):
        super().__init__()
        self.sizes = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.sizes:
                    self.sizes[storage._cdata] = -(-storage.nbytes() // 512) * 512
                    weakref.finalize(storage, self.sizes.pop, storage._cdata)
        return result


@given(programs())
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_alive_is_what_is_alive_in_pytorch(tmp_path, lines):
    text = HEAD + "".join(f"{line}\nmark()\n" for line in lines)
    with LiveStorages() as live:
        names = {"DEVICE": "cpu", "allocated": lambda: sum(live.sizes.values())}
        exec(text, names)
        right = names["told"]
        del names
    gc.collect()
    path, answer = tmp_path / "train.py", tmp_path / "told.json"
    path.write_text(f"import torch\nDEVICE, allocated = 'cuda', torch.cuda.memory_allocated\n{text}"
                    f"with open({str(answer)!r}, 'w') as file:\n    json.dump(told, file)\n")
    run = dry_run(path, steps=1000)
    assert run.error is None, run.format_error()
    assert json.loads(answer.read_text()) == right, "\n".join(lines)


ROWS = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body, self.head = body, nn.Linear(64, 1)
    def forward(self, x):
        return self.head(self.body(x))
def build():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).cuda()
def update(net, optimizer):
    net(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
def sgd(*modules):
    return torch.optim.SGD(list(dict.fromkeys(p for m in modules for p in m.parameters())), lr=0.1)
x = torch.rand(32, 64, device="cuda", requires_grad=True)
"""
BODY, TOP = 2 * 32 * 64 * 64, 32 * 64  # multiply-adds of a forward pass
ONE_NET = {"Net": (BODY + TOP, 2 * (BODY + TOP))}


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("lines", "right"), [
    pytest.param("body = build(); net = Net(body).cuda(); o = sgd(net); body(x)\nfor _ in range(3): update(net, o)",
                 ONE_NET, id="by itself before the steps"),
    pytest.param("body = build(); net = Net(body).cuda(); o = sgd(net)\n"
                 "for _ in range(3): body(x).sum().backward(); update(net, o)",
                 {"Net": (2 * BODY + TOP, 2 * (2 * BODY + TOP))}, id="by itself in each step"),
    pytest.param("body = build(); o = sgd(body); update(body, o); net = Net(body).cuda(); o = sgd(net)\n"
                 "for _ in range(3): update(net, o)", ONE_NET, id="in an earlier step"),
    pytest.param("body = build(); a, b = Net(body).cuda(), Net(body).cuda(); o = sgd(a, b)\n"
                 "for _ in range(3): (a(x).sum() + b(x).sum()).backward(); o.step(); o.zero_grad()",
                 {"Net": (2 * BODY + TOP, 2 * (2 * BODY + TOP)), "Net_2": (TOP, 2 * TOP)}, id="in two"),
    pytest.param("body = build(); a = Net(body).cuda(); o = sgd(a); update(a, o)\n"
                 "del a; b = nn.Sequential(body, nn.Linear(64, 1)).cuda(); o = sgd(b)\nfor _ in range(3): update(b, o)",
                 {"Sequential": (BODY + TOP, 2 * (BODY + TOP))}, id="in one that is gone"),
    pytest.param("body = build(); a = Net(body).cuda(); o = sgd(a); update(a, o)\ndel a\n"
                 "for _ in range(3): update(body, o)",
                 {"Sequential": (BODY, 2 * BODY)}, id="by itself after one that is gone"),
    pytest.param("for _ in range(4):\n    net = Net(build()).cuda(); o = sgd(net); update(net, o)", ONE_NET,
                 id="made anew in each step"),
    pytest.param("def main():\n    net = Net(build()).cuda(); o = sgd(net)\n    for _ in range(2): update(net, o)\n"
                 "main()", ONE_NET, id="in a function that has ended"),
])
def test_rows_of_modules_add_up(tmp_path, lines, right):
    path = tmp_path / "train.py"
    path.write_text(ROWS + lines + "\n")
    run = dry_run(path)
    assert run.error is None, run.format_error()
    p = run.profile
    assert {child.path: (child.fwd_macs, child.bwd_macs) for child in p.modules.children} == right
    rows = list(p.modules.walk())
    for name in ("fwd_macs", "bwd_macs", "fwd_seconds", "bwd_seconds"):
        assert getattr(p.modules, name) == pytest.approx(sum(getattr(row.own, name) for row in rows))
    assert p.modules.fwd_macs == p.fwd_macs and p.modules.bwd_macs == p.bwd_macs
    assert p.params == sum(row.own.params for row in rows)
    assert p.optimizer == "SGD"


SEARCH = """
import torch
from torch import nn
def attempt(rows):
    net = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 8)).cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.rand(rows, 1024, device="cuda")).sum().backward()
    optimizer.step()
for rows in (64, 128, 256, 64):
    attempt(rows)
"""


def test_a_search_for_the_batch_size_holds_one_model(tmp_path):
    """Its attempts are steps of one optimizer each, and the last, like the first, has the same peak and rows."""
    path = tmp_path / "search.py"
    path.write_text(textwrap.dedent(SEARCH))
    first, last = [dry_run(path, steps=steps) for steps in (1, 4)]
    assert (first.steps, last.steps) == (1, 4) and last.profile.optimizer == "AdamW"
    weights = 1024 * 1024 + 1024 + 8 * 1024 + 8
    assert first.profile.params == last.profile.params == weights
    assert first.profile.param_bytes == last.profile.param_bytes == 4 * weights
    assert first.profile.optimizer_bytes == last.profile.optimizer_bytes == 8 * weights
    assert [c.path for c in last.profile.modules.children] == ["Sequential"]
    peaks = [max(info.peak_allocated_bytes for info in run.profile.phases.values()) for run in (first, last)]
    assert peaks[0] == peaks[1]
    assert {h.label for h in last.profile.holders if h.category == "parameter"} == {
        f"Sequential.{part}" for part in ("0.weight", "0.bias", "1.weight", "1.bias")}


def test_what_a_script_sets_of_its_process_is_put_back(tmp_path, monkeypatch):
    monkeypatch.setenv("ANALYZER_TEST_KEPT", "before")
    before = dict(os.environ), os.getcwd(), list(sys.path)
    path = tmp_path / "train.py"
    path.write_text(f"""
import os, sys
os.environ.update(ANALYZER_TEST_KEPT="after", ANALYZER_TEST_NEW="1")
os.chdir({str(tmp_path)!r})
sys.path.insert(0, "elsewhere")
""")
    dry_run(path)
    assert (dict(os.environ), os.getcwd(), sys.path) == before
