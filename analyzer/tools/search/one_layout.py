"""`compose_layout`: the step of one layout that is given, as a search composes those of many; the best by name."""
from __future__ import annotations

from typing import Any

from analyzer.errors import InputError
from analyzer.hardware import ClusterSpec
from analyzer.zoo.target import Target

from .layout import Layout, Question, Space
from .probe import ProbeJournal, Subject, find_template, run_probes
from .rank import Loss, causal_loss
from .result import SearchResult
from .search import Progress, Searcher, conclude
from .stage import Template


def compose_layout(target: Target, cluster: ClusterSpec, layout: Layout, sequence: int,
                   loss: Loss = causal_loss) -> SearchResult:
    """The step of a layout with samples of ``sequence`` tokens, of which ``layout`` says how many there are. Raises
    InputError for a layout that the model cannot have, and where one of its ranks cannot be profiled.
    """
    subject = Subject(target, cluster, sequence, loss=loss)
    template = find_template(subject)
    for problem in _list_problems(template, layout, sequence):
        raise InputError(f"{target.name}: {layout}: {problem}")
    question = Question(layout.devices, cluster.devices_per_host, layout.global_batch, sequence, Space())
    searcher = Searcher(subject, question, ProbeJournal(None, {}), run_probes)
    searcher.counts["layouts"] = 1
    searcher.evaluate([layout])
    for error in searcher.failed.values():
        raise InputError(f"{target.name}: {layout}: a rank of it cannot be profiled: {error}")
    return conclude(searcher, 1, None, None)


def list_best(target: Target, cluster: ClusterSpec, devices: int, global_batch: int, sequence: int, count: int,
              loss: Loss = causal_loss, progress: Progress | None = None, **choices: Any) -> list[Layout]:
    """The ``count`` fastest layouts that fit, the fastest first; those that lack least where none does. ``progress``
    hears how far it is. Raises InputError where there is none.
    """
    subject = Subject(target, cluster, sequence, loss=loss)
    question = Question(devices, cluster.devices_per_host, global_batch, sequence, Space.of(choices))
    searcher = Searcher(subject, question, ProbeJournal(None, {}), run_probes, progress)
    searcher.span = 0.0, 0.4
    searcher.bound()
    searcher.span = 0.4, 1.0
    searcher.rank(count)
    if not searcher.steps:
        raise InputError(f"{target.name}: no layout on {devices} devices takes {global_batch} samples of {sequence:,} "
                         "tokens: " + ("; ".join(dict.fromkeys(searcher.failed.values())) or "none divides them"))
    return [step.layout for step in conclude(searcher, count, None, None).steps]


def _list_problems(template: Template, layout: Layout, sequence: int) -> list[str]:
    """Why a model cannot be laid out so."""
    facts, found = template.facts, []
    if layout.tensor > 1:
        limit = template.find_tensor_limit()
        if not limit:
            why = "it has no tp_plan, which says how layers are divided" if facts.blocks else "its blocks are not alike"
            found.append(f"tensor parallelism: {why}")
        elif limit % layout.tensor:
            found.append(f"tensor parallelism of {layout.tensor}: what is divided has a common divisor of {limit}")
        if facts.experts and not layout.sequence_parallel:
            found.append("tensor parallelism of a model with experts needs sequence parallelism here")
    if layout.pipeline > 1 and facts.no_pipeline:
        found.append(f"pipeline parallelism: {facts.no_pipeline}")
    elif layout.stages > max(1, facts.blocks):
        found.append(f"{layout.stages} stages: it has {facts.blocks} blocks")
    if layout.context > 1 and sequence % (2 * layout.context):
        found.append(f"context parallelism: {sequence} tokens are no multiple of {2 * layout.context}")
    if layout.expert > 1:
        inner = layout.context * layout.tensor
        if not facts.experts or facts.experts % layout.expert:
            found.append(f"{facts.experts} experts a block are not divided by {layout.expert}")
        elif layout.expert % inner or layout.shard % (layout.expert // inner):
            found.append(f"experts over {layout.expert} ranks: they must be {inner} that share a sequence, times a "
                         f"divisor of the {layout.shard} that have others")
    return found
