"""``analyzer calibrate``: the command line of `calibrate`."""
from __future__ import annotations

import argparse
import os
from typing import Any

_HELP = """\
Measures the device at hand: bandwidth, products by format and size, attention, convolutions, copies, and what the host
needs for each operator. Writes FILE, which --device takes in every command. A few minutes; a measurement that was
interrupted goes on when the command is given again.
"""

_EXAMPLES = """\
examples:
  analyzer calibrate lab_card.json
  analyzer calibrate host.json --device cpu --quick
  analyzer profile resnet50 --input 8x3x224x224 --device lab_card.json

exit codes: 0 done; 2 the command line cannot be used; 130 interrupted
"""


def add_calibrate_command(commands: Any) -> None:
    """Add ``calibrate`` to the subparsers of the command line."""
    run = commands.add_parser("calibrate", help="measure the device at hand and write a file that --device takes",
                              description=_HELP, epilog=_EXAMPLES,
                              formatter_class=argparse.RawDescriptionHelpFormatter)
    run.add_argument("file", metavar="FILE", help="where to write it, e.g. lab_card.json")
    run.add_argument("--device", help="what to measure: cuda, cuda:1, cpu (default: cuda where there is one, else cpu)")
    run.add_argument("--quick", action="store_true", help="a few sizes, in seconds: rates, but little else")
    run.add_argument("--again", action="store_true", help="measure anew where FILE holds a measurement already")


def run_calibrate(arguments: argparse.Namespace) -> int:
    """``analyzer calibrate``; the result is the exit code."""
    import torch

    from analyzer.errors import InputError
    from analyzer.hardware.device_file import is_device_file
    from analyzer.hardware.listing import format_device

    from .calibrate import calibrate

    if not is_device_file(arguments.file):
        raise InputError(f"FILE is {arguments.file!r}: --device takes it for a file only if it ends in .json; give "
                         f"{arguments.file + '.json'!r}")
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    before = _find_change(arguments.file)
    spec = calibrate(arguments.file, device, quick=arguments.quick, again=arguments.again)
    if _find_change(arguments.file) == before:
        print(f"{arguments.file} is a finished measurement; --again measures anew\n")
    print(format_device(spec))
    constants = ", ".join(f"{family} ({len(values)})" for family, values in spec.calibration.items()) or "none"
    print(f"\nconstants measured: {constants}\nwritten to {arguments.file}: give it as --device {arguments.file}")
    return 0


def _find_change(path: str) -> int | None:
    """When a file was last written, None where there is none."""
    return os.stat(path).st_mtime_ns if os.path.exists(path) else None
