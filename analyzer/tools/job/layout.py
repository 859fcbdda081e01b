"""`profile_layout`: what a step costs whose ranks divide the model itself, composed from profiles of some ranks."""
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from analyzer.errors import InputError
from analyzer.hardware import ClusterSpec, DeviceSpec, cluster_of, find_cluster, find_device
from analyzer.results.verdict import Verdict
from analyzer.tools.search import Layout, SearchResult, compose_layout
from analyzer.zoo.target import Target, model_errors

from .build import DTYPES, load_model, make_model, set_scores
from .document import Files
from .plan import PROJECTORS, TOWERS, ModelParallel, TrainingPlan
from .rollout import Rollout, sample_rollout, wait

_CHECKPOINTS = {"none": "none", "blocks": "blocks", "operators": "selective"}


@dataclass(frozen=True)
class LaidOutJob:
    """The step of all ranks, of which one of each kind was profiled in part."""

    plan: TrainingPlan
    result: SearchResult
    assumptions: tuple[str, ...]
    rollout: Rollout | None = None
    beside_bytes: int = 0                    #: of weights of towers, and of a model that is compared with, on a rank

    @property
    def verdict(self) -> Verdict:
        """That of the rank which needs most. Beside a rollout it holds what it does as it updates."""
        needed, capacity = self.result.best.needed_bytes + self.beside_bytes, self.result.capacity_bytes
        own = Verdict(device=self.result.device, fits=None if capacity is None else needed <= capacity,
                      needed_bytes=needed, capacity_bytes=capacity, count=self.plan.ranks,
                      free_bytes=None if capacity is None else capacity - needed)
        if self.rollout is None:
            return own
        held, all_leaves = self.beside_bytes + max(stage.update_peak_bytes for stage in self.result.best.stages), (
            self.rollout.plan.offloads_model and self.rollout.plan.offloads_optimizer)
        return self.rollout.judge(own, *((held, 0) if all_leaves else (0, held)))

    @property
    def step_seconds(self) -> float | None:
        return wait(self.rollout, self.result.best.step_seconds)

    @property
    def step_range(self) -> tuple[float, float] | None:
        """The range of `step_seconds`."""
        low, high = (wait(self.rollout, end) for end in self.result.best.step_seconds_range or (None, None))
        return None if low is None or high is None else (low, high)

    @property
    def tokens_per_second(self) -> float | None:
        """Of all ranks, padding counted."""
        return self.plan.tokens / self.step_seconds if self.step_seconds else None


def profile_layout(plan: TrainingPlan, device: str | DeviceSpec, *, files: Files | None = None,
                   cluster: str | ClusterSpec | None = None) -> LaidOutJob:
    """Predict a step of a plan with `ModelParallel`. Raises InputError where its model cannot be divided so."""
    layout, said = make_layout(plan)
    bare = replace(plan, task="sft", reference="none", checkpoints="none", checkpoint_every=1, loss_chunks=None)
    build, more = load_model(bare, files or Files())

    with torch.device("meta"):
        towers = _drop_towers(build())
    if towers:
        more.append("ranks divide the language model; those of the first stage hold its towers whole")

    def make() -> nn.Module:
        model = make_model(bare, build)
        _drop_towers(model)
        if plan.task in ("classify", "reward"):
            set_scores(model, max(1 if plan.task == "reward" else plan.classes, layout.tensor))
        return _untie(model, layout.pipeline)

    spec = find_device(device) if isinstance(device, str) else device
    known = find_cluster(cluster) if isinstance(cluster, str) else cluster or cluster_of(spec.name)
    found = replace(known, device=spec)
    with model_errors(plan.model):
        result = compose_layout(Target(plan.model, make), found, layout, plan.length)
    reference = _count_reference(plan, files or Files())
    if plan.offloads_teacher:  # it is there while nothing is saved for backward
        reference = max(0, reference - min(stage.peak_bytes - stage.update_peak_bytes for stage in result.best.stages))
    beside = towers * DTYPES[plan.dtype].itemsize + reference
    return LaidOutJob(plan, result, (*more, *plan.assumptions, *said, *result.assumptions),
                      sample_rollout(plan, spec, files), beside)


def _drop_towers(model: nn.Module) -> int:
    """Take away the parts of a model that see or hear, which rows of text do not pass; the parameters of these."""
    config, count, left = getattr(model, "config", None), 0, [model]
    if not any(hasattr(config, f"{kind}_config") for kind in ("vision", "audio")):
        return 0
    while left:
        module = left.pop()
        for name, child in list(module.named_children()):
            if name in (*TOWERS, *PROJECTORS):
                count += sum(parameter.numel() for parameter in child.parameters())
                setattr(module, name, None)
            else:
                left.append(child)
    return count


def _count_reference(plan: TrainingPlan, files: Files) -> int:
    """Bytes of a reference's weights on a rank, which divide them as they do the model's own."""
    if plan.reference != "copy" or plan.parallel is None:
        return 0
    ranks, total = plan.parallel, 0.0
    build, _ = load_model(replace(plan, model=plan.teacher or plan.model), files)
    with torch.device("meta"):
        for path, parameter in build().named_parameters():
            total += parameter.numel() / ranks.pipeline / (ranks.expert if ".experts." in path else ranks.tensor)
    return int(total * DTYPES[plan.dtype].itemsize)


def make_layout(plan: TrainingPlan) -> tuple[Layout, list[str]]:
    """The layout of a plan, and what is taken for granted. Raises InputError for what no layout has."""
    parallel = plan.parallel or ModelParallel()
    said = []
    if plan.quantize is not None:
        raise InputError(f"{plan.model}: {plan.quantize} weights are not divided by ranks here")
    checkpoints = _CHECKPOINTS.get(plan.checkpoints, "blocks")
    if plan.checkpoints not in _CHECKPOINTS or plan.checkpoint_every > 1:
        said.append("every block is run again in backward, and its input is kept on the device")
    if plan.task != "sft":
        said.append(f"of {plan.task} the passes that train, with the loss of each token; of a reference the weights")
    if plan.loss_chunks is not None:
        said.append("the loss of all tokens at once")
    data = plan.ranks // parallel.size
    computes_as_held = plan.autocast is None and (plan.sharding is None or plan.sharding.dtype is None)
    is_half = parallel.sharding.startswith("fsdp") and plan.dtype != "fp32" and computes_as_held
    optimizer = "adamw_fused" if plan.optimizer == "adamw" else plan.optimizer
    return Layout(replicate=parallel.replicas, shard=data // parallel.replicas, context=parallel.context,
                  expert=parallel.expert, tensor=parallel.tensor, pipeline=parallel.pipeline, virtual=parallel.virtual,
                  schedule=parallel.schedule, micro_batch=plan.sequences, micro_batches=plan.accumulate,
                  sharding=parallel.sharding, checkpointing=checkpoints, sequence_parallel=parallel.sequence,
                  precision="bf16" if is_half else "mixed", optimizer=optimizer, offload=parallel.offloads,
                  compile=plan.compiles), said


def _untie(model: nn.Module, stages: int) -> nn.Module:
    """A model whose head has a weight of its own where another stage has the embedding, as Megatron keeps a copy
    (core/models/common/language_module/language_module.py, `setup_embeddings_and_output_layer`).
    """
    get_input, get_output = (getattr(model, f"get_{which}_embeddings", None) for which in ("input", "output"))
    if stages > 1 and callable(get_input) and callable(get_output):
        embedding, head = get_input(), get_output()
        if head is not None and head.weight is embedding.weight:
            head.weight = nn.Parameter(torch.empty_like(head.weight), head.weight.requires_grad)
    return model
