"""Rollouts of trainers that TRL's names are of: by vLLM on the devices that train, or behind a server."""
from __future__ import annotations

from dataclasses import replace

from ..options import Options
from ..plan import RolloutPlan, ServingPlan, TrainingPlan

_WEIGHTS = {"nf4": "int4", "int8": "int8"}  # how vLLM holds what bitsandbytes quantizes


def add_rollout(options: Options, plan: TrainingPlan, name: str, *, uses_engine: bool = False, share: float = 0.9,
                mode: str = "colocate", counts_passes: bool = True) -> TrainingPlan:
    """The plan of an update with the rollout before it; as it is where the model itself samples, which is not modelled.
    ``name`` is the option that asks for it; the others are defaults of the program: whether vLLM samples, with which
    share of the memory, and whether ``steps_per_generation`` counts passes or updates.
    """
    sampled = 1.0
    if plan.task == "distill":
        sampled = options.fraction("lmbda", 0.5, means="share of answers that are sampled")
    if plan.task not in ("policy", "distill") or not sampled:
        return plan
    new = options.count("max_completion_length", 512)
    if not options.flag("use_vllm", uses_engine, means="answers are sampled by vLLM"):
        options.note(name, "not modelled", f"{options.get(name)}: the rollout is left out; the update is profiled")
        return plan
    is_apart = options.text("vllm_mode", mode, choices=("colocate", "server"),
                            means="where answers are sampled") == "server"
    tp = options.count("vllm_tensor_parallel_size", 1)
    if plan.ranks % tp and not is_apart:
        raise options.fail("vllm_tensor_parallel_size", f"{plan.ranks} ranks cannot be divided by it")
    each = plan.micro_batch * plan.data_ranks * (1 if counts_passes else plan.accumulate)
    times = options.number("steps_per_generation", plan.accumulate if counts_passes else 1, least=1) or 1
    answers = options.number("generation_batch_size", each * times, least=1) or 1
    sequences = max(1, answers // (1 if is_apart else plan.ranks // tp))
    used = options.fraction("vllm_gpu_memory_utilization", share,
                            means="" if is_apart else "share of each device that vLLM takes")
    overlaps = options.flag("async_generate")
    server = ServingPlan(
        model=plan.model, engine="vllm", weights=_WEIGHTS.get(plan.quantize or ""), tp=1 if is_apart else tp,
        length=options.number("vllm_max_model_len" if options.get("vllm_max_model_length") is None else
                              "vllm_max_model_length", least=1), memory_share=None if is_apart else used,
        sequences=options.number("vllm_max_num_seqs", least=1) or (None if is_apart else sequences))
    updates = answers / (plan.micro_batch * plan.data_ranks * plan.accumulate) * options.count("num_iterations", 1)
    return replace(plan, rollout=RolloutPlan(
        server=server, sequences=sequences, new=new, steps=updates / sampled, is_apart=is_apart, overlaps=overlaps,
        sleeps=not is_apart and not overlaps and (
            options.flag("vllm_enable_sleep_mode") or bool(options.number("sleep_level", 0))),
        offloads_model=options.flag("offload_model"), offloads_optimizer=options.flag("offload_optimizer")))
