"""Training in float8 as torchao writes it: what it computes, saves and sends, beside the same model in bfloat16."""
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from analyzer import ProfileOptions, profile
from analyzer.parallel import world

float8 = pytest.importorskip("torchao.float8")
ROWS, WIDTH, WIDE = 4096, 1024, 2048
ONE_STEP = ProfileOptions(steps=1)


def two_layers(recipe=None, dtype=torch.bfloat16, **settings):
    model = nn.Sequential(nn.Linear(WIDTH, WIDE, bias=False), nn.Linear(WIDE, WIDTH, bias=False)).to(dtype)
    if recipe is None:
        return model
    config = float8.Float8LinearConfig(**settings) if settings else float8.Float8LinearConfig.from_recipe_name(recipe)
    return float8.convert_to_float8_training(model, config=config)


def profile_of(build):
    x = torch.empty(ROWS, WIDTH, dtype=torch.bfloat16, device="meta", requires_grad=True)
    return profile(build, args=(x,), device="h100_sxm", options=ONE_STEP)


@pytest.mark.parametrize(("recipe", "scaled", "plain"), [
    (None, 0, 6), ("tensorwise", 6, 0), ("rowwise", 6, 0),
    ("rowwise_with_gw_hp", 4, 2)])  # gradients of weights in bfloat16
def test_products_are_those_of_the_recipe_at_the_rate_of_their_format(recipe, scaled, plain):
    p = profile_of(lambda: two_layers(recipe))
    calls = {name: [o for o in p.operators if o.operator == name] for name in ("aten._scaled_mm.default",
                                                                               "aten.mm.default")}
    assert [sum(o.calls for o in found) for found in calls.values()] == [scaled, plain]
    product = 2 * ROWS * WIDTH * WIDE
    assert [sum(o.flops for o in found) for found in calls.values()] == [scaled * product, plain * product]
    assert p.uncounted == ()
    # the eager step saves what it was given, in the format that it came in, and casts it again in backward; the
    # library of scaled products has a workspace of its own
    more = p.phases["forward"].allocated_bytes - profile_of(two_layers).phases["forward"].allocated_bytes
    assert more == (2**20 if scaled else 0)
    if scaled and plain:
        seconds = {name: sum(o.seconds for o in found) / sum(o.calls for o in found) for name, found in calls.items()}
        assert seconds["aten._scaled_mm.default"] < 0.7 * seconds["aten.mm.default"]


@pytest.mark.parametrize(("settings", "gathered"), [
    ({"enable_fsdp_float8_all_gather": True}, 1), ({"enable_fsdp_float8_all_gather": False}, 2), (None, 2)])
def test_fsdp_gathers_bytes_where_torchao_casts_before(settings, gathered):
    def build():
        with torch.device("meta"):
            model = two_layers(settings and "tensorwise", torch.float32, **settings or {})
        for layer in model:
            fully_shard(layer, mesh=init_device_mesh("cuda", (4,)), reshard_after_forward=True,
                        mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        return model.to_empty(device="cuda")

    with world(4):
        p = profile_of(build)
    elements = 2 * WIDTH * WIDE
    assert (p.params, p.param_bytes) == (elements // 4, elements)
    whole = {phase: sum(row.bytes for row in p.comm if row.kind == "all_gather" and row.phase == phase)
             for phase in ("forward", "backward")}
    assert whole == {"forward": gathered * elements, "backward": gathered * elements}


def test_scales_of_all_weights_are_computed_by_one_reduction():
    def build():
        with torch.device("meta"):
            model = two_layers("tensorwise", torch.float32, enable_fsdp_float8_all_gather=True)
        return fully_shard(model, mesh=init_device_mesh("cuda", (4,))).to_empty(device="cuda")

    def step(model, optimizer, x):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        float8.precompute_float8_dynamic_scale_for_fsdp(model)

    with world(4):
        p = profile(build, (torch.zeros(ROWS, WIDTH),), optimizer="adamw_fused", device="h100_sxm", step=step,
                    options=ProfileOptions(steps=2))
    assert [row.bytes for row in p.comm if row.kind == "all_reduce"] == [2 * 4]  # the largest element of each weight
    assert p.params == 2 * WIDTH * WIDE // 4


def save_products(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("saves", "again"), [(True, 0), (False, 1)])
def test_a_policy_of_a_compiled_checkpoint_is_asked_of_products_of_float8(saves, again):
    def build():
        given = {"context_fn": lambda: create_selective_checkpoint_contexts(save_products)} if saves else {}
        return torch.compile(checkpoint_wrapper(two_layers("rowwise"), preserve_rng_state=False, **given))

    calls = {o.phase: o.calls for o in profile_of(build).operators if o.operator == "aten._scaled_mm.out"}
    # of what is not saved, the first product is an input of the second's gradients
    assert (calls["forward"], calls["backward"], calls.get("recompute", 0)) == (2, 4, again)
