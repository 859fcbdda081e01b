"""verl's commands: what of them becomes a plan, and what is refused as verl refuses it."""
import shlex
from dataclasses import replace
from typing import Any

import pytest

from analyzer.tools.job import Job, JobError, read_command
from analyzer.tools.job.plan import Adapter, ModelParallel, PolicyPlan, RolloutPlan, ServingPlan, TrainingPlan

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
COMMAND = f"""python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=1024
data.max_prompt_length=512 data.max_response_length=1024 actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct
{ACTOR}.ppo_mini_batch_size=256 {ACTOR}.ppo_micro_batch_size_per_gpu=16 {ACTOR}.use_kl_loss=True
{ACTOR}.fsdp_config.optimizer_offload=True {ROLLOUT}.log_prob_micro_batch_size_per_gpu=32
{ROLLOUT}.tensor_model_parallel_size=2 {ROLLOUT}.name=vllm {ROLLOUT}.gpu_memory_utilization=0.6 {ROLLOUT}.n=5
trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.logger=console"""


def _read(*more: str) -> Job:
    return read_command([*shlex.split(COMMAND), *more])


PLAN = TrainingPlan(
    model="Qwen/Qwen2-7B-Instruct", task="policy", reference="copy", micro_batch=16, accumulate=10, length=1536,
    dtype="fp32", autocast="bf16", checkpoints="blocks", optimizer="adamw", ranks=8, ranks_per_host=8,
    parallel=ModelParallel(sharding="fsdp"),
    rollout=RolloutPlan(server=ServingPlan(
        model="Qwen/Qwen2-7B-Instruct", engine="vllm", tp=2, length=1536, memory_share=0.6, sequences=256, chunk=8192),
        sequences=1280, new=1024, sleeps=True, offloads_optimizer=True),
    policy=PolicyPlan(prompts=1024, samples=5, longest_prompt=512, longest_answer=1024, updates=4,
                      score_room=32 * 1536))


def test_a_command() -> None:
    """Of 256 x 5 sequences of an update 160 a device, in ten micro-batches of 16."""
    job = _read()
    assert (job.program.name, job.missing) == ("verl", [])
    assert job.plan == PLAN


@pytest.mark.parametrize(("word", "fields"), [
    (f"{ACTOR}.use_dynamic_bsz=True", {"room": 16384, "score_room": 16384}),
    (f"{ACTOR}.entropy_coeff=0.01", {"entropy": True}), (f"{ACTOR}.ppo_epochs=2", {"epochs": 2}),
    ("algorithm.adv_estimator=gae", {"algorithm": "ppo", "critic": True}),
    ("algorithm.adv_estimator=rloo", {"algorithm": "rloo"})])
def test_options_of_phases(word: str, fields: dict[str, Any]) -> None:
    plan = _read(word).plan
    assert isinstance(plan, TrainingPlan) and PLAN.policy is not None
    assert plan.policy == replace(PLAN.policy, **fields)


@pytest.mark.parametrize(("words", "fields"), [
    ([f"{ACTOR}.use_kl_loss=False"], {"reference": "none"}),
    (["actor_rollout_ref.model.lora_rank=64"], {"adapter": Adapter(r=64), "reference": "adapter"}),
    ([f"{ACTOR}.ulysses_sequence_parallel_size=2"], {"parallel": ModelParallel(context=2, sharding="fsdp"),
                                                     "accumulate": 20}),
    (["actor_rollout_ref.model.enable_gradient_checkpointing=False"], {"checkpoints": "none"}),
    ([f"{ACTOR}.strategy=megatron", f"{ACTOR}.megatron.tensor_model_parallel_size=4"],
     {"parallel": ModelParallel(tensor=4), "dtype": "bf16", "accumulate": 40}),
    (["actor_rollout_ref.model.use_fused_kernels=True"], {"loss_chunks": 6})])
def test_options_of_the_update(words: list[str], fields: dict[str, Any]) -> None:
    plan = _read(*words).plan
    assert isinstance(plan, TrainingPlan)
    assert replace(plan, rollout=PLAN.rollout) == replace(PLAN, **fields)


@pytest.mark.parametrize(("words", "match"), [
    ([f"{ACTOR}.ppo_mini_batch_size=2048"], "is above data.train_batch_size, 1024"),
    ([f"{ROLLOUT}.tensor_model_parallel_size=3"], "does not divide the 8 devices"),
    ([f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu=1024"], "is below one prompt")])
def test_what_verl_refuses(words: list[str], match: str) -> None:
    with pytest.raises(JobError, match=match):
        _read(*words)
