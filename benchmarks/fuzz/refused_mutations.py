"""Valid calls with one thing changed: what the CPU refuses then is refused here, and what it runs is not.

    python -m benchmarks.fuzz.run refused-mutations                 # docs/reliability.md: two samples of every operator
    python -m benchmarks.fuzz.run refused-mutations --only conv2d   # those of one, with a line for each that differs

The calls are samples of torch's database of operators (`operator_samples`). Of each one tensor has another dtype, one
element or one dimension more or less, a number is another one, or all floating tensors have another dtype.
The real run on the CPU is the right answer. Calls that PyTorch does not survive are left out (`CRASHES`).
"""
from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from analyzer import MetaTensorMode
from analyzer.errors import DataDependentError, UnsupportedOperatorError
from benchmarks.fuzz.operator_samples import load_operators
from benchmarks.fuzz.refused_calls import describe, error_of

Tensor = torch.Tensor
DTYPES = (torch.int32, torch.int64, torch.float16, torch.float64, torch.bool, torch.bfloat16, torch.complex64)
BOTH_RUN, SAME_KIND, OTHER_KIND, PRICED = "both run", "same kind of error", "another kind of error", "priced"
FALSELY, NOT_FOLLOWED = "refused falsely", "not followed without data"
BEYOND = "refused, where PyTorch reads beyond what it is given"
EMPTY = "priced, with no element to compute"  #: kernels of CUDA return before they look at a dtype

#: Operators of which PyTorch itself reads or writes out of bounds for such calls.
CRASHES = ("segment_reduce",)

Change = tuple[str, Callable[[list[Any]], None]]  #: what is changed, and how, of the flat arguments


def list_changes(leaves: list[Any], chance: random.Random) -> Iterator[Change]:
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            for dtype in chance.sample(DTYPES, 3):
                if dtype != leaf.dtype:
                    yield f"argument {i} as {dtype}", _setting(i, lambda x, dtype=dtype: x.to(dtype))
            if leaf.dim():
                dim = chance.randrange(leaf.dim())
                yield f"argument {i} longer in {dim}", _setting(i, lambda x, dim=dim: _lengthen(x, dim))
                yield f"argument {i} of a dimension less", _setting(
                    i, lambda x: x.select(0, 0) if x.shape[0] else x.sum(0))
            yield f"argument {i} of a dimension more", _setting(i, lambda x: x.unsqueeze(0))
        elif type(leaf) is int:
            for value in {leaf + 3, -leaf - 3, 0} - {leaf}:
                yield f"argument {i} {value}, not {leaf}", _setting(i, lambda _, value=value: value)
    for dtype in DTYPES:
        yield f"all in {dtype}", lambda flat, dtype=dtype: flat.__setitem__(slice(None), [  # type: ignore[misc]
            x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in flat])


def _setting(i: int, change: Callable[..., Any]) -> Callable[[list[Any]], None]:
    def make(flat: list[Any]) -> None:
        flat[i] = change(flat[i])
    return make


def _lengthen(x: Tensor, dim: int) -> Tensor:
    return torch.cat([x, x.narrow(dim, 0, 1) if x.shape[dim] else x.new_zeros(
        [n + (d == dim) for d, n in enumerate(x.shape)])], dim)


def compare(operator: Any, sample: Any, change: Callable[[list[Any]], None]) -> tuple[str, str] | None:
    """How a changed call went, and a line that says what was found and what is right; None where it cannot be made."""
    runs = []
    for _ in range(2):
        leaves, tree = tree_flatten((sample.input, tuple(sample.args), sample.kwargs))
        flat = [x.detach().clone() if isinstance(x, Tensor) else x for x in leaves]
        try:
            change(flat)
        except (RuntimeError, IndexError):  # a cast or a cut that this tensor does not have
            return None
        x, args, kwargs = tree_unflatten(flat, tree)
        runs.append(lambda x=x, args=args, kwargs=kwargs: operator(x, *args, **kwargs))
    right = error_of(runs[0])
    with MetaTensorMode():
        found = error_of(runs[1])
    told = (f"{'nothing' if found is None else describe(found)}; right "
            f"{'nothing' if right is None else describe(right)}")
    if isinstance(found, (DataDependentError, UnsupportedOperatorError)):
        return NOT_FOLLOWED, told
    if right is None and found is not None:
        return BEYOND if reads_beyond(operator.name, flat) else FALSELY, told
    if right is None:
        return BOTH_RUN, told
    if found is None:
        is_empty = any(isinstance(x, Tensor) and not x.numel() for x in flat)
        return EMPTY if is_empty else PRICED, told
    return SAME_KIND if isinstance(found, type(right)) else OTHER_KIND, told


def reads_beyond(name: str, flat: list[Any]) -> bool:
    """Whether a kernel reads past the end of weights or statistics: aten/src/ATen/native/Normalization.cpp compares no
    sizes, which `torch.nn.functional.batch_norm` does before.
    """
    input, *others = (x for x in flat if isinstance(x, Tensor))
    return "batch_norm" in name and input.dim() > 1 and any(t.numel() < input.shape[1] for t in others)


def compare_all(only: str = "", samples: int = 2) -> Iterator[tuple[str, str, str]]:
    """Of each changed call its name, how it went, and what was found."""
    for operator in load_operators():
        if (only not in operator.formatted_name or operator.name.strip("_").startswith(CRASHES)
                or torch.float32 not in operator.supported_dtypes("cpu")):
            continue
        torch.manual_seed(0)
        chance = random.Random(operator.formatted_name)
        given = list(operator.sample_inputs("cpu", torch.float32))
        for sample in chance.sample(given, min(samples, len(given))):
            leaves, _ = tree_flatten((sample.input, tuple(sample.args), sample.kwargs))
            for name, change in list_changes(leaves, chance):
                if (result := compare(operator, sample, change)) is not None:
                    yield f"{operator.formatted_name}, {name}", *result


def tell(options: argparse.Namespace) -> bool:
    """Print how many calls went which way, and what differs."""
    counts: Counter[str] = Counter()
    for name, verdict, told in compare_all((options.only or [""])[0], options.samples or 2):
        counts[verdict] += 1
        if verdict in (PRICED, FALSELY, OTHER_KIND):
            print(f"{name}: {verdict}: {told}", flush=True)
    refused = counts[SAME_KIND] + counts[OTHER_KIND] + counts[PRICED] + counts[EMPTY]
    print(f"{sum(counts.values())} calls, {refused} that the CPU refuses; "
          + ", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    return True
