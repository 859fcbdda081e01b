"""What a script computes without gradients for several steps, as a rollout, is a phase of its own, in no step."""
import textwrap

import pytest

from analyzer.tools.dryrun.script import dry_run

HEAD = """
import torch
from torch import nn
from torch.nn import functional as F
def build(out=8):
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, out)).cuda()
def state():
    return torch.randn(32, 64, device="cuda")
model, value, reference = build(), build(1), build()
optimizer = torch.optim.Adam([*model.parameters()])
def train(loss, *optimizers):
    loss.backward()
    for one in optimizers or [optimizer]:
        one.step()
        one.zero_grad()
"""
PASS, VALUE = 32 * (64 * 128 + 128 * 8), 32 * (64 * 128 + 128)

PPO = """
critic = torch.optim.Adam([*value.parameters()])
for update in range(3):
    states, chosen, values, x = [], [], [], state()
    with torch.no_grad():
        for _ in range(6):
            probabilities = model(x).softmax(-1)
            action = probabilities.argmax(-1)
            states.append(x)
            chosen.append(probabilities.gather(1, action[:, None]).log())
            values.append(value(x))
            x = x + action[:, None]
        expected = reference(torch.cat(states)).log_softmax(-1)
        returns = torch.stack(values).flip(0).cumsum(0).flip(0).flatten()
    states, chosen = torch.cat(states), torch.cat(chosen)
    for epoch in range(2):
        order = torch.randperm(len(states), device="cuda")
        for part in order.split(64):
            logits = model(states[part])
            ratio = (logits.log_softmax(-1)[:, :1] - chosen[part]).exp().mean()
            apart = F.kl_div(expected[part], logits.log_softmax(-1), log_target=True, reduction="batchmean")
            train(ratio + apart + F.mse_loss(value(states[part])[:, 0], returns[part]), optimizer, critic)
"""
GRPO = """
for update in range(8):
    x = state()
    with torch.no_grad():
        for _ in range(4):
            x = x + model(x).mean(1, keepdim=True)
        old = model(x).log_softmax(-1)
    for _ in range({times}):
        for micro in range(2):
            loss = (model(x).log_softmax(-1) - old).exp().mean() / 2
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.fixture
def run(tmp_path):
    def run(text, steps):
        path = tmp_path / "train.py"
        path.write_text(HEAD + textwrap.dedent(text))
        found = dry_run(path, steps=steps)
        assert found.error is None and found.steps == steps, found.format_error()
        return found.profile
    return run


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("text", "steps", "rollout", "forward"), [
    (PPO, (3, 12, 13, 15), 6 * (PASS + VALUE + PASS), 2 * (PASS + VALUE)),  # 192 states, 64 a step: 6 steps an update
    (GRPO.format(times=3), (2, 3, 4, 8), 5 * PASS, 2 * PASS)], ids=["ppo", "grpo"])
def test_the_rollout_of_an_update_is_a_phase_whichever_step_is_the_last(run, text, steps, rollout, forward):
    profiles = [run(text, number) for number in steps]
    for p in profiles:
        assert p.phases["preparation"].macs == rollout and p.fwd_macs == p.phases["forward"].macs == forward
        assert p.step_phases.keys() == {"forward", "backward", "optimizer", "zero_grad"}
        assert p.first_step["forward"].macs == forward
        assert len([a for a in p.assumptions if "results several steps read" in a]) == 1
    for name in ("fwd_flops", "bwd_flops", "samples_per_second"):
        assert len({getattr(p, name) for p in profiles}) == 1, name
    assert len({p.phases["forward"].seconds for p in profiles}) == 1
    assert [[(m.path, m.calls, m.fwd_macs) for m in p.modules.walk() if m.calls] for p in profiles[1:]] == [
        [(m.path, m.calls, m.fwd_macs) for m in profiles[0].modules.walk() if m.calls]] * (len(profiles) - 1)


def test_how_often_it_comes_is_told(run):
    said = [[a for a in run(GRPO.format(times=3), steps).assumptions if "results several steps read" in a]
            for steps in (2, 4)]
    assert said == [[
        "passes without gradients whose results several steps read (5 of Sequential), as a rollout, are a phase of "
        f"their own, preparation: it {often} and is in no figure of a step, but peaks of memory are those of the whole "
        "run"] for often in ("came once in the 2 steps seen", "comes once in 3 steps")]


OF_EACH_STEP = {
    "a rollout for one step": (GRPO.format(times=1), 7 * PASS),
    "a generator and a critic that steps more often": ("""
        critic = torch.optim.Adam([*value.parameters()])
        for step in range(20):
            with torch.no_grad():
                fake = model(state())
            train(value(F.pad(fake, (0, 56))).mean(), critic)
            if step % 3 == 0:
                train(value(F.pad(model(state()), (0, 56))).mean())
        """, 3 * (PASS + VALUE) + PASS + VALUE),
    "a queue that later steps read": ("""
        queue = torch.zeros(320, 8, device="cuda")
        for step in range(10):
            x = state()
            with torch.no_grad():
                key = reference(x)
            train((model(x) * queue[:32] * key).mean())
            queue = torch.cat([key, queue[:288]])
        """, 2 * PASS),
    "a pass that every other step has": ("""
        for step in range(10):
            x, guess = state(), torch.zeros(32, 1, device="cuda")
            if step % 2 == 0:
                with torch.no_grad():
                    guess = model(x).mean(1, keepdim=True)
            train(model(x + guess).mean())
        """, 2 * PASS),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", OF_EACH_STEP)
def test_passes_without_gradients_that_serve_their_own_step_are_of_it(run, name):
    text, forward = OF_EACH_STEP[name]
    p = run(text, 3)
    assert not {"preparation", "evaluation"} & p.phases.keys() and p.fwd_macs == forward
