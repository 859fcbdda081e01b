"""Whether the forms of the rules for cuDNN's weight gradients hold for models that they were not made with.

    python -m benchmarks.accuracy_forms [PART OF A MODEL ...] [--processes N]

Each form says when something is copied or split (`analyzer/cuda/workspaces/convolution.py`); they were seen in reserved
bytes. Each training step with convolutions is predicted with all forms and without each. For each model, the others
say which forms are kept: those without which their reserved bytes are further off, on the average. The model that was
left out is predicted with what is kept (where several are dropped, without the one that takes it furthest off). Prints
the section of docs/accuracy.md, and writes it where all models run.
"""
from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from analyzer import ProfileOptions, profile
from analyzer.cuda.workspaces import convolution
from analyzer.hardware import find_device
from benchmarks.cases import Case, build, measured_cases
from benchmarks.page import is_named, map_apart, markdown, parse_parts, percent, publish

_Convolution: Any = convolution._Convolution


def _splits_in_float32_alone(c: Any) -> bool:
    return bool(c.groups == 1 and c.x.dtype == torch.float32)


def _without(is_of: Callable[[Any], bool]) -> Callable[[Any], bool]:
    original = _Convolution._copies_for_weight_gradient
    return lambda c: c.uses_copies if is_of(c) else original(c)


#: What stands for a form that is left out: a method of a convolution, and another one in its place.
ALTERNATIVES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "16-bit partial sums": ("_splits_weight_gradient", _splits_in_float32_alone),
    "16-bit copies": ("_copies_for_weight_gradient", _without(lambda c: c.x.dtype != torch.float32)),
    "few products": ("_copies_for_weight_gradient", _without(lambda c: c.x.dtype == torch.float32)),
}
SAYS = {"16-bit partial sums": "weight gradients are split in 16 bits as in float32 (but for 1x1 of ragged channels)",
        "16-bit copies": "in 16 bits, those of spatial kernels are always copied for",
        "few products": "in float32, those of 1x1 are copied for where there are fewer products than multiprocessors"}


@contextmanager
def form_left_out(form: str | None) -> Iterator[None]:
    """Without one of the forms."""
    if form is None:
        yield
        return
    name, other = ALTERNATIVES[form]
    before = getattr(_Convolution, name)
    setattr(_Convolution, name, other)
    try:
        yield
    finally:
        setattr(_Convolution, name, before)


@dataclass(frozen=True)
class Errors:
    """The error of a case's reserved bytes, with all forms (None) and without each."""

    case: Case
    reserved: dict[str | None, float]


def examine(case: Case) -> Errors:
    """Predict one case with all forms and without each."""
    torch.set_num_threads(1)
    measured, found = max(row[7] for row in case.phases), {}
    for form in (None, *ALTERNATIVES):
        model, args, kwargs = build(case)
        with form_left_out(form):  # under a name of its own the device has no workspaces noted before
            p = profile(model, args, kwargs, mode=case.mode, optimizer=case.optimizer, autocast=case.autocast,
                        device=replace(find_device("h200"), name=f"h200 without {form}"),
                        options=ProfileOptions(keep_events=False))
        assert p.peak_reserved_bytes is not None
        found[form] = p.peak_reserved_bytes / measured - 1
    return Errors(case, found)


def is_kept(form: str, others: Sequence[Errors]) -> bool | None:
    """Whether the other models are nearer with a form than without; None where it changes nothing in them."""
    changed = [e.reserved for e in others if e.reserved[form] != e.reserved[None]]
    gain = statistics.fmean([abs(r[form]) - abs(r[None]) for r in changed]) if changed else 0.0
    return gain > 0 if changed else None


def section(errors: Sequence[Errors]) -> str:
    """The figures of the page: what each form changes, and what a model is predicted with that was left out."""
    forms = markdown(["form", "what it says", "cases that it changes", "mean error with", "without", "models nearer"],
                     [_describe_form(form, errors) for form in ALTERNATIVES], 2)
    rows, with_forms, left_out = [], [], []
    for model in dict.fromkeys(e.case.model for e in errors):
        own, others = ([e for e in errors if (e.case.model == model) is is_own] for is_own in (True, False))
        dropped = [form for form in ALTERNATIVES if not is_kept(form, others)]
        for e in own:
            found = max((e.reserved[form] for form in dropped), key=abs, default=e.reserved[None])
            with_forms.append(abs(e.reserved[None]))
            left_out.append(abs(found))
            if any(e.reserved[form] != e.reserved[None] for form in ALTERNATIVES):
                figures = [e.reserved[None], found, *(e.reserved[form] for form in ALTERNATIVES)]
                rows.append([e.case.id, ", ".join(dropped) or "none",
                             *(percent(figure, 2, signed=True) for figure in figures)])
    near, near_with = (sum(error <= 0.04 for error in some) for some in (left_out, with_forms))
    headers = ["case", "forms that the others drop", "reserved today", "left out",
               *(f"without {form}" for form in ALTERNATIVES)]
    return f"""{forms}

{markdown(headers, rows, 2)}

Of {len(left_out)} training steps with convolutions, {near} are within 4 % when their model is left out (with it
{near_with}; median {percent(statistics.median(left_out), 2)}, worst {percent(max(left_out), 2)})."""


def _describe_form(form: str, errors: Sequence[Errors]) -> list[str]:
    changed = [e for e in errors if e.reserved[form] != e.reserved[None]]
    models = list(dict.fromkeys(e.case.model for e in changed))
    nearer = sum(is_kept(form, [e for e in changed if e.case.model == model]) is True for model in models)
    means = [percent(statistics.fmean([abs(e.reserved[key]) for e in changed]) if changed else None, 2)
             for key in (None, form)]
    return [form, SAYS[form], str(len(changed)), *means, f"{nearer} of {len(models)}"]


def main() -> int:
    options = parse_parts(__doc__, "take only the models whose name")
    cases = [c for c in measured_cases() if c.mode == "train" and c.lib == "torchvision"
             and is_named(c.model, options.parts)]
    text = section(map_apart(examine, cases, options.processes))
    publish("accuracy.md", {"accuracy_forms": text}, not options.parts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
