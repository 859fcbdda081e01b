"""Calls that PyTorch refuses, from its own tests: each is refused here too, with an error of the same kind.

    python -m benchmarks.fuzz.run refused-calls    # docs/reliability.md: all, on the CPU and on a simulated GPU
    python -m benchmarks.fuzz.run refused-calls --only gather     # the calls of one operator, module or optimizer
    python -m benchmarks.fuzz.run refused-calls --differing    # a line for each that differs, known or not

The calls are the ``error_inputs`` of torch's databases of operators, modules and optimizers (torch/testing/_internal/
common_methods_invocations.py, common_modules.py, common_optimizers.py). On the CPU each one runs with data first, and
what it raises there is the right answer; one that does not raise is left out. For CUDA, where no data runs, the right
answer is the kind that the database names.
"""
from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from analyzer import MetaTensorMode
from benchmarks.fuzz.operator_samples import load_operators

AGREES, OTHER_KIND, PRICED = "same kind of error", "another kind of error", "priced"
DEVICES = ("cpu", "cuda")

#: Calls that differ, by device and name, and why; at most 3 of a hundred.
KNOWN = {(device, name): why for device, name, why in json.loads(
    Path(__file__).with_name("known.json").read_text())["calls"]}


class Refused(NamedTuple):
    """A call that PyTorch refuses; it runs once, for it may write to its inputs."""

    name: str      #: of the operator, module or optimizer, with the number of its error input
    kind: type[BaseException]  #: of the error that the database names
    run: Callable[[], Any]


def refused_calls(device: str, only: Sequence[str] = ("",)) -> Iterator[Refused]:
    """The calls of the three databases on a device, of what has one of these texts in its name."""
    for source in (_of_operators, _of_modules, _of_optimizers):
        yield from source(device, lambda name: any(text in name for text in only))


def _of_operators(device: str, is_asked: Callable[[str], bool]) -> Iterator[Refused]:
    for operator in load_operators():
        if operator.error_inputs_func is None or not is_asked(operator.formatted_name):
            continue
        for number, given in enumerate(operator.error_inputs(device)):
            sample = given.sample_input
            run = partial(operator, sample.input, *sample.args, **sample.kwargs)
            yield Refused(f"{operator.formatted_name}[{number}]", given.error_type, run)


def _of_modules(device: str, is_asked: Callable[[str], bool]) -> Iterator[Refused]:
    from torch.testing._internal.common_modules import module_db

    for module in module_db:
        if module.module_error_inputs_func is None or not is_asked(module.name):
            continue
        given = module.module_error_inputs_func(module, device=device, dtype=torch.float32, requires_grad=False,
                                                training=False)
        for number, one in enumerate(given):
            def run(module: Any = module, one: Any = one.module_error_input) -> Any:
                made = module.module_cls(*one.constructor_input.args, **one.constructor_input.kwargs)
                if one.forward_input is not None:
                    made.to(device)(*one.forward_input.args, **one.forward_input.kwargs)
            yield Refused(f"{module.name}[{number}]", one.error_type, run)


def _of_optimizers(device: str, is_asked: Callable[[str], bool]) -> Iterator[Refused]:
    from torch.testing._internal.common_optimizers import optim_db

    for optimizer in optim_db:
        name: str = optimizer.optim_cls.__name__  # type: ignore[attr-defined]
        if not is_asked(name):
            continue
        for number, one in enumerate(optimizer.optim_error_inputs_func(device, torch.float32)):
            def run(optimizer: Any = optimizer, one: Any = one.optimizer_error_input) -> None:
                optimizer.optim_cls(one.params, **one.kwargs).step()
            yield Refused(f"{name}[{number}]", one.error_type, run)


def error_of(run: Callable[[], Any]) -> Exception | None:
    try:
        run()
    except Exception as error:  # of whichever kind: it is the answer
        return error
    return None


def compare(call: Refused, kind: type[BaseException]) -> tuple[str, str]:
    """How a call goes without data, and what it raises."""
    with MetaTensorMode():
        found = error_of(call.run)
    if found is None:
        return PRICED, "nothing"
    return AGREES if isinstance(found, kind) else OTHER_KIND, describe(found)


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def compare_all(device: str, only: Sequence[str] = ("",)) -> Iterator[tuple[Refused, str, str]]:
    """Each call with how it went, and a line that says what was found and what is right."""
    torch.manual_seed(0)
    if device == "cpu":
        for real, call in zip(refused_calls(device, only), refused_calls(device, only), strict=True):
            if (right := error_of(real.run)) is not None:
                verdict, found = compare(call, type(right))
                yield call, verdict, f"{found}; right {describe(right)}"
        return
    # operators of Python scalars, in the database for any error, which run on all devices
    runs = {call.name for call in refused_calls("cpu", only) if call.kind is Exception and error_of(call.run) is None}
    with MetaTensorMode():
        for call in refused_calls(device, only):
            if call.name in runs:
                continue
            verdict, found = compare(call, call.kind)
            yield call, verdict, f"{found}; right {call.kind.__name__}"


def tell(options: argparse.Namespace) -> bool:
    """Print how many calls went which way on each device, and what differs without a reason. Returns whether none does.
    """
    holds = True
    for device in [options.device] if options.device else DEVICES:
        counts: Counter[str] = Counter()
        for call, verdict, told in compare_all(device, options.only or [""]):
            counts[verdict] += 1
            holds &= verdict == AGREES or (device, call.name) in KNOWN
            if verdict != AGREES and ((device, call.name) not in KNOWN or options.differing):
                print(f"{device} {call.name}: {verdict}: {told}", file=sys.stderr)
        total = sum(counts.values())
        print(f"{device}: {total} calls; " + ", ".join(f"{name} {count}" for name, count in counts.items()))
    return holds
