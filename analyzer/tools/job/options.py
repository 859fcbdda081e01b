"""The options of a configuration as its program reads them: checked, with defaults, and with what became of each."""
from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, overload

from analyzer.errors import find_close

from .document import Document, JobError, Keys, write_value

Kind = Literal["understood", "default", "no effect", "assumed", "not modelled", "unknown"]
#: Kinds of ``names.json`` that tell what is taken in the place of an option, as what that is told, and with which
#: values an option asks for nothing.
_LEFT_OUT: Sequence[tuple[str, Kind, Sequence[Any]]] = (
    ("not modelled", "not modelled", ()), ("not modelled above 1", "not modelled", (1, "1")),
    ("assumed", "assumed", ()))
_MANY = 16  # choices, of which an error names those that resemble what is there


@dataclass(frozen=True)
class OptionReading:
    """What became of one option. ``kind`` is one of

    - ``understood``: it is part of what is profiled; ``default``: it was not given, and the program has a default that
      changes the cost; ``no effect``: it changes no cost (a learning rate, a name of a run);
    - ``assumed``: what it asks for is taken to be something else, which costs about the same, as ``meaning`` says;
    - ``not modelled``: it changes the cost, and the answer leaves it out; ``unknown``: the program's reader here does
      not know it.
    """

    name: str
    value: Any
    kind: Kind
    meaning: str = ""
    place: str = ""


@dataclass
class Options:
    """The values of one mapping of a configuration. Each is taken by a method that checks it and notes that it was
    understood; `rest` says what of the others becomes.

    ``layers`` are documents with mappings in them, of which a later one overrides: a file, then the command line.
    """

    layers: Sequence[tuple[Document, Mapping[str, Any]]]
    keys: Keys = ()
    readings: list[OptionReading] = field(default_factory=list)
    _taken: set[str] = field(default_factory=set)
    _told: set[str] = field(default_factory=set)  # of those taken, what is among the readings

    @classmethod
    def of(cls, *documents: Document, readings: list[OptionReading] | None = None) -> Options:
        """Those of whole documents; what becomes of them is added to ``readings``."""
        return cls([(document, document.data) for document in documents], (), [] if readings is None else readings)

    def names(self) -> list[str]:
        return list(dict.fromkeys(name for _, values in self.layers for name in values))

    def get(self, name: str) -> Any:
        """A value as it was written, None where it is not there or empty; it is not taken."""
        return next((values[name] for _, values in reversed(self.layers) if values.get(name) is not None), None)

    def place(self, name: str) -> str:
        """The file and line of an option; of one that is not there the file."""
        document = next((document for document, values in reversed(self.layers) if name in values), self.layers[-1][0])
        return document.place(*self.keys, name)

    def fail(self, name: str, problem: str) -> JobError:
        """The error that an option cannot be used, to be raised."""
        value = self.get(name)
        said = "" if value is None else f" {write_value(value)}:"
        others = self._others() if value is None else ()
        near = next((f"; is it {other}, at {self.place(other)}?" for other in others if find_close(name, [other])), "")
        return JobError(f"{self.place(name)}: {self.full_name(name)}:{said} {problem}{near}")

    def full_name(self, name: str) -> str:
        return ".".join(map(str, (*self.keys, name)))

    # Values, checked.

    @overload
    def number(self, name: str, default: int, *, least: int = 0, means: str = "") -> int: ...
    @overload
    def number(self, name: str, default: None = None, *, least: int = 0, means: str = "") -> int | None: ...
    def number(self, name: str, default: int | None = None, *, least: int = 0, means: str = "") -> int | None:
        """A whole number. Raises JobError for anything else, and for one below ``least``."""
        value = self._take(name, default, means)
        if value is None or value == default:
            return default
        if isinstance(value, str):
            value = _read_number(value)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value) or value < least:
            raise self.fail(name, f"must be a whole number of at least {least}")
        return int(value)

    def count(self, name: str, default: int = 1, *, means: str = "") -> int:
        """A whole number of at least 1."""
        return self.number(name, default, least=1, means=means)

    def fraction(self, name: str, default: float, *, means: str = "") -> float:
        """A number of at least 0."""
        value = self._take(name, default, means)
        value = _read_number(value) if isinstance(value, str) else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
            raise self.fail(name, "must be a number of at least 0")
        return float(value)

    def flag(self, name: str, default: bool = False, *, means: str = "") -> bool:
        """Yes or no, also as the words that programs take for it."""
        value = self._take(name, default, means)
        if isinstance(value, str):
            value = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False,
                     "0": False, "none": False}.get(value.lower(), value)
        if value in (0, 1):
            value = bool(value)
        if not isinstance(value, bool):
            raise self.fail(name, "must be true or false")
        return value

    def switch(self, name: str, means: str) -> bool:
        """A flag that is off by itself, which is told where it is given alone."""
        return self.flag(name, means="" if self.get(name) is None else means)

    @overload
    def text(self, name: str, default: str, *, choices: Iterable[str] = (), means: str = "") -> str: ...
    @overload
    def text(self, name: str, default: None = None, *, choices: Iterable[str] = (), means: str = "") -> str | None: ...
    def text(self, name: str, default: str | None = None, *, choices: Iterable[str] = (),
             means: str = "") -> str | None:
        """A word, one of ``choices`` where there are some; in any case of letters. Raises JobError for another."""
        value = self._take(name, default, means)
        if value is None:
            return None
        if isinstance(value, (Mapping, list)):
            raise self.fail(name, "must be one word")
        if value is True and self._stands_alone(name):
            raise self.fail(name, "needs a value after it")
        said, known = str(value), list(choices)
        if known and said != default:
            found = next((choice for choice in known if choice.lower() == said.lower()), None)
            if found is None:
                near = find_close(said, known)
                raise self.fail(name, f"is none of the {len(known)} that are known{near}" if near and len(known) > _MANY
                                else f"must be one of {', '.join(known)}{near}")
            return found
        return said

    def needed(self, name: str, why: str, *, means: str = "") -> str:
        """A word that must be there. Raises JobError, which says ``why``, where it is not."""
        found = self.text(name, means=means)
        if found is None:
            raise self.fail(name, f"is not there, and {why}")
        return found

    def words(self, name: str, default: Sequence[str] = (), *, means: str = "") -> list[str]:
        """A list of words; one word is a list of those between its commas."""
        value = self._take(name, list(default) or None, means)
        if value is None:
            return []
        if isinstance(value, str):
            return [word.strip() for word in value.split(",") if word.strip()]
        if not isinstance(value, list) or any(isinstance(word, (Mapping, list)) for word in value):
            raise self.fail(name, "must be a list of words")
        return [str(word) for word in value]

    def part(self, name: str) -> Options | None:
        """The mapping under a name; None where there is none. Raises JobError where the value is no mapping."""
        value = self.get(name)
        self._taken.add(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.fail(name, "must be a mapping of names to values")
        inner = [(document, values[name]) for document, values in self.layers if isinstance(values.get(name), Mapping)]
        return Options(inner, (*self.keys, name), self.readings)

    def section(self, name: str) -> Options:
        """The mapping under a name, an empty one where there is none, whose defaults are told too. Raises JobError."""
        return self.part(name) or Options([(document, {}) for document, _ in self.layers], (*self.keys, name),
                                          self.readings)

    def join(self, *names: str) -> None:
        """Let the values of the mappings under these names, where none are given of all mappings, stand beside those of
        the whole, over which they count.
        """
        layers: list[tuple[Document, Mapping[str, Any]]] = []
        for document, values in self.layers:
            parts = {name: value for name, value in values.items()
                     if isinstance(value, Mapping) and (name in names or not names)}
            joined = {name: value for name, value in values.items() if name not in parts}
            lines = dict(document.lines)
            for name, inner in parts.items():
                joined.update(inner)
                lines.update({(key,): lines[name, key] for key in inner if (name, key) in lines})
            layers.append((replace(document, lines=lines), joined))
        self.layers = layers

    def _take(self, name: str, default: Any, means: str) -> Any:
        value = self.get(name)
        self._taken.add(name)
        if name not in self._told and (value is not None or means and default is not None):
            self._told.add(name)
            self.readings.append(
                OptionReading(self.full_name(name), default, "default", means) if value is None else
                OptionReading(self.full_name(name), value, "understood", means, self.place(name)))
        return default if value is None else value

    # What is not a value of the step.

    def note(self, name: str, kind: Kind, meaning: str) -> None:
        """Note what became of an option, in the place of what was noted of it before."""
        self._taken.add(name)
        self._told.add(name)
        full = self.full_name(name)
        self.readings[:] = [reading for reading in self.readings if reading.name != full]
        self.readings.append(OptionReading(full, self.get(name), kind, meaning, self.place(name)))

    def assume(self, name: str, meaning: str) -> None:
        """Note what is taken in the place of what an option asks for."""
        self.note(name, "assumed", meaning)

    def finish(self, *programs: str, known: Iterable[str] = ()) -> None:
        """Note what becomes of all options that were not taken, by the names of some programs in ``names.json``:
        what changes the cost and is not modelled, with what is taken instead, then what changes no cost.
        """
        names = set(known)
        for program in programs:
            for kind, found, off in _LEFT_OUT:
                for meaning, words in _read_names()[program].get(kind, {}).items():
                    self._tell(set(words), found, meaning, off)
                    names.update(word for word in words if word[-1] != "*")
        self.rest(" ".join(names_of(program) for program in programs), names)

    def rest(self, without_effect: str, known: Iterable[str] = ()) -> None:
        """Note what becomes of all options that were not taken: those of ``without_effect``, names with spaces
        between them of which one that ends in ``*`` is the beginning of names, change no cost; others are unknown,
        with the names that resemble them, also of ``known``.
        """
        words = set(without_effect.split())
        for name in list(self._others()):
            if has_name(words, name):
                self.note(name, "no effect", "")
        for meaning, names in _read_names()["every program"]["not modelled"].items():
            self._tell(set(names), "not modelled", meaning)
        for name in list(self._others()):
            if self.get(name) is not None:
                there = {*(word for word in words if word[-1] != "*"), *self._taken, *known} - {name}
                near = _find_neighbour(name, there) or find_close(name, there)
                self.note(name, "unknown", near.removeprefix("; "))

    def leave_out(self, names: str, meaning: str) -> None:
        """Of options that change the cost and are not modelled: each that is given, and is not off, is noted. Names
        are as those of `rest`.
        """
        self._tell(set(names.split()), "not modelled", meaning)

    def _tell(self, words: set[str], kind: Kind, meaning: str, off: Sequence[Any] = ()) -> None:
        for name in [other for other in self._others() if has_name(words, other)]:
            self._taken.add(name)
            if self.get(name) not in (None, False, 0, "false", "False", "none", "", [], {}, *off):
                self.note(name, kind, meaning)

    def _stands_alone(self, name: str) -> bool:
        """Whether an option stands on a command line without a value that it needs."""
        document = next(document for document, values in reversed(self.layers) if values.get(name) is not None)
        return document.form == "command" and not has_name(document.switches, name)

    def _others(self) -> Iterator[str]:
        return (name for name in self.names() if name not in self._taken)


def names_of(program: str, kind: str = "without effect") -> str:
    """Names of a program's options, with spaces between them: those that change no cost, or another kind of
    ``names.json``; one that ends in ``*`` is the beginning of names.

    >>> names_of("llamafactory_v1", "without effect of adapters").split()[:2]
    ['lora_alpha', 'use_rslora']
    """
    return " ".join(_read_names()[program].get(kind, ()))


@cache
def _read_names() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("names.json").read_text("utf-8"))
    return found


#: One thing by the names of several programs, of which people write one in the place of another.
_NEIGHBOURS = ("cutoff_len sequence_len max_length max_seq_length max_seq_len seq_len block_size model_max_length "
               "max_model_len context_length",
               "micro_batch_size per_device_train_batch_size local_batch_size batch_size train_batch_size",
               "lora_r lora_rank network_dim rank", "optim optimizer optimizer_type",
               "base_model model_name_or_path model pretrained_model_name_or_path model_path",
               "lora_target lora_target_modules target_modules lora_attn_modules",
               "tensor_parallel_size tp_size tensor_parallel_degree tensor_model_parallel_size",
               "attn_implementation attn_impl flash_attn", "gpu_memory_utilization mem_fraction_static",
               "max_num_seqs max_running_requests", "gradient_checkpointing enable_activation_checkpointing")


def _find_neighbour(name: str, known: Iterable[str]) -> str:
    """What another program's name is called in this one, as `find_close` says it; empty where it is none."""
    there = set(known)
    found = [word for group in _NEIGHBOURS if name in group.split() for word in group.split() if word in there]
    return f"; did you mean {' or '.join(found)}?" if found else ""


def has_name(words: Iterable[str], name: str) -> bool:
    """Whether a name is among words of which one that ends in ``*`` is the beginning of names.

    >>> has_name({"seed", "log_*"}, "log_level"), has_name({"seed", "log_*"}, "seeds")
    (True, False)
    """
    return name in words or any(word.endswith("*") and name.startswith(word[:-1]) for word in words)


def _read_number(text: str) -> Any:
    try:
        value = float(text)
    except ValueError:
        return text
    return int(value) if value.is_integer() else value
