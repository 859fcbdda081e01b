"""Many rows of one kind as columns: a text that stands in many rows is written once."""
from __future__ import annotations

import typing
from collections.abc import Callable, Sequence
from typing import Any

from analyzer.errors import ProfileFormatError
from analyzer.results.span import SpanInfo

Decoder = Callable[[Any, str], Any]  # (JSON value, where it stands) -> value, or ProfileFormatError

IN_COLUMNS: tuple[Any, ...] = (SpanInfo,)  #: kinds of rows that are written so
_VALUES, _PLACES = "values", "places"      # of a column of texts: each once, and for each row which of them it is


def write_columns(rows: Sequence[Any]) -> dict[str, Any]:
    """Rows of one of `IN_COLUMNS` as lists by name of their fields.

    >>> span = SpanInfo("host", "launch", "fc", None, None, "", "forward", 0.0, 1e-6)
    >>> columns = write_columns([span, span])
    >>> columns["seconds"], columns["lane"]
    ([1e-06, 1e-06], {'values': ['host'], 'places': [0, 0]})
    """
    columns = zip(_list_hints(type(rows[0])), zip(*rows, strict=True))
    return {name: _write_texts(column) if is_text(hint) else list(column) for (name, hint), column in columns}


def _write_texts(column: Sequence[Any]) -> dict[str, list[Any]]:
    places = {value: i for i, value in enumerate(dict.fromkeys(column))}
    return {_VALUES: list(places), _PLACES: [places[value] for value in column]}


def columns_decoder(kind: Any, decoder_of: Callable[[Any], Decoder]) -> Decoder:
    """The decoder of rows of a kind of `IN_COLUMNS`; none of them are written as an empty list."""
    decoders = {name: (is_text(hint), decoder_of(hint)) for name, hint in _list_hints(kind)}

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


def is_text(hint: Any) -> bool:
    """Whether values of a type are text.

    >>> is_text(str | None), is_text(float)
    (True, False)
    """
    return str in (hint, *typing.get_args(hint))
