"""``analyzer models``: the open models whose published shapes come with the package."""
from __future__ import annotations

import argparse

from analyzer.errors import InputError, find_close
from analyzer.hardware import format_catalogue, format_device
from analyzer.report.text_table import print_rows
from analyzer.units import UNKNOWN
from analyzer.zoo.published_shape import PublishedShape, find_shape, list_names, list_shapes

_HEADERS = ("Name", "Parameters", "Weights", "Class")
_FIELDS = ("name", "parameters", "weights", "model_class", "alike", "published", "published_by", "sources")


def run_models(arguments: argparse.Namespace) -> int:
    shape = None if arguments.name is None else find_shape(arguments.name)
    if shape is not None and arguments.format == "text":
        print(describe_shape(shape))
    else:
        print(list_models(arguments.name or "", arguments.format))
    return 0


def run_devices(arguments: argparse.Namespace) -> int:
    print(format_device(arguments.name) if arguments.name else format_catalogue())
    return 0


def list_models(part: str = "", fmt: str = "text") -> str:
    """A table of the published shapes with ``part`` in a name, in CSV with all fields. Raises InputError for none."""
    found = [shape for shape in list_shapes() if any(part.lower() in name.lower() for name in shape.names)]
    if not found:
        raise InputError(f"models {part}: no published shape has this in its name{find_close(part, list_names())}")
    if fmt == "csv":
        cells = [[s.name, str(s.parameters), s.weights or "", s.model_class, " ".join(s.alike),
                  str(s.published.parameters), s.published.source, "; ".join(s.sources)] for s in found]
        return print_rows(_FIELDS, cells, fmt=fmt)
    rows = [(shape.name, f"{shape.parameters:,}", shape.weights or UNKNOWN, shape.model_class) for shape in found]
    return print_rows(_HEADERS, rows, left=(0, 2, 3), fmt=fmt)


def describe_shape(shape: PublishedShape) -> str:
    said, own = shape.published, shape.config.items()
    count = f"{said.parameters:,}" if isinstance(said.parameters, int) else said.parameters
    published = f"published: {count}" + (f" for {said.of}" if said.of else "") + f", {said.source}"
    if said.why is not None:
        published += f"; {said.more:+,} here: {said.why}"
    return "\n".join([
        shape.name, f"parameters: {shape.parameters:,} ({shape.model_class})", published,
        f"weights: {shape.weights or 'their type is not in the config'}",
        *([f"of the same shape: {', '.join(shape.alike)}"] if shape.alike else []),
        *(f"config: {source}" for source in shape.sources), "", *(f"  {name} = {value}" for name, value in own)])
