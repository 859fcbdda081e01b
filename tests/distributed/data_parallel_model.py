"""Models and the figures of a run that tests of data parallelism share."""
from functools import cache

import torch
from torch import nn

from analyzer import profile
from analyzer.parallel import world

HIDDEN, LAYERS, VOCABULARY, POSITIONS = 256, 4, 1024, 128
BLOCK = 12 * HIDDEN**2 + 13 * HIDDEN  #: elements of a block: attention 4, MLP 8; four biases (3 + 1 + 4 + 1), 2 norms
ROOT = (VOCABULARY + POSITIONS) * HIDDEN + 2 * HIDDEN  #: of the root: embeddings (the head is tied), a norm
P = LAYERS * BLOCK + ROOT
TENSORS = 12 * LAYERS + 4
IDS = torch.zeros(2, 128, dtype=torch.int64)


def gpt2(**settings):
    from transformers import GPT2Config, GPT2LMHeadModel
    config = GPT2Config(n_embd=HIDDEN, n_layer=LAYERS, n_head=4, vocab_size=VOCABULARY, n_positions=POSITIONS,
                        bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM", **settings)
    config.use_cache = False
    return GPT2LMHeadModel(config).train().to("cuda")


class Run:
    """The profile of a rank, its peak of requested bytes, and those that are there after a phase of the last step."""

    def __init__(self, build, size=8, rank=0, *, args=None, kwargs=None, **settings):
        def read_bytes(log):
            from analyzer.profilers.annotation import Annotation
            self.peak = max(phase.peak_requested_bytes for phase in log.phases)
            self._ends = {phase.phase: phase.requested_bytes for phase in log.phases}
            return Annotation()

        settings.setdefault("optimizer", "adamw")
        given = {"args": args} if args is not None else {"kwargs": kwargs or {"input_ids": IDS, "labels": IDS.clone()}}
        with world(size, rank):
            self.profile = profile(build, profilers=[read_bytes], **given, **settings)

    def end(self, phase):
        """Requested bytes after a phase."""
        return self._ends[phase]

    def comm(self, phase, kind=None):
        """Whole bytes that a phase communicates, of one kind or all."""
        if kind is None:
            return self.profile.phases[phase].comm_bytes
        return sum(row.bytes for row in self.profile.comm if row.phase == phase and row.kind == kind)

    def calls(self, kind):
        """How many collectives of a kind there are."""
        return sum(row.kind == kind for row in self.profile.comm)


class Normed(nn.Module):
    """A convolution and a batch norm of 16 channels, and a linear layer: 634 parameters, statistics of 33 elements."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).mean((2, 3))).sum()


@cache
def shared_run(build):
    """The run of ``build`` with no further settings, at which several tests look."""
    return Run(build)


@cache
def one():
    """One device, whose peak all others are held against."""
    return Run(gpt2, 1)


def accumulate(model, optimizer, **inputs):
    with model.no_sync():
        model(**inputs).loss.backward()
    model(**inputs).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def scale(make):
    """A step with a scaler of gradients, which the first step makes: ``make`` is a list of its class."""
    def step(model, optimizer, **inputs):
        if isinstance(make[0], type):
            make[0] = make[0]("cuda")
        with torch.autocast("cuda", torch.float16):
            loss = model(**inputs).loss
        make[0].scale(loss).backward()
        make[0].step(optimizer)
        make[0].update()
        optimizer.zero_grad()
    return step
