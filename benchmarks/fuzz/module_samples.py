"""Modules of torch's own database, run with data and without: shapes of results and gradients, and what is refused.

    python -m benchmarks.fuzz.run modules                # docs/reliability.md: all, in training and in evaluation
    python -m benchmarks.fuzz.run modules --only Conv    # those whose names contain a text

The samples are those of torch/testing/_internal/common_modules.py. The run with data is on the CPU; those without are
on the CPU and on a simulated GPU. Of those of ``LinearCrossEntropyLoss``, 1,714, every hundredth one is run.
"""
from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from analyzer import MetaTensorMode
from benchmarks.fuzz.operator_samples import load_operators

EQUAL, STRIDES, DIFFERS = "equal", "other strides", "another result"
BOTH_REFUSE, PRICED, REFUSED = "both refuse", "priced", "refused"


def module_samples(only: str = "") -> Iterator[tuple[str, Any, Any, bool]]:
    """The name of a sample, the module's entry, the sample, and whether the module is in training."""
    next(iter(load_operators()))  # with what the databases need and this machine may lack
    from torch.testing._internal.common_modules import module_db

    for info in module_db:
        for training in (True, False) if only in info.name else ():
            torch.manual_seed(0)
            given = list(info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True,
                                                 training=training))
            for number, sample in enumerate(given):
                if sample.forward_input is not None and not ("LinearCrossEntropy" in info.name and number % 100):
                    yield f"{info.name}[{number}]{'' if training else ' in evaluation'}", info, sample, training


def run(info: Any, sample: Any, training: bool, device: str) -> tuple[list[Any], list[Any]]:
    """Descriptions of the results, and of the gradients of the parameters."""
    torch.manual_seed(0)
    arguments = sample.constructor_input
    module = info.module_cls(*arguments.args, **arguments.kwargs).to(device).train(training)
    args, kwargs = tree_map_only(torch.Tensor, lambda t: t.detach().to(device).requires_grad_(t.requires_grad),
                                 (sample.forward_input.args, sample.forward_input.kwargs))
    results = [t for t in tree_leaves(module(*args, **kwargs)) if isinstance(t, torch.Tensor)]
    if leaves := [t.abs().sum() for t in results if t.requires_grad]:
        torch.stack(leaves).sum().backward()
    return ([(tuple(t.shape), t.dtype, t.requires_grad, t.stride()) for t in results],
            [(name, p.grad is not None and tuple(p.grad.shape)) for name, p in module.named_parameters()])


def judge(right: Any, found: Any) -> str:
    if isinstance(right, Exception):
        return BOTH_REFUSE if isinstance(found, Exception) else PRICED
    if isinstance(found, Exception):
        return REFUSED
    if right == found:
        return EQUAL
    (results, gradients), (others, other_gradients) = right, found
    same = [one[:3] for one in results] == [one[:3] for one in others] and gradients == other_gradients
    return STRIDES if same else DIFFERS


def attempt(*arguments: Any) -> Any:
    try:
        return run(*arguments)
    except Exception as error:  # whatever it refuses
        return error


def compare_all(only: str = "") -> Iterator[tuple[str, str, str, Any]]:
    """Of each sample and device: its name, how it went, and what was found."""
    for name, info, sample, training in module_samples(only):
        right = attempt(info, sample, training, "cpu")
        for device in ("cpu", "cuda"):
            with MetaTensorMode():
                found = attempt(info, sample, training, device)
            yield f"{name} on {device}", device, judge(right, found), found


def tell(options: argparse.Namespace) -> bool:
    """Print how many samples went which way on each device, and what differs. Returns whether none does."""
    counts: dict[str, Counter[str]] = {"cpu": Counter(), "cuda": Counter()}
    for name, device, verdict, found in compare_all((options.only or [""])[0]):
        counts[device][verdict] += 1
        if verdict in (DIFFERS, PRICED, REFUSED):
            print(f"{name}: {verdict}: {str(found).splitlines()[0][:200]}", flush=True)
    for device, count in counts.items():
        print(f"{device}: {sum(count.values())} samples; " + ", ".join(f"{n} {what}" for what, n in count.items()))
    return not any(count[bad] for count in counts.values() for bad in (DIFFERS, PRICED, REFUSED))
