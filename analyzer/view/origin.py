"""How a saved profile was made, and whether it may be made again: code runs, and other files are read, only where a
command line names them.
"""
from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from analyzer.api.prediction import parse_command
from analyzer.errors import AnalyzerError, InputError
from analyzer.hardware.device_file import is_device_file
from analyzer.recipe.optimizer import OPTIMIZERS
from analyzer.results.command import CommandInfo, Option
from analyzer.results.profile import Profile
from analyzer.zoo.target import names_own_code
from analyzer.zoo.transformers_models import names_file

from .setting import check_command

_UNKNOWN = ("The file does not say which command made it; `analyzer profile TARGET --json FILE` writes that. Name the "
            "model: analyzer view FILE --target TARGET")


@dataclass(frozen=True)
class Origin:
    """The command that makes a profile again, or why there is none; ``note`` says what of it was guessed."""

    command: CommandInfo | None
    refusal: str = ""
    note: str = ""


def find_origin(profile: Profile, target: str | None = None) -> Origin:
    """The origin of a profile that was read from a file; ``target`` is what a command line says that it is of.

    Raises InputError where the file says that it is of another model, of a library.

    >>> saved = Profile(name="Net", mode="infer", made_by=CommandInfo("net.py:Net", {"input": ("2x8",)}))
    >>> find_origin(saved).refusal
    'It is of net.py:Net, code that runs only where a command line names it: analyzer view FILE --target net.py:Net'
    >>> print(find_origin(saved, "net.py:Net").command)
    analyzer profile net.py:Net --input 2x8
    """
    command = profile.made_by
    if command is None:
        if target is None:
            return Origin(None, _UNKNOWN)
        command = _guess_command(profile, target)
        note = "The file does not say how it was made, and it is taken that it was so"
        if profile.optimizer is not None and "optimizer" not in command.options:
            note += ", without its optimizer, which the program made itself"
        return _check(Origin(command, note=note), target)
    if target is not None and target != command.target:
        if not names_own_code(command.target):
            raise InputError(f"--target {target}: the file is of {command.target}; leave --target out")
        return _check(Origin(replace(command, target=target), note=f"The file is of {command.target}"), target)
    return _check(Origin(command), target)


def _check(origin: Origin, target: str | None) -> Origin:
    """What no command line could say is refused, and code that this one, which names ``target``, does not name."""
    assert origin.command is not None
    try:
        arguments = parse_command(origin.command)
        refusal = _find_own_code(arguments, target)
        if not refusal:
            check_command(origin.command)  # which imports an optimizer of torch's by its name
    except AnalyzerError as error:
        refusal = f"The command that the file says made it cannot be read: {error}"
    return Origin(None, refusal) if refusal else origin


def _find_own_code(arguments: argparse.Namespace, target: str | None) -> str:
    """Why options may not run, or may not be looked up; empty where they may."""
    rule = "code that runs only where a command line names it: analyzer"
    if arguments.target != target and names_own_code(arguments.target):
        return f"It is of {arguments.target}, {rule} view FILE --target {arguments.target}"
    if ":" in (arguments.optimizer or "") and not arguments.optimizer.startswith("torch.optim:"):
        return f"Its optimizer is {arguments.optimizer}, {rule} profile --optimizer {arguments.optimizer}"
    if not (arguments.attention or "sdpa").isidentifier():  # transformers takes others for repositories that hold code
        return f"Its attention is {arguments.attention!r}, which is no name of one that comes with transformers"
    if arguments.target != target and arguments.target.startswith("hf:") and names_file(arguments.target[3:]):
        return (f"It is of {arguments.target}, a file that is read only where a command line names it: analyzer view "
                f"FILE --target {arguments.target}")
    for flag, name in (("device", arguments.device), ("cluster", arguments.cluster)):
        if is_device_file(name or ""):
            return (f"Its {flag} is {name}, a file that is read only where a command line names it: analyzer profile "
                    f"--{flag} {name}")
    return ""


def _guess_command(profile: Profile, target: str) -> CommandInfo:
    """A command for a profile that does not say which made it."""
    for name in profile.inputs:
        if not name.isidentifier():
            raise InputError(f"--target {target}: the file has an input {name!r}, which no --input can name; profile "
                             f"the model anew: analyzer profile {target} --json FILE")
    inputs = [f"{name}={tensor.dtype}:{'x'.join(map(str, tensor.shape)) or 'scalar'}"
              for name, tensor in profile.inputs.items()]
    optimizer, world = profile.optimizer or "", profile.world
    known: dict[str, Option | None] = {
        "mode": profile.mode, "device": profile.device, "autocast": profile.autocast,
        "optimizer": optimizer if optimizer in OPTIMIZERS or ":" in optimizer else None}
    if world is not None:
        known |= {"world": world.size, "rank": world.rank, "devices_per_host": world.devices_per_host,
                  "cluster": world.cluster}
    return CommandInfo(target, {"input": tuple(inputs), **{k: v for k, v in known.items() if v is not None}})
