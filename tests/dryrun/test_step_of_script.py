"""Which step of a script its figures are of, and that what came before the step changes none of them."""
import textwrap

import pytest

from analyzer.tools.dryrun.script import dry_run

HEAD = """
import torch
from torch import nn
from torch.nn import functional as F
"""


@pytest.fixture
def run(tmp_path):
    def run(text, steps=3, **settings):
        path = tmp_path / "train.py"
        path.write_text(HEAD + textwrap.dedent(text))
        found = dry_run(path, steps=steps, **settings)
        assert found.error is None, found.format_error()
        return found.profile
    return run


PASSES = """
model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(6)]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.rand(16, 128, device="cuda")
with torch.no_grad():
    for _ in range({passes}):
        x = model(x)
for step in range({steps}):
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
model(torch.cat([x, x])).sum().backward()
"""


def test_passes_before_the_loop_take_no_time_in_it(run):
    plain, *others = [run(PASSES.format(passes=passes, steps=3)) for passes in (0, 1, 40)]
    for p in others:
        assert p.step_seconds == plain.step_seconds and p.step_phases == plain.phases
        assert [m.calls for m in p.modules.walk()] == [m.calls for m in plain.modules.walk()] == [0] + 7 * [1]
        assert p.module_calls == plain.module_calls and len(p.module_calls) == 7


ALTERNATE = """
def build(out):
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, out)).cuda()
critic, generator = build(1), build(64)
optimizers = {{name: torch.optim.Adam(net.parameters()) for name, net in (("c", critic), ("g", generator))}}
for name in {order!r} * 20:
    made = generator(torch.rand(16, 64, device="cuda"))
    critic(made if name == "g" else made.detach()).mean().backward()
    optimizers[name].step()
    optimizers[name].zero_grad()
"""
BOTH = 16 * 64 * 32 * 2 + 16 * 32 * (64 + 1)  # multiply-adds of a pass of generator and critic


@pytest.mark.sweep(4)
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("order", ["cg", "gc", "ccg", "cccccg"])
def test_a_step_is_whole_once_each_optimizer_that_is_there_has_stepped(run, order, steps):
    p = run(ALTERNATE.format(order=order), steps=steps)
    critics = order.count("c")
    assert p.optimizer == ("Adam, Adam 2" if critics == 1 else f"Adam ({critics} steps), Adam 2 (1 step)")
    assert p.fwd_macs == len(order) * BOTH
    assert p.first_step["forward"].macs == len(order) * BOTH
    assert sum(m.fwd_macs for m in p.modules.walk() if m.type == "Linear") == p.fwd_macs
    assert [(m.path, m.calls) for m in p.modules.children] == [("Sequential", len(order)), ("Sequential_2", len(order))]
    assert len(p.module_calls) == 2 * 4 * len(order) and p.module_calls[-1].parent == len(p.module_calls) - 4
    assert not any("did not step" in a for a in p.assumptions)


def test_an_optimizer_that_does_not_step_is_waited_for_a_while(run):
    p = run(ALTERNATE.format(order="c"))
    said, = [a for a in p.assumptions if "did not step" in a]
    assert said.startswith("optimizers that are there and did not step while others did (Adam): what their steps take")
    assert p.optimizer == "Adam" and p.fwd_macs == p.first_step["forward"].macs == BOTH
    ended = run(ALTERNATE.format(order="c").replace("* 20", "* 4"))  # before that
    assert said in ended.assumptions and ended.fwd_macs == BOTH


def test_a_step_that_was_not_finished_is_in_no_record_of_modules(run):
    """The script ends by itself after three steps and a pass over twice as much."""
    p = run(PASSES.format(passes=1, steps=3), steps=9)
    assert {call.inputs[0].shape for call in p.module_calls} == {(16, 128)} and len(p.module_calls) == 7
    assert [m.calls for m in p.modules.walk()] == [0] + 7 * [1]
    assert p.step_seconds == run(PASSES.format(passes=0, steps=3)).step_seconds


def test_the_batch_is_that_of_the_update_and_not_what_a_rollout_was_given(run):
    """The last observation is kept to the end of the script: 64 rows in 4.8 ms were told as one."""
    p = run("""
        class Policy(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.head = nn.Linear(4, 64), nn.Linear(64, 2)
            def forward(self, obs):
                return self.head(self.body(obs)).argmax(-1)
            def evaluate(self, observations):
                return self.head(self.body(observations))
        policy, last = Policy().cuda(), torch.zeros(1, 4, device="cuda")
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
        with torch.no_grad():
            for _ in range(8):
                policy(last)
        for step in range(3):
            policy.evaluate(torch.rand(64, 4).cuda()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        """)
    assert p.batch_size == 64 and [info.shape for info in p.inputs.values()] == [(64, 4)]


def test_a_second_script_finds_no_accelerator_of_the_first(run):
    """Accelerate keeps what the process was set to, and refuses another precision."""
    state = pytest.importorskip("accelerate.state")
    own = dict(state.AcceleratorState._shared_state)
    for precision in ("no", "bf16"):
        p = run(f"""
            from accelerate import Accelerator
            accelerator = Accelerator(mixed_precision="{precision}")
            model = nn.Linear(8, 8)
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for step in range(3):
                accelerator.backward(model(torch.rand(4, 8, device="cuda")).sum())
                optimizer.step()
                optimizer.zero_grad()
            """)
        assert p.batch_size == 4
    assert state.AcceleratorState._shared_state == own
