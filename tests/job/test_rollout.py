"""Rollouts: what an engine takes beside the model that learns of its answers, and what a step waits for them."""
import json
from dataclasses import replace
from typing import Any

import pytest

from analyzer.hardware import find_device
from analyzer.tools.job.plan import RolloutPlan, ServingPlan, TrainingPlan
from analyzer.tools.job.rollout import Rollout, sample_rollout, wait
from analyzer.tools.job.screen import describe_training
from analyzer.tools.job.training import profile_training
from analyzer.tools.serving.simulation import NoRoomError
from tests.job.test_training import CONFIG

GIB = 2**30


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> TrainingPlan:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    server = ServingPlan(model=str(folder), engine="vllm", memory_share=0.5, sequences=8)
    return TrainingPlan(model=str(folder), task="policy", micro_batch=2, length=512, autocast="bf16",
                        rollout=RolloutPlan(server=server, sequences=8, new=256))


def _sample(plan: TrainingPlan, **fields: Any) -> Rollout:
    assert plan.rollout is not None
    found = sample_rollout(replace(plan, rollout=replace(plan.rollout, **fields)), "h100", None)
    assert found is not None
    return found


@pytest.mark.parametrize(("fields", "expected"), [  # of a model of 6 GiB with states of 12, whose update needs 30
    ({}, "half + 30 - pass"), ({"sleeps": True}, "half + 18"),
    ({"sleeps": True, "offloads_model": True}, "half + 12"), ({"sleeps": True, "offloads_optimizer": True}, "half + 6"),
    ({"sleeps": True, "offloads_optimizer": True, "offloads_model": True}, "half"), ({"is_apart": True}, "30")])
def test_what_is_needed(plan: TrainingPlan, fields: dict[str, Any], expected: str) -> None:
    own = profile_training(replace(plan, rollout=None), "h100").verdict
    assert own is not None
    own = replace(own, needed_bytes=30 * GIB)
    rollout = _sample(plan, **fields)
    found, memory = rollout.judge(own, 6 * GIB, 12 * GIB), find_device("h100").memory_bytes or 0
    graphs = 0 if rollout.engine is None else rollout.engine.graph_bytes  # beside the share, whether it sleeps or not
    assert (graphs == 0) is bool(fields.get("is_apart"))
    sizes = {"half": memory // 2 + graphs, "pass": 0 if rollout.engine is None else rollout.engine.pass_bytes}
    more, _, less = expected.partition(" - ")
    held = [sizes[word] if word in sizes else int(word) * GIB for word in more.split(" + ")]
    assert found.needed_bytes == sum(held) - sizes.get(less, 0)
    assert (found.phase == "rollout") is bool(fields.get("sleeps"))


def test_an_engine_of_unknown_size(plan: TrainingPlan) -> None:
    own = profile_training(replace(plan, rollout=None), "h100").verdict
    unknown = replace(_sample(plan), start=replace(_sample(plan).start, deployment=replace(
        _sample(plan).start.deployment, device=replace(find_device("h100"), memory_bytes=None))))
    assert own is not None and unknown.engine is not None and unknown.engine.sampling_bytes is None
    found = unknown.judge(own, 6 * GIB, 12 * GIB)
    assert (found.fits, found.needed_bytes) == (None, None) and "- of each" in str(unknown)


def test_a_step_waits_for_its_answers(plan: TrainingPlan) -> None:
    together, alone = profile_training(plan, "h100"), profile_training(replace(plan, rollout=None), "h100")
    assert together.rollout is not None and together.rollout.seconds and alone.step_seconds and together.step_seconds
    assert together.step_seconds == pytest.approx(alone.step_seconds + together.rollout.seconds)
    assert "rollout: 8 answers of 256 tokens to prompts of 256, at once" in describe_training(together)
    assert _sample(plan, steps=4.0).seconds == pytest.approx(together.rollout.seconds / 4)
    longer = _sample(plan, overlaps=True)
    assert longer.seconds and wait(longer, longer.seconds / 2) == longer.seconds and wait(longer, 1e9) == 1e9


def test_an_engine_that_does_not_start(plan: TrainingPlan) -> None:
    assert plan.rollout is not None
    with pytest.raises(NoRoomError, match="rollout of .* on h100_sxm: vllm does not start: No available memory"):
        _sample(plan, server=replace(plan.rollout.server, memory_share=0.0005))
