"""Plans end to end: within the budget when replayed, and on real tensors the same step, bit by bit."""
import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from analyzer import profile, symbolic_profile, symbolic_trace
from analyzer.errors import InputError
from analyzer.tools.solver import InfeasibleBudgetError, Plan, Planner, measure_step, solve
from analyzer.tools.solver.kept_result import KeepResults
from analyzer.tools.solver.unit import peak_bytes
from analyzer.tools.solver.unit_maker import UnitMaker
from tests.small_model import Calls

from .plan_model import MODELS, build, take_step


def square(output):
    return output.loss if hasattr(output, "loss") else output.square().sum()


def planner_of(name, **options):
    model, inputs = build(name)
    gm = symbolic_trace(model, meta_args=inputs)
    return model, inputs, gm, Planner(gm, (), inputs, loss_fn=square, **options)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    different = [k for k in expected if not torch.equal(found[k], expected[k])]
    assert different == []


def assert_same_step(plan, gm, model, inputs):
    """A step of ``gm`` under ``plan`` is one of ``model``, from which it was traced."""
    assert_same(take_step(plan.apply(gm), model, inputs), take_step(model, model, inputs))


@pytest.mark.parametrize("name", MODELS)
def test_plans_of_operators_meet_their_budgets_and_change_no_result(name):
    model, inputs, gm, planner = planner_of(name)
    expected = take_step(model, model, inputs)
    whole = planner.unplanned
    costs = []
    for budget in (0.85, 0.7):
        try:
            plan = planner.solve(budget)
        except InputError as error:
            assert "smallest budget" in str(error)
            continue
        planned = plan.apply(gm)
        checked = measure_step(planned, (), inputs, loss_fn=square)
        assert checked == plan.planned
        assert checked.peak_activation_bytes <= budget * whole.peak_activation_bytes
        assert (checked.fwd_flops, checked.bwd_flops) == (whole.fwd_flops, whole.bwd_flops)
        assert_same(take_step(planned, model, inputs), expected)
        # the solver's account of what is run again is the checker's
        assert plan.cost == pytest.approx(checked.recompute_flops, rel=1e-3, abs=1e-4 * whole.fwd_flops)
        costs.append(checked.recompute_flops)
    assert costs and costs == sorted(costs) and costs[0] < 0.2 * whole.fwd_flops


def test_planned_graphs_can_be_copied():
    model, inputs, gm, planner = planner_of("resnet")
    planned = planner.solve(0.7).apply(gm)
    expected = take_step(planned, model, inputs)
    for again in (copy.deepcopy(planned), pickle.loads(pickle.dumps(planned))):
        assert_same(take_step(again, again, inputs), expected)


class Stretch(nn.Module):
    """Many steps of elementwise operators, which a function makes of all, with no product between them."""

    def __init__(self, function):
        super().__init__()
        self.function, self.scale = function, nn.Parameter(torch.rand(64))
        self.before, self.after = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.function(x, self.scale, self)


def gate(x, scale, _):
    for _ in range(32):
        x = x + torch.sigmoid(x * scale) * torch.tanh(x)
    return x


def scan(x, scale, model):
    x, h, seen = model.before(x), torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        g = torch.sigmoid(x[:, t])
        h = scale * h * g + (1 - g) * torch.tanh(x[:, t])
        seen.append(h)
    return model.after(torch.stack(seen, 1))


def scan_states(x, scale, model):
    x, h, seen = F.softplus(model.before(x)), x.new_zeros(len(x), 64, 16), []
    for t in range(x.shape[1]):
        h = torch.exp(-x[:, t, :, None] * scale[:16]) * h + x[:, t, :, None] * x[:, t, None, :16]
        seen.append(h.sum(-1))
    return model.after(torch.stack(seen, 1))


def normalize(x, scale, _):
    for _ in range(16):
        x = F.dropout(F.gelu(F.layer_norm(x, (64,), scale)), 0.1)
    return x


# shares of the memory that are possible; one division in each stretch leaves more than 90 %
@pytest.mark.parametrize(("function", "share"), [(gate, 0.25), (scan, 0.61), (scan_states, 0.31), (normalize, 0.31)])
def test_stretches_without_products_are_divided_too(function, share):
    torch.manual_seed(0)
    model, inputs = Stretch(function), {"x": torch.rand(8, 32, 64)}
    gm = symbolic_trace(model, meta_args=inputs)
    plan = solve(gm, share, kwargs=inputs)
    assert profile(plan.apply(gm), kwargs=inputs, device="cpu").peak_allocated_bytes < plan.unplanned.peak_bytes
    assert plan.planned.peak_activation_bytes <= share * plan.unplanned.peak_activation_bytes
    assert_same_step(plan, gm, model, inputs)


def test_the_smallest_budget_is_not_above_doing_nothing():
    def few_steps(x, scale, model):
        x, h, seen = model.before(x), torch.zeros_like(x[:, 0]), []
        for t in range(8):
            h = torch.tanh(scale * h + x[:, t])
            seen.append(h)
        return model.after(torch.stack(seen, 1))

    model, inputs = Stretch(few_steps), {"x": torch.rand(8, 8, 64)}
    with pytest.raises(InfeasibleBudgetError, match=r", 100\.0% of the activations"):
        solve(symbolic_trace(model, meta_args=inputs), 0.05, kwargs=inputs)


def test_budgets_of_the_whole_step():
    _, _, _, planner = planner_of("encoder")
    whole = planner.unplanned.peak_bytes
    plan = planner.solve(int(0.85 * whole))
    assert plan.budget_of == "step" and plan.planned.peak_bytes <= 0.85 * whole
    assert planner.solve("1 GiB").regions == ()
    _, _, _, burdened = planner_of("encoder", held_bytes=1000)
    assert burdened.solve(int(0.85 * whole) + 1000).planned.peak_bytes <= 0.85 * whole


def test_an_infeasible_budget_says_the_smallest_that_is_not():
    _, _, _, planner = planner_of("llama")
    with pytest.raises(
            InputError,
            match=r"budget=0\.01: no plan of \w+ stays within .*; the smallest budget that one was found for is "
                  r"([\d,]+) "
            r"bytes .*of the activations' memory\)") as caught:
        planner.solve(0.01)
    smallest = int(str(caught.value).partition("found for is ")[2].split()[0].replace(",", ""))
    plan = planner.solve(smallest / planner.unplanned.peak_activation_bytes + 1e-9)
    assert plan.planned.peak_activation_bytes <= smallest


def test_what_changes_buffers_by_hand_is_not_run_again():
    def count(model, x):
        for layer in model.layers:
            x = torch.tanh(F.gelu(layer(x)))
            model.seen.add_(x.detach().mean(0))
        return x

    torch.manual_seed(0)
    model, inputs = Calls(count, layers=nn.ModuleList(nn.Linear(16, 16) for _ in range(6)), seen=nn.Buffer(
        torch.zeros(16))), {"x": torch.randn(32, 16)}
    gm = symbolic_trace(model, meta_args=inputs)
    plan = solve(gm, 0.75, kwargs=inputs)
    assert plan.regions and not any(name.startswith("add_") for r in plan.regions for name in r.nodes)
    assert_same_step(plan, gm, model, inputs)


def test_the_user_s_own_checkpoints_stay():
    def run(model, x):
        for i, layer in enumerate(model.layers):
            x = checkpoint(layer, x, use_reentrant=False) if i == 1 else layer(x)
        return x

    torch.manual_seed(0)
    model, inputs = Calls(run, layers=nn.ModuleList(nn.Sequential(
        nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.GELU()) for _ in range(4))), {"x": torch.randn(64, 16)}
    gm = symbolic_trace(model, meta_args=inputs, trace_act_ckpt=True)
    plan = solve(gm, 0.8, kwargs=inputs)
    assert plan.regions and plan.apply(gm).code.count("checkpoint.checkpoint(") == len(plan.regions) + 1
    assert_same_step(plan, gm, model, inputs)


def test_autocast_blocks_are_not_cut():
    def run(model, x):
        for i, layer in enumerate(model.layers):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=i in (2, 3, 4)):
                x = F.silu(layer(x))
            x = x.float()
        return x

    torch.manual_seed(0)
    model, inputs = Calls(run, layers=nn.ModuleList(nn.Linear(32, 32) for _ in range(8))), {"x": torch.randn(64, 32)}
    gm = symbolic_trace(model, meta_args=inputs)
    plan = solve(gm, 0.7, kwargs=inputs)
    assert_same_step(plan, gm, model, inputs)


def test_a_kept_result_that_is_written_to_afterwards_is_noticed():
    w = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(4, 4, requires_grad=True)
    y = checkpoint(lambda x: x @ w, x, use_reentrant=False, context_fn=KeepResults(("product#0",)))
    z = checkpoint(lambda x: (x.sin() @ w).exp() * 2, x, use_reentrant=False, context_fn=KeepResults(("product#0",)))
    (y + z).sum().backward(retain_graph=True)
    first = x.grad.clone()
    x.grad = None
    (y + z).sum().backward()
    torch.testing.assert_close(x.grad, first)
    kept = []

    def region(x):
        kept.append(x @ w)
        return kept[-1].exp()

    y = checkpoint(region, x, use_reentrant=False, context_fn=KeepResults(("product#0",)))
    with torch.no_grad():
        kept[0].add_(1)
    with pytest.raises(RuntimeError, match="the result product#0 that a checkpoint keeps was written to in place"):
        y.sum().backward()


def test_what_follows_a_kept_attention_with_dropout_draws_the_same_again():
    library = torch.library.Library("tests_of_plans", "DEF")  # as CUDA's fused attention, which draws inside
    library.define("_scaled_dot_product_noisy(Tensor x, Tensor y) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
    library.impl("_scaled_dot_product_noisy", lambda x, y: (x @ y) * torch.bernoulli(torch.full((4, 4), 0.5)), "CPU")

    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            out = torch.ops.tests_of_plans._scaled_dot_product_noisy(x, y)
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.saved_tensors[0], None

    def gradient(**options):
        torch.manual_seed(0)
        x = torch.linspace(0, 1, 16).reshape(4, 4).requires_grad_()
        checkpoint(lambda x: nn.functional.dropout(Noisy.apply(x, torch.ones(4, 4)).sin()).exp(), x,
                   use_reentrant=False, **options).sum().backward()
        return x.grad

    assert torch.equal(gradient(context_fn=KeepResults(("product#0",))), gradient())


def test_skipped_products_are_not_run_again_and_leave_nothing():
    def region(x):
        y = x.sin()
        a, b, c = y @ w, torch.nn.functional.conv1d(y[None], v, bias), y @ w
        a += 1
        return a.view(4, 2, 2), b, c

    def gradients(**options):
        x = torch.linspace(0, 1, 16).reshape(4, 4).requires_grad_()
        total = sum(t.exp().sum() for t in checkpoint(region, x, use_reentrant=False, **options))
        torch.autograd.backward(total, retain_graph=True)
        once = x.grad.clone()
        with FlopCounterMode(display=False) as counted:
            total.backward()
        return once, x.grad, w.grad, v.grad, bias.grad, counted.get_total_flops()

    found = []
    for options in ({}, {"context_fn": KeepResults(skips=("product#0", "product#1"))}):
        torch.manual_seed(0)
        w, v, bias = (torch.randn(shape, requires_grad=True) for shape in ((4, 4), (3, 4, 1), (3,)))
        found.append(gradients(**options))
    *expected, all_flops = found[0]
    *mine, flops = found[1]
    assert all(torch.equal(a, b) for a, b in zip(mine, expected))
    assert all_flops - flops == 2 * 4 * 4 * 4 + 2 * 3 * 4 * 4


def test_what_is_made_of_no_tensor_is_made_again():
    def region(x):
        return (x * torch.scalar_tensor(2.0).add(1.0)).sin()

    x = torch.linspace(0, 1, 4, requires_grad=True)
    skips = KeepResults(skips=("aten.scalar_tensor.default#0",))
    checkpoint(region, x, use_reentrant=False, context_fn=skips).sum().backward()
    assert torch.equal(x.grad, 3 * (3 * x).cos())


def test_plans_skip_products_that_only_others_read():
    def rotate(model, x):
        for _ in range(3):
            y = model.norm(x)
            a, b, c = [layer(y) for layer in model.layers]
            x = torch.tanh(a.view(-1, 64)).view_as(a) * torch.sigmoid(b) + c.exp()
        return x

    torch.manual_seed(0)
    model = Calls(rotate, norm=nn.LayerNorm(64), layers=nn.ModuleList(nn.Linear(64, 64) for _ in range(3)))
    inputs = {"x": torch.randn(32, 64)}
    gm = symbolic_trace(model, meta_args=inputs)
    planner = Planner(gm, (), inputs)
    problem, make = planner.problem(whole=False), UnitMaker(planner.problem(whole=False))
    place = {name: i for i, atom in enumerate(problem.atoms) for name in atom}
    first = place["norm"]
    (three, *_), (with_view, *_) = make.regions(first, place["layers_2"]), make.regions(first, place["view"])
    assert three.skips == with_view.skips == (0, 1)  # the third is the last one, before which running again stops
    (reads, *_) = make.regions(first, place["tanh"])
    assert reads.skips == (1, 2)
    last = len(problem)
    division = [three, make.plain(three.last + 1, last - 1), make.plain(last, last)]
    plan = planner._plan(division, 0, "activations", "chain", None)
    assert plan.regions[0].skips == (0, 1) and Plan.from_json(plan.to_json()) == plan
    assert plan.cost == pytest.approx(plan.planned.recompute_flops, rel=1e-3)
    assert_same_step(plan, gm, model, inputs)


def test_plans_are_plain_data(tmp_path):
    _, _, gm, planner = planner_of("dense")
    plan = planner.solve(0.6)
    plan.to_json(tmp_path / "plan.json")
    again = Plan.from_json(tmp_path / "plan.json")
    assert again == plan
    assert "Products kept" in plan.table() and "checkpoints of operators" in str(plan)
    with pytest.raises(InputError, match="give the path of a saved plan, or its text"):
        Plan.from_json(tmp_path / "none.json")


def test_error_texts():
    model, inputs, gm, planner = planner_of("dense")
    plan = planner.solve(0.6)
    with pytest.raises(InputError, match=r"plan\.apply\(Dense\): takes a GraphModule of symbolic_trace; plan_blocks"):
        plan.apply(model)
    with pytest.raises(InputError, match="is no node of this graph"):
        plan.apply(symbolic_trace(nn.Linear(2, 2), meta_args={"input": torch.empty(1, 2)}))
    with pytest.raises(InputError, match=r"method='best': must be one of auto, chain, exact"):
        planner.solve(0.5, "best")
    with pytest.raises(InputError, match=r"budget=1\.5: a share of the activations' memory is above 0 and at most 1"):
        planner.solve(1.5)
    with pytest.raises(InputError, match=r"budget='150%': a share of the activations' memory is above 0 and at most 1"):
        planner.solve("150%")
    with pytest.raises(InputError, match=r"give what it is called with: args="):
        solve(gm, 0.5)
    with pytest.raises(InputError, match="takes a GraphModule"):
        solve(model, 0.5)


def test_a_profiled_graph_needs_no_arguments():
    model, inputs, gm, planner = planner_of("encoder", device="a100")
    expected = planner.solve(0.7)
    symbolic_profile(gm, kwargs=inputs, loss_fn=square, device="a100")
    assert solve(gm, 0.7) == expected
    assert solve(gm, 0.7, device="h200").device == "h200"
    symbolic_profile(gm, kwargs=inputs, mode="infer")
    assert solve(gm, 0.7).objective == "flops"


def test_a_value_that_nothing_saves_is_held_by_the_first_checkpoint_after_its_maker_s():
    def branch(model, x):
        y = F.group_norm(x, 4).transpose(1, 2)  # each layer saves a contiguous copy of its own
        return sum([layer(y).exp() for layer in model.layers])

    inputs = {"x": torch.empty(8, 64, 128, device="meta")}
    gm = symbolic_trace(Calls(branch, layers=nn.ModuleList(nn.Linear(64, 64) for _ in range(3))), meta_args=inputs)
    planner = Planner(gm, (), inputs)
    problem = planner.problem(whole=False)
    ends = [i for i, atom in enumerate(problem.atoms) if atom[-1].startswith("exp")]
    make = UnitMaker(problem)
    spans = list(zip([0, *(e + 1 for e in ends)], ends))
    division = [make.regions(a, b)[0] for a, b in spans]
    division += [make.plain(ends[-1] + 1,
                            len(problem) - 1)] * (ends[-1] + 1 < len(problem)) + [
                                make.plain(len(problem), len(problem))
                            ]
    y = 8 * 64 * 128 * 4
    # the result, and y where it comes from outside and is not held yet
    assert [u.held_bytes // y for u in division[:3]] == [1, 2, 1]
    plan = planner._plan(division, 0, "activations", "chain", None)
    assert plan.planned.peak_activation_bytes <= peak_bytes(division)


class WritesLate(nn.Module):
    """A value is made first and written in place last; where ``reads`` it is also read in between, before the write."""

    def __init__(self, reads):
        super().__init__()
        self.reads = reads
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(6))

    def forward(self, x):
        out = torch.ones_like(x) * 2
        for i, block in enumerate(self.blocks):
            x = x + block(x)
            if self.reads and i == 2:
                x = x + out
        out += x
        return out


@pytest.mark.parametrize("reads", [False, True])
def test_a_late_write_in_place_leaves_what_does_not_touch_the_value_free(reads):
    torch.manual_seed(0)
    model, inputs = WritesLate(reads), {"x": torch.randn(256, 16)}
    gm = symbolic_trace(model, meta_args=inputs)
    planner = Planner(gm, (), inputs, loss_fn=square)
    for budget in (0.7, 0.5):
        plan = planner.solve(budget)
        checked = measure_step(plan.apply(gm), (), inputs, loss_fn=square)
        assert checked.peak_activation_bytes <= budget * planner.unplanned.peak_activation_bytes
        assert_same_step(plan, gm, model, inputs)
