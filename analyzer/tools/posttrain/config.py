"""A plan of another program's configuration, as `analyzer job` reads it."""
from __future__ import annotations

from dataclasses import replace

from analyzer.errors import InputError
from analyzer.hardware import ClusterSpec, find_cluster
from analyzer.tools.job import read_job
from analyzer.tools.job.layout import make_layout
from analyzer.tools.job.model_name import find_model
from analyzer.tools.job.plan import PolicyPlan, RolloutPlan, TrainingPlan
from analyzer.tools.job.read import Job
from analyzer.tools.search.search import read_cluster
from analyzer.tools.serving import Layout as EngineLayout

from .answers import Answers
from .plan import EnginePlan, PosttrainPlan

USUAL_PROMPT = 256  #: tokens of a prompt in the mean, where nothing says it and prompts may be longer
NO_LENGTHS = ("the configuration tells the longest prompt and answer alone: prompts of {:,} tokens in the mean, "
              "answers spread evenly up to the longest; give --prompt-tokens and --answer-tokens")


def read_plan(path: str, cluster: str | None = None, per_host: int | None = None) -> PosttrainPlan:
    """The plan of a configuration of verl or NeMo RL. ``cluster``: the devices, as ``8xh100``; None: so many H100 as it
    says. Raises JobError for what cannot be read, InputError where it is no step of post-training.
    """
    devices, spec = None, find_cluster("dgx_h100")
    if cluster is not None:
        devices, spec = read_cluster(cluster)
    job = read_job(path, ranks=devices)
    hosts = per_host or job.launch.ranks_per_host
    return plan_of_job(job, spec if hosts is None else replace(spec, devices_per_host=hosts))


def plan_of_job(job: Job, cluster: ClusterSpec) -> PosttrainPlan:
    """The plan of a job that `analyzer job` has read. Raises InputError where it has no phases."""
    plan = job.plan
    policy = plan.policy if isinstance(plan, TrainingPlan) else None
    if not isinstance(plan, TrainingPlan) or policy is None:
        raise InputError(f"{job.name}: {job.program.name}: is no step of post-training that is planned here; `analyzer "
                         f"job {job.name}` tells what its update needs")
    layout, said = make_layout(plan)
    if layout.is_sharded and layout.shard * layout.context == 1:
        layout = replace(layout, sharding="ddp", offload=False)
    engine = None if plan.rollout is None or policy.algorithm == "dpo" else _make_engine(policy, plan.rollout)
    prompt = min(USUAL_PROMPT, policy.longest_prompt)
    answers = Answers.of((1 + policy.longest_answer) / 2, policy.longest_answer)
    adapter = plan.adapter
    rollout = plan.rollout
    return PosttrainPlan(
        algorithm=policy.algorithm, model=find_model(plan.model, job.files).target, cluster=cluster,
        devices=plan.ranks + policy.engine_devices, layout=replace(layout, micro_batch=1, micro_batches=1),
        engine=engine, prompts=policy.prompts, samples=policy.samples, prompt=prompt,
        longest_prompt=policy.longest_prompt, answers=answers, rows=plan.micro_batch,
        tokens=max(policy.room or 0, policy.longest_prompt + policy.longest_answer) if policy.room else 0,
        packs=policy.room is not None, score_tokens=policy.score_room, updates=policy.updates, epochs=policy.epochs,
        reference=plan.reference, scores_old=policy.scores_old, critic=policy.critic, lag=policy.lag,
        in_flight=policy.in_flight, oversample=policy.oversample, loss_chunks=plan.loss_chunks, entropy=policy.entropy,
        lora=None if adapter is None else f"r={adapter.r}" + (
            f",targets={'+'.join(adapter.targets)}" if adapter.targets else ""),
        offloads_optimizer=rollout is not None and rollout.offloads_optimizer, offloads_model=rollout is not None and
        rollout.offloads_model, pins=policy.pins, assumptions=(
            *said, *plan.assumptions, *(f"{reading.name} is left out: {reading.meaning or 'it is not known'}"
                                        for reading in job.missing), NO_LENGTHS.format(prompt)))


def _make_engine(policy: PolicyPlan, rollout: RolloutPlan) -> EnginePlan:
    server = rollout.server
    return EnginePlan(
        server=server.engine, layout=EngineLayout(server.tp, server.pp, server.dp, server.ep),
        devices=policy.engine_devices, memory_share=server.memory_share,
        sleep=1 if rollout.sleeps and server.engine != "trtllm" else 0,  # of which it is not known what stays
        weights=server.weights or "bf16", cache=server.cache or "bf16", sequences=server.sequences)
