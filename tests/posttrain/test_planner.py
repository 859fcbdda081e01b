"""Steps of post-training: which phases there are, what lies on a card in each, what takes how long."""
import json
from dataclasses import replace
from typing import Any

import pytest

from analyzer.errors import InputError
from analyzer.tools.posttrain import Answers, EnginePlan, Planner, PosttrainPlan, PosttrainProfile
from analyzer.tools.posttrain.advice import find_room, list_variants
from analyzer.tools.posttrain.run import usual_algorithm, usual_plan
from analyzer.tools.posttrain.trainer import divide_passes
from analyzer.tools.search import Layout
from analyzer.tools.serving import Layout as EngineLayout
from analyzer.zoo.target import load_target
from tests.job.test_training import CONFIG


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return f"hf:{folder}"


@pytest.fixture(scope="module")
def planner(model: str) -> Planner:
    return Planner(load_target(model))


def _plan(model: str, algorithm: str = "grpo", **fields: Any) -> PosttrainPlan:
    plan = usual_plan(model, "4xh100", algorithm)
    engine = None if algorithm == "dpo" else EnginePlan(layout=EngineLayout(1))
    usual = {"engine": engine, "prompts": 16, "prompt": 32, "longest_prompt": 64, "answers": Answers.of(64, 192)}
    if algorithm != "dpo":
        usual["samples"] = 4
    return replace(plan, **{**usual, **fields})


def _by_name(found: PosttrainProfile) -> dict[str, Any]:
    return {phase.name: phase for phase in found.phases}


@pytest.fixture(scope="module")
def shared(planner: Planner, model: str) -> PosttrainProfile:
    return planner.plan(_plan(model), price=2.0)


def test_phases_of_a_step(shared: PosttrainProfile) -> None:
    assert [phase.name for phase in shared.phases] == ["sync", "rollout", "scoring", "update"]
    assert shared.step_seconds == pytest.approx(sum(phase.seconds for phase in shared.phases))
    assert all(phase.low <= phase.seconds <= phase.high for phase in shared.phases)
    assert shared.dollars == pytest.approx(1000 * shared.step_seconds * 4 * 2.0 / 3600)
    assert shared.fits and "fits on h100_sxm" in str(shared)
    assert json.loads(shared.to_json())["phases"][1]["name"] == "rollout"


@pytest.mark.parametrize(("algorithm", "names", "scored"), [
    ("rloo", ["sync", "rollout", "scoring", "update"], "old log probabilities, the reference's"),
    ("dapo", ["sync", "rollout", "scoring", "update"], "old log probabilities"),
    ("ppo", ["sync", "rollout", "scoring", "update"], "old log probabilities, the reference's, values"),
    ("dpo", ["scoring", "update"], "the reference's")])
def test_phases_of_algorithms(planner: Planner, model: str, algorithm: str, names: list[str], scored: str) -> None:
    found = planner.plan(_plan(model, algorithm))
    assert [phase.name for phase in found.phases] == names
    assert _by_name(found)["scoring"].said.startswith(f"{scored}:")


def test_a_critic_doubles_updates(planner: Planner, model: str, shared: PosttrainProfile) -> None:
    ppo = _by_name(planner.plan(_plan(model, "ppo")))
    assert ppo["update"].seconds == pytest.approx(2 * _by_name(shared)["update"].seconds)
    assert ppo["update"].card_bytes > _by_name(shared)["update"].card_bytes


def test_what_an_engine_takes_asleep_and_awake(planner: Planner, model: str, shared: PosttrainProfile) -> None:
    """Awake it has its cache while the model trains, too; asleep its weights wait on the host, or are dropped."""
    engine = EnginePlan(layout=EngineLayout(1), sleep=0)
    awake = _by_name(planner.plan(_plan(model, engine=engine)))
    dropped = _by_name(planner.plan(_plan(model, engine=replace(engine, sleep=2))))
    asleep = _by_name(shared)
    assert awake["update"].card_bytes - asleep["update"].card_bytes > 0.5 * 80e9 / 2
    assert asleep["update"].host_bytes - dropped["update"].host_bytes == 4 * planner.sampler(
        _plan(model)).sample(_plan(model)).deployment.weight_bytes()


def test_what_stays_of_the_trainer_while_engines_sample(planner: Planner, model: str, shared: PosttrainProfile) -> None:
    """Of four ranks a quarter of the weights in float32, and of two moments."""
    kept = _by_name(planner.plan(_plan(model, offloads_model=False, offloads_optimizer=False)))
    params = sum(p.numel() for p in load_target(model).build().parameters())
    more = kept["rollout"].card_bytes - _by_name(shared)["rollout"].card_bytes
    assert more == pytest.approx(12 * params / 4, rel=0.01)
    assert kept["sync"].seconds < _by_name(shared)["sync"].seconds and not kept["sync"].host_bytes


def test_engines_apart_work_while_the_trainer_does(planner: Planner, model: str) -> None:
    engine = EnginePlan(layout=EngineLayout(1), devices=2)
    layout = replace(_plan(model).layout, shard=2)
    turns = planner.plan(_plan(model, engine=engine, layout=layout))
    both = planner.plan(_plan(model, engine=engine, layout=layout, lag=1))
    parts = _by_name(both)
    assert turns.step_seconds == pytest.approx(sum(phase.seconds for phase in turns.phases))
    assert both.step_seconds == pytest.approx(max(
        parts["rollout"].seconds + parts["sync"].seconds,
        parts["sync"].seconds + parts["scoring"].seconds + parts["update"].seconds))
    assert both.idle_share < turns.idle_share
    assert parts["update"].cards == "trainer" and parts["rollout"].cards == "engines"


def test_the_entropy_of_tokens_and_parts_of_the_loss(planner: Planner, model: str) -> None:
    """Rows of 4,096 tokens by 4,096 words: an array in float32 has 64 MiB."""
    room = 4096
    plain, entropy, parts = (
        planner.trainer(_plan(model, **more)).fullest_update(_plan(model).layout, room).needed_bytes
        for more in ({}, {"entropy": True}, {"loss_chunks": 16}))
    assert entropy - plain >= room * 4096 * 4
    assert plain - parts >= room * 4096 * 4


def test_passes_are_as_many_on_each_rank(model: str) -> None:
    """64 sequences of 96 tokens, in rows of 256: two a row, so 32 rows, 8 of each rank."""
    plan = _plan(model, answers=Answers.read("64"), tokens=256)
    assert divide_passes(plan, 64, 256, 4) == divide_passes(replace(plan, packs=False, rows=2), 64, 256, 4)
    found = divide_passes(plan, 64, 256, 4)
    assert (found.count, found.rows, found.tokens) == (8, 2, 96)


def test_padding_costs_what_the_longest_row_has(model: str) -> None:
    plan = _plan(model, answers=Answers((32, 96), 96, "two"), packs=False, rows=4, tokens=0)
    packed, padded = (divide_passes(replace(plan, packs=packs, tokens=1024), 64, 1024, 1) for packs in (True, False))
    assert padded.count * padded.rows * padded.tokens > packed.count * packed.rows * packed.tokens


def test_the_room_that_is_left(planner: Planner, model: str, shared: PosttrainProfile) -> None:
    """At most the 64 x 96 tokens of a step that one of four ranks has; of a card with less memory as many as fit."""
    plan = _plan(model)
    assert find_room(planner, plan, shared) == pytest.approx(64 * 96 // 4, abs=64)
    update = _by_name(shared)["update"]
    small = find_room(planner, plan, replace(shared, capacity_bytes=update.card_bytes + 2**25))
    assert small is not None and plan.room < small < 64 * 96 // 4
    assert find_room(planner, plan, replace(shared, capacity_bytes=update.card_bytes // 4)) == 0


def test_changes_that_are_looked_at(model: str) -> None:
    plan = _plan(model)
    names = [name for name, _ in list_variants(plan, 16 * plan.longest, True)]
    assert names == [f"micro-batches of up to {16 * plan.longest:,} tokens", "no checkpoints",
                     "engines of as many ranks as is fastest", "engines on 2 devices of their own, with weights one "
                     "step old"]


@pytest.mark.parametrize(("fields", "match"), [
    ({"tokens": 100}, "the longest prompt with its answer has 256"), ({"prompt": 65}, "their maximum is given as 64"),
    ({"lag": 1}, "give them devices of their own"), ({"reference": "adapter"}, "give lora too"),
    ({"prompts": 0}, "prompts 0: must be a whole number"), ({"engine": None}, "samples answers"),
    ({"engine": EnginePlan(devices=4)}, "the trainer needs some of the 4")])
def test_plans_that_cannot_be_are_refused(model: str, fields: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        _plan(model, **fields)


def test_a_layout_that_the_model_cannot_have_is_refused(planner: Planner, model: str) -> None:
    with pytest.raises(InputError, match="8 stages: it has 4 blocks"):
        planner.plan(replace(_plan(model), layout=Layout(pipeline=8, micro_batches=8), engine=None, algorithm="dpo",
                             samples=2, devices=8))


def test_what_follows_from_an_algorithm(model: str) -> None:
    plan = usual_plan(model, "4xh100")
    assert usual_algorithm("dapo", plan)["reference"] == "none"
    assert usual_algorithm("grpo", replace(plan, lora="r=8"))["reference"] == "adapter"
