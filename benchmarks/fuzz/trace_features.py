"""Graphs of layers, losses and features of models, run on three sets of data: they give what the model gives.

    python -m benchmarks.fuzz.run traces                   # docs/reliability.md: all, in training and in evaluation
    python -m benchmarks.fuzz.run traces --only Dropout    # those whose names contain a text

A model is traced once, on the first set of data, and its graph is run on all three, with the same random numbers as the
model: outputs, gradients and buffers are compared. A model that is refused when it is traced says so, as does a graph
that refuses data which would have taken another path; both are counted apart.
"""
from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator

import torch

from analyzer.errors import AnalyzerError
from analyzer.zoo.torchvision_ops import define_torchvision_ops
from benchmarks.coverage.check import Candidate, Case, Inputs, compare_results, results_of, trace_with
from benchmarks.coverage.layers import layer_cases
from benchmarks.page import is_named

SETS = 3


def compare(case: Case, trains: bool) -> Iterator[str]:
    """How the graph of a case went on each set of data: ``equal``, ``refused …``, ``not run by torch``, or how not."""
    torch.manual_seed(0)
    candidate = case.candidates()[0]
    model = candidate.build().train(trains)
    args, kwargs = _draw(candidate, model, trains, 0)
    with torch.no_grad():
        model(*args, **kwargs)  # which makes what is lazy
    before = {name: b.detach().clone() for name, b in model.named_buffers()}
    given = [_draw(candidate, model, trains, seed) for seed in range(SETS)]
    try:
        expected = [results_of(model, model, before, inputs, candidate, trains) for inputs in given]
    except Exception:  # of any kind, as torch has it
        yield "not run by torch"
        return
    try:
        graph = trace_with(model, given[0])
    except AnalyzerError as error:
        yield f"refused when traced: {str(error).splitlines()[0][:100]}"
        return
    if any("drawn from the profiler's own seed" in told for told in graph.meta["assumptions"]):
        yield "a path drawn by lot, which is told"
        return
    for inputs, real in zip(given, expected):
        try:
            compare_results(real, results_of(graph, model, before, inputs, candidate, trains))
        except AnalyzerError as error:
            yield f"refused when called: {str(error).splitlines()[0][:100]}"
        except Exception as error:  # `DifferentResultError`, or what running the graph raises
            yield f"differs: {type(error).__name__}: {str(error)[:200]}"
        else:
            yield "equal"


def _draw(candidate: Candidate, model: torch.nn.Module, trains: bool, seed: int) -> Inputs:
    torch.manual_seed(seed)
    return candidate.make_inputs(model, trains)


def tell(options: argparse.Namespace) -> bool:
    """Compare every case in both modes, and print how many went which way, and what differs."""
    define_torchvision_ops()
    cases = [case for case in layer_cases() if is_named(case.name, options.only or ())]
    counts: Counter[str] = Counter()
    for case in cases:
        for trains in (True, False):
            for told in compare(case, trains):
                counts[told.partition(":")[0]] += 1
                if told.startswith("differs"):
                    print(f"{case.name} in {'training' if trains else 'evaluation'}: {told}", file=sys.stderr)
    print(f"{len(cases)} models in 2 modes on {SETS} sets of data; torch {torch.__version__}")
    print(", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    return not counts["differs"]
