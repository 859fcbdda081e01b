"""Steps of different lengths: columns that follow from a few profiles against profiles, an epoch against a dry run."""
import json
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from analyzer import ProfileOptions, dry_run
from analyzer.api.profile import profile
from analyzer.errors import InputError
from analyzer.hardware import find_device
from analyzer.memory.allocator import AllocatorOptions
from analyzer.profilers.annotation import Annotation
from analyzer.tools.lengths import Batching, Epoch, Lengths, profile_epoch
from analyzer.tools.lengths.batching import Cell
from analyzer.tools.lengths.columns import read_columns
from analyzer.tools.lengths.epoch_memory import EpochMemory
from analyzer.tools.lengths.inputs import call_maker
from analyzer.tools.lengths.varied_step import ProbedStep, VariedStep

L4 = find_device("l4")


def _vary(model, make, cells, dims=("sequence",), **options):
    """What tells the steps of cells, and what profiles one of them."""
    def run(cell):
        columns, logs = [], []

        def read(log):
            columns[:], logs[:] = [read_columns(log, L4)], [log]
            return Annotation()

        args, kwargs = call_maker(make, dims, cell.rows, cell.sizes)
        found = profile(model, args, kwargs, device=L4, profilers={"columns": read}, **options)
        return ProbedStep(cell, columns[0], found, logs[0])

    return VariedStep(run, cells, dims, L4), run


def _assert_equal(varied, run, cell):
    """What follows for a cell is its profile: calls, every size, every workspace, seconds; so is every address, since
    `read_columns` makes sure that a profile's columns give its addresses.
    """
    assert cell not in varied.probes
    found = run(cell)
    at, own, profiled = varied.at(cell), found.columns, found.profile
    if varied.regimes[own.structure].inexact_bytes == 0:
        time = varied.regimes[own.structure].time(cell)
        assert time is not None and time.seconds == profiled.step_seconds
        assert (time.low, time.high) == profiled.step_seconds_range
    assert at.columns.structure == own.structure
    assert at.nbytes.tolist() == own.nbytes.tolist()
    assert {one: blocks for one, blocks in zip(at.workspaces, at.blocks) if blocks} == dict(
        zip(own.workspaces, own.blocks))


def _ids(name="input_ids", *others):
    return lambda batch, sequence: {each: torch.empty(batch, sequence, dtype=torch.int64, device="meta")
                                    for each in (name, *others)}


SMALL = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2}
T5 = {"vocab_size": 512, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4,
      "decoder_start_token_id": 0, "pad_token_id": 0}
WAV2VEC2 = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
            "conv_dim": [32] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
            "mask_time_prob": 0.0}
VIT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "patch_size": 16}


def _build(name, **options):
    transformers = pytest.importorskip("transformers")
    config, head = name.split(":")
    model = getattr(transformers, head)(getattr(transformers, config)(**options))
    return model.train()


REAL = {
    "a decoder with masked padding": (
        "LlamaConfig:LlamaForCausalLM", SMALL, _ids("input_ids", "attention_mask", "labels"),
        [Cell(4, (n,)) for n in range(17, 250, 3)], [Cell(4, (n,)) for n in (101, 176)]),
    "an encoder and a decoder": (
        "T5Config:T5ForConditionalGeneration", T5, _ids("input_ids", "labels"),
        [Cell(2, (n,)) for n in range(20, 200, 3)], [Cell(2, (n,)) for n in (80, 149)]),
    "audio": (
        "Wav2Vec2Config:Wav2Vec2Model", WAV2VEC2,
        lambda batch, samples: torch.empty(batch, samples, device="meta"),
        [Cell(2, (n,)) for n in range(4000, 32000, 320)], [Cell(2, (n,)) for n in (9120, 16160)]),
}


@pytest.mark.parametrize("case", REAL)
def test_steps_that_follow_are_those_of_profiles(case):
    name, options, make, cells, further = REAL[case]
    dims = ("samples",) if case == "audio" else ("sequence",)
    varied, run = _vary(_build(name, **options), make, cells, dims, optimizer="adamw")
    assert varied.assumptions == [] and len(varied.probes) < 20
    for cell in further:
        if cell not in varied.probes:
            _assert_equal(varied, run, cell)


class Mixed(nn.Module):
    """A mean over positions, scores of pairs of them, a convolution."""

    def __init__(self):
        super().__init__()
        self.embed, self.convolve, self.head = nn.Embedding(64, 16), nn.Conv1d(16, 16, 3, stride=2), nn.Linear(16, 64)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + (x @ x.transpose(1, 2)).softmax(-1) @ x
        return self.head(self.convolve(x.transpose(1, 2)).mean(-1)).sum()


@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.sets(st.integers(8, 400), min_size=12, max_size=40), st.integers(1, 5), st.data())
def test_columns_at_any_length_are_those_of_a_profile(lengths, rows, data):
    varied, run = _vary(Mixed(), lambda batch, sequence: torch.zeros(batch, sequence, dtype=torch.int64),
                        [Cell(rows, (length,)) for length in lengths])
    left = sorted(set(varied.cells) - set(varied.probes))
    if left and not varied.assumptions:
        _assert_equal(varied, run, data.draw(st.sampled_from(left)))


SCRIPT = """
import torch
from torch import nn
model = nn.Sequential(nn.Embedding(1000, 256), nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 1000)).cuda()
optimizer = torch.optim.AdamW(model.parameters())

def step(batch):
    model(batch).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

for length in {lengths}:
    batch = torch.zeros(4, length, dtype=torch.int64, device="cuda")
    step(batch)
    print("reserved", torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated())
    torch.cuda.reset_peak_memory_stats()
"""


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_the_allocator_over_an_epoch_is_that_of_a_dry_run(tmp_path, capsys, monkeypatch, settings):
    if settings:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    lengths = [300, 120, 517, 44, 801, 803, 256, 90, 760, 33]
    script = tmp_path / "loop.py"
    script.write_text(SCRIPT.format(lengths=lengths))
    dry_run(script, device=L4, steps=len(lengths) + 1)
    told = [tuple(map(int, found)) for found in re.findall(r"reserved (\d+) (\d+)", capsys.readouterr().out)]
    model = nn.Sequential(nn.Embedding(1000, 256), nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 1000))
    cells = [Cell(4, (length,)) for length in lengths]
    varied, _ = _vary(model, lambda batch, sequence: torch.zeros(batch, sequence, dtype=torch.int64), cells,
                      optimizer=torch.optim.AdamW, loss_fn=lambda out: out.float().square().mean())
    options = AllocatorOptions.from_string(settings) if settings else AllocatorOptions()
    found = EpochMemory(varied.at, options, None).run(cells)
    assert [(step.reserved, step.peak_allocated) for step in found] == told


@pytest.mark.parametrize("outside, remark", [
    (True, "at which the model itself fails: 'positions'"),
    (False, "is not confirmed by a profile: a defect of analyzer, please report it: KeyError: 'positions', at ")])
def test_a_limit_that_cannot_be_tried_says_whose_fault_it_is(outside, remark, monkeypatch):
    def fail(*_):
        raise KeyError("positions")

    monkeypatch.setattr(VariedStep, "confirm", fail)
    monkeypatch.setattr("analyzer.record.failure.is_outside", lambda filename: outside)
    model = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 1000))
    found = profile_epoch(model, lambda batch, sequence: torch.zeros(batch, sequence, dtype=torch.int64),
                          Batching(rows=1).divide(Lengths.of([100, 200, 300])), device="l4")
    assert [remark in text for text in found.assumptions].count(True) == 1


def test_a_step_that_fails_is_skipped_and_counted():
    model = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 1000))
    make = lambda batch, sequence: torch.zeros(batch, sequence, dtype=torch.int64)  # noqa: E731
    lengths = Lengths.of([100, 200, 5000, 300, 150, 250, 4000, 120])
    whole = profile_epoch(model, make, Batching(rows=1).divide(lengths), device="l4", courses=False)
    needed = {cell.sizes[0]: peak for cell, peak in zip(whole.cells, whole.peak_allocated)}
    assert whole.fits and needed[4000] > needed[300] + 2**23
    limit = ProfileOptions(capacity_bytes=needed[4000] - 1)
    found = profile_epoch(model, make, Batching(rows=1).divide(lengths), device="l4", options=limit)
    assert not found.fits
    assert [cell.sizes[0] >= 4000 for cell in found.cells] == list(found.failed)
    assert found.longest is not None and 300 < found.longest < 4000
    assert found.courses[0].failed == 2
    assert json.loads(found.to_json())["longest"] == found.longest
    cut = Batching(rows=1).divide(lengths.at_most(found.longest))
    assert profile_epoch(model, make, cut, device="l4", options=limit).fits


def test_what_outlives_a_step_must_be_alike():
    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.kept = nn.Linear(8, 8), []

        def forward(self, x):
            self.kept.append(x * 2)
            return self.layer(x)

    with pytest.raises(InputError, match="what a step leaves behind"):
        profile_epoch(Grows(), lambda batch, sequence: torch.zeros(batch, sequence, 8),
                      Epoch.of([[5], [9], [14], [20]]), device="l4")


def test_the_largest_budget_of_batches_that_are_filled():
    """With a budget of positions each batch has as many samples of its length as it has room for."""
    model = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 1000))
    make = lambda batch, sequence: torch.zeros(batch, sequence, dtype=torch.int64)  # noqa: E731
    lengths = Lengths.of([20, 25, 31, 44, 52, 60, 75, 90, 110, 133, 150, 180, 20, 22, 47, 101])
    limit = ProfileOptions(capacity_bytes=64 * 2**20)
    found = profile_epoch(model, make, Batching(1, "tokens", tokens=400).divide(lengths), device="l4", options=limit)
    budget = found.longest
    assert found.fits and budget is not None and budget > 400
    for tokens, fits in ((budget, True), (2 * budget, False)):
        samples = Lengths.of([133] * (3 * tokens // 133))
        again = profile_epoch(model, make, Batching(1, "tokens", tokens=tokens).divide(samples), device="l4",
                              options=limit, courses=False)
        assert again.fits == fits
