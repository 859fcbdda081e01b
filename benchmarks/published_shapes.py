"""Builds every published shape without weights and compares its parameters with those that were published.

    python -m benchmarks.published_shapes
"""
from __future__ import annotations

import re
import sys
import time

from analyzer.api.argument import build_model
from analyzer.errors import MissingExtraError
from analyzer.zoo.published_shape import PublishedCount, PublishedShape, list_shapes
from analyzer.zoo.target import load_target


def count_parameters(shape: PublishedShape, model_class: str | None = None) -> int:
    """Of the model of this shape, or of its ``model_class``."""
    target = load_target(f"hf:{shape.name}" + (f":{model_class}" if model_class else ""))
    return sum(parameter.numel() for parameter in build_model(target.build).parameters())


def agrees(said: PublishedCount, counted: int) -> bool:
    """Whether that count, less what was not counted there, is the published one, to the digits that it has."""
    rest = counted - said.more
    if isinstance(said.parameters, int):
        return rest == said.parameters
    found = re.fullmatch(r"(\d+)(?:\.(\d+))?([MB])", said.parameters)
    assert found is not None, said.parameters
    unit = {"M": 10**6, "B": 10**9}[found[3]]
    return f"{rest / unit:.{len(found[2] or '')}f}{found[3]}" == said.parameters


def check(shape: PublishedShape) -> str | None:  # what is wrong with a shape; None where nothing is
    counted = count_parameters(shape)
    if counted != shape.parameters:
        return f"{counted:,} parameters, not {shape.parameters:,}"
    said = shape.published
    if not agrees(said, count_parameters(shape, said.of) if said.of else counted):
        return f"{counted:,} parameters, and {said.parameters} by {said.source}"
    return None


def main() -> int:
    start, wrong, left_out = time.perf_counter(), 0, 0
    for shape in list_shapes():
        try:
            fault = check(shape)
        except MissingExtraError as error:
            left_out += 1
            print(f"{shape.name}: left out: {error}")
            continue
        wrong += fault is not None
        print(f"{shape.name}: {fault or f'{shape.parameters:,} parameters, as published'}")
    print(f"{len(list_shapes())} shapes, {wrong} of them wrong, {left_out} left out, "
          f"{time.perf_counter() - start:.1f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
