"""verl: ``python -m verl.trainer.main_ppo key=value ...``, and the YAML of a run."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from ..options import Options
from ..plan import Adapter, ModelParallel, PolicyPlan, RolloutPlan, ServingPlan, TrainingPlan
from ..program import JobLaunch, JobProgram, set_option
from .omegaconf import resolve_references

# verl 0.7, verl/trainer/config/_generated_ppo_trainer.yaml and _generated_ppo_megatron_trainer.yaml

_ALGORITHMS: dict[str, Literal["grpo", "ppo", "rloo"]] = {"gae": "ppo", "rloo": "rloo"}
_DTYPES = {"fp32": "fp32", "float32": "fp32", "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16"}
_FEW = 4096  # tokens of a chunk of the loss: verl 0.7, utils/experimental/torch_functional.py, ``chunk_size`` of 512
_ENGINES = ("vllm", "sglang", "trtllm", "hf")


def read(options: Options, launch: JobLaunch) -> TrainingPlan:
    """The plan of a run. Raises JobError for what verl refuses, and for what it needs and is not there."""
    resolve_references(options)
    models = options.part("actor_rollout_ref")
    if models is None:
        raise options.fail("actor_rollout_ref", "is not there, and a run needs it")
    ranks, per_host = _read_cluster(options, launch)
    data = options.section("data")
    prompts = data.count("train_batch_size", 1024, means="prompts of a step")
    prompt, answer = (data.count(f"max_{which}_length", 512, means=f"tokens of {what} at most")
                      for which, what in (("prompt", "a prompt"), ("response", "an answer")))
    data.rest("*")
    actor, rollout = models.section("actor"), models.section("rollout")
    samples = rollout.count("n", 1, means="answers to each prompt")
    algorithm = options.section("algorithm")
    said = algorithm.text("adv_estimator", "gae", means="how advantages are told")
    kl_in_reward = algorithm.flag("use_kl_in_reward")
    algorithm.rest("*")
    plan = _read_actor(models, actor, prompt + answer, ranks, per_host)
    uses_kl = kl_in_reward or actor.flag("use_kl_loss", means="the policy is compared with a reference")
    reference: Any = "none" if not uses_kl else "adapter" if plan.adapter is not None else "copy"
    mini = actor.count("ppo_mini_batch_size", 256, means="prompts of an optimizer step")
    if mini > prompts and not actor.flag("use_dynamic_bsz"):
        raise actor.fail("ppo_mini_batch_size", f"is above data.train_batch_size, {prompts}")
    packs = actor.flag("use_dynamic_bsz", means="micro-batches by tokens")
    room = actor.count("ppo_max_token_len_per_gpu", 16384, means="tokens of a micro-batch" if packs else "")
    score, rows = _read_score(models, rollout, packs, room)
    if room < prompt + answer and packs:
        raise actor.fail("ppo_max_token_len_per_gpu", f"is below one prompt with its answer, {prompt + answer}")
    accumulate = max(1, min(mini, prompts) * samples // (plan.micro_batch * plan.data_ranks))
    plan = replace(plan, reference=reference, accumulate=accumulate,
                   rollout=_read_rollout(models, rollout, plan, prompts * samples, prompt, answer), policy=PolicyPlan(
                       algorithm=_ALGORITHMS.get(said, "grpo"), prompts=prompts, samples=samples, longest_prompt=prompt,
                       longest_answer=answer, updates=max(1, prompts // mini), epochs=actor.count("ppo_epochs", 1),
                       room=room if packs else None, score_room=score if packs else rows * (prompt + answer),
                       critic=said == "gae", entropy=actor.fraction("entropy_coeff", 0.0) > 0))
    options.finish("verl")
    for part in (models, actor, models.section("ref"), models.section("model")):
        part.rest("*")
    return plan


def _read_cluster(options: Options, launch: JobLaunch) -> tuple[int, int]:
    trainer = options.section("trainer")
    each, hosts = trainer.count("n_gpus_per_node", 8, means="devices of a host"), trainer.count("nnodes", 1)
    trainer.rest("*")
    launch.ranks = launch.ranks or each * hosts
    launch.hosts = max(1, launch.ranks // each)
    return launch.ranks, min(each, launch.ranks)


def _read_actor(models: Options, actor: Options, length: int, ranks: int, per_host: int) -> TrainingPlan:
    """The policy's update: FSDP with weights in float32 (workers/fsdp_workers.py), or Megatron."""
    model = models.section("model")
    path = model.needed("path", "a run needs it", means="the policy")
    strategy = actor.text("strategy", "fsdp", choices=("fsdp", "fsdp2", "megatron"), means="how ranks share it")
    micro = actor.number("ppo_micro_batch_size_per_gpu", None, least=1) or 1
    section = actor.section("megatron" if strategy == "megatron" else "fsdp_config")
    if strategy == "megatron":
        parallel = ModelParallel(
            tensor=section.count("tensor_model_parallel_size", 1, means="ranks that divide each tensor"),
            pipeline=section.count("pipeline_model_parallel_size", 1),
            context=section.count("context_parallel_size", 1),
            expert=section.count("expert_model_parallel_size", 1), offloads=section.flag("optimizer_cpu_offload"))
        dtype = "bf16"
    else:
        ulysses = actor.count("ulysses_sequence_parallel_size", 1)
        if ulysses > 1:
            actor.assume("ulysses_sequence_parallel_size", f"{ulysses} ranks share a sequence by context parallelism")
        size = section.number("fsdp_size", -1, least=-1)
        reshards = section.flag("reshard_after_forward", True)
        parallel = ModelParallel(context=ulysses, sharding="fsdp" if reshards else "fsdp_kept", replicas=1 if size < 1
                                 else max(1, ranks // ulysses // size), offloads=section.flag("offload_policy"))
        dtype = _DTYPES[section.text("model_dtype", "fp32", choices=_DTYPES, means="dtype of the weights")]
    if ranks % parallel.size:
        raise section.fail("tensor_model_parallel_size", f"{parallel.size} ranks share a sequence, by which {ranks} "
                           "cannot be divided")
    rank = model.number("lora_rank", 0)
    fused = model.flag("use_fused_kernels", means="the loss in parts of its tokens")
    if section.flag("entropy_from_logits_with_chunking"):
        section.note("entropy_from_logits_with_chunking", "assumed", "entropies of all tokens at once")
    adapter = None if not rank else Adapter(r=rank, targets=() if model.text("target_modules", "all-linear") in (
        "all-linear", None) else tuple(model.words("target_modules")))
    model.flag("use_remove_padding", True)
    return TrainingPlan(
        model=path, task="policy", micro_batch=micro, length=length, dtype=dtype, autocast="bf16", adapter=adapter,
        checkpoints="blocks" if model.flag("enable_gradient_checkpointing", True, means="blocks run again") else "none",
        loss_chunks=max(1, micro * length // _FEW) if fused else None, optimizer="adamw", ranks=ranks,
        ranks_per_host=per_host, parallel=parallel)


def _read_score(models: Options, rollout: Options, packs: bool, room: int) -> tuple[int, int]:
    """Tokens of a pass without gradients, and its rows where it is padded."""
    score = rollout.count("log_prob_max_token_len_per_gpu", room) if packs else room
    return score, rollout.number("log_prob_micro_batch_size_per_gpu", None, least=1) or 1


def _read_rollout(models: Options, rollout: Options, plan: TrainingPlan, answers: int, prompt: int,
                  answer: int) -> RolloutPlan:
    name = rollout.text("name", "vllm", choices=_ENGINES, means="which engine samples")
    if name == "hf":
        rollout.assume("name", "vLLM samples in the place of the model itself")
        name = "vllm"
    tp = rollout.count("tensor_model_parallel_size", 2, means="ranks of an engine")
    if plan.ranks % tp:
        raise rollout.fail("tensor_model_parallel_size", f"does not divide the {plan.ranks} devices")
    server = ServingPlan(
        model=plan.model, engine=name, tp=tp, length=prompt + answer, memory_share=rollout.fraction(
            "gpu_memory_utilization", 0.5, means="share of each device that an engine takes"),
        sequences=rollout.number("max_num_seqs", 256, least=1), chunk=rollout.number("max_num_batched_tokens", 8192,
                                                                                      least=1))
    sleeps = rollout.flag("free_cache_engine", True, means="engines sleep while the model trains")
    rollout.rest("*")
    model_leaves, states_leave = _offloads(models)
    return RolloutPlan(server=server, sequences=max(1, answers * tp // plan.ranks), new=answer, sleeps=sleeps,
                       offloads_model=model_leaves, offloads_optimizer=states_leave)


def _offloads(models: Options) -> tuple[bool, bool]:
    """Whether weights and states leave the devices while engines sample."""
    actor = models.section("actor")
    section = actor.section("megatron" if actor.get("strategy") == "megatron" else "fsdp_config")
    return (section.flag("param_offload", means="weights leave the devices while engines sample"),
            section.flag("optimizer_offload", means="states leave the devices while engines sample"))


def _is_file(data: Mapping[str, Any]) -> bool:
    return "actor_rollout_ref" in data


VERL = JobProgram(
    name="verl", version="0.7", source="volcengine/verl verl/trainer/config", read=read, is_file=_is_file,
    commands=("verl.trainer.main_ppo", "verl/trainer/main_ppo.py"),
    changes={"batch": set_option("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu")})
