"""Optimizers whose step runs the model itself: LBFGS, by name, in steps of one's own and in scripts."""
import pytest
import torch
from torch import nn

from analyzer import ProfileOptions, profile
from analyzer.errors import InputError
from analyzer.recipe.recipe import Recipe
from analyzer.record.tensor_walk import tensors_in
from analyzer.tools.dryrun.script import dry_run

X = torch.rand(32, 64)
MACS = 2 * 32 * 64 * 64  # of a forward pass


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


def loss_fn(out):
    return out.pow(2).mean()


def step(model, optimizer, x):
    def closure():
        optimizer.zero_grad()
        loss = loss_fn(model(x))
        loss.backward()
        return loss
    optimizer.step(closure)


def run_really(settings, steps):
    """The bytes of the states that LBFGS holds after so many steps on data."""
    model = make()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, tolerance_change=0, tolerance_grad=0, **settings)
    for _ in range(steps):
        step(model, optimizer, X)
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in tensors_in(list(optimizer.state[next(model.parameters())].values()))}
    return sum(held.values())


CASES = [({"history_size": 8, "max_iter": 6}, 2, 18), ({"history_size": 5, "max_iter": 4}, 3, 12),
         ({"history_size": 4, "max_iter": 10, "line_search_fn": "strong_wolfe"}, 2, 10)]


@pytest.mark.parametrize(("settings", "steps", "vectors"), CASES)
@pytest.mark.parametrize("own", [False, True])
def test_states_are_those_of_a_run_on_data(settings, steps, vectors, own):
    """Two vectors of a pair, the direction and the last gradient; the history is filled whatever steps are asked for.
    """
    p = profile(make(), X, optimizer=lambda params: torch.optim.LBFGS(params, lr=0.1, **settings), device="h200",
                **({"step": step} if own else {"loss_fn": loss_fn}))
    assert p.optimizer_bytes == run_really(settings, steps)
    assert p.optimizer_bytes // p.param_bytes == vectors
    assert any(a.startswith("LBFGS: its search is assumed to go on") for a in p.assumptions)
    assert not any("history_size" in a for a in p.assumptions)
    # each iteration but the last evaluates once more; a line search in each of them
    evaluations = settings["max_iter"] + ("line_search_fn" in settings)
    assert (p.fwd_macs, p.bwd_macs) == (evaluations * MACS, evaluations * (2 * MACS - MACS // 2))
    assert sum(p.peak_by_category.values()) == p.peak_allocated_bytes
    assert p.peak_by_category["optimizer state"] >= (vectors - 2) * p.param_bytes


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", torch.optim.RMSprop])
def test_what_a_closure_runs_is_no_work_of_the_optimizer(optimizer):
    """Of optimizers that may be given a closure, too."""
    p = profile(make(), X, optimizer=optimizer, step=step)
    plain = profile(make(), X, optimizer=optimizer, loss_fn=loss_fn)
    for name in ("fwd_flops", "bwd_flops", "optimizer_flops", "optimizer_bytes"):
        assert getattr(p, name) == getattr(plain, name), name


def test_one_step_says_what_is_missing():
    p, ran = (profile(make(), X, optimizer="torch.optim:LBFGS", options=ProfileOptions(steps=1), reuse=reuse)
              for reuse in (True, False))
    assert p == ran and p.optimizer_bytes // p.param_bytes == 40
    assert {row.reason for row in p.replay} == {"the optimizer runs the model itself"}
    assert p.assumptions[-1] == (
        "LBFGS: after these steps it holds 19 pairs of vectors, of which its history_size allows 100: in the end it "
        "holds up to 162 times the trained parameters more; run more steps to see it")


def test_accumulation_is_refused():
    with pytest.raises(InputError, match="accumulate=4: LBFGS runs the model itself"):
        profile(make(), X, **Recipe(optimizer="torch.optim:LBFGS", accumulate=4).profile_options("train"))


def test_in_a_script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("""
import torch
from torch import nn
model = nn.Linear(64, 64).cuda()
optimizer = torch.optim.LBFGS(model.parameters(), history_size=30)
x = torch.rand(32, 64, device="cuda")
def closure():
    optimizer.zero_grad()
    loss = model(x).pow(2).mean()
    loss.backward()
    return loss
for _ in range(9):
    optimizer.step(closure)
""")
    p, short = dry_run(path, steps=2).profile, dry_run(path, steps=1).profile
    assert p.optimizer_bytes // p.param_bytes == 62 and short.optimizer_bytes // short.param_bytes == 40
    assert "history_size allows 30" in short.assumptions[-1]
