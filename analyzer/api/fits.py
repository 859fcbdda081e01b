"""`fits`: on which devices a step fits; ``analyzer models``: the open models whose shapes are known."""
from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from analyzer.errors import InputError
from analyzer.fx.surroundings import leaves_no_tensor
from analyzer.hardware import DeviceSpec, find_device, register_device
from analyzer.record.options import ProfileOptions, progress_of
from analyzer.report.node_table import FORMATS, print_rows
from analyzer.results.verdict import FitTable, Verdict
from analyzer.results.view import register_view
from analyzer.units import UNKNOWN
from analyzer.zoo.input_spec import find_close
from analyzer.zoo.published_shape import PublishedShape, find_shape, list_names, list_shapes

from .argument import build_model
from .profile import profile

# `fits`: on which devices a step fits.

@leaves_no_tensor
def fits(model: torch.nn.Module | Callable[[], torch.nn.Module], args: tuple[Any, ...] | Any = (),
         kwargs: dict[str, Any] | None = None, *, devices: Iterable[str | DeviceSpec] | None = None,
         world_size: int | None = None, options: ProfileOptions | None = None, **profile_options: Any) -> FitTable:
    """Whether a step of ``model`` fits on each of ``devices``, by default the host and all whose memory is known.

    The step is profiled for each of them, for what kernels take differs. ``args``, ``kwargs``, ``options`` and
    ``profile_options`` are those of `analyzer.profile`. ``world_size`` above 1 counts communication buffers where
    their size is known. Raises InputError for ``device``, UnknownDeviceError, and what `profile` raises.

    >>> import torch
    >>> rows = torch.empty(2**21, 1024, device="meta")  # 8 GiB, and as much of outputs
    >>> table = fits(torch.nn.Linear(1024, 1024), rows, mode="infer", devices=["t4", "l4"])
    >>> [(row.device, row.fits, row.phase) for row in table], table.fitting
    ([('t4', False, 'forward'), ('l4', True, 'forward')], ('l4',))
    """
    from analyzer.report.verdict import describe_step  # with reports: `import analyzer` needs none

    if "device" in profile_options:
        raise InputError(f"fits(device={profile_options['device']!r}): it tries every device; give devices=[...] to "
                         "try only some")
    if isinstance(devices, (str, DeviceSpec)):
        devices = [devices]
    specs = _list_known() if devices is None else [find_device(device) for device in devices]
    if not specs:
        raise InputError("fits(devices=[]): name at least one device, or leave it out for all of the catalogue")
    options = options or ProfileOptions()
    module = model if isinstance(model, torch.nn.Module) else build_model(model)
    judge, title = register_view.look_up("verdict", "fits"), ""
    rows: list[Verdict] = []
    specs.sort(key=lambda spec: (spec.memory_bytes is None, spec.memory_bytes or 0))
    for i, spec in enumerate(specs):
        limits = options.limit_to_device and spec.memory_bytes is not None
        with progress_of(i, len(specs), spec.name):
            found = profile(module, args, kwargs, device=spec, options=replace(options, limit_to_device=limits),
                            **profile_options)
        rows.append(judge(found, spec, world_size))
        title = describe_step(found)
    devices_held = tuple([row.device for row in rows if row.fits][:3])
    return FitTable(title, tuple([replace(row, devices=devices_held) for row in rows]))


def _list_known() -> list[DeviceSpec]:
    """The host, and the devices of the catalogue whose memory is known: of others nothing can be told."""
    return [spec for spec in register_device if spec.memory_bytes is not None or spec.name == "cpu"]


# ``analyzer models``: the open models whose published shapes come with the package.

_HELP = """\
Lists the open models whose published shapes come with analyzer, to be given as hf:NAME, with or without the
organisation, in any case. Shapes are config files as they were published, without weights.
"""

_EXAMPLES = """\
examples:
  analyzer models                     all of them
  analyzer models llama               those with "llama" in a name
  analyzer models llama-3.1-8b        this one, with the sources of its figures
  analyzer models --format csv
"""

_HEADERS = ("Name", "Parameters", "Weights", "Class")
_FIELDS = ("name", "parameters", "weights", "model_class", "alike", "published", "published_by", "sources")


def add_models_command(commands: Any) -> None:
    """Add ``models`` to the subparsers of the command line."""
    parser = commands.add_parser("models", help="list the open models that hf:NAME takes, or one with its sources",
                                 description=_HELP, epilog=_EXAMPLES,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", metavar="NAME", help="a model, or a part of its name")
    parser.add_argument("--format", choices=tuple(FORMATS), default="text",
                        help="of the table (default text); csv has the sources too")


def run_models(arguments: argparse.Namespace) -> int:
    """``analyzer models``; the result is the exit code."""
    shape = None if arguments.name is None else find_shape(arguments.name)
    if shape is not None and arguments.format == "text":
        print(describe_shape(shape))
    else:
        print(list_models(arguments.name or "", arguments.format))
    return 0


def list_models(part: str = "", fmt: str = "text") -> str:
    """A table of the published shapes that have ``part`` in one of their names: name, parameters, type of the published
    weights, class; in CSV also the models of the same shape and the sources. Raises InputError where there is none.

    >>> print(list_models("mistral-7b", "csv").splitlines()[1][:79])
    mistralai/Mistral-7B-v0.1,7241732096,bfloat16,MistralForCausalLM,mistralai/Mist
    """
    found = [shape for shape in list_shapes() if any(part.lower() in name.lower() for name in shape.names)]
    if not found:
        raise InputError(f"models {part}: no published shape has this in its name{find_close(part, list_names())}")
    if fmt == "csv":
        return print_rows(_FIELDS, [_list_cells(shape) for shape in found], fmt=fmt)
    rows = [(shape.name, f"{shape.parameters:,}", shape.weights or UNKNOWN, shape.model_class) for shape in found]
    return print_rows(_HEADERS, rows, left=(0, 2, 3), fmt=fmt)


def _list_cells(shape: PublishedShape) -> list[str]:
    said = shape.published
    return [shape.name, str(shape.parameters), shape.weights or "", shape.model_class, " ".join(shape.alike),
            str(said.parameters), said.source, "; ".join(shape.sources)]


def describe_shape(shape: PublishedShape) -> str:
    """A published shape with the sources of its figures.

    >>> print(describe_shape(find_shape("pythia-70m")).splitlines()[1])
    parameters: 70,426,624 (GPTNeoXForCausalLM)
    """
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
