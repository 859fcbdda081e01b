"""Samples a second count all micro-batches of a step that accumulates gradients."""
import pytest
import torch
from torch import nn

from analyzer import profile
from analyzer.tools.dryrun.script import dry_run
from analyzer.tools.runtime import FlopsProfiler, measure
from tests.small_model import Calls

MODEL = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
X = torch.rand(32, 64)


def stepping(accumulate):
    """A step of ``accumulate``, and what it accumulates."""
    def step(model, optimizer, x):
        accumulate(model, x)
        optimizer.step()
        optimizer.zero_grad()

    return step


@stepping
def accumulate(model, x):
    for _ in range(8):
        (model(x).sum() / 8).backward()


@stepping
def split(model, x):
    for part in x.split(12):
        model(part).sum().backward()


@stepping
def two_views(model, x):
    (model(x) - model(2 * x)).sum().backward()


@stepping
def evaluate_too(model, x):
    with torch.no_grad():
        model(x)
    model(x).sum().backward()


@pytest.mark.parametrize("run", [profile, measure])
@pytest.mark.parametrize(("step", "samples"), [(accumulate, 256), (split, 32), (two_views, 32), (evaluate_too, 32),
                                               (None, 32)])
def test_samples_of_a_step(run, step, samples):
    p = run(MODEL, (X,), step=step, optimizer="sgd")
    assert p.batch_size == samples
    assert p.samples_per_second == pytest.approx(samples / p.step_seconds)


SCRIPT = """
import torch
from torch import nn
model, loss = nn.Sequential(nn.Linear(64, 4)).cuda(), nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    for _ in range(8):
        loss(model(torch.rand(32, 64, device="cuda")), torch.zeros(32, dtype=torch.long, device="cuda")).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
GAN = """
import torch
from torch import nn
G, D = nn.Linear(8, 64).cuda(), nn.Linear(64, 1).cuda()
optimizers = [torch.optim.Adam(m.parameters()) for m in (G, D)]
for step in range(5):
    fake = G(torch.rand(32, 8, device="cuda"))
    D(torch.rand(32, 64, device="cuda")).mean().backward()
    D(fake.detach()).mean().neg().backward()
    optimizers[1].step()
    D(fake).mean().backward()
    optimizers[0].step()
"""


@pytest.mark.parametrize(("script", "samples"), [(SCRIPT, 256), (GAN, 32)])
def test_samples_of_a_scripts_step(script, samples, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(script)
    found = dry_run(path)
    assert found.error is None and found.profile.batch_size == samples
    assert found.profile.samples_per_second == pytest.approx(samples / found.profile.step_seconds)


class Engine:
    world_size, dp_world_size, mp_world_size = 4, 4, 1

    def train_micro_batch_size_per_gpu(self):
        return 32

    def gradient_accumulation_steps(self):
        return 8


@pytest.mark.parametrize(("passes", "samples"), [(8, 256), (1, 32)])
def test_samples_of_an_engines_step(passes, samples):
    """What was seen counts: an engine's own step is of one micro-batch."""
    prof = FlopsProfiler(MODEL, ds_engine=Engine())
    prof.start_profile()
    for _ in range(passes):
        MODEL(X).sum().backward()
    prof.stop_profile()
    p = prof.profile
    assert p.samples_per_second == pytest.approx(4 * samples / p.step_seconds)
    MODEL.zero_grad()


def test_where_no_call_is_seen_the_engine_says_how_many_micro_batches_there_are():
    weight = MODEL[0].weight
    prof = FlopsProfiler(MODEL, ds_engine=Engine())
    prof.start_profile()
    (X @ weight).sum().backward()  # as a pipeline runs its stages
    prof.stop_profile()
    assert prof.profile.batch_size == 256
    MODEL.zero_grad()


@stepping
def in_flight(model, x):
    """Two micro-batches at a time, as a stage of a pipeline has them."""
    waiting = [model(x).sum(), model(x).sum()]
    for _ in range(3):
        waiting.pop(0).backward()
        waiting.append(model(x).sum())
    for loss in waiting:
        loss.backward()


@stepping
def uneven(model, x):
    for rows in (8, 32, 16):
        model(x[:rows]).sum().backward()


@pytest.mark.parametrize(("step", "passes", "calls"), [(None, 1, 1), (accumulate, 1, 8), (in_flight, 2, 5),
                                                       (two_views, 2, 2), (uneven, 1, 3)])
def test_saved_bytes_are_those_of_the_passes_in_flight_where_they_are_most(step, passes, calls):
    """ReLU's result, which the second layer saves too."""
    for reuse in (True, False):
        p = profile(MODEL, (X,), step=step, optimizer="sgd", device="h200", reuse=reuse)
        own = {m.path: m.own.saved_bytes for m in p.modules.walk()}
        doubled = 4 * 32 * 64 * (step is two_views)
        assert 0 <= own.pop("") - doubled <= 4 * passes  # sums, which a step of one's own makes
        assert own == {"0": 0, "1": passes * 4 * 32 * 64, "2": 0}
        assert p.modules.saved_bytes == sum(m.own.saved_bytes for m in p.modules.walk())
        relus = [n for n in p.nodes if n.target == "1"]
        assert len(relus) == calls and all(n.output_bytes == n.incremental_bytes and not n.temp_bytes for n in relus)
        assert sum(n.incremental_bytes for n in relus) == (4 * 56 * 64 if step is uneven else calls * 4 * 32 * 64)
        given = sum(n.incremental_bytes for n in p.nodes if n.op == "placeholder")
        assert max(n.accumulate_bytes for n in p.nodes) == given + passes * 4 * 32 * 64


def test_what_dies_in_the_forward_pass_of_a_later_micro_batch_is_no_activation():
    """GELU by hand makes temporaries: at the peak each micro-batch has the same of them, under the same name."""
    def run(model, x):
        with torch.no_grad():
            scale = (x @ model.fc.weight.T).abs().amax()
        return (model.fc(x) * scale).square()

    wide = Calls(run, fc=nn.Linear(64, 4096))
    p = profile(wide, (X,), step=accumulate, optimizer="sgd", device="h200")
    kinds = {event.category for event in p.memory_events if event.bytes == 4 * 32 * 4096 and event.action == "alloc"}
    assert kinds == {"activation", "temporary"}
    one = profile(wide, (X,), optimizer="sgd", device="h200")
    divided = 512  # the block of a loss that is divided by the number of micro-batches
    assert p.peak_by_category["activation"] == one.peak_by_category["activation"] + divided


class Lookup(nn.Module):
    """Reads a table by indices, in whatever way ``look`` says."""

    def __init__(self, look):
        super().__init__()
        self.table, self.bags = nn.Embedding(100, 16), nn.EmbeddingBag(100, 16, mode="sum")
        self.look, self.head = look, nn.Linear(16, 1)

    def forward(self, x, indices):
        return self.head(self.look(self, indices)).sum() + x.sum()


LOOKUPS = {
    "bags of rows": (lambda m, i: torch.stack([
        m.bags(row, torch.arange(0, 24, 4, device=i.device)) for row in i]), None),
    "bags": (lambda m, i: m.bags(i), None),
    "whole": (lambda m, i: m.table(i), 6 * 24),
    "in one row": (lambda m, i: m.table(i.view(-1)), 6 * 24)}


@pytest.mark.parametrize("name", LOOKUPS)
@pytest.mark.parametrize("step", [None, accumulate], ids=["built-in", "accumulation"])
def test_features_are_no_tokens(name, step):
    """Entries of bags, and columns that are looked up one by one, are features of a sample."""
    look, tokens = LOOKUPS[name]
    inputs = {"x": torch.rand(6, 3), "indices": torch.zeros(6, 24, dtype=torch.int64)}
    if step is not None:
        def step(model, optimizer, **batch):
            for _ in range(8):
                model(**batch).backward()
            optimizer.step()
    p = profile(Lookup(look), kwargs=inputs, optimizer="sgd", step=step)
    times = 1 if step is None else 8
    assert p.batch_size == 6 * times and p.tokens == (None if tokens is None else tokens * times)
