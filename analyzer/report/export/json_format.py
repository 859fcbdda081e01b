"""A profile as JSON: its versions, what is written and what is read."""
from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from analyzer.errors import InputError, ProfileFormatError
from analyzer.output import FilePath, is_path, write_output
from analyzer.report.speed import RATES, read_rate
from analyzer.results.profile import AnyProfile, ProfileData
from analyzer.results.view import register_exporter
from analyzer.saved_format import Fields, SavedFormat, read_text

from .plain_record import decoder_of, encode


def _leave_fused(fields: Fields) -> Fields:
    """Of version 9, which had an estimate of the compiled step beside the eager one."""
    phases = {step: {name: {**phase, "kernels": None} for name, phase in fields[step].items()}
              for step in ("first_step", "phases")}
    return {**{name: value for name, value in fields.items() if name != "fused"}, **phases, "compiled": None}


def _add_devices(fields: Fields) -> Fields:
    """To version 10, in which a process had one device."""
    return {**fields, "devices": [], "fullest_device": None, "copies": [],
            "memory_events": [[*event, 0] for event in fields["memory_events"]]}


def _add_operators(fields: Fields) -> Fields:
    """To version 11, whose timeline did not tell what ran."""
    return {**fields, "timeline": [[*point, None] for point in fields["timeline"]]}


def _add_grad_mode(fields: Fields) -> Fields:
    """To version 13; of an older inference step it is unknown what it ran under, and of blocks what was asked for."""
    return {**fields, "grad_mode": None, "memory_events": [[*event, None] for event in fields["memory_events"]]}


def _add_allocator_settings(fields: Fields) -> Fields:
    """To version 14; of an older profile they are unknown, but for what its assumptions say."""
    return {**fields, "allocator_settings": None}


def _add_course(fields: Fields) -> Fields:
    """To version 16; an older dry run ended where memory ran out, and did not tell what the host has in each phase."""
    host = {"host_allocated_bytes": None, "host_peak_bytes": None}
    return {**fields, "first_shortage": None, "course": None, "cycles": [
        {**cycle, "phases": [{**phase, **host} for phase in cycle["phases"]]} for cycle in fields["cycles"]]}


FORMAT = SavedFormat("analyzer.profile", ProfileData.format_version, "profile", "profile the model again",
                     {7: lambda fields: {**fields, "made_by": None},
                      8: lambda fields: {**fields, "peak_allocated_bytes_range": None}, 9: _leave_fused,
                      10: _add_devices, 11: _add_operators, 12: _add_grad_mode,
                      13: _add_allocator_settings, 14: lambda fields: {**fields, "cycles": []}, 15: _add_course,
                      16: lambda fields: {**fields, "tf32": None}})
DERIVED = "derived"  # figures that follow from the others; they are written, and not read back


def list_fields(profile: ProfileData) -> Fields:
    """A profile as what JSON can say, its version first."""
    return {**FORMAT.head, **encode(profile)}


@register_exporter.shipped("json")
def write_json(profile: ProfileData, path: str | Path | None = None) -> str:
    """The JSON text, also written to ``path`` if given. Raises InputError for what could not be read back."""
    rates = {name: read_rate(profile, name) for name in RATES}
    # None for what no number holds: a rate of a step that takes next to no time
    data = {**list_fields(profile), DERIVED: {
        name: None if rate is None or not math.isfinite(rate) else rate for name, rate in rates.items()}}
    try:
        read_data(data)
    except ProfileFormatError as error:
        raise InputError(f"to_json(): this profile cannot be saved without loss: {error}") from error
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    if path is not None:
        write_output(path, text + "\n")
    return text


def read_json(source: str | Path, kind: type[AnyProfile] = ProfileData) -> AnyProfile:  # type: ignore[assignment]
    """The profile in JSON text or a file. ProfileFormatError says where it is damaged, InputError that none is."""
    origin, text = load_text(source)
    with damage_in(origin):
        return read_data(FORMAT.decode(text), kind)


@contextmanager
def damage_in(origin: str) -> Iterator[None]:
    """What is wrong with saved text is told of ``origin``, as ProfileFormatError."""
    try:
        yield
    except RecursionError as error:
        raise ProfileFormatError(f"{origin}: nested too deep to be read") from error
    except (InputError, ProfileFormatError) as error:
        raise ProfileFormatError(f"{origin}: {error}") from error


def read_data(data: Any, kind: type[AnyProfile] = ProfileData) -> AnyProfile:  # type: ignore[assignment]
    """The profile in decoded JSON. Raises ProfileFormatError."""
    fields = {name: value for name, value in FORMAT.read(data).items() if name != DERIVED}
    profile: AnyProfile = decoder_of(kind)(fields, "")  # type: ignore[arg-type]
    return profile


def load_text(source: FilePath, caller: str = "from_json", noun: str = "profile") -> tuple[str, str]:
    """What to call a saved text in messages, and the text itself, given so or by the path of its file."""
    hint = f"give the path of a saved {noun}, or its text, which starts with '{{'"
    if not is_path(source):
        raise InputError(f"{caller}({source!r}): {hint}")
    if isinstance(source, str) and (not source.strip() or source.lstrip()[0] in "{[" or "\n" in source.strip()):
        return f"{caller}(text)", source
    try:
        return f"{caller}({os.fspath(source)!r})", read_text(source)
    except InputError as error:
        raise ProfileFormatError(f"{caller}({os.fspath(source)!r}): not a saved {noun}: {error}") from error
    except IsADirectoryError as error:
        raise InputError(f"{caller}({os.fspath(source)!r}): is a folder; {hint}") from error
    except (FileNotFoundError, ValueError) as error:  # the last of a path with a NUL
        raise InputError(f"{caller}({os.fspath(source)!r}): no such file; {hint}") from error
    except OSError as error:
        raise InputError(f"{caller}({os.fspath(source)!r}): cannot be read: {error.strerror}") from error


def write_record(record: Any, saved: SavedFormat, path: str | Path | None = None, **parts: Any) -> str:
    """The JSON text of a record, also written to ``path`` if one is given; ``parts`` are fields that are told
    otherwise than `encode` does.
    """
    text = json.dumps({**saved.head, **encode(record), **parts}, separators=(",", ":"), allow_nan=False)
    if path is not None:
        write_output(path, text + "\n")
    return text


def read_record(kind: Any, source: str | Path, caller: str, saved: SavedFormat,
                prepare: Callable[[Fields], Fields] = dict) -> Any:
    """A record of ``kind`` that was saved so; ``prepare`` sees its fields first. Raises as `read_json` does."""
    origin, text = load_text(source, caller, saved.what)
    with damage_in(origin):
        return decoder_of(kind)(prepare(saved.read(saved.decode(text))), "")
