"""Samples of torch's operators, run on data and without: shapes, strides, dtypes and devices of results are the same;
and whether the operators on the zero list of FLOPs move values, or make them (`ZeroCheck`).

    python -m benchmarks.fuzz.run operators                        # docs/reliability.md: every operator of op_db
    python -m benchmarks.fuzz.run operators --only nn.functional.unfold  # the samples of one, and what differs

Samples are those of PyTorch's own tests (torch/testing/_internal/common_methods_invocations.py, `op_db`), in float32,
with gradients where the operator has them: its results, and the gradients of its inputs by a backward pass through all.
A sample that data decides (`DataDependentError`) and one that is refused (`UnsupportedOperatorError`) say so, and are
counted apart; so are those that the CPU itself refuses.
"""
from __future__ import annotations

import argparse
import json
import random
import sys
import types
import unittest
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from analyzer import MetaTensorMode
from analyzer.errors import DataDependentError, UnsupportedOperatorError
from analyzer.profilers.flop_registry import is_zero_flop_op
from analyzer.zoo.torchvision_ops import define_torchvision_ops

# An operator does no arithmetic if each floating number that it gives is one that it was given (cast where the dtype
# differs), a scalar among its arguments, or a constant of its definition: 0, ±1, an infinity, NaN, or a limit of the
# dtype. That is looked up number by number on real calls.
MOST_ELEMENTS = 20_000  # of a call that is looked at: larger ones only take longer
# Their results are not defined by their inputs: memory as it is, or random integers.
UNDEFINED = ("empty", "new_empty", "random", "randint", "randperm", "resize", "_empty", "set")


class ZeroCheck(TorchDispatchMode):
    """Looks at every call of an operator on the zero list; ``guilty`` names those that gave a number of their own
    making.
    """

    def __init__(self, is_zero: Callable[[Any], bool] = is_zero_flop_op) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_zero = is_zero
        self.calls = 0
        self.names: set[str] = set()
        self.guilty: dict[str, str] = {}
        self.failure: Exception | None = None  #: of the check itself

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        given = [t for t in leaves if isinstance(t, torch.Tensor)]
        looked_at = (self.is_zero(func) and torch.Tag.inplace_view not in func.tags
                     and not func._schema.name.partition("::")[2].lstrip("_").startswith(UNDEFINED)
                     and all(is_plain(t) and t.numel() <= MOST_ELEMENTS for t in given))
        before = [t.detach().clone() for t in given] if looked_at else []
        out = func(*args, **kwargs)
        if looked_at:
            try:
                self.look(func, before, given, [v for v in leaves if isinstance(v, (int, float, complex))], out)
            except Exception as error:
                self.failure = error
                raise
        return out

    def look(self, func: Any, before: list[torch.Tensor], given: list[torch.Tensor], scalars: list[Any],
             out: Any) -> None:
        self.calls += 1
        self.names.add(func._schema.name)
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
        for result in tree_leaves(out):
            if not isinstance(result, torch.Tensor) or not is_plain(result) or result.numel() > MOST_ELEMENTS or not (
                    result.is_floating_point() or result.is_complex()):
                continue
            private: Any = torch._C
            if not writes and any(private._is_alias_of(result, t) for t in given):
                continue  # a view: the numbers are where they were
            made = numbers(result, result.dtype) - allowed(before, scalars, result.dtype)
            if made:
                self.guilty.setdefault(str(func), f"{len(made)} numbers, {sorted(made)[:3]}")


def is_plain(t: torch.Tensor) -> bool:
    return t.layout is torch.strided and not t.is_quantized and t.device.type == "cpu" and type(t) in (
        torch.Tensor, torch.nn.Parameter)


def numbers(t: torch.Tensor, dtype: torch.dtype) -> set[float]:
    """The distinct real numbers of a tensor (of a complex one, of both parts), as that dtype has them; NaN left out."""
    t = t.detach().resolve_conj().resolve_neg()
    real = torch.view_as_real(t) if t.is_complex() else t
    part = {torch.complex64: torch.float32, torch.complex128: torch.float64, torch.complex32: torch.float16}.get(
        dtype, dtype)
    values = real.to(part).to(torch.float64).flatten().unique()
    return set(values[~values.isnan()].tolist())


def allowed(before: Iterable[torch.Tensor], scalars: Iterable[Any], dtype: torch.dtype) -> set[float]:
    limits = torch.finfo(dtype)
    found = {0.0, 1.0, -1.0, float("inf"), float("-inf"), limits.max, limits.min}
    parts = [p for s in scalars for p in ((s.real, s.imag) if isinstance(s, complex) else (s,))]
    if parts:
        found |= numbers(torch.tensor([float(p) for p in parts], dtype=torch.float64), dtype)
    for t in before:
        found |= numbers(t, dtype)
    return found


def sweep(calls: int, seed: int = 0, check: ZeroCheck | None = None) -> ZeroCheck:
    """Run samples of PyTorch's own operator tests (OpInfo), in random order, until so many calls of zero operators were
    looked at.
    """
    check = check or ZeroCheck()
    dtypes = torch.float32, torch.complex64, torch.bfloat16, torch.int64
    pairs = [(op, dtype) for op in load_operators() for dtype in dtypes if dtype in op.supported_dtypes("cpu")]
    random.Random(seed).shuffle(pairs)
    for op, dtype in pairs:
        if check.calls >= calls:
            break
        try:
            samples = list(op.sample_inputs("cpu", dtype, dtype.is_floating_point and op.supports_autograd))
        except Exception:  # a test's own inputs that this build cannot make
            continue
        random.Random(seed).shuffle(samples)
        for sample in samples[:12]:
            try:
                with check:
                    out = op(sample.input, *sample.args, **sample.kwargs)
                    grads = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad
                             and t.is_floating_point()]
                    if grads:
                        torch.autograd.backward(grads, [torch.randn_like(t) for t in grads])
            except Exception:  # not to be had on this build, or a test of an error
                if check.failure is not None:
                    raise
    return check


def load_operators() -> list[Any]:  # PyTorch's own list of operators with samples, `op_db`
    try:
        import expecttest  # noqa: F401
    except ImportError:  # the base class of PyTorch's own test cases, of which none runs here
        stub: Any = types.ModuleType("expecttest")
        stub.TestCase, stub.assert_expected_inline = unittest.TestCase, None
        sys.modules["expecttest"] = stub
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo import core

    # Which of torch's own tests asks for samples: none does. It is looked for in every frame of the stack, and for each
    # frame in all modules: under pytest that takes four times as long as the samples.
    private: tuple[Any, ...] = (common_utils, core)
    for module in private:
        module.extract_test_fn = lambda: None
    # torch's test cases forbid what user code may do, to set flags of cuDNN: torch/backends, disable_global_flags
    torch.backends.disable_global_flags.__globals__["__allow_nonbracketed_mutation_flag"] = True
    return list(op_db)


Tensor = torch.Tensor

#: Operators whose results have other strides than on the CPU in some samples, and why; shapes and bytes are equal.
KNOWN: dict[str, str] = json.loads(Path(__file__).with_name("known.json").read_text())["strides"]


def operators() -> list[Any]:  # those of `op_db` that take float32 on the CPU
    return [op for op in load_operators() if torch.float32 in op.supported_dtypes("cpu")]


def describe(result: Any) -> list[tuple[Any, ...]]:  # of each tensor in a result what is known without data
    return [(tuple(t.shape), t.stride() if t.layout is torch.strided else t.layout, t.dtype, t.device.type,
             t.requires_grad) for t in tree_leaves(result) if isinstance(t, Tensor)]


def run(operator: Any, sample: Any) -> list[tuple[Any, ...]]:  # results of a sample, and gradients of its inputs
    result = operator(sample.input, *sample.args, **sample.kwargs)
    found = describe(result)
    roots = [t for t in tree_leaves(result)
             if isinstance(t, Tensor) and t.requires_grad and t.is_floating_point() and t.layout is torch.strided]
    leaves = [t for t in tree_leaves((sample.input, sample.args, sample.kwargs))
              if isinstance(t, Tensor) and t.requires_grad and t.is_leaf]
    if roots and leaves:
        torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
        found += describe([t.grad for t in leaves])
    return found


def compare(operator: Any, sample: Any) -> str:
    """How a sample went: ``equal``, ``other strides`` (see `KNOWN`), ``data decides``, ``refused``, ``refused by the
    CPU``, or what differs."""
    try:
        expected = run(operator, copy_of(sample))
    except Exception:  # of any kind, as the operator has it
        return "refused by the CPU"
    try:
        with MetaTensorMode():
            found = run(operator, copy_of(sample))
    except DataDependentError:
        return "data decides"
    except UnsupportedOperatorError:
        return "refused"
    except Exception as error:
        return f"fails: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if found == expected:
        return "equal"
    if operator.formatted_name in KNOWN and [(t[0], *t[2:]) for t in found] == [(t[0], *t[2:]) for t in expected]:
        return "other strides"
    return f"differs: {found} is not {expected}"


def copy_of(sample: Any) -> Any:
    """A sample with tensors of its own; under the mode they are the mode's, with contents that are known if small."""
    def clone(t: Tensor) -> Tensor:
        return t.detach().clone(memory_format=torch.preserve_format).requires_grad_(t.requires_grad)

    given, args, kwargs = tree_map_only(Tensor, clone, (sample.input, sample.args, sample.kwargs))
    return type(sample)(given, args=args, kwargs=kwargs)


def samples_of(operator: Any, most: int) -> Iterator[Any]:
    """The first samples of an operator, each with its own tensors."""
    torch.manual_seed(0)
    for index, sample in enumerate(operator.sample_inputs("cpu", torch.float32, operator.supports_autograd)):
        if index == most:
            return
        yield sample


def tell(options: argparse.Namespace) -> bool:
    """Print how many samples went which way, and what differs."""
    define_torchvision_ops()
    counts: Counter[str] = Counter()
    chosen = [op for op in operators() if not options.only or op.name in options.only]
    for operator in chosen:
        seen = set()
        for sample in samples_of(operator, options.samples or 8):
            told = compare(operator, sample)
            counts[told.partition(":")[0]] += 1
            if ":" in told and told not in seen:
                print(f"{operator.formatted_name}: {told}", file=sys.stderr)
            seen.add(told)
    print(f"{sum(counts.values())} samples of {len(chosen)} operators; torch {torch.__version__}")
    print(", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    return True
