"""The trainer of a plan: seconds and bytes of its updates and of its passes that score, composed as a search does."""
from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from torch import nn

from analyzer.api.argument import build_model
from analyzer.hardware import ClusterSpec
from analyzer.recipe import LoraSpec, Recipe
from analyzer.tools.search import Layout, compose_layout
from analyzer.tools.search.bound import least_state_bytes
from analyzer.tools.search.compose import HALF, JobStep, ModelSizes, list_parts, list_stages
from analyzer.tools.search.figures import Figures
from analyzer.tools.search.probe import Subject, find_template
from analyzer.tools.search.search import model_sizes
from analyzer.zoo.target import Target

from .answers import pack
from .plan import PosttrainPlan
from .score import PolicyLoss, score


@dataclass(frozen=True)
class Passes:
    """Micro-batches of one rank: ``count`` of them, each of ``rows`` sequences of ``tokens``, as long together as what
    is packed. Attention of a token is to the tokens of its own sequence: their length is the mean that a token sees.
    """

    count: int
    rows: int
    tokens: int


@dataclass(frozen=True)
class HeldByRank:
    """Bytes that the fullest rank of the trainer holds between its phases."""

    model: int
    optimizer: int


def divide_passes(plan: PosttrainPlan, sequences: int, room: int, data: int) -> Passes:
    """How ``data`` ranks share some sequences of a step, in micro-batches with ``room`` for so many tokens. Each rank
    has equally many micro-batches, since they communicate in each.
    """
    lengths = plan.draw()[:sequences]
    seen = sum(length * length for length in lengths) / sum(lengths)
    if plan.packs:
        count = max(1, math.ceil(pack(lengths, room) / data))
        filled = sum(lengths) / (count * data)
    else:
        rows = [lengths[start:start + plan.rows] for start in range(0, len(lengths), plan.rows)]
        count = max(1, math.ceil(len(rows) / data))
        filled = sum(max(row) * len(row) for row in rows) / (count * data)
        seen = sum(max(row) for row in rows) / len(rows)
    number = max(1, round(filled / seen))
    return Passes(count, number, max(1, round(filled / number)))


def make_alike(target: Target) -> tuple[Target, str]:
    """A target whose blocks are alike, so that ranks may divide them: where a model of transformers has experts in all
    but its first blocks (``first_k_dense_replace``), those have them too; and what was changed, empty for nothing.
    """
    config: Any = getattr(build_model(target.build), "config", None)
    dense = getattr(config, "first_k_dense_replace", 0)
    if not dense:
        return target, ""

    def build() -> nn.Module:
        changed = copy.deepcopy(config)
        changed.first_k_dense_replace = 0
        if hasattr(changed, "mlp_layer_types"):  # of transformers 5, which says it for each layer
            changed.mlp_layer_types = ["sparse"] * changed.num_hidden_layers
        import transformers

        model: nn.Module = transformers.AutoModelForCausalLM.from_config(changed)
        return model

    return replace(target, build=build), f"the first {dense} blocks, which have no experts, are taken to have them"


class Trainer:
    """Composes the steps of one model; what was composed once is kept."""

    def __init__(self, target: Target, cluster: ClusterSpec, lora: str | None = None,
                 loss: PolicyLoss | None = None) -> None:
        target, self.assumed = make_alike(target)
        if lora is not None:
            recipe, build = Recipe(lora=LoraSpec.parse(lora)), target.build
            target = replace(target, name=f"{target.name} with adapters", build=lambda: recipe.apply(build()))
        # with all the memory that a step wants: whether it fits is told of its phases together
        self.cluster = replace(cluster, device=replace(cluster.device, memory_bytes=None))
        self.target, self.loss = target, loss or PolicyLoss()
        self._compose = lru_cache(maxsize=None)(self._compose_step)
        self._score = lru_cache(maxsize=None)(self._score_passes)

    def _fit(self, layout: Layout, tokens: int) -> int:
        """Tokens of a sequence that its ranks can divide, no fewer."""
        step = layout.tensor * (2 * layout.context if layout.context > 1 else 1)
        return -(-tokens // step) * step

    def _compose_step(self, layout: Layout, tokens: int) -> JobStep:
        return compose_layout(self.target, self.cluster, layout, tokens, self.loss).best

    def _score_passes(self, layout: Layout, tokens: int) -> Figures:
        return score(Subject(self.target, self.cluster, tokens, loss=self.loss), layout)

    def sizes(self) -> ModelSizes:
        return model_sizes(find_template(Subject(self.target, self.cluster, 1)), 1)

    def update(self, layout: Layout, passes: Passes) -> tuple[JobStep, float]:
        """One optimizer step, and the part of it that is taken: torch's pipelines have as many micro-batches as stages
        at least, Megatron's may have fewer, so that a step ends that many earlier. Raises InputError for a layout that
        the model cannot have.
        """
        count, stages = max(passes.count, layout.pipeline), layout.pipeline
        shaped = replace(layout, micro_batch=passes.rows, micro_batches=count)
        part = (passes.count + stages - 1) / (count + stages - 1)
        return self._compose(shaped, self._fit(layout, passes.tokens)), part

    def fullest_update(self, layout: Layout, room: int) -> JobStep:
        """A step whose micro-batches each have as many tokens as there is room for."""
        shaped = replace(layout, micro_batch=1, micro_batches=max(2, layout.pipeline))
        return self._compose(shaped, self._fit(layout, room))

    def score_seconds(self, layout: Layout, passes: Passes) -> tuple[float, float, str]:
        """Seconds of all passes that score, the spread above them, and what bounds them. Stages of a pipeline work on
        one micro-batch after the other.
        """
        found = self._score(replace(layout, micro_batch=passes.rows, micro_batches=2),
                            self._fit(layout, passes.tokens))
        each = found["step_seconds"] / 2
        bounds = {name.removeprefix("bound_"): value for name, value in found.items() if name.startswith("bound_")}
        return ((passes.count + layout.pipeline - 1) * each, found.get("above", 0.0),
                max(bounds, key=lambda name: bounds[name], default="-"))

    def score_bytes(self, layout: Layout, room: int) -> int:
        """At the peak of passes that score, of the fullest micro-batch; nothing of the optimizer."""
        found = self._score(replace(layout, micro_batch=1, micro_batches=2), self._fit(layout, room))
        return int(found["pass_peak_bytes"])

    def held(self, layout: Layout) -> HeldByRank:
        """Between phases, of the fullest rank."""
        sizes, most = self.sizes(), HeldByRank(0, 0)
        parts = list_parts(layout, sizes.blocks)
        for stages in list_stages(layout):
            own = [parts[stage] for stage in stages]
            states = sum(least_state_bytes(layout, sizes, part)[0] for part in own)
            if layout.is_distributed:  # weights of 16 bits, and what is divided in 32
                model = HALF * sum(sizes.gathered(part, layout) for part in own)
                states += model - HALF * sum(sizes.held(part, layout.tensor) for part in own)
            else:
                model = sum(least_state_bytes(replace(layout, optimizer=None), sizes, part)[0] for part in own)
            most = max(most, HeldByRank(int(model), int(states - model)), key=lambda held: held.model + held.optimizer)
        return most

    def whole_bytes(self) -> int:
        """Of all weights in 16 bits."""
        sizes = self.sizes()
        return 2 * (sizes.blocks * sizes.block + sizes.before + sizes.behind)
