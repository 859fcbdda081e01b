"""The model that a training plan asks for: loaded, given adapters, frozen, set up for its task, shared by ranks."""
from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from analyzer.errors import InputError
from analyzer.recipe import LoraSpec, Recipe, add_lora, list_blocks, quantize_experts
from analyzer.zoo.input_spec import import_extra
from analyzer.zoo.target import load_target

from .checkpoint import checkpoint_some, offload_inputs
from .document import Files
from .layer import RotatedLinear, compute_in_fp8, quantize_and_back, share_codes, unpack_by_operators
from .model_name import find_model
from .plan import Adapter, Sharding, TrainedBlocks, TrainingPlan

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def load_model(plan: TrainingPlan, files: Files) -> tuple[Callable[[], nn.Module], list[str]]:
    """What builds the model with the head of the plan's task, and sentences on what was taken for granted."""
    if plan.config is not None:
        return partial(_build_sizes, plan.config), []
    found = find_model(plan.model, files)
    said = [found.assumed] if found.assumed else []
    target = load_target(found.target)
    if plan.task in ("classify", "reward"):
        return _build_classifier(found.target, 1 if plan.task == "reward" else plan.classes), said
    return target.build, said


def _build_sizes(config: Mapping[str, Any]) -> nn.Module:
    """The model of transformers that has these sizes. Raises MissingExtraError without the library."""
    transformers = import_extra("transformers", "hf:")
    sizes = dict(config)
    made = transformers.AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(made)
    return model


def _build_classifier(target: str, classes: int) -> Callable[[], nn.Module]:
    """A model of the same family that gives numbers of a sequence (``...ForSequenceClassification``)."""
    causal = load_target(target).build

    def build() -> nn.Module:
        import transformers

        written: Any = getattr(causal, "args", None)
        config = written[1] if written else getattr(causal(), "config")  # noqa: B009  # no attribute of every module
        mapping = transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
        if type(config) not in mapping:
            model: Any = causal()
            set_scores(model, classes)
            model.__class__ = type(f"{type(model).__name__}Scores", (_Scores, type(model)), {})
            return model  # type: ignore[no-any-return]
        config = type(config).from_dict({**config.to_dict(), "num_labels": classes, "pad_token_id": 0})
        found: Any = mapping[type(config)]
        return found._from_config(config)  # type: ignore[no-any-return]

    return build


def set_scores(model: Any, classes: int) -> None:
    """Let a language model give some numbers of each token in the place of logits. Raises InputError without a head."""
    head = model.get_output_embeddings()
    if head is None:
        raise InputError(f"{type(model).__name__}: has no head in the place of which one for a sequence could be")
    model.set_output_embeddings(nn.Linear(head.in_features, classes, bias=False, dtype=head.weight.dtype,
                                          device=head.weight.device))


class _Scores:
    """A language model whose last token's numbers are those of its row (ms-swift 4.6, swift/model/patcher.py,
    `_patch_sequence_classification`, which is for models of which transformers has no classifier).
    """

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **given: Any) -> Any:
        found: Any = super().forward(input_ids=input_ids, **given)  # type: ignore[misc]
        logits = found.logits[:, -1]
        loss = None
        if labels is not None:
            loss = functional.cross_entropy(logits, labels) if logits.shape[-1] > 1 else functional.mse_loss(
                logits[:, 0].float(), labels)
        return type(found)(loss=loss, logits=logits)


def make_model(plan: TrainingPlan, build: Callable[[], nn.Module],
               teach: Callable[[], nn.Module] | None = None) -> nn.Module:
    """The model of one rank before ranks share it, in training mode; ``teach`` builds its teacher."""
    keeps_some = plan.checkpoints == "operators" or plan.checkpoint_every > 1
    quantize: Any = plan.quantize
    model = build()
    recipe = Recipe(dtype=DTYPES[plan.dtype], attention=choose_attention(model, plan.attention), quantize=quantize,
                    loss_chunks=None if plan.task in ("classify", "reward") else plan.loss_chunks,
                    checkpointing=plan.checkpoints not in ("none", "saved_offloaded") and not keeps_some)
    reference = None
    if plan.reference == "copy":
        other = (teach or build)()
        reference = replace(recipe, checkpointing=False, attention=choose_attention(other, plan.attention)).apply(
            other).requires_grad_(False)
    model = _apply(recipe, model, plan)
    if plan.quantizes_experts and not quantize_experts(model):
        raise InputError(f"{plan.model}: quantized experts: {type(model).__name__} has none that are one parameter")
    if plan.fake_quantization is not None:
        quantize_and_back(model, plan.fake_quantization, plan.loss_chunks is not None)
    if keeps_some:
        checkpoint_some(model, plan)
    if plan.checkpoints == "inputs_offloaded":
        offload_inputs(model)
    if plan.adapter is not None:
        _train_whole(model, plan.adapter.saved)
    _freeze(model, plan)
    for path, parameter in model.named_parameters() if plan.upcast else ():
        if parameter.ndim == 1 and any(re.search(pattern, path) for pattern in plan.upcast):
            parameter.data = parameter.data.float()
    if plan.trained_dtype is not None:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(DTYPES[plan.trained_dtype])
    if plan.task in _PAIRED:
        model = PairLoss(model, reference, plan.task, plan.reference != "none", plan.loss_chunks)
    return model.train()


def choose_attention(model: nn.Module, wanted: str | None) -> str | None:
    """What of transformers computes as fused kernels do: FlexAttention where a model, such as gpt-oss with its sinks,
    cannot take PyTorch's own.
    """
    has_flex = getattr(model, "_supports_flex_attn", False) and not getattr(model, "_supports_sdpa", True)
    return "flex_attention" if wanted == "sdpa" and has_flex else wanted


def lora_spec(model: nn.Module, adapter: Adapter) -> LoraSpec:
    """Adapters as peft places them: a target is the end of a path, ``re:...`` a regular expression of whole paths."""
    if adapter.excluded:
        others = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)
                    and (not adapter.targets or f".{path}".endswith(tuple(f".{name}" for name in adapter.targets)))
                    and not any(part in path for part in adapter.excluded)]
        return LoraSpec(adapter.r, tuple(others), adapter.dropout, adapter.dtype, adapter.casts)
    targets: list[str] = []
    for target in adapter.targets:
        if not target.startswith("re:"):
            targets.append(target)
            continue
        try:
            pattern = re.compile(target[3:])
        except re.error as error:
            raise InputError(f"target modules {target[3:]!r}: is no regular expression: {error}") from error
        found = [path for path, module in model.named_modules() if pattern.fullmatch(path)]
        if not found:
            raise InputError(f"target modules {target[3:]!r}: no layer of {type(model).__name__} has such a path; the "
                             f"first are {', '.join([path for path, _ in model.named_modules() if path][:4])}")
        targets += found
    return LoraSpec(adapter.r, tuple(targets), adapter.dropout, adapter.dtype, adapter.casts)


def _apply(recipe: Recipe, model: nn.Module, plan: TrainingPlan) -> nn.Module:
    """The model with what a recipe changes, and its adapters."""
    spec = None if plan.adapter is None else lora_spec(model, plan.adapter)
    if plan.adapter is not None and plan.adapter.rotates and spec is not None:
        model = replace(recipe, loss_chunks=None, checkpointing=False).apply(model)
        add_lora(model, spec, RotatedLinear)
        model = Recipe(loss_chunks=recipe.loss_chunks, checkpointing=recipe.checkpointing).apply(model)
    else:
        model = replace(recipe, lora=spec).apply(model)
    if plan.unpacks:
        unpack_by_operators(model)
    if plan.computes_in_fp8:
        compute_in_fp8(model)
    return model


def _train_whole(model: nn.Module, names: tuple[str, ...]) -> None:
    """Train modules beside adapters, and keep their old weights (peft/utils/other.py, `ModulesToSaveWrapper`)."""
    for name in names:
        found = [module for path, module in model.named_modules() if f".{path}".endswith(f".{name}")]
        if not found:
            raise InputError(f"modules to save: {type(model).__name__} has no module named {name}")
        for module in found:
            for key, parameter in list(module._parameters.items()):
                if parameter is not None:
                    module.register_buffer(f"original_{key}", parameter.detach().clone(), persistent=False)
                    module._parameters[key] = nn.Parameter(parameter.detach())


def _freeze(model: nn.Module, plan: TrainingPlan) -> None:
    patterns = [*plan.trained, *([] if plan.trained_blocks is None else _list_patterns(model, plan.trained_blocks))]
    if not patterns and not plan.frozen:
        return
    trained = [re.compile(_plain_slices(pattern)) for pattern in patterns]
    frozen = [re.compile(pattern) for pattern in plan.frozen]
    for path, parameter in model.named_parameters():
        trains = any(pattern.match(path) for pattern in trained) if trained else parameter.requires_grad
        parameter.requires_grad_(trains and not any(pattern.search(path) for pattern in frozen)
                                 and parameter.is_floating_point())
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(f"{', '.join(patterns or plan.frozen)}: leaves no parameter of {type(model).__name__} to "
                         "train")


def _list_patterns(model: nn.Module, blocks: TrainedBlocks) -> list[str]:
    """Of parameters of the blocks that train. Raises InputError where the model does not say how many it has."""
    config: Any = getattr(model, "config", None)
    count = getattr(getattr(config, "text_config", config), "num_hidden_layers", None)
    if not isinstance(count, int):
        raise InputError(f"{type(model).__name__}: its configuration has no num_hidden_layers, by which the blocks "
                         "that train are found")
    if blocks.where == "spread":
        if not blocks.count or count % blocks.count:
            raise InputError(f"{blocks.count} blocks that train, spread evenly: {type(model).__name__} has {count} "
                             "blocks, which is no multiple")
        step = count // blocks.count
        numbers = range(step - 1, count, step)
    else:
        some = min(blocks.count, count)
        numbers = range(count - some, count) if blocks.where == "last" else range(some)
    names = f"(?:{'|'.join(map(re.escape, blocks.modules))})" if blocks.modules else ""
    return [rf".*\.{number}\.{names}" for number in numbers]


def _plain_slices(pattern: str) -> str:
    """A pattern without the rows that axolotl may name behind it: ``^lm_head.weight$[:32000]``."""
    return re.sub(r"\[\d*:\d*\]$", "", pattern)


# Losses of pairs of answers, as TRL computes them.

_PAIRED = ("anchored", "dpo", "orpo", "simpo", "kto", "reward", "policy", "distill")
_DISTILLED = 512  # tokens whose divergence is computed at once: ms-swift 4.6, rlhf_trainers/gkd_loss.py, `jsd_loss`


class PairLoss(nn.Module):
    """A model and what it is compared with; its output is the loss of both answers of each pair (trl 1.16,
    trainer/dpo_trainer.py, `_compute_loss`: one pass over chosen and rejected answers, one row after the other).
    """

    def __init__(self, policy: nn.Module, reference: nn.Module | None, task: str, compares: bool,
                 parts: int | None = None) -> None:
        super().__init__()
        self.policy, self.reference = policy, reference
        self.task, self.compares, self.parts = task, compares, parts

    policy: Any

    @property
    def config(self) -> Any:
        """Of the model, which DeepSpeed's "auto" asks for its width."""
        return self.policy.config

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **seen: Any) -> torch.Tensor:
        if self.task == "reward":
            rewards = self.policy(input_ids=input_ids, **seen).logits[:, 0].float()
            chosen, rejected = rewards.chunk(2)
            return functional.logsigmoid(chosen - rejected).mean().neg()
        if self.task == "distill":
            return self._distill(input_ids, seen)
        if self.task == "anchored":
            return self._anchor(input_ids, seen)
        scores = self._score(self.policy, input_ids, seen)
        if self.compares:
            with torch.no_grad():
                compared = self._score(self.policy if self.reference is None else self.reference, input_ids, seen)
            scores = scores - compared
        if self.task == "policy":
            return scores.mean().neg()
        chosen, rejected = scores.chunk(2)
        return functional.logsigmoid(0.1 * (chosen - rejected)).mean().neg()

    def _distill(self, input_ids: torch.Tensor, seen: Mapping[str, Any]) -> torch.Tensor:
        """The mean divergence from the teacher's probabilities, or from those of a few tokens that a server tells."""
        given = [self._flatten(self.policy(input_ids=input_ids, **seen).logits)]
        if self.compares:
            with torch.no_grad():
                teacher = self.policy if self.reference is None else self.reference
                given.append(self._flatten(teacher(input_ids=input_ids, **seen).logits))
        total = given[0].new_zeros(())
        for parts in zip(*(logits.split(_DISTILLED) for logits in given)):
            own, *other = (functional.log_softmax(part, dim=-1) for part in parts)
            size = min(part.shape[-1] for part in (own, *other))  # vocabularies of a family differ in padding
            total = total + (own[:, :1].sum() if not other else (
                other[0][:, :size].exp() * (other[0][:, :size] - own[:, :size])).sum())
        return total / len(given[0])

    def _anchor(self, input_ids: torch.Tensor, seen: Mapping[str, Any]) -> torch.Tensor:
        """LLaMA-Factory 0.9.6, train/trainer_utils.py, `asft_loss_func`: of all tokens at once."""
        with torch.no_grad():
            other = (self.policy if self.reference is None else self.reference)(input_ids=input_ids, **seen).logits
        logits = self.policy(input_ids=input_ids, **seen).logits.float()
        own, other = (each[:, :-1].contiguous().flatten(0, 1) for each in (logits, other))
        losses = functional.cross_entropy(own, input_ids[:, 1:].flatten(), reduction="none")
        divergences = functional.kl_div(functional.log_softmax(own, dim=-1), functional.softmax(other, dim=-1),
                                        reduction="none").sum(dim=-1)
        return (losses * torch.exp(-losses.detach())).mean() + 0.1 * divergences.mean()

    @staticmethod
    def _flatten(logits: torch.Tensor) -> torch.Tensor:
        return logits.flatten(0, 1) / 0.9  # a temperature, whatever it is

    def _score(self, model: Any, input_ids: torch.Tensor, seen: Mapping[str, Any]) -> torch.Tensor:
        """The sum of the log probabilities of each row's tokens (trl/trainer/utils.py, `selective_log_softmax`: a row
        at a time in 16 bits, all rows at once in float32).
        """
        logits = model(input_ids=input_ids, **seen).logits[:, :-1]
        if self.parts is not None:
            return self._score_parts(model, logits, input_ids[:, 1:])
        index = input_ids[:, 1:].unsqueeze(-1)
        if logits.dtype is torch.float32:
            chosen = logits.gather(-1, index).squeeze(-1)
            norms = torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
            found: torch.Tensor = (chosen - norms).sum(-1)
            return found
        rows = [functional.log_softmax(row, dim=-1).gather(-1, which).squeeze(-1) for row, which in zip(logits, index)]
        return torch.stack(rows).sum(-1).float()

    def _score_parts(self, model: Any, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The same with the head in parts of the tokens, each run again in backward: `recipe.chunk_loss` has put what
        gives the head's input in its place.
        """
        head = model.get_output_embeddings().head

        def score(part: torch.Tensor, labels_of_part: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(head(part).float(), labels_of_part, reduction="none").neg()

        parts = zip(hidden.reshape(-1, hidden.shape[-1]).chunk(self.parts or 1), labels.reshape(-1).chunk(
            self.parts or 1))
        found: list[torch.Tensor] = [checkpoint(score, part, ids, use_reentrant=False) for part, ids in parts]
        return torch.cat(found).reshape(labels.shape).sum(-1)


# Ranks.

def share_model(model: nn.Module, plan: TrainingPlan) -> nn.Module:
    """The model as one of several ranks holds it; as it is where there is one rank."""
    sharding = plan.sharding
    if sharding is None or plan.ranks == 1:
        return model
    if sharding.kind == "ddp":
        return nn.parallel.DistributedDataParallel(model.cuda())
    assert sharding.kind == "fsdp"
    return _shard(model if plan.picture is None else model.cuda(), plan, sharding)


def _shard(model: nn.Module, plan: TrainingPlan, sharding: Sharding) -> nn.Module:
    """As accelerate 1.15 shards it, utils/fsdp_utils.py, `fsdp2_prepare_model`: each block by itself, embedding and
    head by themselves, the rest with the root; what trains in float32 where passes run in 16 bits.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    dtype = sharding.dtype or plan.autocast
    if dtype is not None and plan.quantize is None:
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.data = parameter.data.float()
    computed = None if dtype is None else DTYPES[dtype]
    share_codes(model, computed or DTYPES[plan.dtype])
    reduced = computed if sharding.reduce_dtype is None else DTYPES[sharding.reduce_dtype]
    settings: dict[str, Any] = {
        "reshard_after_forward": sharding.reshards,
        "mp_policy": MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=reduced, output_dtype=computed),
        "offload_policy": CPUOffloadPolicy() if sharding.offloads else OffloadPolicy(),
        "ignored_params": {p for p in model.parameters() if not p.is_floating_point()}}
    replicas = sharding.replicas or max(1, plan.ranks // (plan.ranks_per_host or 8))
    if replicas > 1:
        settings["mesh"] = init_device_mesh("cuda", (replicas, plan.ranks // replicas),
                                            mesh_dim_names=("replicate", "shard"))
    for part in _list_shared_alone(model, sharding.shares_ends):
        fully_shard(part, **settings)
    del settings["reshard_after_forward"]
    fully_shard(model, **settings)
    return model


def _list_shared_alone(model: nn.Module, shares_ends: bool) -> Iterator[nn.Module]:
    parts = [model.policy, model.reference] if isinstance(model, PairLoss) else [model]
    for part in parts:
        if part is None:
            continue
        yield from list_blocks(part)
        if not shares_ends:
            continue
        get_input, get_output = (getattr(part, f"get_{which}_embeddings", None) for which in ("input", "output"))
        ends = [get() if callable(get) else None for get in (get_input, get_output)]
        weights = [getattr(end, "weight", None) for end in ends]
        if weights[0] is not weights[1]:
            yield from (end for end in ends if isinstance(end, nn.Module))
    denoiser = getattr(model, "denoiser", None)
    if isinstance(denoiser, nn.Module):  # whose inputs are cast as it is called
        yield denoiser
