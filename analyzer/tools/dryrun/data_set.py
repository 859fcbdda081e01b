"""Stand-ins for data sets of the hub under a dry run: their columns, and texts of a given number of tokens."""
from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from analyzer.errors import InputError, find_close

from .saved_file import assume

ROWS = 256  #: of each split
#: How many tokens a text has, by the type of its column. A word of the texts is a token of the stand-in for a
#: tokenizer, and of most others.
TOKENS = {"text": 512, "words": 32, "messages": 512, "conversations": 512, "prompt": 32, "reply": 512 - 32}
_WORD = "the"


@cache
def _list_data_sets() -> dict[str, dict[str, Any]]:
    """What is known of each data set by its names: ``columns`` and ``splits``, or ``configs`` that have such.

    A column's type is one of `TOKENS`, ``int``, ``float``, ``bool``, ``label:a,b`` or ``label:100``, ``image:500x500``,
    ``audio:16000``, a list of a type or an object of types. A message is of a role and a content. ``checked`` says what
    the columns were compared with; those of data sets without it were not compared with their cards.
    """
    listed = json.loads((Path(__file__).parent / "data_sets.json").read_text(encoding="utf-8"))
    return {name.lower(): one for one in listed for name in one["names"]}


def find_columns(path: str, name: str | None) -> tuple[dict[str, Any], list[str]] | None:
    """The columns and splits of a data set; None for one that is not known. Raises InputError for a config that it does
    not have, or that is not given.
    """
    found = _list_data_sets().get(path.lower())
    if found is None:
        return None
    configs = found.get("configs")
    if configs is not None:
        if name not in configs:
            what = "needs a config" if name is None else f"has no config {name!r} in its stand-in"
            raise InputError(f"load_dataset({path!r}) {what}; it has {', '.join(configs)}")
        own = configs[name]
        found = {**found, **(own if "columns" in own else {"columns": own})}
    return found["columns"], found["splits"]


def list_close(path: str) -> str:
    return find_close(path.rpartition("/")[2], [name.rpartition("/")[2] for name in _list_data_sets()])


def make_data_set(path: str, columns: Mapping[str, Any], splits: Iterable[str], split: Any, streaming: bool) -> Any:
    """What ``load_dataset`` gives: a data set of each split, of the one asked for, or of each in a list of them."""
    import datasets  # type: ignore[import-untyped,unused-ignore]

    features = datasets.Features({name: _make_feature(kind) for name, kind in columns.items()})
    values = {name: [_make_value(kind, row) for row in range(ROWS)] for name, kind in columns.items()}
    whole = {name: datasets.Dataset.from_dict(values, features=features, split=datasets.NamedSplit(name))
             for name in splits}
    tokens = {name: count for name, kind in columns.items() if (count := _count_tokens(kind))}
    lengths = ", ".join(f"{name} {count}" for name, count in tokens.items())
    assume(f"{path}: a stand-in with the columns of that data set, {ROWS} rows in each split"
           + (f"; tokens of a text: {lengths}" if lengths else ""))

    def stream(data: Any) -> Any:
        return data.to_iterable_dataset() if streaming else data

    def take(one: Any) -> Any:
        if str(one) == "all":
            return stream(datasets.concatenate_datasets(list(whole.values())))
        read = one if isinstance(one, datasets.ReadInstruction) else datasets.ReadInstruction.from_spec(str(one))
        parts = [whole[part.splitname].select(range(part.from_, part.to))
                 for part in read.to_absolute(dict.fromkeys(whole, ROWS))]
        return stream(datasets.concatenate_datasets(parts))

    if split is None:
        kind = datasets.IterableDatasetDict if streaming else datasets.DatasetDict
        return kind({name: stream(data) for name, data in whole.items()})
    if isinstance(split, (list, tuple)):
        return [take(one) for one in split]
    return {name: take(one) for name, one in split.items()} if isinstance(split, dict) else take(split)


def _make_feature(kind: Any) -> Any:
    import datasets

    if isinstance(kind, dict):
        return {name: _make_feature(part) for name, part in kind.items()}
    if isinstance(kind, list):
        return datasets.List(_make_feature(kind[0])) if hasattr(datasets, "List") else [_make_feature(kind[0])]
    word, _, rest = kind.partition(":")
    if word in ("messages", "prompt", "reply"):
        return [{"role": datasets.Value("string"), "content": datasets.Value("string")}]
    if word == "conversations":
        return [{"from": datasets.Value("string"), "value": datasets.Value("string")}]
    if word == "label":
        return datasets.ClassLabel(num_classes=int(rest)) if rest.isdigit() else datasets.ClassLabel(
            names=rest.split(","))
    if word == "image":
        return datasets.Image()
    if word == "audio":
        return datasets.Audio(sampling_rate=int(rest))
    return datasets.Value({"int": "int64", "float": "float32", "bool": "bool"}.get(word, "string"))


def _make_value(kind: Any, row: int) -> Any:
    if isinstance(kind, dict):
        return {name: _make_value(part, row) for name, part in kind.items()}
    if isinstance(kind, list):
        return [_make_value(kind[0], row)]
    word, _, rest = kind.partition(":")
    made: dict[str, Callable[[], Any]] = {
        "text": lambda: _make_text(TOKENS["text"]), "words": lambda: _make_text(TOKENS["words"]), "word": lambda: _WORD,
        "messages": lambda: [*_make_message("user", "prompt"), *_make_message("assistant", "reply")],
        "prompt": lambda: _make_message("user", "prompt"), "reply": lambda: _make_message("assistant", "reply"),
        "conversations": lambda: [{"from": "human", "value": _make_text(TOKENS["prompt"])},
                                  {"from": "gpt", "value": _make_text(TOKENS["reply"])}],
        "label": lambda: row % (int(rest) if rest.isdigit() else len(rest.split(","))), "int": lambda: 0,
        "float": lambda: 1.0, "bool": lambda: row % 2 == 0, "id": lambda: str(row),
        "image": lambda: {"bytes": _make_image(rest), "path": None},
        "audio": lambda: {"bytes": _make_sound(int(rest)), "path": None}}
    return made[word]()


def _make_text(tokens: int) -> str:
    return " ".join([_WORD] * tokens)


def _make_message(role: str, kind: str) -> list[dict[str, str]]:
    return [{"role": role, "content": _make_text(TOKENS[kind])}]


def _count_tokens(kind: Any) -> int:
    if isinstance(kind, dict):
        return sum(map(_count_tokens, kind.values()))
    return 0 if isinstance(kind, list) else TOKENS.get(kind, 0)


@cache
def _make_image(size: str) -> bytes:
    """Of ``WIDTHxHEIGHT``, in colours; ``WIDTHxHEIGHTxL`` in greys."""
    from PIL import Image

    width, height, *mode = size.split("x")
    buffer = io.BytesIO()
    Image.new(mode[0] if mode else "RGB", (int(width), int(height))).save(buffer, "PNG")
    return buffer.getvalue()


_SECONDS = 10  # of a sound: about the mean of LibriSpeech's


@cache
def _make_sound(rate: int) -> bytes:
    import wave

    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes(bytes(2 * rate * _SECONDS))
    return buffer.getvalue()


def is_own(path: str, data_files: Any) -> bool:
    """Whether ``load_dataset`` would read files of the script's own, or what is in the cache of data sets."""
    from datasets import config
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES  # type: ignore[import-untyped,unused-ignore]

    if data_files is not None or path in _PACKAGED_DATASETS_MODULES or os.path.exists(path):
        return True
    kept = Path(config.HF_DATASETS_CACHE, path.replace("/", "___"))
    return kept.is_dir() and any(kept.iterdir())


class Metric:
    """Answers as what ``evaluate.load`` gives: a metric of which nothing is known without data."""

    def __init__(self, path: str, config_name: str | None = None, *_: Any, **__: Any) -> None:
        self.name = config_name or path
        assume(f"evaluate.load({path!r}): a stand-in, whose result is 0: there are no data")

    def add(self, *_: Any, **__: Any) -> None:
        """Nothing is kept."""

    add_batch = add

    def compute(self, *_: Any, **__: Any) -> dict[str, float]:
        return {self.name: 0.0}
