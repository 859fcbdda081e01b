"""Samples of torch's operators, run on data and without: shapes, strides, dtypes and devices of results are the same.

    python -m benchmarks.operator_samples                     # docs/reliability.md: every operator of op_db
    python -m benchmarks.operator_samples --only nn.functional.fold  # the samples of one, and what differs

Samples are those of PyTorch's own tests (torch/testing/_internal/common_methods_invocations.py, `op_db`), in float32,
with gradients where the operator has them: its results, and the gradients of its inputs by a backward pass through all.
A sample that data decides (`DataDependentError`) and one that is refused (`UnsupportedOperatorError`) say so, and are
counted apart; so are those that the CPU itself refuses.
"""
from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from analyzer import MetaTensorMode
from analyzer.errors import DataDependentError, UnsupportedOperatorError
from analyzer.zoo.torchvision_ops import define_torchvision_ops

from .flop_zero_check import load_operators

Tensor = torch.Tensor

#: Operators whose results have other strides than on the CPU in some samples, and why; shapes and bytes are equal.
KNOWN = {**dict.fromkeys(("linalg_eig", "linalg_lstsq", "linalg_lstsq_grad_oriented", "svd_lowrank", "pca_lowrank"),
                         "LAPACK gives matrices by columns; the kernels on meta give some of them by rows"),
         **dict.fromkeys(("nonzero", "nonzero_static", "argwhere"), "one row or none: meta has another stride"),
         "fft_rfftn": "the CPU's library keeps the order of dimensions of a complex copy that meta has not",
         "t": "the gradient of a matrix of one row is the transposed one itself: a stride that no element needs"}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="OPERATOR")
    parser.add_argument("--samples", type=int, default=8, metavar="N", help="of each operator (%(default)s)")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    define_torchvision_ops()
    counts: Counter[str] = Counter()
    chosen = [op for op in operators() if arguments.only in (None, op.name)]
    for operator in chosen:
        seen = set()
        for sample in samples_of(operator, arguments.samples):
            told = compare(operator, sample)
            counts[told.partition(":")[0]] += 1
            if ":" in told and told not in seen:
                print(f"{operator.formatted_name}: {told}", file=sys.stderr)
            seen.add(told)
    print(f"{sum(counts.values())} samples of {len(chosen)} operators; torch {torch.__version__}")
    print(", ".join(f"{name} {count}" for name, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
