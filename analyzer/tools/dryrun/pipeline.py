"""Stand-ins for repositories of diffusers' pipelines: a folder for each component, weights without data."""
from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from analyzer.meta.intercept.mode_stack import modes_taken_off

from .checkpoint import make_header
from .saved_file import SavedFiles, assume
from .stand_in import WEIGHTS
from .tokenizer import save_tokenizer

_PARTS_WEIGHTS = "diffusion_pytorch_model.safetensors"  # of what is of diffusers itself
_TOKENIZERS = {"CLIP": "CLIPTokenizer", "T5": "T5TokenizerFast"}
_ANY = "PreTrainedTokenizerFast"  # of other encoders: it reads any tokenizer.json


def write_pipeline(files: SavedFiles, folder: Path, name: str, fields: Mapping[str, Any]) -> None:
    """A folder as ``save_pretrained`` of a pipeline leaves it, with stand-ins for tokenizers, weights without data."""
    import diffusers

    kind = getattr(diffusers, fields["_class_name"])
    index: dict[str, Any] = {"_class_name": kind.__name__}
    for part, config in fields.items():
        if isinstance(config, dict):
            index[part] = write_part(files, folder / part, config)
        if part.startswith("text_encoder"):
            place = part.replace("text_encoder", "tokenizer")
            index[place] = ["transformers", _write_tokenizer(folder / place, name, config)]
    wanted = inspect.signature(kind.__init__).parameters.get("scheduler")
    is_flow = wanted is not None and "FlowMatch" in str(wanted.annotation)
    scheduler = "FlowMatchEulerDiscreteScheduler" if is_flow else "DDPMScheduler"
    _write(folder / "scheduler" / "scheduler_config.json", {"_class_name": scheduler})
    index["scheduler"] = ["diffusers", scheduler]
    _write(folder / "model_index.json", index)
    assume(f"{name}: components of the shapes that ship with analyzer, weights without data, its scheduler a "
           f"{scheduler} with diffusers' defaults")


def _write(path: Path, fields: Mapping[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(fields), encoding="utf-8")


def write_part(files: SavedFiles, folder: Path, config: Mapping[str, Any]) -> list[str]:
    """The library and the class of a component, which is left in ``folder``."""
    import diffusers

    name = config["_class_name"]
    if hasattr(diffusers, name):
        _write(folder / "config.json", config)
        files.keep(folder / _PARTS_WEIGHTS, partial(_describe_weights, name, config))
        return ["diffusers", name]
    _write(folder / "config.json", _make_config(config).to_dict())
    files.keep(folder / WEIGHTS, partial(_describe_weights, name, config))
    return ["transformers", name]


def _make_config(config: Mapping[str, Any]) -> Any:
    import transformers

    own = {key: value for key, value in config.items() if key != "_class_name"}
    return getattr(transformers, config["_class_name"]).config_class(**own, architectures=[config["_class_name"]])


def _write_tokenizer(folder: Path, name: str, config: Mapping[str, Any]) -> str:
    folder.mkdir()
    save_tokenizer(folder, f"{name}, {folder.name}", _make_config(config))
    return next((found for prefix, found in _TOKENIZERS.items() if config["_class_name"].startswith(prefix)), _ANY)


def _describe_weights(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    import diffusers
    import transformers

    with modes_taken_off(), torch.device("meta"):
        kind = getattr(diffusers, name, None)
        model = getattr(transformers, name)(_make_config(config)) if kind is None else kind.from_config(config)
        tensors: dict[int, tuple[str, torch.Tensor]] = {}
        for place, tensor in model.state_dict(keep_vars=True).items():
            tensors.setdefault(id(tensor), (place, tensor.detach()))  # of tied weights, the first
    return make_header(dict(tensors.values()), {"format": "pt"})
