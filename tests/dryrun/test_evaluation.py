"""Forward passes that lead to no update are evaluation: a phase of its own, in no figure of a step."""
import textwrap

import pytest

from analyzer.tools.dryrun.script import dry_run

HEAD = """
import copy, torch
from torch import nn
from torch.nn import functional as F
def build():
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 8)).cuda()
def batch(size=64):
    return torch.randn(size, 256).cuda(), torch.randint(8, (size,)).cuda()
model = build()
optimizer = torch.optim.AdamW(model.parameters())
def train(loss):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
PASS = 64 * (256 * 512 + 512 * 8)  # multiply-adds of a forward pass over 64 samples

EVALUATES = """
def evaluate():
    model.eval()
    total, correct = torch.zeros((), device="cuda"), 0
    {grad}
        for _ in range(3):
            x, y = batch(128)
            out = model(x)
            total += F.cross_entropy(out, y)
            correct += (out.argmax(1) == y).sum().item()
    model.train()
    return total.item() / 3
{before}
for step in range(10):
    x, y = batch()
    train(F.cross_entropy(model(x), y))
    if (step + 1) % {every} == 0:
        evaluate()
"""
NO_GRAD, INFERENCE, WITH_GRAD = "with torch.no_grad():", "with torch.inference_mode():", "if True:"


@pytest.fixture
def run(tmp_path):
    def run(text, steps=3, **settings):
        path = tmp_path / "train.py"
        path.write_text(HEAD + textwrap.dedent(text))
        found = dry_run(path, steps=steps, **settings)
        assert found.error is None or "stop_at_oom" in settings, found.format_error()
        return found.profile
    return run


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("grad", "before", "every", "evaluations"), [
    (NO_GRAD, "", 2, 1), (NO_GRAD, "", 1, 2), (INFERENCE, "", 2, 1), (WITH_GRAD, "", 2, 1),
    (NO_GRAD, "evaluate()", 100, 1)], ids=["no_grad", "each step", "inference_mode", "with gradients", "before"])
def test_evaluation_is_in_no_figure_of_a_step(run, grad, before, every, evaluations):
    p = run(EVALUATES.format(grad=grad, before=before, every=every))
    plain = run(EVALUATES.format(grad=grad, before="", every=100))
    assert p.phases["evaluation"].macs == evaluations * 3 * 2 * PASS
    assert "evaluation" not in plain.phases
    for name in ("fwd_macs", "fwd_flops", "bwd_flops", "executed_flops", "step_seconds", "kernel_seconds",
                 "samples_per_second", "operators", "inputs", "batch_size"):
        assert getattr(p, name) == getattr(plain, name), name
    assert p.fwd_macs == PASS
    for phase in ("forward", "backward", "optimizer"):
        assert (p.phases[phase].flops, p.phases[phase].seconds) == (plain.phases[phase].flops,
                                                                    plain.phases[phase].seconds), phase
        assert p.first_step[phase].macs == plain.first_step[phase].macs, phase
    assert [(n.name, n.outputs, n.fwd_seconds) for n in p.nodes] == [
        (n.name, n.outputs, n.fwd_seconds) for n in plain.nodes]
    assert [(m.path, m.calls, m.inputs, m.saved_bytes, m.activation_bytes) for m in p.modules.walk()] == [
        (m.path, m.calls, m.inputs, m.saved_bytes, m.activation_bytes) for m in plain.modules.walk()]
    assert [call.inputs for call in p.module_calls] == [call.inputs for call in plain.module_calls]
    assert p.spans == plain.spans
    assert any(a.startswith("evaluation with gradients: 3 passes of Sequential that lead to no update, as at ")
               for a in p.assumptions) == (grad == WITH_GRAD)
    said = [a for a in p.assumptions if a.startswith("forward passes that lead to no update")]
    assert said == [f"forward passes that lead to no update ({3 * evaluations} of Sequential) are a phase of their "
                    "own, evaluation: they are in no figure of a step, but peaks of memory are those of the whole run"]
    assert "evaluation" in p.screen() and f"{p.phases['evaluation'].seconds}" not in p.screen()


COMPILED = """
loss_of = torch.compile(lambda x, y: F.cross_entropy(model(x), y))
for _ in range(10):
    train(loss_of(*batch()))
    with torch.inference_mode():
        for _ in range({times}):
            print(loss_of(*batch()).item())
"""


def test_passes_of_compiled_functions_that_lead_to_no_update_are_evaluation_too(run):
    p, plain = run(COMPILED.format(times=2)), run(COMPILED.format(times=0))
    assert p.fwd_macs == plain.fwd_macs == PASS and p.phases["evaluation"].macs == 2 * 2 * PASS
    assert (p.step_seconds, p.kernels) == (plain.step_seconds, plain.kernels)
    assert [(row.calls, row.graphs) for row in p.compiled] == [(1, 1)]


TEACHES = {
    "distillation": ("""
        teacher = build().requires_grad_(False)
        for _ in range(5):
            x, y = batch()
            with torch.no_grad():
                target = teacher(x).softmax(1)
            train(F.kl_div(model(x).log_softmax(1), target))
        """, 2),
    "a memory that a later step reads": ("""
        key = build().requires_grad_(False)
        queue = torch.zeros(640, 8, device="cuda")
        for step in range(5):
            x, y = batch()
            train((model(x) * queue[:64]).logsumexp(1).mean())
            with torch.no_grad():
                queue[step * 64:(step + 1) * 64] = key(x)
        """, 2),
    "a rollout": ("""
        for _ in range(5):
            states, values = [], []
            x = batch()[0]
            with torch.no_grad():
                for _ in range(4):
                    out = model(x)
                    values.append(out[:, 1])
                    x = x + out.mean(1, keepdim=True)
                    states.append(x)
            target = torch.stack(values).sum(0)
            train(F.mse_loss(model(states[-1])[:, 1], target))
        """, 5),
    "a generator that is not trained here": ("""
        critic = nn.Linear(8, 1).cuda()
        optimizer = torch.optim.AdamW(critic.parameters())
        for _ in range(5):
            with torch.no_grad():
                fake = model(batch()[0])
            train(critic(fake).mean())
        """, 1 + 8 / (256 * 512 + 512 * 8)),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", TEACHES)
def test_what_an_update_uses_is_of_the_step(run, name):
    text, passes = TEACHES[name]
    p = run(text)
    assert "evaluation" not in p.phases and p.fwd_macs == passes * PASS
    assert not any("lead to no update" in a for a in p.assumptions)


def test_averages_of_weights_are_of_the_step_and_passes_with_them_are_not(run):
    text = """
    average = copy.deepcopy(model).requires_grad_(False)
    for step in range(10):
        x, y = batch()
        train(F.cross_entropy(model(x), y))
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), model.parameters()):
                mine.lerp_(theirs, 0.01)
            {evaluates}
    """
    p, plain = (run(text.format(evaluates=line)) for line in ("average(torch.randn(64, 256).cuda()).argmax(1)", "pass"))
    assert p.phases["evaluation"].macs == 2 * PASS  # after the first step and the second
    assert p.phases["forward"].flops == plain.phases["forward"].flops
    assert p.phases["forward"].seconds == plain.phases["forward"].seconds
    assert sum(row.calls for row in p.operators if row.operator.startswith("aten.lerp_")) == 4


def test_a_script_without_updates_has_no_evaluation(run):
    p = run("""
    with torch.no_grad():
        for _ in range(3):
            model(batch()[0])
    """)
    assert p.mode == "infer" and p.fwd_macs == 3 * PASS and "evaluation" not in p.phases


def test_the_peak_of_evaluation_is_that_of_the_run(run):
    p = run("""
    for step in range(10):
        x, y = batch()
        train(F.cross_entropy(model(x), y))
        with torch.no_grad():
            outs = [model(batch(1 << 16)[0]) for _ in range(2)]
            torch.cat(outs).argmax(1)
            del outs
    """)
    assert p.peak_allocated_bytes == p.phases["evaluation"].peak_allocated_bytes
    assert p.peak_allocated_bytes > 2 * max(p.phases[phase].peak_allocated_bytes for phase in (
        "forward", "backward", "optimizer"))
    assert ", in evaluation" in p.screen() and sum(p.peak_by_category.values()) == p.peak_allocated_bytes
    assert p.step_phases.keys() == {"forward", "backward", "optimizer", "zero_grad"}


def test_memory_may_run_out_after_evaluation(run):
    text = """
    for step in range(10):
        x, y = batch(64 if step < 2 else 1 << 28)
        train(F.cross_entropy(model(x), y))
        with torch.no_grad():
            model(batch()[0])
    """
    p = run(text, steps=5)
    assert p.first_shortage.step == 2 and p.phases["evaluation"].macs == 4 * PASS
    p = run(text, steps=5, stop_at_oom=True)
    assert p.out_of_memory.step == 2 and p.fwd_macs == PASS
    assert p.phases["evaluation"].macs == 2 * PASS
