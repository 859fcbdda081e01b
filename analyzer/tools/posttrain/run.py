"""`posttrain`: a step of post-training by a model and a cluster, with the usual choices for all else."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from analyzer.hardware.price import read_prices
from analyzer.tools.search import Layout
from analyzer.tools.search.search import read_cluster
from analyzer.zoo.target import load_target

from .advice import advise
from .answers import Answers  # noqa: F401  # of the example
from .plan import EnginePlan, PosttrainPlan
from .planner import Planner
from .result import PosttrainProfile


def posttrain(target: str, cluster: str, algorithm: str = "grpo", *, engine_devices: int = 0,
              price: float | str | None = None, advice: bool = False, **fields: Any) -> PosttrainProfile:
    """Predict a step of post-training ``target`` (as `analyzer profile` takes it) on a ``cluster`` (``"8xh100"``).

    ``fields`` are of `PosttrainPlan`: prompts, samples, lengths, the trainer's ``layout``, the ``engine``. ``price``:
    dollars for an hour of one card. With ``advice`` the room that is left and changes that help are looked for too.
    Raises InputError for what cannot be, NoRoomError where no engine holds the model.

    >>> found = posttrain("gpt2", "8xh100", prompts=16, longest_prompt=256, answers=Answers.of(256, 768))
    >>> [phase.name for phase in found.phases], found.fits
    (['sync', 'rollout', 'scoring', 'update'], True)
    """
    plan = replace(usual_plan(target, cluster, algorithm, engine_devices), **fields)
    planner = Planner(load_target(target))
    found = planner.plan(plan, read_prices(price).find(plan.cluster.device))
    return advise(planner, plan, found) if advice else found


def usual_plan(target: str, cluster: str, algorithm: str = "grpo", engine_devices: int = 0) -> PosttrainPlan:
    """A plan of a model with the usual choices: parameters and states divided among all of the trainer's devices,
    blocks run again, engines on the same devices unless they have some for themselves.

    >>> str(usual_plan("gpt2", "8xh100").layout)
    'fsdp 8, 1 x 1, checkpoint blocks'
    """
    devices, spec = read_cluster(cluster)
    engine = None if algorithm == "dpo" else EnginePlan(devices=engine_devices)
    trainer = devices - engine_devices
    layout = Layout(shard=trainer, sharding="fsdp" if trainer > 1 else "ddp", checkpointing="blocks")
    plan = PosttrainPlan(algorithm="dpo" if engine is None else "grpo", model=target, cluster=spec, devices=devices,
                         layout=layout, engine=engine)
    return replace(plan, **usual_algorithm(algorithm, plan))


def usual_algorithm(algorithm: str, plan: PosttrainPlan) -> dict[str, Any]:
    """Fields that follow from an algorithm: DPO compares pairs with a reference; PPO has a critic and a reference, GRPO
    and RLOO a reference (TRL 1.16, trainer/rloo_config.py, has one by its ``beta``), DAPO none (arXiv 2503.14476).
    """
    found: dict[str, Any] = {"algorithm": algorithm, "critic": algorithm == "ppo",
                             "reference": "none" if algorithm == "dapo" else "adapter" if plan.lora else "copy"}
    if algorithm == "dpo":
        found.update(engine=None, samples=2, lag=0, in_flight=False)
    return found
