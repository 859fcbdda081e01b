"""Checks one model: PyTorch itself first, then profile in both modes, then the trace against the original."""
from __future__ import annotations

import copy
import gc
import inspect
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from analyzer import MetaTensorMode, profile, symbolic_trace
from analyzer.meta.structure import replace_tensors, tensors_of
from analyzer.record.eager import default_loss

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Candidate:
    """One way to build a model and to call it; ``make_inputs(model, train)`` gives real tensors of a small size."""

    label: str
    build: Callable[[], nn.Module]
    make_inputs: Callable[[nn.Module, bool], Inputs]
    loss_fn: Callable[[Any], torch.Tensor] | None = None
    #: of the inputs; one that fails four times in the same way is not tried with other builds
    variant: str = ""
    may_be_large: bool = False  #: known to work as it is, also where it is too large for a run on data


@dataclass(frozen=True)
class Case:  # a model by name; of its candidates the first is taken that PyTorch itself can run on data
    name: str    #: "timm:resnet18"
    family: str  #: row of the table
    group: str   #: stratum of the sample
    candidates: Callable[[], list[Candidate]]

LARGEST_REAL = 150_000_000  # parameters; larger models are not run on data
SEED = 7

Row = dict[str, Any]


class Reference(NamedTuple):  # what PyTorch itself makes of a candidate
    candidate: Candidate
    model: nn.Module | None = None  #: with data, where it is small enough
    trains: bool = True
    buffers: dict[str, torch.Tensor] = {}             #: before the training step
    inputs: Inputs | None = None                      #: of that step
    expected: dict[str, torch.Tensor] | None = None   #: its results


def check_case(case: Case) -> Row:
    """A row with one entry per step: ``"pass"``, or why not. ``"unusable"`` says that PyTorch itself cannot run the
    model here.
    """
    row: Row = {"name": case.name, "family": case.family, "group": case.group}
    try:
        reference = _choose(case.candidates())
    except Exception as error:
        row["unusable"] = str(error) if isinstance(error, UnusableError) else _reason(error)
        return row
    steps: dict[str, Callable[[], None]] = {
        "train": lambda: _profile(reference, "train"), "infer": lambda: _profile(reference, "infer"),
        "trace": lambda: _trace(reference)}
    if not reference.trains:
        del steps["train"]
    for step, run in steps.items():
        try:
            run()
            row[step] = "pass"
        except Exception as error:
            row[step] = _reason(error)
        gc.collect()
    return row


class UnusableError(Exception):
    """PyTorch runs no candidate."""


def _choose(candidates: Iterable[Candidate]) -> Reference:
    """The first candidate that PyTorch can train, else the first that it can run."""
    failures: list[str] = []
    seen: Counter[tuple[str, str]] = Counter()
    chosen: Reference | None = None
    for candidate in candidates:
        if any(variant == candidate.variant and count > 3 for (variant, _), count in seen.items()):
            continue
        try:
            reference = _run_on_data(candidate)
        except Exception as error:
            failures.append(f"{candidate.label}: {_reason(error)}")
            seen[candidate.variant, _reason(error)] += 1
            del error  # with its frames, which hold the model
            gc.collect()
            continue
        if reference.trains:
            return reference
        chosen = chosen or reference
    if chosen is None:
        raise UnusableError(" | ".join(dict.fromkeys(failures)))
    return chosen


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}"


def group_reason(reason: str) -> str:  # a reason without what differs between models: numbers, names in quotes, paths
    text = re.sub(r"\S*/([\w.-]+\.py):\d+", r"\1", reason)
    text = re.sub(r"'[^']*'", "'…'", text)
    return re.sub(r"\d+", "#", text)[:160]


def _run_on_data(candidate: Candidate) -> Reference:
    params = _count_params(candidate)
    if params is not None and params > LARGEST_REAL:
        if not candidate.may_be_large:
            raise ValueError(f"{params:,} parameters are too many for a run on data")
        return Reference(candidate)
    torch.manual_seed(SEED)
    model = candidate.build()
    model.eval()
    args, kwargs = candidate.make_inputs(model, False)
    with torch.no_grad():
        model(*args, **kwargs)
    model.train()
    before = {name: b.detach().clone() for name, b in model.named_buffers()}
    try:
        inputs = candidate.make_inputs(model, True)
        expected = results_of(model, model, before, inputs, candidate, True)
    except Exception:
        return Reference(candidate, model, False, before)
    return Reference(candidate, model, True, before, inputs, expected)


def _count_params(candidate: Candidate) -> int | None:
    try:
        with MetaTensorMode():
            return sum(p.numel() for p in candidate.build().parameters() if not is_lazy(p))
    except Exception:  # the profile will say why, and PyTorch whether it can
        return None


def _profile(reference: Reference, mode: Literal["train", "infer"]) -> None:
    candidate, train = reference.candidate, mode == "train"

    def build() -> nn.Module:
        return candidate.build().train(train)

    with MetaTensorMode():
        model = build()
    args, kwargs = candidate.make_inputs(model, train)
    is_sparse = any(g.layout is not torch.strided for g in (reference.expected or {}).values())  # which Adam refuses
    trains = train and any(p.requires_grad for p in model.parameters())
    profile(model, args=args, kwargs=kwargs, mode=mode, loss_fn=candidate.loss_fn,
            optimizer=("sgd" if is_sparse else "adamw") if trains else None)


def _trace(reference: Reference) -> None:
    candidate, real, trains, before, inputs, expected = reference
    if real is None:
        _replay_without_data(candidate)
        return
    real.train(trains)
    _restore(real, before)
    inputs = inputs or candidate.make_inputs(real, trains)
    gm = trace_with(real, inputs)
    # a path drawn by lot: the original may take another
    if any("drawn from the profiler's own seed" in a for a in gm.meta["assumptions"]):
        real.eval()
        inputs, expected = candidate.make_inputs(real, trains), None
        gm = trace_with(real, inputs)
    found = results_of(gm, real, before, inputs, candidate, trains)
    if expected is not None:
        try:
            compare_results(expected, found)
            return
        except DifferentResultError:  # of a model whose first step differs from the next, as one that keeps a cache
            pass
    compare_results(results_of(real, real, before, inputs, candidate, trains), found)


def _restore(model: nn.Module, buffers: dict[str, torch.Tensor]) -> None:
    for name, b in model.named_buffers():
        if name in buffers:
            b.data = buffers[name].clone()


def trace_with(model: nn.Module, inputs: Inputs) -> Any:
    bound = inspect.signature(model.forward).bind(*inputs[0], **inputs[1])
    tensors: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        (tensors if next(tensors_of(value), None) is not None else constants)[name] = value
    return symbolic_trace(model, meta_args=tensors, concrete_args=constants)


def results_of(run: nn.Module, owner: nn.Module, before: dict[str, torch.Tensor], inputs: Inputs, candidate: Candidate,
             trains: bool) -> dict[str, torch.Tensor]:
    """Outputs, gradients and those buffers that change in one step, by name, with the buffers as ``before``."""
    args, kwargs = copy.deepcopy(inputs)
    _restore(run, before)
    owner.zero_grad()
    torch.manual_seed(SEED)
    random.seed(SEED)
    try:
        with torch.set_grad_enabled(trains):
            output = run(*args, **kwargs)
            found = {f"output {i}": t.detach().clone() for i, t in enumerate(tensors_of(output))}
            if trains:
                (candidate.loss_fn or default_loss)(output).backward()
        found |= {f"gradient of {n}": p.grad.clone() for n, p in owner.named_parameters() if p.grad is not None}
        changed = {n: b.detach().clone() for n, b in run.named_buffers() if n in before and not _same(b, before[n])}
        return found | {f"buffer {n}": b for n, b in changed.items()}
    finally:
        owner.zero_grad()


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    has_nan = a.is_floating_point() and a.itemsize > 1  # eight bits have no such kernel
    return a.shape == b.shape and torch.equal(a.nan_to_num() if has_nan else a, b.nan_to_num() if has_nan else b)


class DifferentResultError(AssertionError):
    """The graph gives something else than the model."""


def compare_results(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    if expected.keys() != found.keys():
        raise DifferentResultError(f"missing or extra: {sorted(expected.keys() ^ found.keys())[:5]}")
    for name, value in expected.items():
        other = found[name]
        if value.layout in (torch.sparse_coo, torch.sparse_csr):
            value, other = value.to_dense(), other.to_dense()
        if value.is_quantized:
            value, other = value.dequantize(), other.dequantize()
        try:
            torch.testing.assert_close(other, value, equal_nan=True)
        except AssertionError as error:
            raise DifferentResultError(f"{name}: {' '.join(str(error).split())}") from None


def _replay_without_data(candidate: Candidate) -> None:
    with MetaTensorMode():
        model = candidate.build().eval()
    inputs = candidate.make_inputs(model, False)
    with MetaTensorMode():  # on the device that is profiled: the devices of a graph's factories are constants
        model.cuda()
        inputs = replace_tensors(inputs, lambda t: t.cuda())
    gm = trace_with(model, inputs)
    logs = [_operators(m, inputs) for m in (model, gm)]
    if logs[0] != logs[1]:
        different = {k: (logs[0].get(k), logs[1].get(k)) for k in logs[0].keys() | logs[1].keys()
                     if logs[0].get(k) != logs[1].get(k)}
        raise DifferentResultError(f"the replay calls other operators: {dict(list(different.items())[:5])}")


def _operators(model: nn.Module, inputs: Inputs) -> dict[Any, Any]:
    """How often each operator runs, and the shapes of the outputs."""
    result = profile(model, args=inputs[0], kwargs=inputs[1], mode="infer")
    found: Counter[Any] = Counter()
    assert result.modules is not None
    for info in result.modules.walk():
        for operator in info.operators:
            found[operator.operator] += operator.calls
    return {**found, "outputs": [(o.shape, o.dtype) for o in result.modules.outputs], "flops": result.fwd_flops}
