"""NeMo RL: the YAML of a run (`examples/run_grpo.py --config FILE key=value`), over those that it names as defaults."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ..options import Options, names_of
from ..plan import Adapter, ModelParallel, PolicyPlan, RolloutPlan, ServingPlan, Task, TrainingPlan
from ..program import JobLaunch, JobProgram, set_option
from .omegaconf import resolve_references

# NeMo RL 0.5, examples/configs/grpo_math_1B.yaml, dpo.yaml, sft.yaml and nemo_rl/models/policy; defaults are those of
# the first, which the others repeat

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_TASKS: dict[str, Task] = {"grpo": "policy", "ppo": "policy", "dpo": "dpo", "sft": "sft", "distillation": "distill",
                           "rm": "reward"}
_MOST_DEFAULTS = 8  # files that name each other
_FULL = "what each rank has of the batch at once"


def read(options: Options, launch: JobLaunch) -> TrainingPlan:
    """The plan of a run. Raises JobError for what NeMo RL refuses, and for what it needs and is not there."""
    _join_defaults(options, launch)
    kind = next((name for name in _TASKS if options.get(name) is not None), "grpo")
    policy = options.part("policy")
    if policy is None:
        raise options.fail("policy", "is not there, and a run needs it")
    ranks, per_host = _read_cluster(options, launch)
    engines = _count_engines(policy, ranks, per_host) if _TASKS[kind] in ("policy", "distill") else 0
    trainer = ranks - engines
    plan = _read_trainer(policy, _TASKS[kind], trainer, per_host)
    loss = options.part("loss_fn")
    compares = loss is not None and kind in ("grpo", "ppo")
    if kind == "dpo" or compares:
        section = options.part(kind)
        skips = section is not None and section.flag("skip_reference_policy_logprobs_calculation")
        plan = replace(plan, reference="none" if skips else "adapter" if plan.adapter else "copy")
    if kind == "distillation":
        teacher = options.part("teacher")
        plan = replace(plan, reference="copy", teacher=None if teacher is None else teacher.text("model_name"))
    if kind in ("grpo", "ppo", "dpo"):
        plan = _add_phases(options, policy, plan, kind, engines)
    options.finish("nemo_rl")
    policy.rest(names_of("nemo_rl", "without effect of policies"))
    return plan


def _join_defaults(options: Options, launch: JobLaunch) -> None:
    """Put the files that ``defaults`` names below the configuration, and fill in what refers to other values."""
    found, missing = list(options.layers), ""
    folder, said = Path(found[0][0].name).parent, found[0][1].get("defaults")
    for _ in range(_MOST_DEFAULTS):
        if not isinstance(said, str):
            break
        path = launch.files.find(folder / said)
        if path is None:
            missing = str(said)
            break
        document = launch.files.document(path)
        found.insert(0, (document, document.data))
        folder, said = Path(path).parent, document.data.get("defaults")
    options.layers = found
    resolve_references(options)
    if missing:
        options.note("defaults", "assumed", f"{missing}: no such file; the values of grpo_math_1B.yaml are taken")
    elif "defaults" in options.names():
        options.note("defaults", "no effect", "")


def _read_cluster(options: Options, launch: JobLaunch) -> tuple[int, int]:
    """All devices, and those of a host."""
    cluster = options.part("cluster")
    if cluster is None:
        return launch.size, launch.ranks_per_host or 8
    each, nodes = cluster.count("gpus_per_node", 1, means="devices of a host"), cluster.count("num_nodes", 1)
    cluster.rest("*")
    ranks = launch.ranks or each * nodes
    launch.ranks, launch.hosts = ranks, max(1, ranks // each)
    return ranks, min(each, ranks)


def _count_engines(policy: Options, ranks: int, per_host: int) -> int:
    """Devices that engines have for themselves (nemo_rl/algorithms/grpo.py, ``setup``)."""
    generation = policy.part("generation")
    apart = None if generation is None else generation.part("colocated")
    if apart is None or apart.flag("enabled", True, means="engines share the trainer's devices"):
        return 0
    resources = apart.part("resources")
    each = None if resources is None else resources.number("gpus_per_node")
    nodes = None if resources is None else resources.number("num_nodes")
    found = (each or per_host) * (nodes or 1)
    if not 0 < found < ranks:
        raise apart.fail("resources", f"engines with {found} of {ranks} devices leave none for training")
    return found


def _read_trainer(policy: Options, task: Task, ranks: int, per_host: int) -> TrainingPlan:
    """The update: micro-batches, and how ranks share the model, by Megatron or by FSDP2 (``dtensor_cfg``)."""
    model = policy.needed("model_name", "a run needs it", means="the policy")
    micro = policy.count("train_micro_batch_size", 4, means="sequences of a pass of one device")
    batch = policy.count("train_global_batch_size", 512, means="sequences of an optimizer step")
    length = policy.count("max_total_sequence_length", 512, means="tokens of a prompt with its answer at most")
    precision = policy.text("precision", "bfloat16", choices=_DTYPES)
    megatron = policy.part("megatron_cfg")
    uses_megatron = megatron is not None and megatron.flag("enabled")
    section = megatron if megatron is not None and uses_megatron else policy.section("dtensor_cfg")
    parallel = (_read_megatron if uses_megatron else _read_dtensor)(section)
    if ranks % parallel.size:
        raise section.fail("tensor_parallel_size", f"{parallel.size} ranks share a sequence, which do not divide the "
                           f"{ranks} of the trainer")
    runs_again = section.flag("activation_checkpointing", means="each block is run again in backward")
    adapter = _read_adapter(section, uses_megatron)
    draft = policy.part("draft")
    if draft is not None and draft.flag("enabled"):
        policy.note("draft", "not modelled", "a draft that is trained too is left out")
    section.rest("*")
    data = ranks // parallel.size
    pairs = 2 if task in ("dpo", "reward") else 1
    return TrainingPlan(
        model=model, task=task, micro_batch=micro, accumulate=max(1, batch // (micro * data)), length=length,
        dtype="fp32" if not uses_megatron else _DTYPES[precision], autocast=None if precision == "float32" else _DTYPES[
            precision], adapter=adapter, checkpoints="blocks" if runs_again else "none",
        optimizer="adamw_fused" if uses_megatron else "adamw", ranks=ranks, ranks_per_host=per_host, parallel=parallel,
        assumptions=(f"{pairs * micro} sequences are {_FULL}",) if task == "sft" else ())


def _read_megatron(section: Options) -> ModelParallel:
    degrees: dict[str, Any] = {name: section.count(f"{long}_model_parallel_size", means=what) for name, long, what in (
        ("tensor", "tensor", "ranks that divide each tensor"), ("pipeline", "pipeline", "stages of the blocks"),
        ("expert", "expert", "ranks that have different experts"))}
    section.number("num_layers_in_first_pipeline_stage")
    section.number("num_layers_in_last_pipeline_stage")
    fp8 = section.part("fp8_cfg")
    if fp8 is not None and fp8.flag("enabled"):
        section.note("fp8_cfg", "not modelled", "products of the trainer are in 16 bits")
    if section.count("expert_tensor_parallel_size", 1) > 1:
        section.assume("expert_tensor_parallel_size", "experts are whole")
    return ModelParallel(**degrees, context=section.count("context_parallel_size", 1),
                         sequence=section.flag("sequence_parallel") or degrees["tensor"] == 1)


def _read_dtensor(section: Options) -> ModelParallel:
    """FSDP2 over all ranks that share no sequence; weights are in float32 (dtensor_policy_worker.py)."""
    return ModelParallel(tensor=section.count("tensor_parallel_size", 1, means="ranks that divide each tensor"),
                         context=section.count("context_parallel_size", 1), expert=section.count(
                             "expert_parallel_size", 1), sequence=section.flag("sequence_parallel"), sharding="fsdp",
                         offloads=section.flag("cpu_offload", means="weights and states lie on the host"))


def _read_adapter(section: Options, uses_megatron: bool) -> Adapter | None:
    lora = section.part("peft" if uses_megatron else "lora_cfg")
    if lora is None or not lora.flag("enabled"):
        return None
    return Adapter(r=lora.count("dim", 8, means="rank of the adapters"), targets=tuple(lora.words("target_modules")))


def _add_phases(options: Options, policy: Options, plan: TrainingPlan, kind: str, engines: int) -> TrainingPlan:
    section = options.section(kind)
    batch = plan.micro_batch * plan.accumulate * plan.data_ranks
    packs, room, score = _read_packing(policy, plan)
    if kind == "dpo":
        return replace(plan, policy=PolicyPlan(
            algorithm="dpo", prompts=batch, samples=2, longest_prompt=max(1, plan.length // 2), longest_answer=max(
                1, plan.length // 2), room=room if packs else None, score_room=score, scores_old=False))
    prompts = section.count("num_prompts_per_step", 32, means="prompts of a step")
    samples = section.count("num_generations_per_prompt", 16, means="answers to each prompt")
    lag = in_flight = 0
    asynchronous = section.part("async_grpo")
    if asynchronous is not None and asynchronous.flag("enabled"):
        lag = asynchronous.count("max_trajectory_age_steps", 1, means="steps that weights may be old")
        in_flight = asynchronous.flag("in_flight_weight_updates")
    more = section.fraction("batch_multiplier", 1.0) if section.flag("use_dynamic_sampling") else 1.0
    section.rest("*")
    generation = policy.section("generation")
    answer = generation.count("max_new_tokens", plan.length)
    rollout = _read_rollout(generation, plan, prompts * samples, answer, engines)
    algorithm: Literal["ppo", "dapo", "grpo"] = "ppo" if kind == "ppo" else "dapo" if more > 1 else "grpo"
    prompt = min(512, max(1, plan.length // 2))
    found = PolicyPlan(
        algorithm=algorithm, prompts=prompts, samples=samples, longest_prompt=prompt, longest_answer=max(1, min(
            answer, plan.length - prompt)), updates=max(1, prompts * samples // batch), room=room if packs else None,
        score_room=score, critic=kind == "ppo", lag=lag, in_flight=bool(in_flight), oversample=max(1.0, more),
        engine_devices=engines, pins=False)
    return replace(plan, policy=found, rollout=rollout)


def _read_packing(policy: Options, plan: TrainingPlan) -> tuple[bool, int, int]:
    """Whether sequences are packed, or batched by tokens, and the tokens of a pass with and without gradients."""
    rows = policy.number("logprob_batch_size", plan.micro_batch, least=1) or plan.micro_batch
    for name in ("sequence_packing", "dynamic_batching"):
        part = policy.part(name)
        if part is not None and part.flag("enabled", means=f"by tokens of a pass ({name})"):
            room, score = (part.number(f"{which}_mb_tokens", each * plan.length, least=1) for which, each in (
                ("train", plan.micro_batch), ("logprob", rows)))
            return True, room or plan.length, score or plan.length
    return False, plan.micro_batch * plan.length, rows * plan.length


def _read_rollout(generation: Options, plan: TrainingPlan, answers: int, new: int, engines: int) -> RolloutPlan:
    backend = generation.text("backend", "vllm", choices=("vllm", "sglang", "trtllm", "megatron"))
    if backend == "megatron":
        generation.assume("backend", "vLLM samples, with its own defaults")
        backend = "vllm"
    cfg = generation.section(f"{backend}_cfg")
    tp = cfg.count("tensor_parallel_size", 1, means="ranks of an engine")
    share = cfg.fraction("gpu_memory_utilization", 0.6, means="share of each device that an engine takes")
    is_8bit = cfg.text("precision") == "fp8"
    devices = engines or plan.ranks
    server = ServingPlan(model=plan.model, engine=backend, tp=tp, pp=cfg.count("pipeline_parallel_size", 1),
                         weights="fp8" if is_8bit else None, length=plan.length, memory_share=share)
    cfg.rest("*")
    generation.rest("*")
    sequences = max(1, answers * tp * server.pp // devices)
    return RolloutPlan(server=server, sequences=sequences, new=min(new, max(1, plan.length - 1)), is_apart=engines > 0,
                       sleeps=not engines, offloads_model=not engines, offloads_optimizer=not engines,
                       steps=max(1, answers // (plan.micro_batch * plan.accumulate * plan.data_ranks)))


def _is_file(data: Mapping[str, Any]) -> bool:
    policy = data.get("policy")
    if isinstance(data.get("defaults"), str):  # of Hydra's files it is a list
        return bool({"policy", "cluster", *_TASKS} & set(data))
    return isinstance(policy, Mapping) and bool(
        {"model_name", "dtensor_cfg", "megatron_cfg", "generation", "max_total_sequence_length", "tokenizer"}
        & set(policy)) and bool({"defaults", "cluster", *_TASKS} & set(data))


NEMO_RL = JobProgram(
    name="NeMo RL", version="0.5", source="NVIDIA-NeMo/RL examples/configs/*.yaml", read=read, is_file=_is_file,
    commands=tuple(f"examples/run_{kind}.py" for kind in ("grpo", "grpo_math", "dpo", "sft", "ppo", "distillation",
                                                          "distillation_math", "rm")),
    changes={"length": set_option("policy.max_total_sequence_length")})
