"""torch.cond, while_loop, scan and map cost what they run; a choice that only data could make is refused."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._higher_order_ops import map as map_op
from torch._higher_order_ops import scan, while_loop

from analyzer import ProfileOptions, profile, symbolic_trace
from analyzer.errors import DataDependentError

X = torch.rand(2, 8)
WIDE, NARROW = 2 * 2 * 8 * 64, 2 * 8 * 8  # multiply-adds of a batch through `up` and `down`, and through `fc`


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.fc = nn.Linear(8, 64), nn.Linear(64, 8), nn.Linear(8, 8)

    def choose(self, condition, x):
        return torch.cond(condition, lambda x: self.down(self.up(x)), self.fc, (x,))


class Known(Model):
    def forward(self, x):
        return self.choose(torch.tensor(x.shape[0] > 1), self.choose(x.shape[0] > 2, x))


class Unknown(Model):
    def forward(self, x):
        return self.choose(x.sum() > 0, x)


class Counted(Model):
    def forward(self, x):
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, self.fc(x)), (torch.tensor(0), x))[1]


class UntilSmall(Model):
    def forward(self, x):
        return while_loop(lambda x: x.sum() > 3, lambda x: (self.fc(x),), (x,))[0]


class Scanned(Model):
    def forward(self, x):
        return scan(lambda carry, one: (carry + self.fc(one), carry * 2), torch.zeros_like(x),
                    torch.stack([x] * 5, 1), dim=1, reverse=True)[0]


class Mapped(Model):
    def forward(self, x):
        return map_op(lambda one, scale: self.fc(one) * scale, x, self.fc.bias)


# backward: the gradient of each weight used, and of each input that has one (x has none)
@pytest.mark.parametrize("kind, forward_macs, backward_macs", [
    (Known, NARROW + WIDE, NARROW + 2 * WIDE), (Counted, 3 * NARROW, 5 * NARROW), (Scanned, 5 * NARROW, 5 * NARROW),
    (Mapped, NARROW, NARROW)])
def test_what_runs_counts_as_often_as_it_runs(kind, forward_macs, backward_macs):
    for reuse in (True, False):
        p = profile(kind(), (X,), reuse=reuse)
        assert (p.fwd_macs, p.bwd_macs) == (forward_macs, backward_macs)
    assert not any("taken" in text for text in p.assumptions)
    assert any("only the other branch uses get no gradient" in text for text in p.assumptions) == (kind is Known)


@pytest.mark.parametrize("kind, macs", [(Unknown, {"false": NARROW, "true": WIDE}), (UntilSmall, {"false": 0})])
def test_what_only_data_could_choose_is_refused_or_answered_by_the_policy(kind, macs):
    unknown = torch.empty(2, 8, device="meta")
    with pytest.raises(DataDependentError, match=r"needs the contents of a tensor .*\s.*test_control_flow.py:\d+"):
        profile(kind(), (unknown,), mode="infer", options=ProfileOptions(unknown_condition="error"))
    for policy, expected in macs.items():
        p = profile(kind(), (unknown,), mode="infer", options=ProfileOptions(unknown_condition=policy))
        assert p.fwd_macs == expected
        assert any(f"a condition that depends on data was taken as {policy}" in text for text in p.assumptions)


@pytest.mark.parametrize("kind", [Known, Unknown, Counted, Scanned])
def test_a_trace_gives_what_the_module_gives(kind):
    model = kind()
    gm = symbolic_trace(model, meta_args={"x": X})
    torch.testing.assert_close(gm(X), model(X))
