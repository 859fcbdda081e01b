"""Checks one model: PyTorch itself first, then profile in both modes, then the trace against the original."""
from __future__ import annotations

import copy
import gc
import inspect
import random
import re
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from analyzer import MetaTensorMode, profile, symbolic_trace
from analyzer.meta.structure import replace_tensors, tensors_of
from analyzer.record.eager import default_loss

from .coverage_case import Candidate, Case, Inputs

LARGEST_REAL = 150_000_000  # parameters; larger models are not run on data
SEED = 7

Row = dict[str, Any]


@dataclass(frozen=True)
class Reference:
    """What PyTorch itself makes of a candidate."""

    model: nn.Module | None  #: with data, where it is small enough
    trains: bool | str       #: True, or why PyTorch cannot train it
    buffers: dict[str, torch.Tensor]           #: before the training step
    inputs: Inputs | None                      #: of that step
    expected: dict[str, torch.Tensor] | None   #: its results


def check_case(case: Case) -> Row:
    """A row with one entry per step: ``"pass"``, or why not. ``"unusable"`` says that PyTorch itself cannot run the
    model here.
    """
    row: Row = {"name": case.name, "family": case.family, "group": case.group}
    start = time.perf_counter()
    try:
        candidates = case.candidates()
    except Exception as error:
        row["unusable"] = _reason(error)
        return row
    failures: list[str] = []
    seen: Counter[tuple[str, str]] = Counter()
    chosen: tuple[Candidate, Reference] | None = None
    for candidate in candidates:
        if any(variant == candidate.variant and count > 3 for (variant, _), count in seen.items()):
            continue
        try:
            reference = _run_on_data(candidate, row)
        except Exception as error:
            failures.append(f"{candidate.label}: {_reason(error)}")
            seen[candidate.variant, _reason(error)] += 1
            del error  # with its frames, which hold the model
            gc.collect()
            continue
        if reference.trains is True or chosen is None:
            chosen = candidate, reference
        if reference.trains is True:
            break
    if chosen is None:
        row["unusable"] = " | ".join(dict.fromkeys(failures))
        return row
    candidate, reference = chosen
    trains = reference.trains
    row["candidate"] = candidate.label
    row["reference_seconds"] = round(time.perf_counter() - start, 2)
    if trains is not True:
        row["no_training"] = trains
    if trains is True:
        _note(row, "train", lambda: _profile(candidate, row, "train"))
    _note(row, "infer", lambda: _profile(candidate, row, "infer"))
    _note(row, "trace", lambda: _trace(candidate, row, reference))
    return row


def _note(row: Row, step: str, run: Callable[[], None]) -> None:
    start = time.perf_counter()
    try:
        run()
        row[step] = "pass"
    except Exception as error:
        row[step] = _reason(error)
        row[step + "_traceback"] = "".join(traceback.format_exception(error, chain=True))[-6000:]
    row[step + "_seconds"] = round(time.perf_counter() - start, 2)
    gc.collect()


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}"


def group_reason(reason: str) -> str:
    """A reason without what differs between models: numbers, names in quotes, paths."""
    text = re.sub(r"\S*/([\w.-]+\.py):\d+", r"\1", reason)
    text = re.sub(r"'[^']*'", "'…'", text)
    return re.sub(r"\d+", "#", text)[:160]


def _run_on_data(candidate: Candidate, row: Row) -> Reference:
    params = _count_params(candidate)
    if params is not None and params > LARGEST_REAL:
        if not candidate.may_be_large:
            raise ValueError(f"{params:,} parameters are too many for a run on data")
        row["params"] = params
        return Reference(None, True, {}, None, None)
    torch.manual_seed(SEED)
    model = candidate.build()
    model.eval()
    args, kwargs = candidate.make_inputs(model, False)
    with torch.no_grad():
        model(*args, **kwargs)
    row["params"] = sum(p.numel() for p in model.parameters())
    model.train()
    before = {name: b.detach().clone() for name, b in model.named_buffers()}
    try:
        inputs = candidate.make_inputs(model, True)
        expected = results_of(model, model, before, inputs, candidate, True)
    except Exception as error:
        return Reference(model, _reason(error), before, None, None)
    if any(g.layout is not torch.strided for g in expected.values()):
        row["sparse_gradients"] = True  # which Adam refuses
    return Reference(model, True, before, inputs, expected)


def _count_params(candidate: Candidate) -> int | None:
    try:
        with MetaTensorMode():
            return sum(p.numel() for p in candidate.build().parameters() if not is_lazy(p))
    except Exception:  # the profile will say why, and PyTorch whether it can
        return None


def _profile(candidate: Candidate, row: Row, mode: Literal["train", "infer"]) -> None:
    train = mode == "train"

    def build() -> nn.Module:
        return candidate.build().train(train)

    with MetaTensorMode():
        model = build()
    args, kwargs = candidate.make_inputs(model, train)
    optimizer = ("sgd" if row.get("sparse_gradients") else "adamw") if train and any(
        p.requires_grad for p in model.parameters()) else None
    result = profile(model, args=args, kwargs=kwargs, mode=mode, loss_fn=candidate.loss_fn, optimizer=optimizer)
    row[mode + "_assumptions"] = len(result.assumptions)
    if result.uncounted:
        row[mode + "_uncounted"] = [u.operator for u in result.uncounted]


# -- trace -------------------------------------------------------------------------------------------------------


def _trace(candidate: Candidate, row: Row, reference: Reference) -> None:
    real, before, expected, trains = reference.model, reference.buffers, reference.expected, reference.trains is True
    if real is None:
        _replay_without_data(candidate)
        return
    real.train(trains)
    _restore(real, before)
    inputs = reference.inputs or candidate.make_inputs(real, trains)
    gm = trace_with(real, inputs)
    # a path drawn by lot: the original may take another
    if any("drawn from the profiler's own seed" in a for a in gm.meta["assumptions"]):
        real.eval()
        row["trace_mode"] = "eval"
        inputs, expected = candidate.make_inputs(real, trains), None
        gm = trace_with(real, inputs)
    row["trace_assumptions"] = len(gm.meta["assumptions"])
    row["nodes"] = len(gm.graph.nodes)
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
