"""`analyzer posttrain`: options, configurations, errors, exit codes."""
import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analyzer.errors import InputError
from analyzer.tools.posttrain import Answers, Planner, PosttrainPlan
from analyzer.tools.posttrain import choose as choosing
from analyzer.tools.posttrain.choose import ChoiceInterrupted, choose
from analyzer.tools.posttrain.command import make_plan
from analyzer.tools.posttrain.run import usual_plan
from analyzer.tools.search import Layout
from analyzer.tools.serving import Layout as EngineLayout
from analyzer.zoo.target import load_target
from tests.job.test_nemo_rl import BASE
from tests.job.test_training import CONFIG

Run = Callable[..., tuple[int, str, str]]
SHORT = ("--prompts", "8", "--samples", "2", "--prompt-tokens", "32,64", "--answer-tokens", "32,64", "--no-advice")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return f"hf:{folder}"


def _parse(*words: str) -> argparse.Namespace:
    from analyzer.commands import COMMANDS

    parser = argparse.ArgumentParser()
    COMMANDS["posttrain"].add_to(parser.add_subparsers(dest="command"), True)
    return parser.parse_args(["posttrain", *words])


def test_a_step_on_the_screen_and_saved(run: Run, model: str, tmp_path: Path) -> None:
    code, out, _ = run("posttrain", model, "--cluster", "2xh100", *SHORT, "--price", "2", "--json",
                       str(tmp_path / "a.json"))
    assert code == 0
    assert "16 answers a step" in out and "1,000 steps: $" in out and "fits on h100_sxm" in out
    saved = json.loads((tmp_path / "a.json").read_text())
    assert saved["fits"] and [phase["name"] for phase in saved["phases"]] == ["sync", "rollout", "scoring", "update"]


def test_a_step_that_does_not_fit(run: Run, model: str) -> None:
    """The engine takes nine tenths of a card, and stays awake beside an update of very long rows."""
    code, out, _ = run("posttrain", model, "--cluster", "2xh100", *SHORT, "--memory-share", "0.9", "--sleep", "0",
                       "--micro-batch-tokens", "200000")
    assert code == 3 and "does NOT fit on h100_sxm" in out and "at the peak of update" in out


def test_options_are_fields_of_a_plan(model: str) -> None:
    plan = make_plan(_parse(model, "--cluster", "8xh100", "--algorithm", "dapo", "--engine-devices", "4", "--tp", "2",
                            "--lag", "1", "--in-flight", "--trainer", "tensor=2,checkpointing=none", "--keep",
                            "weights", "--oversample", "1.5", "--entropy", "--server", "sglang:0.5.6"))
    assert plan.layout == Layout(shard=2, tensor=2, sharding="fsdp")
    assert plan.engine is not None and plan.engine.layout == EngineLayout(2)
    assert (plan.engine.devices, plan.engine.server, plan.engine.version) == (4, "sglang", "0.5.6")
    assert (plan.algorithm, plan.reference, plan.lag, plan.in_flight) == ("dapo", "none", 1, True)
    assert (plan.offloads_model, plan.offloads_optimizer, plan.oversample, plan.entropy) == (False, True, 1.5, True)


def test_options_over_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(BASE)
    told, given = (make_plan(_parse("--config", str(tmp_path / "a.yaml"), *more)) for more in (
        (), ("--prompt-tokens", "64,128", "--answer-tokens", "100,384", "--samples", "4")))
    assert (told.prompts, told.samples, told.longest_prompt, told.answers.longest) == (32, 16, 256, 256)
    assert any("give --prompt-tokens" in text for text in told.assumptions)
    assert (given.samples, given.longest_prompt, given.answers.longest) == (4, 128, 384)
    assert not any("give --prompt-tokens" in text for text in given.assumptions)
    assert told.cluster.device.name == "h100_sxm" and told.layout == Layout(
        shard=8, sharding="fsdp", sequence_parallel=False, optimizer="adamw_fused")


@pytest.mark.parametrize(("words", "match"), [
    (("gpt2", "--cluster", "8xh100", "--prompts", "0"), "prompts 0: must be a whole number of at least 1"),
    ((), "give a TARGET"), (("gpt2",), "give --cluster"),
    (("gpt2", "--cluster", "8xh100", "--keep", "cache"), "--keep cache: write weights, optimizer"),
    (("gpt2", "--cluster", "8xh100", "--trainer", "tensor=3"), "8 devices are no multiple of 3"),
    (("gpt2", "--cluster", "8xh100", "--trainer", "shard=4"), "is of 4 devices, and the trainer has 8"),
    (("gpt2", "--cluster", "8xh100", "--trainer", "colour=4"), "--trainer colour=4: write FIELD=VALUE"),
    (("gpt2", "--cluster", "8xh100", "--algorithm", "dpo", "--tp", "2"), "is of engines, and DPO has none"),
    (("gpt2", "--cluster", "8xh100", "--answer-tokens", "50,20"), "the mean lies between 1 and the maximum")])
def test_what_cannot_be_is_told(run: Run, words: tuple[str, ...], match: str) -> None:
    code, _, said = run("posttrain", *words)
    assert code == 2 and match in said


def test_a_configuration_without_phases_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("sft: {max_num_steps: 1}\n" + BASE[BASE.index("policy:"):])
    code, _, said = run("posttrain", "--config", str(tmp_path / "a.yaml"))
    assert code == 2 and "`analyzer job" in said


def _small(model: str) -> PosttrainPlan:
    return replace(usual_plan(model, "2xh100"), prompts=8, samples=2, prompt=32, longest_prompt=64,
                   answers=Answers.of(32, 64))


def test_the_fastest_that_fits(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one layout with engines on the same cards, with two shares of them, and apart; the search itself has tests of
    its own.
    """
    listed: list[int] = []

    def list_one(target: Any, cluster: Any, devices: int, *_: Any, **__: Any) -> list[Layout]:
        listed.append(devices)
        return [Layout(replicate=devices, sharding="ddp")]

    monkeypatch.setattr(choosing, "list_best", list_one)
    monkeypatch.setattr(choosing, "_PARTS", ((1, 2),))
    heard: list[str] = []
    found = choose(Planner(load_target(model)), _small(model), progress=lambda share, text: heard.append(text))
    assert listed == [2, 1] and "best so far" in heard[-1] and found.fits
    assert found.assumptions[-1] == "the fastest of 3 ways that were planned"


def test_a_choice_that_is_stopped_has_the_best_until_then(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(target: Any, cluster: Any, devices: int, *_: Any, **__: Any) -> list[Layout]:
        if devices < 2:
            raise KeyboardInterrupt
        return [Layout(replicate=2, sharding="ddp")]

    monkeypatch.setattr(choosing, "list_best", stop)
    with pytest.raises(ChoiceInterrupted, match="2 ways were planned") as stopped:
        choose(Planner(load_target(model)), _small(model))
    assert stopped.value.result is not None and stopped.value.result.fits


def test_where_no_layout_can_be_that_is_told(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> list[Layout]:
        raise InputError("none divides them")

    monkeypatch.setattr(choosing, "list_best", refuse)
    with pytest.raises(InputError, match="no way of .* none divides them"):
        choose(Planner(load_target(model)), _small(model))
