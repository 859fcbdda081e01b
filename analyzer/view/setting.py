"""What of a saved command can be changed: its settings as plain values, read from the command and put back."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from analyzer.api.prediction import parse_command
from analyzer.api.world_option import check_world_options
from analyzer.errors import InputError, UnknownDeviceError, is_count
from analyzer.hardware import find_device
from analyzer.hardware.catalogue import register_device
from analyzer.recipe.optimizer import OPTIMIZERS
from analyzer.recipe.option import read_recipe
from analyzer.results.command import CommandInfo, Option
from analyzer.zoo.input_spec import InputSpec, parse_inputs

Setting = int | str | bool | None

SIZES = {"batch": "Batch size", "sequence": "Sequence length", "image": "Image size"}
SWITCHES = {"checkpointing": "Checkpointing"}
CHOICES = {"device": "Device", "dtype": "Parameters", "autocast": "Autocast", "optimizer": "Optimizer"}
TITLES = {**SIZES, **CHOICES, **SWITCHES}
_TRAINING = ("optimizer", "checkpointing")


def read_settings(command: CommandInfo) -> dict[str, Setting]:
    """The settings of a command by name; a size that its inputs do not have, or not all the same, is left out.

    >>> read_settings(CommandInfo("gpt2", {"input": ("input_ids=int64:2x64",), "mode": "infer", "device": "h100"}))
    {'batch': 2, 'sequence': 64, 'device': 'h100', 'dtype': None, 'autocast': None}
    """
    specs, found = _read_inputs(command), dict[str, Setting]()
    for name in SIZES:
        values = {spec.shape[i] for spec in specs for i in spec.find_dims(name)}
        if len(values) == 1:
            found[name], = values
    is_inference = command.options.get("mode") == "infer"
    for name in (*CHOICES, *SWITCHES):
        if not (is_inference and name in _TRAINING):
            value = command.options.get(name, False if name in SWITCHES else None)
            found[name] = None if isinstance(value, tuple) else value
    return found


def change_settings(command: CommandInfo, wanted: Mapping[str, Any]) -> CommandInfo:
    """The command with other settings, each read as that of a command line is. Raises InputError, or
    UnknownDeviceError, for one that is not there or has no such value: a device or an optimizer is one that is known by
    its name, or as the command has it.

    >>> command = CommandInfo("resnet18", {"input": ("8x3x64x64",), "device": "h100", "checkpointing": True})
    >>> print(change_settings(command, {"batch": 16, "image": 32, "checkpointing": False, "dtype": "bf16"}))
    analyzer profile resnet18 --input float32:16x3x32x32 --device h100 --dtype bf16
    """
    before, specs, options = read_settings(command), _read_inputs(command), dict(command.options)
    for name, value in wanted.items():
        if name not in before:
            raise InputError(f"{name!r}: is nothing that can be changed here; these can: {', '.join(before)}")
        if name in SIZES:
            if not is_count(value, 1):
                raise InputError(f"{TITLES[name]} {value!r}: must be a whole number of at least 1")
            specs = [spec.resize(name, value) for spec in specs]
        elif value != before[name]:
            _check_value(name, value)
            options = {key: old for key, old in options.items() if key != name}
            options |= {} if value in (None, False) else {name: value}
    changed = replace(command, options={**options, "input": tuple([str(spec) for spec in specs])})
    check_command(changed)
    return changed


def check_command(command: CommandInfo) -> None:
    """Raise InputError, or UnknownDeviceError, for options that no command line could have."""
    arguments = parse_command(command)
    check_world_options(arguments)
    read_recipe(arguments)
    parse_inputs(arguments.input)
    find_device(arguments.device)


def describe_change(before: CommandInfo, after: CommandInfo) -> str:
    """Which settings are others.

    >>> one = CommandInfo("resnet18", {"input": ("8x3x64x64",), "device": "h100", "optimizer": "sgd"})
    >>> describe_change(one, change_settings(one, {"batch": 16, "optimizer": None})), describe_change(one, one)
    ('batch size 8 → 16, optimizer sgd → none', 'as saved')
    """
    old, new = read_settings(before), read_settings(after)
    changed = [f"{TITLES[name].lower()} {_word(old.get(name))} → {_word(value)}" for name, value in new.items()
               if value != old.get(name)]
    return ", ".join(changed) or "as saved"


def list_choices(name: str, value: Setting) -> list[tuple[str, str]]:
    """Values of a setting that a page offers, with what to call them; the one that it has is among them."""
    known: dict[str, str] = {
        "device": {spec.name: spec.name for spec in register_device},
        "dtype": {"": "as built", "bf16": "bf16", "fp16": "fp16", "fp32": "fp32"},
        "autocast": {"": "none", "bfloat16": "bfloat16", "float16": "float16"},
        "optimizer": {"": "none", **{name: name for name in OPTIMIZERS}}}[name]
    return list({**({} if value in (None, *known) else {str(value): str(value)}), **known}.items())


def _check_value(name: str, value: object) -> None:
    if name in SWITCHES:
        if not isinstance(value, bool):
            raise InputError(f"{TITLES[name]} {value!r}: must be true or false")
    elif not (isinstance(value, str) or value is None and name != "device"):
        raise InputError(f"{TITLES[name]} {value!r}: must be a name")
    elif name == "optimizer" and value is not None and value not in OPTIMIZERS:
        raise InputError(f"{TITLES[name]} {value!r}: must be one of {', '.join(OPTIMIZERS)}; others are code, which "
                         "only a command line may name")
    elif name == "device" and isinstance(value, str) and register_device.find(value) is None:
        raise UnknownDeviceError(f"{TITLES[name]} {value!r}: {register_device.list_near(value, 3)}")


def _read_inputs(command: CommandInfo) -> list[InputSpec]:
    given: Option = command.options.get("input", ())
    return list(parse_inputs(given if isinstance(given, tuple) else (str(given),)))


def _word(value: Setting) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)
