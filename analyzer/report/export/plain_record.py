"""Records as plain data that JSON can say, and back: rows as columns, and what must hold among the fields."""
from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Union

from analyzer.errors import ProfileFormatError
from analyzer.hardware.device_spec import is_device_file
from analyzer.results.lane import SIGNED, SpanInfo
from analyzer.results.profile import ProfileData
from analyzer.results.world import RankRun, WorldInfo
from analyzer.saved_format import name_json, shorten

_MOST_RANKS = 2**24  # more than were ever run: views list them
_ROUNDING = 1e-9  # what a difference of seconds may be below zero
MOST = 10**60  #: no quantity is as large: so much is a mistake, and soon no number of floating point


def find_fault(record: Any) -> str | None:
    """What is wrong with a record as a whole; None where nothing is."""
    if isinstance(record, RankRun) and not (
            record.first <= record.last and record.step >= 1
            and (record.last - record.first) // record.step < _MOST_RANKS):
        return f"no run of ranks: {record}"
    if isinstance(record, WorldInfo) and record.rank >= record.size:
        return f"rank {record.rank} of {record.size}"
    return _check_profile(record) if isinstance(record, ProfileData) else None


def _check_profile(profile: ProfileData) -> str | None:
    """Whether places are in their lists, and devices go by names: a saved profile opens no other file."""
    cluster = None if profile.world is None else profile.world.cluster
    for name, value in (("device", profile.device), ("world.cluster", cluster)):
        if value is not None and is_device_file(value):
            return f"{name} {value[:80]!r}: the name of a file, not of a {name.rpartition('.')[2]}"
    names = [row.name for row in profile.devices]
    if profile.fullest_device is not None and profile.fullest_device not in names:
        return f"fullest_device {profile.fullest_device[:80]!r}: not the name of one of devices"
    if not all(re.fullmatch(r"[a-z]+:[0-9]{1,3}", name) for name in names):
        return "devices: a name that is no device's, such as cuda:1"
    modules = [] if profile.modules is None else list(profile.modules.walk())
    deep = next((module for module in modules if module.depth >= len(modules)), None)
    if deep is not None:
        return f"modules: {deep.path!r} is at depth {deep.depth} of {len(modules)} modules"
    for i, call in enumerate(profile.module_calls):
        if call.parent is not None and call.parent >= i:
            return f"module_calls[{i}].parent: {call.parent} is no earlier call"
    spans = profile.spans
    lost = next((span.launch for span in spans if span.launch is not None and span.launch >= len(spans)), None)
    return None if lost is None else f"spans: one was launched by {lost}, of {len(spans)} spans"


Decoder = Callable[[Any, str], Any]  # (JSON value, where it stands) -> value, or ProfileFormatError

IN_COLUMNS: tuple[Any, ...] = (SpanInfo,)  #: kinds of rows that are written so
_VALUES, _PLACES = "values", "places"      # of a column of texts: each once, and for each row which of them it is


def _write_columns(rows: Sequence[Any]) -> dict[str, Any]:
    columns = zip(_list_hints(type(rows[0])), zip(*rows, strict=True))
    written: dict[str, Any] = {}
    for (name, hint), column in columns:
        places = {value: i for i, value in enumerate(dict.fromkeys(column))} if _is_text(hint) else {}
        written[name] = {_VALUES: list(places), _PLACES: [places[value] for value in column]} if places else list(
            column)
    return written


def _columns_decoder(kind: Any, decoder_of: Callable[[Any], Decoder]) -> Decoder:
    decoders = {name: (_is_text(hint), decoder_of(hint)) for name, hint in _list_hints(kind)}

    def decode(value: Any, where: str) -> Any:
        if value == []:
            return ()
        if type(value) is not dict or list(value) != list(decoders):
            raise ProfileFormatError(f"{where}: expected columns {', '.join(decoders)}")
        columns = [_read_column(value[name], f"{where}.{name}", *decoder) for name, decoder in decoders.items()]
        if len({len(column) for column in columns}) != 1:
            raise ProfileFormatError(f"{where}: expected columns of one length, got " + ", ".join(
                f"{name} of {len(column)}" for name, column in zip(decoders, columns)))
        return tuple([kind(*row) for row in zip(*columns, strict=True)])
    return decode


def _read_column(value: Any, where: str, is_texts: bool, decoder: Decoder) -> list[Any]:
    if not is_texts:
        if type(value) is not list:
            raise ProfileFormatError(f"{where}: expected list")
        return [decoder(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if type(value) is not dict or list(value) != [_VALUES, _PLACES] or {*map(type, value.values())} != {list}:
        raise ProfileFormatError(f"{where}: expected {_VALUES} and {_PLACES}")
    texts = [decoder(item, f"{where}.{_VALUES}[{i}]") for i, item in enumerate(value[_VALUES])]
    for i, place in enumerate(value[_PLACES]):
        if type(place) is not int or not 0 <= place < len(texts):
            raise ProfileFormatError(
                f"{where}.{_PLACES}[{i}]: expected a place among {len(texts)} values, got {place!r}")
    return [texts[place] for place in value[_PLACES]]


def _list_hints(kind: Any) -> list[tuple[str, Any]]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return [(name, hints[name]) for name in kind._fields]


def _is_text(hint: Any) -> bool:
    return str in (hint, *typing.get_args(hint))


def read_plain(kind: Any, data: Any) -> Any:
    """A record of ``kind`` in plain data, whose lists may be tuples. Raises ProfileFormatError."""
    return decoder_of(kind)(_list_tuples(data), "")


def _list_tuples(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {key: _list_tuples(value) for key, value in data.items()}
    return [_list_tuples(value) for value in data] if isinstance(data, list | tuple) else data


def encode(value: Any) -> Any:
    """A record as what JSON can say."""
    if dataclasses.is_dataclass(value):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return _write_columns(value) if value and type(value[0]) in IN_COLUMNS else [encode(item) for item in value]
    return value


@cache
def decoder_of(kind: Any) -> Decoder:
    """The decoder of a type that the records use."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _scalar_decoder(args[0], -MOST if SIGNED in args else -_ROUNDING)
    if dataclasses.is_dataclass(kind):
        return _record_decoder(kind)
    if isinstance(kind, type) and issubclass(kind, tuple):
        return _named_tuple_decoder(kind)
    if origin is tuple and args[0] in IN_COLUMNS:
        return _columns_decoder(args[0], decoder_of)
    if origin is tuple:
        return _sequence_decoder(args[0], None if args[-1] is Ellipsis else len(args))
    if origin is dict:
        return _mapping_decoder(args[1])
    if origin in (Union, types.UnionType):
        return _union_decoder(args)
    return _scalar_decoder(kind, -_ROUNDING if kind in (int, float) else None)


def _scalar_decoder(kind: type, above: float | None = None) -> Decoder:
    """The decoder of a plain type; its numbers are ``above`` one, where that is given, and below `MOST`."""
    allowed = (int, float) if kind is float else (kind,)

    def decode(value: Any, where: str) -> Any:
        if type(value) not in allowed:
            raise _mismatch(where, _name_type(kind), value)
        if above is not None and not above < value < MOST:
            raise _RangeError(f"{where}: {shorten(value)} is no quantity; an unknown one is null")
        if type(value) is float and not math.isfinite(value):
            raise ProfileFormatError(f"{where}: {value} is no number")
        return value
    return decode


class _RangeError(ProfileFormatError):
    """A number of the right type that is no quantity."""


def _union_decoder(kinds: tuple[Any, ...]) -> Decoder:
    optional = type(None) in kinds
    decoders = [_scalar_decoder(kind) if str in kinds and kind in (int, float) else decoder_of(kind)
                for kind in kinds if kind is not type(None)]  # what may be a text too is a user's, and no quantity

    def decode(value: Any, where: str) -> Any:
        if value is None and optional:
            return None
        if len(decoders) == 1 and isinstance(value, dict | list):
            return decoders[0](value, where)  # its message says which part is wrong
        for decoder in decoders:
            try:
                return decoder(value, where)
            except _RangeError:
                raise
            except ProfileFormatError:
                pass
        raise _mismatch(where, " or ".join(_name_type(kind) for kind in kinds), value)
    return decode


def _sequence_decoder(kind: Any, length: int | None) -> Decoder:
    item_decoder = decoder_of(kind)

    def decode(value: Any, where: str) -> Any:
        if type(value) is not list:
            raise _mismatch(where, "list", value)
        if length is not None and len(value) != length:
            raise ProfileFormatError(f"{where}: expected list of {length}, got one of {len(value)}")
        return tuple(item_decoder(item, f"{where}[{i}]") for i, item in enumerate(value))
    return decode


def _mapping_decoder(kind: Any) -> Decoder:
    item_decoder = decoder_of(kind)

    def decode(value: Any, where: str) -> Any:
        if type(value) is not dict:
            raise _mismatch(where, "object", value)
        for key in value:
            if type(key) is not str:
                raise _mismatch(f"{where}: key {key!r}", "str", key)
        return {key: item_decoder(item, f"{where}[{key!r}]") for key, item in value.items()}
    return decode


def _named_tuple_decoder(kind: Any) -> Decoder:
    decoders = [(name, decoder_of(hint)) for name, hint in typing.get_type_hints(kind, include_extras=True).items()]

    def decode(value: Any, where: str) -> Any:
        if type(value) is not list or len(value) != len(decoders):
            raise _mismatch(where, f"list of {len(decoders)} ({', '.join(name for name, _ in decoders)})", value)
        return _checked(kind(*(decoder(item, f"{where}.{name}")
                               for (name, decoder), item in zip(decoders, value, strict=True))), where)
    return decode


def _record_decoder(kind: Any) -> Decoder:
    @cache
    def field_decoders() -> dict[str, Decoder]:  # when first used, since a record can contain its own kind
        hints = typing.get_type_hints(kind, include_extras=True)
        return {field.name: decoder_of(hints[field.name]) for field in dataclasses.fields(kind)}

    def decode(value: Any, where: str) -> Any:
        if type(value) is not dict:
            raise _mismatch(where, "object", value)
        decoders = field_decoders()
        at, prefix = (f"{where}: ", f"{where}.") if where else ("", "")
        if unknown := [key for key in value if key not in decoders]:
            near = difflib.get_close_matches(str(unknown[0]), decoders, n=1)
            raise ProfileFormatError(f"{at}unknown field {unknown[0]!r}" +
                                     (f"; did you mean {near[0]!r}?" if near else ""))
        if missing := [name for name in decoders if name not in value]:
            raise ProfileFormatError(f"{at}missing field {missing[0]!r}")
        record = kind(**{name: decoder(value[name], prefix + name) for name, decoder in decoders.items()})
        return _checked(record, where)
    return decode


def _checked(record: Any, where: str) -> Any:
    fault = find_fault(record)
    if fault is not None:
        raise ProfileFormatError(f"{where}: {fault}" if where else fault)
    return record


def _mismatch(where: str, expected: str, value: Any) -> ProfileFormatError:
    shown = "" if value is None or isinstance(value, dict | list) else f" {shorten(value)}"
    return ProfileFormatError(f"{where or 'profile'}: expected {expected}, got {name_json(value)}{shown}")


def _name_type(kind: Any) -> str:
    if kind is type(None):
        return "null"
    if dataclasses.is_dataclass(kind) or typing.get_origin(kind) is dict:
        return "object"
    return "list" if typing.get_origin(kind) is tuple else str(kind.__name__)
