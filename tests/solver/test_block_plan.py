"""Plans of blocks: the best of all choices, within the budget when profiled, and on real tensors the same step."""
import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from analyzer import profile
from analyzer.errors import InputError
from analyzer.parallel import world
from analyzer.tools.solver import BlockChoice, BlockPlan, BlockPlanner, InfeasibleBudgetError, PlannedStep, plan_blocks
from analyzer.tools.solver.block_choice import apply_choices, undo_choices
from analyzer.tools.solver.block_option import CopyRate, account, choose, list_options
from analyzer.tools.solver.block_step import BlockInfo, BlockResult, BlockStep

from .plan_model import ResNet

MIB = 2**20


class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, scale=1.0):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1) * scale


def stack(count=6, width=64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), *(Block(width) for _ in range(count)), nn.Linear(width, 8))


def take_step(model, x):
    """What a step leaves: the output, gradients, buffers, random numbers. The model is as before."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.zero_grad()
    torch.manual_seed(1)
    output = model(x)
    output.square().sum().backward()
    found = {"output": output.detach(), "random": torch.get_rng_state()}
    found |= {f"gradient {name}": p.grad for name, p in model.named_parameters()}
    found |= {f"buffer {name}": b.clone() for name, b in model.named_buffers()}
    model.load_state_dict(before)
    return found


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


# choices of blocks whose costs are told

def block(i, results, inner=100, seconds=(1.0, 2.0), extra=0, can_wait=True):
    again = 0.5 + sum(r.seconds for r in results)
    return BlockInfo(str(i), inner, 10, 10, can_wait, again, tuple(results), *seconds, extra)


def chains():
    one = [BlockResult("a#0", 40, 3.0)], [BlockResult("a#0", 40, 3.0, False)]
    two = [BlockResult("a#0", 40, 3.0), BlockResult("b#0", 25, 1.0)]
    slow = [BlockResult("a#0", 60, 1.0, False), BlockResult("b#0", 20, 2.0)]
    yield [block(i, one[i % 2], can_wait=False) for i in range(8)], 0
    yield [block(i, two) for i in range(4)], 200
    yield [block(i, two if i % 2 else slow, extra=30 * (4 - i)) for i in range(4)], 50
    yield [block(i, slow, inner=90 + i, seconds=(0.2 * i, 1.0)) for i in range(4)], 0


def every_choice(info, following, rate):
    """All ways to treat one block: bytes kept, bytes sent, seconds."""
    found = [(info.saved_bytes, 0, 0.0)]
    for ways in itertools.product("kro", repeat=len(info.results)):
        for input_way in "ko":
            if "o" in (*ways, input_way) and following is None or input_way == "o" and not info.input_can_wait:
                continue
            if any(way == "o" and not r.can_wait for way, r in zip(ways, info.results)):
                continue
            sent = sum(r.bytes for way, r in zip(ways, info.results) if way == "o") + 10 * (input_way == "o")
            kept = sum(r.bytes for way, r in zip(ways, info.results) if way == "k") + 10 * (input_way == "k")
            cost = info.again_seconds - sum(r.seconds for way, r in zip(ways, info.results) if way != "r")
            if following is not None:
                cost += max(0, sent / rate.out - following.fwd_seconds)
                cost += max(0, sent / rate.back - following.bwd_seconds)
            found.append((kept, sent, cost))
    return list(dict.fromkeys(found))


def peak_of(step, ways):
    """Memory of a step: while each block runs backward what earlier ones keep, all of it, and what comes for the one
    before it; and at the loss.
    """
    held, peak = 0, 0
    for info, (kept, _, _), sent in zip(step.blocks, ways, [0, *(way[1] for way in ways)]):
        peak = max(peak, held + info.whole_bytes + info.extra_bytes + sent)
        held += kept
    return max(peak, held + step.extra_bytes)


@pytest.mark.parametrize("chain", list(chains()), ids=["eight", "four", "unlike", "few seconds"])
def test_no_other_choice_within_the_limit_is_faster(chain):
    infos, loss = chain
    step, rate = BlockStep(tuple(infos), loss), CopyRate(30.0, 30.0)
    ways = [every_choice(info, following, rate) for info, following in zip(infos, [*infos[1:], None])]
    # of alike ways, those that no other beats
    ways = [[w for w in row if not any(o != w and all(a <= b for a, b in zip(o, w)) for o in row)] for row in ways]
    every = [(peak_of(step, combination), sum(cost for *_, cost in combination))
             for combination in itertools.product(*ways)]
    least = min(peak for peak, _ in every)
    assert choose(step, rate, least - 1) is None
    for limit in sorted({least, *(int(least + (max(p for p, _ in every) - least) * share)
                                  for share in (0.1, 0.3, 0.5, 0.8, 1.0))}):
        chosen = choose(step, rate, limit, "exact")
        mine = [(c.kept_bytes, c.offloaded_bytes, c.recompute_seconds + c.copy_seconds) for c in chosen]
        assert peak_of(step, mine) <= limit
        assert sum(cost for *_, cost in mine) == pytest.approx(min(cost for peak, cost in every if peak <= limit))


def test_what_copies_hide_costs_nothing_and_the_rest_is_waited_for():
    info = block(0, [BlockResult("a#0", 40, 3.0)])
    following = replace(info, fwd_seconds=2.0, bwd_seconds=1.0)
    options = {(o.offloads, o.offloads_input): o for o in list_options(info, CopyRate(25.0, 40.0), following)}
    assert options[("a#0",), False].copy_seconds == 0.0                  # 40 bytes in 1.6 and 1.0 seconds
    both = options[("a#0",), True]
    assert both.copy_seconds == pytest.approx(50 / 40 - 1.0)             # 50 bytes in 2.0 and 1.25
    assert (both.kept_bytes, both.offloaded_bytes, both.recompute_seconds) == (0, 50, 0.5)
    assert not any(o.offloaded_bytes for o in list_options(info, CopyRate(25.0, 40.0), None))
    assert not any(o.offloaded_bytes for o in list_options(info, CopyRate(0.0, 0.0), following))


def test_the_host_s_memory_is_kept_to():
    step = BlockStep(tuple(block(i, [BlockResult("a#0", 40, 3.0)]) for i in range(8)), 0)
    free = choose(step, CopyRate(60.0, 60.0), 300)
    bound = choose(step, CopyRate(60.0, 60.0), 300, host_bytes=150)
    cost = [sum(c.recompute_seconds + c.copy_seconds for c in choices) for choices in (free, bound)]
    assert sum(c.offloaded_bytes for c in free) > 150 >= sum(c.offloaded_bytes for c in bound) and cost[0] < cost[1]
    assert not any(c.offloaded_bytes for c in choose(step, CopyRate(60.0, 60.0), 300, host_bytes=0))


# plans of models

@pytest.fixture(scope="module")
def planner():
    return BlockPlanner(stack(8, 512), torch.empty(2**14, 512, device="meta"), device="h100", optimizer="adamw")


def test_plans_stay_within_their_budgets_and_are_faster_than_running_all_again(planner):
    seconds = []
    for budget in (2500 * MIB, 1800 * MIB, "1200MiB"):
        plan = planner.plan(budget)
        seconds.append(plan.planned.step_seconds)
        assert plan.planned == PlannedStep.of(plan.profile)
        assert max(plan.planned.peak_allocated_bytes, plan.planned.peak_reserved_bytes) <= plan.budget_bytes
        assert plan.planned.step_seconds <= plan.recomputed.step_seconds
        assert BlockPlan.from_json(plan.to_json()) == replace(plan, profile=None)
    assert not any(c.runs_again for c in planner.plan("4GiB").choices)
    assert seconds == sorted(seconds) and plan.offloaded_bytes > 0
    with pytest.raises(InfeasibleBudgetError, match=r"budget=104,857,600: no plan of Sequential stays within "
                                                    r"100\.00 MiB; the least that one takes is [\d,]+ bytes"):
        planner.plan("100MiB")


@pytest.mark.parametrize("blocks", [[], "layers.0"])
def test_blocks_are_a_list_of_paths(blocks):
    with pytest.raises(InputError) as error:
        plan_blocks(stack(), torch.empty(4, 64), budget="1GiB", device="a100", blocks=blocks)
    assert str(error.value) == (f"blocks={blocks!r}: must be a list of paths of modules, such as "
                                "['layers.0', 'layers.1']")


def test_what_is_held_when_the_backward_pass_begins_is_what_the_plan_says(planner):
    plain, step, whole, recomputed = planner.profile_ends()

    def rest(found, kept_bytes):
        return found.phases["forward"].allocated_bytes - kept_bytes

    for limit in (2000 * MIB, 1100 * MIB):
        choices = choose(step, CopyRate.of(planner.device), limit)
        assert any(c.offloads for c in choices) and account(step, choices) <= limit
        # a product that runs again in the backward pass takes a workspace of that thread's, which stays
        again = any(c.runs_again and "product#0" not in (*c.keeps, *c.offloads) for c in choices)
        other = rest(recomputed, sum(c.kept_bytes for c in whole)) if again else rest(
            plain, sum(info.saved_bytes for info in step.blocks))
        assert rest(planner._profile(choices), sum(c.kept_bytes for c in choices)) == other


def test_a_planned_model_takes_the_same_step(planner):
    model, x = stack(8, 512), torch.randn(16, 512)
    expected = take_step(model, x)
    before = {path: dict(vars(m)) for path, m in model.named_modules()}
    plan = planner.plan("1800MiB")
    assert any(c.offloads for c in plan.choices) and any(c.keeps for c in plan.choices)
    assert plan.apply(model) is model
    assert_equal(take_step(model, x), expected)
    with pytest.raises(InputError, match=r"plan\.apply\(Sequential\): 1 is under a plan already; plan\.undo\(model\)"):
        plan.apply(model)
    with torch.no_grad():
        model(x)
    plan.undo(model)
    assert {path: dict(vars(m)) for path, m in model.named_modules()} == before
    with pytest.raises(InputError, match=r"plan\.undo\(Sequential\): 1 is not under a plan"):
        plan.undo(model)
    with pytest.raises(InputError, match=r"plan\.apply\(Linear\): Linear has no module '1', which the plan is for"):
        plan.apply(nn.Linear(2, 2))


@pytest.mark.parametrize("offloads_input", [False, True])
@pytest.mark.parametrize(("keeps", "offloads"), [
    ((), ()), (("product#0",), ()), ((), ("product#1", "aten.gelu.default#0")),
    (("aten.native_layer_norm.default#0",), ("product#0", "product#1"))])
def test_gradients_and_random_numbers_are_those_without_a_plan(keeps, offloads, offloads_input):
    model, x = stack(), torch.randn(32, 64)
    expected = take_step(model, x)
    choices = [BlockChoice(str(i), True, keeps, offloads, offloads_input) for i in range(1, 7)]
    apply_choices(model, choices, "test")
    assert_equal(take_step(model, x), expected)
    model.zero_grad()
    torch.manual_seed(1)
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()  # what was given once is computed or fetched again
    torch.testing.assert_close(model[1].up.weight.grad, 2 * expected["gradient 1.up.weight"])
    undo_choices(model, choices, "test")


def test_what_a_kept_result_alone_reads_is_not_computed_again():
    class Turn(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(64, 64)

        def forward(self, x):
            left, right = self.project(x).chunk(2, -1)
            return x + F.gelu(torch.cat([-right, left], -1) + x * 2)

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), *(Turn() for _ in range(4))), torch.randn(32, 64)
    expected = take_step(model, x)
    planner = BlockPlanner(model, torch.empty(2**16, 64, device="meta"), device="h100")
    _, step, *_ = planner.profile_ends()
    names = [r.name for r in step.blocks[1].results]
    # the sum is all that GELU's gradient reads: what it is made of is computed for it alone, but for the chunks
    assert {r.name: names[r.reader] for r in step.blocks[1].results if r.reader >= 0} == {
        "aten.cat.default#0": "aten.add.Tensor#0", "aten.neg.default#0": "aten.cat.default#0",
        "aten.mul.Tensor#0": "aten.add.Tensor#0"}
    rate = CopyRate.of(planner.device)
    option = next(o for o in list_options(step.blocks[1], rate, step.blocks[2]) if o.keeps == ("aten.add.Tensor#0",))
    assert set(option.skips) == {"aten.cat.default#0", "aten.neg.default#0", "aten.mul.Tensor#0"}
    choices = [replace(option, path=str(i)) for i in range(1, 5)]
    apply_choices(model, choices, "test")
    assert_equal(take_step(model, x), expected)
    undo_choices(model, choices, "test")


class Attending(nn.Module):
    """With dropout attention is one kernel of a GPU, and on a host two products and more."""

    def __init__(self, width=64):
        super().__init__()
        self.attend, self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        query, key, value = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.attend(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=0.1).transpose(1, 2).flatten(-2)
        return x + F.dropout(self.down(F.gelu(self.up(mixed))), 0.1)


def test_where_other_kernels_run_than_planned_nothing_is_skipped():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), *(Attending() for _ in range(4))), torch.randn(4, 32, 64)
    expected = take_step(model, x)
    planner = BlockPlanner(model, torch.empty(512, 128, 64, device="meta"), device="a100")
    _, step, *_ = planner.profile_ends()
    skipping = {option.skips: option for option in list_options(step.blocks[1], CopyRate(0.0, 0.0), None)
                if any(name.startswith("product") for name in option.skips)}
    assert skipping
    for option in skipping.values():
        choices = [replace(option, path=str(i)) for i in range(1, 5)]
        apply_choices(model, choices, "test")
        assert_equal(take_step(model, x), expected)
        undo_choices(model, choices, "test")


def test_running_statistics_are_updated_once():
    torch.manual_seed(0)
    model, x = ResNet().train(), torch.randn(4, 3, 16, 16)
    expected = take_step(model, x)
    choices = [BlockChoice(f"blocks.{i}", True, ("product#1",), ("product#0",), True) for i in range(6)]
    apply_choices(model, choices, "test")
    assert_equal(take_step(model, x), expected)


def test_a_choice_is_a_policy_of_pytorch():
    model, x = stack(2), torch.randn(32, 64)
    expected = take_step(model, x)
    choice = BlockChoice("1", True, ("product#0",), ("product#1",))
    nothing = PlannedStep(0, 0, None, None)
    plan = BlockPlan("stack", "h100", 1, nothing, nothing, nothing, (choice, BlockChoice("2")))
    forward, flops = model[1].forward, []
    for options in ({}, {"context_fn": plan.context_fn("1")}):
        model[1].forward = partial(checkpoint, forward, use_reentrant=False, **options)
        with FlopCounterMode(display=False) as counted:
            assert_equal(take_step(model, x), expected)
        flops.append(counted.get_total_flops())
    assert flops[0] - flops[1] == 2 * 32 * 64 * 256  # of the product that is kept; the other one ends the block
    with pytest.raises(InputError, match=r"context_fn\('2'\): the plan has no checkpoint there; it has them at 1"):
        plan.context_fn("2")


def test_a_rank_of_a_sharded_model_has_a_plan():
    def build():
        model = stack(6, 256).cuda()
        for layer in model[1:-1]:
            fully_shard(layer)
        return fully_shard(model)

    with world(8):
        planner = BlockPlanner(build, torch.empty(2**14, 256, device="meta"), device="h100", optimizer="adamw_fused")
        *_, recomputed = planner.profile_ends()
        budget = recomputed.peak_reserved_bytes + 64 * MIB
        plan = planner.plan(budget)
        assert plan.planned.peak_reserved_bytes <= budget and plan.planned.step_seconds < recomputed.step_seconds
        # what a plan costs is what the profile of the model with it says
        again = profile(lambda: plan.apply(build()), torch.empty(2**14, 256, device="meta"), device="h100",
                        optimizer="adamw_fused")
        assert PlannedStep.of(again) == plan.planned


def test_error_texts():
    with pytest.raises(InputError, match=r"budget='much': write bytes, as an int or as text such as '70GiB'"):
        plan_blocks(stack(), torch.empty(8, 64), budget="much", device="h100")
    with pytest.raises(InputError, match="plan_blocks: Linear has no repeated blocks"):
        plan_blocks(nn.Linear(8, 8), torch.empty(8, 8), budget="1GiB", device="h100")
    with pytest.raises(InputError, match="method='best': must be one of auto, chain, exact"):
        plan_blocks(stack(), torch.empty(8, 64), budget="1GiB", device="h100", method="best")
