"""Steps that keep memory are told as such, with what holds it; steps that do not, are not."""
import textwrap

import pytest
import torch
from torch import nn

from analyzer import ProfileOptions, profile
from analyzer.tools.dryrun.script import dry_run

MIB = 2**20


def update(model, optimizer, x):
    out = model(x)
    out.mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return out


def growths(found):
    return [text for text in found.assumptions if text.startswith("memory grows")]


@pytest.mark.parametrize("steps", [2, 3, 5])
@pytest.mark.parametrize("device", ["h100", "cpu"])
def test_a_list_of_outputs_is_told(steps, device):
    kept = []

    def step(model, optimizer, x):
        kept.append(update(model, optimizer, x))

    p = profile(nn.Sequential(nn.Linear(64, 1024)), torch.rand(256, 64), step=step, optimizer="adam", device=device,
                options=ProfileOptions(steps=steps))
    (text,) = growths(p)
    assert text.startswith(f"memory grows: step {steps} ended with 1.00 MiB more than the one before, in 1 more tensors"
                           "; the largest that it made and kept is of _0 (module 0), 1.00 MiB.")


@pytest.mark.parametrize("steps", [2, 4])
def test_a_tensor_that_each_step_makes_longer_is_told(steps):
    bank = []

    def step(model, optimizer, x):
        out = update(model, optimizer, x).detach()
        bank[:] = [torch.cat([*bank, out])]

    class Bank(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 1024)
            self.register_buffer("seen", torch.zeros(1, 1024))

        def forward(self, x):
            out = self.layer(x)
            self.seen = torch.cat([self.seen, out.detach()])
            return out

    def profiled(model, **how):
        return growths(profile(model, torch.rand(256, 64), optimizer="adam", device="h100",
                               options=ProfileOptions(steps=steps), **how))

    text, = profiled(nn.Linear(64, 1024), step=step)
    assert text.startswith(f"memory grows: step {steps} ended with 1.00 MiB more than the one before, in a tensor that "
                           "each step makes of the one before and more, of")
    text, = profiled(Bank())
    assert f"step {steps} ended with 1.00 MiB more" in text and f", {steps}.00 MiB. Where" in text


def test_a_state_of_the_optimizer_that_each_step_adds_to_is_told():
    def step(model, optimizer, x):
        update(model, optimizer, x)
        p = next(model.parameters())
        optimizer.state[p].setdefault("history", []).append(torch.zeros_like(p))

    text, = growths(profile(nn.Linear(256, 1024), torch.rand(8, 256), step=step, optimizer="adam", device="h100",
                            options=ProfileOptions(steps=4)))
    assert "1.00 MiB more than the one before, in 1 more tensors" in text and "an optimizer's state has more" in text


def test_what_a_step_replaces_or_makes_once_is_no_growth():
    kept = {}

    def step(model, optimizer, x):
        kept["last"] = update(model, optimizer, x)  # the last one alone
        if "shadow" not in kept:
            kept["shadow"] = [p.detach().clone() for p in model.parameters()]

    for steps in (2, 3):
        assert growths(profile(nn.Linear(64, 1024), torch.rand(256, 64), step=step, optimizer="adamw", device="h100",
                               options=ProfileOptions(steps=steps))) == []
    assert growths(profile(nn.Linear(64, 1024), torch.rand(256, 64), optimizer="adamw", device="h100")) == []


@pytest.mark.parametrize(("keep", "grows"), [
    ("losses.append(loss)", True), ("losses.append(loss.item())", False), ("losses = [loss]", False),
    ("del loss", False)])
def test_a_script_that_keeps_its_losses_is_told(tmp_path, keep, grows):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent("""
        import torch
        from torch import nn
        model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 8)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(10):
            out = model(torch.rand(512, 256, device="cuda"))
            loss = out.square().mean()
            loss.backward(retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
            KEEP
    """).replace("KEEP", keep))
    run = dry_run(path)
    assert run.error is None and len(growths(run.profile)) == grows
    if grows:
        assert "(module Sequential" in growths(run.profile)[0]
