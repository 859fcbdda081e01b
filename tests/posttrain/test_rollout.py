"""Rollouts: a batch of answers that differ in length, simulated; seconds derived by hand."""
from dataclasses import replace
from typing import Any, cast

import pytest

from analyzer.errors import InputError
from analyzer.tools.posttrain.answers import Answers
from analyzer.tools.posttrain.plan import EnginePlan, PosttrainPlan
from analyzer.tools.posttrain.rollout import Sampler
from analyzer.tools.posttrain.run import usual_plan
from analyzer.tools.serving import Batch, Layout, ServedModel, Traffic, make_deployment, read_served_model, simulate
from analyzer.tools.serving.engine import ENGINES
from analyzer.tools.serving.simulation import Timeline
from analyzer.zoo.target import load_target


class Even:
    """A timer by which a pass takes a second, and one that reads prompts four; it notes the prompts' tokens."""

    constants = {f"{name}.request_seconds": 0.0 for name in ENGINES}

    def __init__(self) -> None:
        self.read = 0

    def seconds(self, batch: Batch) -> float:
        self.read += batch.prompt_tokens
        return 4.0 if batch.chunks else 1.0


@pytest.fixture(scope="module")
def llama() -> ServedModel:
    return read_served_model(load_target("hf:llama-3.2-1b").build, "hf:llama-3.2-1b")


def _simulate(llama: ServedModel, traffic: Traffic) -> tuple[Timeline, Even]:
    timer = Even()
    return simulate(make_deployment(llama), cast(Any, timer), traffic), timer


def test_answers_end_when_their_tokens_are_there(llama: ServedModel) -> None:
    """All prompts are read in the first pass, which gives each its first token; n tokens are there n - 1 passes on."""
    line, _ = _simulate(llama, Traffic.batch(100, [3, 10, 1, 5]))
    assert line.ends == (4.0, 6.0, 8.0, 13.0)


def test_a_slot_that_is_free_takes_the_next_answer(llama: ServedModel) -> None:
    """Of one slot: 4 + 2 seconds, then as many again."""
    line, _ = _simulate(llama, Traffic.batch(100, [3, 3], slots=1))
    assert line.ends == (6.0, 12.0)


def test_a_prompt_is_read_once_for_its_samples(llama: ServedModel) -> None:
    """The other three read the last, unfinished block of 16 tokens again: 100 - 96."""
    assert _simulate(llama, Traffic.batch(100, [2] * 4))[1].read == 400
    assert _simulate(llama, Traffic.batch(100, [2] * 4, samples=4))[1].read == 100 + 3 * 4


def test_copies_of_attention_share_the_answers(llama: ServedModel) -> None:
    """The copy that has most tokens decides."""
    timer, found = Even(), make_deployment(llama, layout=Layout(dp=2), engine="sglang")
    line = simulate(found, cast(Any, timer), Traffic.batch(100, [2, 2, 9, 9]))
    assert len(line.ends) == 2 and line.ends[-1] == 4.0 + 8.0


@pytest.mark.parametrize("fields", [{"answers": (1, 2), "concurrency": 1}, {"answers": (9,)}, {"samples": 0}])
def test_a_batch_that_cannot_be_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="answers"):
        Traffic(**{"prompt_tokens": 4, "new_tokens": 8, "concurrency": 1, "bursts": True, "answers": (8,), **fields})


def _plan(**fields: Any) -> PosttrainPlan:
    plan = replace(usual_plan("hf:llama-3.2-1b", "8xh100"), prompts=64, samples=4, answers=Answers.of(64, 256))
    return replace(plan, **fields)


def test_the_longest_answers_keep_engines(llama: ServedModel) -> None:
    """Answers of one length have no tail, and leave no place empty."""
    sampler = Sampler(llama, _plan().cluster)
    engine = EnginePlan(layout=Layout(1))
    uneven = sampler.sample(_plan(engine=engine))
    even = sampler.sample(_plan(engine=engine, answers=Answers.read("64")))
    assert uneven.answer_tokens == pytest.approx(even.answer_tokens, rel=0.02)
    assert uneven.seconds > 2 * even.seconds
    assert even.tail_seconds == 0.0 and even.idle_share < 0.2  # what reading the prompts takes
    assert uneven.tail_seconds > 0.2 * uneven.seconds and uneven.idle_share > 0.5


def test_engines_that_get_weights_in_flight_do_not_wait_for_the_longest_answers(llama: ServedModel) -> None:
    apart = EnginePlan(layout=Layout(1), devices=4)
    layout = replace(_plan().layout, shard=4)
    sampler = Sampler(llama, _plan().cluster)
    waits, flies = (sampler.sample(_plan(engine=apart, layout=layout, lag=1, in_flight=in_flight))
                    for in_flight in (False, True))
    assert flies.seconds < 0.7 * waits.seconds and (flies.tail_seconds, flies.idle_share) == (0.0, 0.0)


def test_the_fastest_layout_of_an_engine_is_taken(llama: ServedModel) -> None:
    sampler = Sampler(llama, _plan().cluster)
    found = sampler.sample(_plan())
    each = [sampler.sample(_plan(engine=EnginePlan(layout=Layout(tp)))) for tp in (1, 2, 4, 8)]
    assert found.seconds <= min(rollout.seconds for rollout in each[:2])
    assert [rollout.engines for rollout in each] == [8, 4, 2, 1]


def test_engines_that_devices_cannot_be_divided_into_are_refused(llama: ServedModel) -> None:
    with pytest.raises(InputError, match="8 devices are no multiple"):
        Sampler(llama, _plan().cluster).sample(_plan(engine=EnginePlan(layout=Layout(1, pp=3))))
