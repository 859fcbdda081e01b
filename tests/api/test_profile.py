"""profile(): published figures, hand-derived bytes, and a model that is as it was."""
import copy
import dataclasses
from functools import partial

import pytest
import torch
from torch import nn

from analyzer import MetaTensorMode, Profile, ProfileOptions, profile
from analyzer.errors import DataDependentError, InputError, UnknownDeviceError
from analyzer.parallel import world
from analyzer.recipe.recipe import Recipe
from analyzer.zoo import MODELS


def image(batch):
    return torch.empty(batch, 3, 224, 224, device="meta")


def test_hand_derived_bytes_of_a_linear_relu_step():
    model = nn.Sequential(nn.Linear(256, 512, bias=False), nn.ReLU())
    p = profile(model, args=(torch.empty(128, 256),), optimizer="momentum")
    weight, x, y = 256 * 512 * 4, 128 * 256 * 4, 128 * 512 * 4
    rows = {n.name: n for n in p.nodes}
    assert (p.param_bytes, p.buffer_bytes, p.optimizer_bytes) == (weight, 0, weight)
    assert (rows["input"].output_bytes, rows["input"].incremental_bytes) == (x, x)  # the linear layer saves its input
    # relu saves its result, not its input
    assert (rows["_0"].output_bytes, rows["_0"].temp_bytes) == (0, y)
    assert (rows["_1"].output_bytes, rows["_1"].incremental_bytes) == (y, y)
    assert (rows["_0"].accumulate_bytes, rows["_1"].accumulate_bytes) == (x, x + y)
    assert (rows["_0"].param_bytes, rows["_0"].backward_bytes, rows["_1"].backward_bytes) == (weight, 0, y)
    assert (rows["_0"].fwd_flops, rows["_0"].bwd_flops,
            rows["_0"].fwd_macs) == (2 * 128 * 256 * 512, ) * 2 + (128 * 256 * 512, )


def test_optimizer_states_appear_in_the_first_step_and_stay():
    n = 1024 * 1024 * 4
    plain, adamw = (profile(nn.Linear(1024, 1024, bias=False), args=(torch.empty(1, 1024), ), optimizer=o)
                    for o in ("sgd", "adamw"))
    # and the step count, a float32 scalar on the host
    assert (plain.optimizer_bytes, adamw.optimizer_bytes) == (0, 2 * n)

    def held(phases, phase):
        return phases[phase].allocated_bytes

    assert held(adamw.first_step, "backward") == held(plain.first_step, "backward")
    for phases, phase in ((adamw.first_step, "zero_grad"), (adamw.phases, "forward"), (adamw.phases, "zero_grad")):
        other = plain.first_step if phases is adamw.first_step else plain.phases
        assert held(phases, phase) - held(other, phase) == 2 * n
    assert held(adamw.phases, "optimizer") - held(adamw.phases, "zero_grad") == n  # the gradient


def test_peaks_are_the_larger_of_both_steps_and_categories_add_up():
    p = profile(MODELS["resnet18"].factory, args=(image(4),), optimizer="adamw")
    peaks = [i.peak_allocated_bytes for step in (p.first_step, p.phases) for i in step.values()]
    assert p.peak_allocated_bytes == max(peaks)
    assert sum(p.peak_by_category.values()) == p.peak_allocated_bytes
    assert {"parameter", "gradient", "optimizer state", "buffer", "input"} <= set(p.peak_by_category)
    assert list(p.phases) == ["forward", "backward", "optimizer", "zero_grad"]


@pytest.mark.parametrize(("name", "mode"), [("resnet18", "infer"), *(
    (name, "train") for name in sorted(set(MODELS) - {"llama_405b", "llama_1b"}))])
def test_shipped_models_profile(name, mode):
    shipped = MODELS[name]
    args = (image(2), ) if "8x3" in shipped.input or "3x224" in shipped.input else (torch.ones(
        2, 64, dtype=torch.int64), )
    p = profile(shipped.factory, args=args, mode=mode)
    assert p.fwd_flops > 0
    assert (p.bwd_flops > 0) == (mode == "train")
    assert Profile.from_json(p.to_json()) == p


class Stateful(nn.Module):
    """Changes everything a forward pass can change."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.history = []
        self.last = None

    def forward(self, x, fail=None):
        self.count += 1
        self.history.append(x)
        self.last = self.norm(x) @ self.weight
        if fail is not None:
            raise fail
        return nn.functional.dropout(self.last)


def everything(model):
    return {
        **{k: (id(v), v.clone(), v.grad) for k, v in model.named_parameters()},
        **{k: (id(v), v.clone(), None) for k, v in model.named_buffers()}
    }


@pytest.mark.parametrize("fail", [None, ValueError("no"), KeyboardInterrupt()])
def test_the_model_its_gradients_and_the_generators_are_as_they_were(fail):
    model = Stateful()
    model(torch.randn(4, 8)).sum().backward()
    model.history.clear()
    model.last = None
    grads = {k: v.grad.clone() for k, v in model.named_parameters()}
    hook = model.register_forward_hook(lambda *a: None)
    x = torch.randn(4, 8)
    before, rng, attributes = everything(model), torch.get_rng_state(), copy.copy(model.__dict__)
    if fail is None:
        profile(model, args=(x,), optimizer="adamw")
    else:
        with pytest.raises(type(fail)):
            profile(model, args=(x,), kwargs={"fail": fail}, optimizer="adamw")
    assert torch.equal(rng, torch.get_rng_state())
    for name, (identity, value, _) in everything(model).items():
        assert identity == before[name][0]
        assert torch.equal(value, before[name][1])
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, grads[name])
        assert type(p) is nn.Parameter
    assert model.__dict__ == attributes
    assert model.history == []
    assert list(model._forward_hooks) == [hook.id]
    assert model.training


@pytest.mark.parametrize(("call", "error", "text"), [
    (dict(mode="test"), InputError, r"mode='test': must be 'train' or 'infer'"),
    (dict(optimizer="lyon"), InputError, r"optimizer='lyon': give one of sgd, momentum"),
    (dict(autocast="bf16"), InputError, r"autocast='bf16': must be a torch.dtype"),
    (dict(device="h2000"), UnknownDeviceError, r"h2000.*h200"),
    (dict(options=3), InputError, "options=3"),
    (dict(loss_fn=lambda out: out), InputError, r"scalar.*\(2, 4\)"),
    (dict(kwargs={"y": torch.empty(1)}), InputError, r"forward.*'y'"),
    (dict(args=()), InputError, "needs input too; give it"),
])
def test_bad_arguments_are_named(call, error, text):
    with pytest.raises(error, match=f"(?s){text}"):
        profile(nn.Linear(3, 4), **{"args": (torch.empty(2, 3),), **call})


@pytest.mark.parametrize("model", [3, lambda: 3])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(InputError, match="nn.Module"):
        profile(model, args=(torch.empty(2, 3),))


def test_arguments_may_be_real_meta_or_made_under_the_mode_and_nested():
    class Nested(nn.Module):
        def forward(self, pair, *, named):
            return pair[0] + pair[1]["b"] * named

    with MetaTensorMode():
        made = torch.rand(2, 3, device="cuda")
    p = profile(Nested(), args=((made, {"b": torch.rand(2, 3)}), ), kwargs={"named": torch.empty(2, 3, device="meta")},
                mode="infer")
    assert [n.op for n in p.nodes].count("placeholder") == 3
    assert all(n.outputs[0].device == "cuda:0" for n in p.nodes if n.op == "placeholder")


def test_a_users_own_profiler_adds_a_column_and_replaces_by_name():
    from analyzer.profilers.annotation import Annotation

    def count_calls(log):
        out = Annotation()
        for call in log.calls:
            if call.node >= 0 and call.phase == "forward":
                out.add(out.nodes, call.node, "calls", 1)
        return out

    p = profile(nn.Linear(3, 4), args=(torch.empty(2, 3),), mode="infer", profilers=[count_calls])
    assert next(n for n in p.nodes if n.op == "call_module").extra["calls"] >= 1
    replaced = profile(nn.Linear(3, 4), args=(torch.empty(2, 3), ), mode="infer",
                       profilers={"flops": lambda log: Annotation()})
    assert replaced.fwd_flops is None


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    value: torch.Tensor


class Scored(nn.Module):
    """Gives its logits and their loss, in whatever ``form`` makes of the two."""

    def __init__(self, form):
        super().__init__()
        self.fc, self.form = nn.Linear(64, 256), form

    def forward(self, x):
        logits = self.fc(x)
        return self.form(logits, logits.float().logsumexp(1).mean())


FORMS = {
    "tuple": (lambda logits, loss: (logits, loss), lambda out: out[1]),
    "loss first": (lambda logits, loss: [loss, logits, logits.detach()], lambda out: out[0]),
    "dict": (lambda logits, loss: {"logits": logits, "objective": loss}, lambda out: out["objective"]),
    "nested": (lambda logits, loss: (logits, {"inner": (loss, logits.argmax(1))}), lambda out: out[1]["inner"][0]),
    "dataclass": (Output, lambda out: out.value)}


@pytest.mark.parametrize("name", FORMS)
def test_the_only_scalar_among_outputs_is_the_loss(name):
    form, loss_fn = FORMS[name]
    x = torch.rand(32, 64)
    for reuse in (True, False):
        p, told = (profile(Scored(form), x, optimizer="sgd", loss_fn=fn, reuse=reuse) for fn in (None, loss_fn))
        assert p.assumptions == ("the only scalar of the model's 2 outputs is taken as the loss",)
        for field in ("bwd_flops", "peak_allocated_bytes", "peak_by_category", "step_seconds", "fwd_flops", "phases"):
            assert getattr(p, field) == getattr(told, field), field
    recipe = Recipe(optimizer="sgd", accumulate=2)
    twice, told = (profile(Scored(form), x, **recipe.profile_options("train", fn)) for fn in (None, loss_fn))
    assert twice.bwd_flops == told.bwd_flops and twice.peak_allocated_bytes == told.peak_allocated_bytes


@pytest.mark.parametrize(("form", "said"), [
    (lambda logits, loss: (logits, loss, 2 * loss), "the loss is taken as the sum of the model's 3 outputs, of which 2 "
                                                    "are scalars; loss_fn= says otherwise"),
    (lambda logits, loss: (loss, 2 * loss), None), (lambda logits, loss: (logits, 2 * logits), None),
    (lambda logits, loss: (logits.detach(), loss), None), (lambda logits, loss: loss, None)])
def test_a_sum_of_outputs_is_said_where_it_may_not_be_meant(form, said):
    assert profile(Scored(form), torch.rand(32, 64)).assumptions == (() if said is None else (said,))


def _build(box, device="cuda"):
    box["model"] = nn.Linear(64, 64, bias=False).to(device)
    box["optimizer"] = torch.optim.AdamW(box["model"].parameters())
    return box["model"]


def test_an_optimizer_of_before_the_run_is_refused_or_has_its_states():
    """Outside of a world other parameters are put in the place of a model's: an optimizer that was made with it would
    update the old ones, which have no gradients, and its states would be missing.
    """
    box = {}

    def step(model, *_):
        box["model"](torch.zeros(8, 64, device="cuda")).sum().backward()
        box["optimizer"].step()

    with world(1):
        inside = profile(partial(_build, box), step=step)
    assert inside.optimizer_bytes == 2 * inside.param_bytes == 2 * 4 * 64 * 64
    refused = "step: AdamW holds the parameters from before the run.*optimizer=lambda params"
    with pytest.raises(InputError, match=refused):
        profile(partial(_build, box), step=step)
    model = _build(box, "cpu")  # on real data
    before = model.weight.detach().clone()
    with pytest.raises(InputError, match=refused):
        profile(model, torch.zeros(8, 64), step=lambda model, _, x: (model(x).sum().backward(),
                                                                     box["optimizer"].step()))
    made = profile(model, torch.zeros(8, 64), optimizer=torch.optim.AdamW, step=lambda model, optimizer, x: (
        model(x).sum().backward(), optimizer.step()))
    assert made.optimizer_bytes == inside.optimizer_bytes
    assert model.weight.equal(before) and model.weight.grad is None and not box["optimizer"].state
    own = profile(model, torch.zeros(8, 64), step=lambda model, _, x: (
        model(x).sum().backward(), torch.optim.AdamW(model.parameters()).step()))
    assert own.optimizer_bytes == inside.optimizer_bytes  # those of the last step; an optimizer each


def test_a_backward_pass_that_calls_the_engine_itself_is_one():
    """As Megatron-LM does. Of the sum of the two gradients of `h` the first is the engine's own, and is added to."""
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

        def forward(self, x):
            h = self.a(x)
            return (self.b(h) + self.b(h * 2) + h).sum()

    def direct(model, optimizer, x):
        loss = model(x)
        torch.autograd.Variable._execution_engine.run_backward(
            tensors=(loss,), grad_tensors=(torch.ones_like(loss),), keep_graph=False, create_graph=False, inputs=(),
            allow_unreachable=True, accumulate_grad=True)
        optimizer.step()
        optimizer.zero_grad()

    def usual(model, optimizer, x):
        loss = model(x)
        loss.backward(torch.ones_like(loss))
        optimizer.step()
        optimizer.zero_grad()

    engine = torch.autograd.Variable._execution_engine
    found, expected = (profile(Net, (torch.zeros(512, 64),), step=step, optimizer="sgd", device="h100_sxm")
                       for step in (direct, usual))
    assert torch.autograd.Variable._execution_engine is engine
    assert found.bwd_flops == expected.bwd_flops > 0
    assert {name: (phase.flops, phase.peak_allocated_bytes) for name, phase in found.phases.items()} == {
        name: (phase.flops, phase.peak_allocated_bytes) for name, phase in expected.phases.items()}


def test_a_custom_function_may_have_a_name_of_its_own():
    class Named(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.name = "norm"  # beside which the method of autograd's nodes is hidden
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient + gradient

    class Net(nn.Linear):
        def forward(self, x):
            return Named.apply(super().forward(x))

    named, plain = (profile(lambda kind=kind: kind(8, 8), (torch.zeros(4, 8),), device="h100_sxm")
                    for kind in (Net, nn.Linear))
    assert named.bwd_flops == plain.bwd_flops + 4 * 8  # of the sum


def reads(read):
    def step(model, optimizer, x, y):
        out = model(x)
        loss = torch.nn.functional.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        read(out.detach(), loss.detach(), y)
    return step


SCALAR = "an unknown scalar (torch.float32) was taken as 1"


@pytest.mark.parametrize(("read", "said"), [
    (lambda out, loss, y: loss.item(), SCALAR), (lambda out, loss, y: float(loss), SCALAR),
    (lambda out, loss, y: print(f"loss {loss:.4f}"), SCALAR), (lambda out, loss, y: print(loss), None),
    (lambda out, loss, y: loss.cpu().tolist(), SCALAR),
    (lambda out, loss, y: (out.argmax(1) == y).sum().item(), "an unknown scalar (torch.int64) was taken as 8")],
    ids=["item", "float", "format", "print", "tolist", "accuracy"])
def test_numbers_that_a_step_reads_outside_of_modules_are_placeholders(read, said):
    """As in a dry run; the figures are those of the step that reads none. Of layers that compute zero the largest class
    is the first, which all eight labels are.
    """
    batch = torch.rand(8, 64), torch.zeros(8, dtype=torch.int64)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])
    found, right = [profile(model, batch, step=reads(one), optimizer="sgd", device="h100")
                    for one in (read, lambda out, loss, y: None)]
    told = [text for text in found.assumptions if text not in right.assumptions]
    assert [said in text for text in told] == ([] if said is None else [True])
    assert (found.fwd_macs, found.bwd_macs) == (right.fwd_macs, right.bwd_macs)
    assert found.peak_allocated_bytes == right.peak_allocated_bytes
    if said is SCALAR:
        with pytest.raises(DataDependentError, match="unknown_value='placeholder'"):
            profile(model, batch, step=reads(read), optimizer="sgd", options=ProfileOptions(unknown_value="error"))


def test_numbers_that_a_module_reads_in_a_step_are_no_placeholders():
    class Reading(torch.nn.Linear):
        def forward(self, x):
            hidden = super().forward(x)
            return hidden * hidden.exp().mean().item()

    with pytest.raises(DataDependentError, match="needs the contents"):
        profile(Reading(4, 4), torch.rand(2, 4), step=lambda model, _, x: model(x).sum().backward())


@pytest.mark.parametrize("reuse", [True, False])
def test_inference_is_run_under_what_was_asked_for(reuse):
    """Under autocast no_grad keeps casts of weights that require a gradient; inference_mode not, since torch 2.11."""
    def blocks():
        return nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(8)])

    def run(**options):
        return profile(blocks, (torch.rand(8, 1024),), mode="infer", autocast=torch.bfloat16, reuse=reuse,
                       options=ProfileOptions(**options))

    usual, found = run(), run(inference_mode=True)
    kept = 7 * 2 * 1024**2 if torch.__version__ >= "2.11" else 0
    assert usual.peak_allocated_bytes - found.peak_allocated_bytes == kept and usual.fwd_flops == found.fwd_flops
    for p, name in (usual, "no_grad"), (found, "inference_mode"):
        assert p.grad_mode == name
        assert p.screen().splitlines()[0] == f"Sequential: one infer step on h200 ({name}, autocast bfloat16)"
    with pytest.raises(InputError, match="no gradient is computed in it"):
        profile(blocks, (torch.rand(8, 1024),), options=ProfileOptions(inference_mode=True))
