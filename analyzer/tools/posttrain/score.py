"""Passes that only score: log probabilities of sequences that are there, by ranks as a search profiles them."""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from analyzer.api.profile import profile
from analyzer.parallel import world
from analyzer.tools.search.compose import divide_blocks
from analyzer.tools.search.figures import FigureReader, Figures
from analyzer.tools.search.layout import Layout
from analyzer.tools.search.peaks import SEVERAL, extend
from analyzer.tools.search.probe import PROBE_OPTIONS, Subject, find_template
from analyzer.tools.search.rank import RankJob
from analyzer.tools.search.stage import Piece


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of a policy of logits: log probabilities of the tokens in float32, in ``chunks`` of the tokens that are
    each run again in backward, and with ``entropy`` that of each token, a second array of tokens by vocabulary (verl
    0.7, utils/torch_functional.py, ``logprobs_from_logits``, ``entropy_from_logits``).
    """

    chunks: int | None = None
    entropy: bool = False

    def __call__(self, logits: Any, labels: Tensor) -> Tensor:
        rows, ids = logits.flatten(0, 1), labels.flatten(0, 1)
        if self.chunks is None:
            return self._sum(rows, ids)
        parts = zip(rows.chunk(self.chunks), ids.chunk(self.chunks))
        found = [checkpoint(self._sum, part, own, use_reentrant=False) for part, own in parts]
        total: Tensor = torch.stack(found).sum()
        return total

    def _sum(self, rows: Any, ids: Tensor) -> Tensor:
        wide = rows.float()
        loss = functional.cross_entropy(wide, ids)
        if not self.entropy:
            return loss
        own = wide.to_local() if isinstance(wide, DTensor) else wide  # of tensor parallel ranks each its words
        chances = functional.softmax(own, dim=-1)
        entropy = torch.logsumexp(own, dim=-1) - (chances * own).sum(-1)
        return loss + entropy.mean()


class ScoreJob(RankJob):
    """A rank that tells the log probabilities of its micro-batches, without gradients, and updates nothing."""

    def step(self, _: nn.Module, optimizer: Any, *inputs: Any) -> None:
        size = self.layout.micro_batch
        with torch.no_grad(), self._training():
            for i in range(self.layout.micro_batches):
                tokens = inputs[0][i * size:(i + 1) * size]
                self.loss(self.model(tokens), tokens)


def score(subject: Subject, layout: Layout) -> Figures:
    """The figures of a rank that scores two micro-batches, or the only one; of a pipeline those of a stage that has
    both ends, the most that one has.
    """
    template = find_template(subject)
    stage = replace(layout, pipeline=1, virtual=1, schedule="1F1B", optimizer=None, checkpointing="none",
                    micro_batches=min(2, layout.micro_batches), offload=False)
    most = max(divide_blocks(len(template.blocks), layout.stages), default=0) * layout.virtual
    counts = (most,) if most <= SEVERAL[1] else SEVERAL
    return extend(most, {count: _measure(subject, stage, count) for count in counts})


def _measure(subject: Subject, layout: Layout, blocks: int) -> Figures:
    template = find_template(subject)
    reader = FigureReader(subject.device, template.path if 0 < blocks < len(template.blocks) else None)
    with world(layout.devices, 0, cluster=subject.cluster):
        # weights of 16 bits alone, where the optimizer has those of 32
        job = ScoreJob(template, layout, [Piece(blocks)], [0], subject.sequence, layout.is_distributed,
                       subject.loss)
        found = profile(job.build, job.inputs(), device=subject.device, step=job.step, profilers=reader.profilers,
                        reuse=False, options=PROBE_OPTIONS)
    return reader.read(found, layout.devices, True)
