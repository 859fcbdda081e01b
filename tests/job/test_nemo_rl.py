"""NeMo RL's YAML: files that it names as defaults, references to other values, and what of them becomes a plan."""
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analyzer.tools.job import Job, JobError, read_job
from analyzer.tools.job.plan import ModelParallel, PolicyPlan, RolloutPlan, ServingPlan, TrainingPlan

BASE = """\
grpo:
  num_prompts_per_step: 32
  num_generations_per_prompt: 16
  async_grpo: {enabled: false, max_trajectory_age_steps: 1}
loss_fn: {reference_policy_kl_penalty: 0.01}
policy:
  model_name: Qwen/Qwen2.5-1.5B
  tokenizer: {name: "${policy.model_name}"}
  train_global_batch_size: 512
  train_micro_batch_size: 4
  logprob_batch_size: ${policy.train_micro_batch_size}
  max_total_sequence_length: 512
  precision: bfloat16
  dtensor_cfg: {enabled: true, tensor_parallel_size: 1, activation_checkpointing: false}
  sequence_packing:
    enabled: true
    train_mb_tokens: ${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}
    logprob_mb_tokens: ${mul:${policy.max_total_sequence_length}, ${policy.logprob_batch_size}}
  generation:
    backend: vllm
    max_new_tokens: ${policy.max_total_sequence_length}
    vllm_cfg: {tensor_parallel_size: 1, gpu_memory_utilization: 0.6}
    colocated: {enabled: true, resources: {gpus_per_node: null, num_nodes: null}}
cluster: {gpus_per_node: 8, num_nodes: 1}
"""
OWN = """\
defaults: ../base.yaml
policy:
  train_micro_batch_size: 2
"""


def _read(tmp_path: Path, text: str) -> Job:
    (tmp_path / "recipes").mkdir(exist_ok=True)
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "recipes" / "own.yaml").write_text(text)
    return read_job(tmp_path / "recipes" / "own.yaml")


SHARED = TrainingPlan(
    model="Qwen/Qwen2.5-1.5B", task="policy", reference="copy", micro_batch=2, accumulate=32, length=512, dtype="fp32",
    autocast="bf16", optimizer="adamw", ranks=8, ranks_per_host=8, parallel=ModelParallel(
        sequence=False, sharding="fsdp"),
    rollout=RolloutPlan(server=ServingPlan(model="Qwen/Qwen2.5-1.5B", engine="vllm", length=512, memory_share=0.6),
                        sequences=64, new=511, sleeps=True, offloads_model=True, offloads_optimizer=True),
    policy=PolicyPlan(prompts=32, samples=16, longest_prompt=256, longest_answer=256, room=1024, score_room=1024,
                      pins=False))


def test_a_file_over_its_defaults(tmp_path: Path) -> None:
    """Of 512 answers to 8 devices 64 each; a micro-batch of 2 x 512 tokens, as the file's own 2 say."""
    job = _read(tmp_path, OWN)
    assert (job.program.name, job.missing) == ("NeMo RL", [])
    assert job.plan == SHARED


@pytest.mark.parametrize(("more", "fields"), [
    ("  sequence_packing: {enabled: false}", {"room": None}),
    ("  train_global_batch_size: 128", {"updates": 4}),
    ("grpo: {async_grpo: {enabled: true, max_trajectory_age_steps: 2, in_flight_weight_updates: true}}",
     {"lag": 2, "in_flight": True}),
    ("grpo: {use_dynamic_sampling: true, batch_multiplier: 3}", {"algorithm": "dapo", "oversample": 3.0}),
    ("  max_total_sequence_length: 4096", {"longest_prompt": 512, "longest_answer": 3584, "room": 8192,
                                           "score_room": 8192})])
def test_options_of_phases(tmp_path: Path, more: str, fields: dict[str, Any]) -> None:
    plan = _read(tmp_path, f"{OWN}{more}\n").plan
    assert isinstance(plan, TrainingPlan) and SHARED.policy is not None
    assert plan.policy == replace(SHARED.policy, **fields)


def test_engines_with_devices_of_their_own(tmp_path: Path) -> None:
    plan = _read(tmp_path, f"{OWN}  generation: {{colocated: {{enabled: false, resources: {{gpus_per_node: 2}}}}}}\n"
                           "cluster: {num_nodes: 1}\n").plan
    assert isinstance(plan, TrainingPlan) and plan.policy is not None and plan.rollout is not None
    assert (plan.ranks, plan.policy.engine_devices, plan.rollout.is_apart, plan.rollout.sleeps) == (6, 2, True, False)


def test_ranks_of_megatron(tmp_path: Path) -> None:
    plan = _read(tmp_path, OWN + """\
  dtensor_cfg: {enabled: false}
  megatron_cfg: {enabled: true, tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2,
                 sequence_parallel: true, activation_checkpointing: true}
""").plan
    assert isinstance(plan, TrainingPlan)
    assert plan.parallel == ModelParallel(tensor=2, pipeline=2)
    assert (plan.checkpoints, plan.dtype, plan.accumulate) == ("blocks", "bf16", 128)


def test_pairs(tmp_path: Path) -> None:
    text = BASE.replace("grpo:\n  num_prompts_per_step: 32\n  num_generations_per_prompt: 16\n  async_grpo: {enabled: "
                        "false, max_trajectory_age_steps: 1}", "dpo: {max_num_epochs: 1}")
    plan = _read(tmp_path, text).plan
    assert isinstance(plan, TrainingPlan) and plan.policy is not None
    assert (plan.task, plan.reference, plan.rollout) == ("dpo", "copy", None)
    assert (plan.policy.prompts, plan.policy.samples, plan.policy.scores_old) == (512, 2, False)


@pytest.mark.parametrize(("more", "match"), [
    ("  dtensor_cfg: {tensor_parallel_size: 3}", "3 ranks share a sequence, which do not divide the 8"),
    ("  generation: {colocated: {enabled: false, resources: {gpus_per_node: 8}}}", "leave none for training"),
    ("  train_micro_batch_size: x", "must be a whole number")])
def test_what_cannot_be_is_refused(tmp_path: Path, more: str, match: str) -> None:
    text = OWN.replace("  train_micro_batch_size: 2\n", "") if "micro" in more else OWN
    with pytest.raises(JobError, match=match):
        _read(tmp_path, f"{text}{more}\n")


def test_defaults_that_are_not_there_are_told(tmp_path: Path) -> None:
    job = _read(tmp_path, OWN.replace("base.yaml", "none.yaml") + "  model_name: gpt2\n")
    assert any(reading.name == "defaults" and reading.kind == "assumed" for reading in job.readings)
