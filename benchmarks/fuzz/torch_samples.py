"""Samples of torch's own databases of operators, modules and optimizers, run on data and without: results are laid out
alike, and what PyTorch refuses is refused with an error of the same kind.

    python -m benchmarks.fuzz.run operators                   # docs/reliability.md: results and gradients of each
    python -m benchmarks.fuzz.run modules                     # the same, in training and in evaluation
    python -m benchmarks.fuzz.run refused-calls               # calls that the databases name as errors
    python -m benchmarks.fuzz.run refused-mutations           # valid calls with one thing changed
    python -m benchmarks.fuzz.run operators --only unfold     # those whose names contain a text

The databases are those of PyTorch's own tests: torch/testing/_internal/common_methods_invocations.py (`op_db`),
common_modules.py and common_optimizers.py. The run with data is on the CPU and is right; for CUDA the kind of an error
is the one that the database names. What differs for a reason stands in known.json. Of a valid call that is changed one
tensor has another dtype, one element or one dimension more or less, a number is another one, or all floating tensors
have another dtype.
"""
from __future__ import annotations

import argparse
import json
import random
import sys
import types
import unittest
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from analyzer import MetaTensorMode
from analyzer.errors import DataDependentError, UnsupportedOperatorError
from analyzer.zoo.torchvision_ops import define_torchvision_ops

_KNOWN = json.loads(Path(__file__).with_name("known.json").read_text())
#: Operators whose results have other strides than on the CPU in some samples, and why; shapes and bytes are equal.
STRIDES: dict[str, str] = _KNOWN["strides"]
#: Calls that are refused otherwise, by device and name, and why.
KNOWN = {(device, name): why for device, name, why in _KNOWN["calls"]}

EQUAL, OTHER_STRIDES, DIFFERS, BOTH_REFUSE = "equal", "other strides", "another result", "both refuse"
PRICED, REFUSED, NOT_FOLLOWED = "priced", "refused", "not followed without data"
SAME_KIND, OTHER_KIND, BOTH_RUN = "same kind of error", "another kind of error", "both run"
BEYOND = "refused, where PyTorch reads beyond what it is given"
EMPTY = "priced, with no element to compute"  #: kernels of CUDA return before they look at a dtype


class Outcome(NamedTuple):
    """How a sample went on a device, and what was found where it is not as with data."""

    name: str
    device: str
    verdict: str
    told: str = ""


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


def list_operators(only: Sequence[str] = ("",)) -> list[Any]:
    """Those that take float32 on the CPU and have one of these texts in their names."""
    return [op for op in load_operators() if torch.float32 in op.supported_dtypes("cpu")
            and any(text in op.formatted_name for text in only)]


def describe(result: Any) -> list[tuple[Any, ...]]:  # of each tensor in a result what is known without data
    return [(tuple(t.shape), t.stride() if t.layout is torch.strided else t.layout, t.dtype, t.requires_grad)
            for t in tree_leaves(result) if isinstance(t, Tensor)]


def error_of(run: Callable[[], Any]) -> Exception | None:
    try:
        run()
    except Exception as error:  # of whichever kind: it is the answer
        return error
    return None


def name_error(error: Exception | None) -> str:
    return "nothing" if error is None else f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def compare_runs(run: Callable[[str], list[tuple[Any, ...]]], device: str, has_known_strides: bool) -> tuple[str, str]:
    """How a run without data on a device went beside that on the CPU; both give descriptions of tensors."""
    def attempt(on: str) -> Any:
        try:
            return run(on)
        except Exception as error:  # of any kind, as torch has it
            return error

    right = attempt("cpu")
    with MetaTensorMode():
        found = attempt(device)
    if isinstance(right, Exception) or isinstance(found, Exception):
        if isinstance(found, (DataDependentError, UnsupportedOperatorError)):
            return NOT_FOLLOWED, name_error(found)
        if isinstance(right, Exception):
            return BOTH_REFUSE if isinstance(found, Exception) else PRICED, name_error(right)
        return REFUSED, name_error(found)
    if right == found:
        return EQUAL, ""
    is_alike = [(t[0], *t[2:]) for t in found] == [(t[0], *t[2:]) for t in right]
    return OTHER_STRIDES if is_alike and has_known_strides else DIFFERS, f"{found} is not {right}"


# ---- results and gradients


def samples_of(operator: Any, most: int) -> Iterator[Any]:
    """The first samples of an operator, each with its own tensors."""
    torch.manual_seed(0)
    for _, sample in zip(range(most), operator.sample_inputs("cpu", torch.float32, operator.supports_autograd)):
        yield sample


def run_operator(operator: Any, sample: Any, device: str) -> list[tuple[Any, ...]]:
    """Results of a sample, and gradients of its inputs; under the mode the copies are the mode's, with contents that
    are known if small.
    """
    def clone(t: Tensor) -> Tensor:
        return t.detach().clone(memory_format=torch.preserve_format).requires_grad_(t.requires_grad)

    x, args, kwargs = tree_map_only(Tensor, clone, (sample.input, sample.args, sample.kwargs))
    result = operator(x, *args, **kwargs)
    found = describe(result)
    roots = [t for t in tree_leaves(result)
             if isinstance(t, Tensor) and t.requires_grad and t.is_floating_point() and t.layout is torch.strided]
    leaves = [t for t in tree_leaves((x, args, kwargs)) if isinstance(t, Tensor) and t.requires_grad and t.is_leaf]
    if roots and leaves:
        torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
        found += describe([t.grad for t in leaves])
    return found


def try_operators(only: Sequence[str], samples: int | None, devices: Sequence[str]) -> Iterator[Outcome]:
    define_torchvision_ops()
    for operator in list_operators(only):
        for number, sample in enumerate(samples_of(operator, samples or 8)):
            yield Outcome(f"{operator.formatted_name}[{number}]", "cpu", *compare_runs(
                partial(run_operator, operator, sample), "cpu", operator.formatted_name in STRIDES))


def run_module(info: Any, sample: Any, training: bool, device: str) -> list[tuple[Any, ...]]:
    """Results of a module, and gradients of its parameters."""
    torch.manual_seed(0)
    arguments = sample.constructor_input
    module = info.module_cls(*arguments.args, **arguments.kwargs).to(device).train(training)
    args, kwargs = tree_map_only(Tensor, lambda t: t.detach().to(device).requires_grad_(t.requires_grad),
                                 (sample.forward_input.args, sample.forward_input.kwargs))
    results = [t for t in tree_leaves(module(*args, **kwargs)) if isinstance(t, Tensor)]
    if leaves := [t.abs().sum() for t in results if t.requires_grad]:
        torch.stack(leaves).sum().backward()
    return describe(results) + [(name, "", p.grad is not None and tuple(p.grad.shape))
                                for name, p in module.named_parameters()]


def try_modules(only: Sequence[str], samples: int | None, devices: Sequence[str]) -> Iterator[Outcome]:
    load_operators()  # with what the databases need and this machine may lack
    from torch.testing._internal.common_modules import module_db

    for info, training in ((info, training) for info in module_db for training in (True, False)
                           if any(text in info.name for text in only)):
        torch.manual_seed(0)
        given = list(info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True,
                                             training=training))
        for number, sample in enumerate(given):
            # of LinearCrossEntropyLoss there are 1,714, of which every hundredth is run
            if sample.forward_input is None or "LinearCrossEntropy" in info.name and number % 100:
                continue
            for device in devices:
                yield Outcome(f"{info.name}[{number}]{'' if training else ' in evaluation'}", device, *compare_runs(
                    partial(run_module, info, sample, training), device, True))


# ---- calls that PyTorch refuses


class Call(NamedTuple):
    """A call that PyTorch refuses; it runs once, for it may write to its inputs. ``kind``: what the database names."""

    name: str
    kind: type[BaseException]
    run: Callable[[], Any]


def refused_calls(device: str, only: Sequence[str] = ("",)) -> Iterator[Call]:
    """The ``error_inputs`` of the three databases on a device, of what has one of these texts in its name."""
    def is_asked(name: str) -> bool:
        return any(text in name for text in only)

    for operator in load_operators():
        if operator.error_inputs_func is not None and is_asked(operator.formatted_name):
            for number, given in enumerate(operator.error_inputs(device)):
                sample = given.sample_input
                yield Call(f"{operator.formatted_name}[{number}]", given.error_type,
                           partial(operator, sample.input, *sample.args, **sample.kwargs))
    from torch.testing._internal.common_modules import module_db
    from torch.testing._internal.common_optimizers import optim_db

    for info in module_db:
        if info.module_error_inputs_func is not None and is_asked(info.name):
            for number, one in enumerate(info.module_error_inputs_func(
                    info, device=device, dtype=torch.float32, requires_grad=False, training=False)):
                yield Call(f"{info.name}[{number}]", one.error_type,
                           partial(_call_module, info, one.module_error_input, device))
    for optimizer in optim_db:
        kind: Any = optimizer.optim_cls
        if is_asked(kind.__name__):
            for number, one in enumerate(optimizer.optim_error_inputs_func(device, torch.float32)):
                given = one.optimizer_error_input
                yield Call(f"{kind.__name__}[{number}]", one.error_type, partial(
                    lambda kind, given: kind(given.params, **given.kwargs).step(), kind, given))


def _call_module(info: Any, given: Any, device: str) -> None:
    made = info.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs)
    if given.forward_input is not None:
        made.to(device)(*given.forward_input.args, **given.forward_input.kwargs)


def try_refused_calls(only: Sequence[str], samples: int | None, devices: Sequence[str]) -> Iterator[Outcome]:
    torch.manual_seed(0)
    for device in devices:
        real = {call.name: (call.kind, error_of(call.run)) for call in refused_calls("cpu", only)}
        with nullcontext() if device == "cpu" else MetaTensorMode():
            for call in refused_calls(device, only):
                named, error = real.get(call.name, (None, None))
                # one that the CPU runs; of Python scalars, in the database for any error, all devices run it
                if error is None and (device == "cpu" or named is Exception):
                    continue
                kind = type(error) if device == "cpu" else call.kind
                with MetaTensorMode():
                    found = error_of(call.run)
                yield Outcome(call.name, device, PRICED if found is None else SAME_KIND if isinstance(
                    found, kind) else OTHER_KIND, f"{name_error(found)}; right {kind.__name__}")


# ---- valid calls with one thing changed

DTYPES = (torch.int32, torch.int64, torch.float16, torch.float64, torch.bool, torch.bfloat16, torch.complex64)
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


def compare_changed(operator: Any, sample: Any, change: Callable[[list[Any]], None]) -> tuple[str, str] | None:
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
    told = f"{name_error(found)}; right {name_error(right)}"
    if isinstance(found, (DataDependentError, UnsupportedOperatorError)):
        return NOT_FOLLOWED, told
    if right is None:
        return BOTH_RUN if found is None else BEYOND if reads_beyond(operator.name, flat) else REFUSED, told
    if found is None:
        return EMPTY if any(isinstance(x, Tensor) and not x.numel() for x in flat) else PRICED, told
    return SAME_KIND if isinstance(found, type(right)) else OTHER_KIND, told


def reads_beyond(name: str, flat: list[Any]) -> bool:
    """Whether a kernel reads past the end of weights or statistics: aten/src/ATen/native/Normalization.cpp compares no
    sizes, which `torch.nn.functional.batch_norm` does before.
    """
    input, *others = (x for x in flat if isinstance(x, Tensor))
    return "batch_norm" in name and input.dim() > 1 and any(t.numel() < input.shape[1] for t in others)


def try_changed(only: Sequence[str], samples: int | None, devices: Sequence[str]) -> Iterator[Outcome]:
    for operator in (op for op in list_operators(only) if not op.name.strip("_").startswith(CRASHES)):
        torch.manual_seed(0)
        chance = random.Random(operator.formatted_name)
        given = list(operator.sample_inputs("cpu", torch.float32))
        for sample in chance.sample(given, min(samples or 2, len(given))):
            leaves, _ = tree_flatten((sample.input, tuple(sample.args), sample.kwargs))
            for name, change in list_changes(leaves, chance):
                if (result := compare_changed(operator, sample, change)) is not None:
                    yield Outcome(f"{operator.formatted_name}, {name}", "cpu", *result)


Try = Callable[[Sequence[str], "int | None", Sequence[str]], Iterator[Outcome]]
#: Each part, with the verdicts that are no agreement.
PARTS: dict[str, tuple[Try, tuple[str, ...]]] = {
    "operators": (try_operators, (DIFFERS, PRICED, REFUSED)), "modules": (try_modules, (DIFFERS, PRICED, REFUSED)),
    "refused-calls": (try_refused_calls, (OTHER_KIND, PRICED)),
    "refused-mutations": (try_changed, (OTHER_KIND, PRICED, REFUSED))}


def tell(part: str, options: argparse.Namespace) -> bool:
    """Print how many samples went which way on each device, and what differs without a reason. Returns whether none
    does.
    """
    run, wrong = PARTS[part]
    counts: dict[str, Counter[str]] = {}
    holds = True
    for one in run(options.only or ("",), options.samples, [options.device] if options.device else ("cpu", "cuda")):
        counts.setdefault(one.device, Counter())[one.verdict] += 1
        if one.verdict in wrong and ((one.device, one.name) not in KNOWN or options.differing):
            holds &= (one.device, one.name) in KNOWN
            print(f"{one.device} {one.name}: {one.verdict}: {one.told:.400}", flush=True)
    for device, count in counts.items():
        print(f"{device}: {sum(count.values())} calls; " + ", ".join(f"{n} {what}" for what, n in count.most_common()))
    print(f"torch {torch.__version__}")
    return holds
