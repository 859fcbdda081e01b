"""Steps of torch.func, control flow and operators whose result depends on data cost what runs."""
import pytest
import torch
from torch import nn
from torch._higher_order_ops import map as map_op
from torch._higher_order_ops import scan, while_loop
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from analyzer import ProfileOptions, profile, symbolic_trace
from analyzer.errors import DataDependentError
from analyzer.tools.runtime import measure
from tests.call import Call

X, IMAGES = torch.rand(4, 8), torch.rand(4, 3, 8, 8)
IDS, LABELS = torch.arange(20).reshape(4, 5) % 10, torch.arange(4) % 3


class Convnet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.fc(self.norm(self.conv(x)).relu().mean((2, 3)))


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.fc = nn.Embedding(10, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.fc(self.norm(self.embedding(x)).mean(1))


def linear():
    return nn.Linear(8, 3)


def cross_entropy(model, parameters, x, y):
    return functional.cross_entropy(functional_call(model, parameters, (x,)), y)


def nll(model, parameters, x, y):
    return functional.nll_loss(functional.log_softmax(functional_call(model, parameters, (x,)), -1), y)


def detached(model):
    return {name: p.detach() for name, p in model.named_parameters()}


def gradient_of(loss):
    return lambda model, optimizer, x, y: grad(lambda p: loss(model, p, x, y))(detached(model))


def gradient_per_sample(loss):
    return lambda model, optimizer, x, y: vmap(
        grad(lambda p, one, label: loss(model, p, one[None], label[None])), (None, 0, 0))(detached(model), x, y)


def dual(model, optimizer, x, y):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


STEPS = {
    "jacrev": lambda m, o, x, y: jacrev(lambda p: functional_call(m, p, (x,)))(detached(m)),
    "hessian": lambda m, o, x, y: hessian(lambda p: cross_entropy(m, p, x, y))(detached(m)),
    "vjp": lambda m, o, x, y: vjp(lambda p: cross_entropy(m, p, x, y), detached(m))[1](torch.ones((), device=x.device)),
    "jvp": lambda m, o, x, y: jvp(lambda x: functional.cross_entropy(m(x), y), (x,), (torch.ones_like(x),)),
    "jacfwd": lambda m, o, x, y: jacfwd(lambda x: functional_call(m, detached(m), (x,)))(x[0]),
    "dual": dual,
}


@pytest.mark.parametrize("make, args, step", [
    *((linear, X, gradient_of(loss)) for loss in (cross_entropy, nll)),
    *((linear, X, gradient_per_sample(loss)) for loss in (cross_entropy, nll)),
    *((make, x, kind(cross_entropy)) for make, x in ((Convnet, IMAGES), (Embedded, IDS))
      for kind in (gradient_of, gradient_per_sample)),
    *((linear, X, step) for step in STEPS.values()), *((Convnet, IMAGES, STEPS[name]) for name in ("jvp", "dual")),
])
def test_products_are_those_of_a_run_on_data(make, args, step):
    model = make()
    # torch's counter takes the grouped convolution, which a convolution under vmap is, for a dense one
    plain = gradient_of(cross_entropy) if make is Convnet and step not in STEPS.values() else step
    with FlopCounterMode(display=False) as counter:
        plain(model, None, args, LABELS)
    for reuse in (True, False):
        p = profile(model, (args, LABELS), step=step, device="h100", reuse=reuse)
        assert 2 * (p.fwd_macs + p.bwd_macs) == counter.get_total_flops()


# torch.cond, while_loop, scan and map cost what they run; a choice that only data could make is refused.

INPUT = torch.rand(2, 8)
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
        p = profile(kind(), (INPUT,), reuse=reuse)
        assert (p.fwd_macs, p.bwd_macs) == (forward_macs, backward_macs)
    assert not any("taken" in text or "assumed" in text for text in p.assumptions)
    assert any("only the other branch uses get no gradient" in text for text in p.assumptions) == (kind is Known)


@pytest.mark.parametrize("kind, macs", [(Unknown, {"false": NARROW, "true": WIDE}), (UntilSmall, {"false": 0})])
def test_what_only_data_could_choose_is_refused_or_answered_by_the_policy(kind, macs):
    unknown = torch.empty(2, 8, device="meta")
    with pytest.raises(DataDependentError, match=r"needs the contents of a tensor .*\s.*test_functional_step.py:\d+"):
        profile(kind(), (unknown,), mode="infer", options=ProfileOptions(unknown_condition="error"))
    for policy, expected in macs.items():
        p = profile(kind(), (unknown,), mode="infer", options=ProfileOptions(unknown_condition=policy))
        assert p.fwd_macs == expected
        assert any(f"a condition that depends on data was taken as {policy}" in text for text in p.assumptions)


@pytest.mark.parametrize("kind", [Known, Unknown, Counted, Scanned])
def test_a_trace_gives_what_the_module_gives(kind):
    model = kind()
    gm = symbolic_trace(model, meta_args={"x": INPUT})
    torch.testing.assert_close(gm(INPUT), model(INPUT))


# Operators whose result depends on data are logged as themselves, with their own count.



@pytest.mark.parametrize(("function", "args", "flops"), [
    (torch.unique, (torch.rand(1000),), 10_000),  # 1000 ⌈log₂ 1000⌉ comparisons
    (torch.unique, (torch.ones(1000, device="meta"),), 10_000),
    (lambda x: torch.unique(x, dim=0), (torch.rand(100, 3),), 100 * 3 * 7),
    (torch.masked_select, (torch.rand(100), torch.rand(100) > 0.5), 0),
    (lambda x: x[x > 0.5], (torch.rand(100),), 0),
    (lambda a, b: torch.linalg.lstsq(a, b)[0], (torch.rand(6, 4), torch.rand(6, 2)), 310),
], ids=["unique", "unique of unknown data", "unique rows", "masked_select", "mask", "lstsq"])
def test_an_operator_of_unknown_size_counts_by_its_own_formula(function, args, flops):
    model = Call(lambda m, *given: function(*given))
    predicted = profile(model, args=args, mode="infer", device="cpu")
    assert (predicted.fwd_flops, predicted.uncounted) == (flops, ())
    if not args[0].is_meta:
        assert measure(model, args=args, mode="infer", steps=1).fwd_flops == flops


class Tangent(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.rand(256, 256), requires_grad=False)

    def forward(self, x):
        return jvp(lambda t: t * self.gain, (x,), (x,))[1]


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_zero_tangents_take_no_memory(device):
    found = profile(Tangent(), torch.rand(256, 256), mode="infer", device=device)
    # x, gain, their product, the tangent of x times gain, and its sum with the zero tangent of gain times x: a copy
    assert found.peak_allocated_bytes == 5 * 256 * 256 * 4
    assert not [row for row in found.operators if "prims" in str(row)]


WIDE = 256 * 256 * 4  # bytes of a weight


class Ensemble(nn.Module):
    """Three members' weights in one, a template in a list, and what is registered besides."""

    def __init__(self, template="meta", stacked="cpu", besides=None, calls_template=False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 256, 256, device=stacked))
        self.template = [nn.Linear(256, 256, bias=False, device=template)]
        self.besides = None if besides is None else nn.Linear(256, 256, bias=False, device=besides)
        self.calls_template = calls_template

    def forward(self, x):
        if self.calls_template:
            x = self.template[0](x)
        return vmap(lambda w, x: functional_call(self.template[0], {"weight": w}, (x,)), (0, None))(self.weight, x)


@pytest.mark.parametrize("device", ["cpu", "h100"])
@pytest.mark.parametrize("settings, weights", [
    ({}, 3),                             # the template holds no bytes
    ({"besides": "cpu"}, 4),
    ({"template": "cpu"}, 4),            # one with data does
    ({"stacked": "meta"}, 4),            # a model that was built on meta is there as a whole
    ({"stacked": "meta", "besides": "cpu"}, 5), ({"besides": "meta"}, 5),  # and one that was partly
    ({"calls_template": True}, 4)])      # what an operator uses is on the device
def test_templates_on_meta_hold_no_bytes(settings, weights, device):
    for x in (torch.rand(8, 256), torch.rand(8, 256, device="meta")):
        found = profile(Ensemble(**settings), x, mode="infer", device=device)
        held = found.peak_by_category.get("parameter", 0) + found.peak_by_category.get("buffer", 0)
        assert held == weights * WIDE
        assert found.fwd_flops == (3 + settings.get("calls_template", 0)) * 2 * 8 * 256 * 256


def test_templates_stay_on_meta_in_the_model_of_a_user():
    model = Ensemble()
    profile(model, torch.rand(8, 256), mode="infer", device="cpu")
    assert model.template[0].weight.device.type == "meta"
    assert type(model.template[0].weight) is nn.Parameter
