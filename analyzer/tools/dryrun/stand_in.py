"""Stand-ins for a model's repository on the hub: a config, a tokenizer, a processor, and the header of weights."""
from __future__ import annotations

import copy
import importlib.util
import json
import os
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from analyzer.meta.intercept.mode_stack import modes_taken_off
from analyzer.zoo.target import load_target

from .checkpoint import make_header
from .saved_file import SavedFiles, assume
from .tokenizer import write_tokenizer

WEIGHTS = "model.safetensors"
#: Files of which any makes a folder one that has a tokenizer; asked for, they are made where there is none.
TOKENIZER_FILES = frozenset({
    "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model",
    "spiece.model", "sentencepiece.bpe.model", "spm.model", "tekken.json", "special_tokens_map.json",
    "added_tokens.json"})
PROCESSOR_FILES = frozenset({"preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"})

_DEFAULT_SIDE = 224  # of images: the default of transformers' processors of images


def write_config(folder: Path, name: str, shape_name: str, config: Mapping[str, Any]) -> None:
    """``config.json`` of a published shape. What packs its weights is left out: they are whole, of the same type."""
    fields = copy.deepcopy(dict(config))
    told = f"{name}: the shape {'' if name == shape_name else f'of {shape_name} '}that ships with analyzer"
    if fields.pop("quantization_config", None) is not None:
        told += ", its weights not packed"
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    assume(f"{told}, weights without data")


def describe_timm(name: str) -> dict[str, Any] | None:
    """The ``config.json`` of the repository of one of timm's models, as `timm.models.push_to_hf_hub` writes it, with
    the names by which transformers wraps them; None of other names, and where timm is not installed.
    """
    owner, _, of_timm = name.partition("/")
    if owner != "timm" or importlib.util.find_spec("timm") is None:
        return None
    import timm

    if (pretrained := timm.get_pretrained_cfg(of_timm)) is None:
        return None
    told = pretrained.to_dict()
    return {"architecture": told["architecture"], "num_classes": told["num_classes"], "pretrained_cfg": told,
            "model_type": "timm_wrapper", "architectures": ["TimmWrapperForImageClassification"]}


def keep_weights(files: SavedFiles, folder: Path) -> None:
    """Let ``folder`` have a file of safetensors, of which a header is made when it is first asked for."""
    files.keep(folder / WEIGHTS, partial(_describe_weights, folder))


def _describe_weights(folder: Path) -> dict[str, Any]:
    """The header of what ``save_pretrained`` would write of the model that the folder's config describes."""
    with modes_taken_off(), torch.device("meta"):
        model = load_target(f"hf:{folder}").build()
        seen: dict[int, str] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            seen.setdefault(id(tensor), name)  # of tied weights, the first
        state = model.state_dict()
        tensors = {name: state[name] for name in seen.values()}
        try:
            from transformers.core_model_loading import revert_weight_conversion
        except ImportError:  # of versions before 5, models and files have the same names
            pass
        else:
            tensors = revert_weight_conversion(model, tensors)  # type: ignore[arg-type]
    return make_header(tensors, {"format": "pt"})


def provide(folder: Path, name: str, asked: Iterable[str]) -> None:
    """Make the files of a tokenizer or a processor in ``folder``, which has a config, where some of them are asked
    for.
    """
    if not (folder / "config.json").exists():
        return  # of a pipeline, whose components have what they need
    names = {os.path.basename(file) for file in asked}
    if names & TOKENIZER_FILES and not (folder / "tokenizer.json").exists():
        write_tokenizer(folder, name)
    if names & PROCESSOR_FILES and not (folder / "preprocessor_config.json").exists():
        _write_processor(folder, name)


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in TOKENIZER_FILES)


def has_weights(folder: Path) -> bool:
    return any(name.endswith((".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json"))
               for name in os.listdir(folder))


def _write_processor(folder: Path, name: str) -> None:
    """The defaults of the class for this kind of config, for images as large as the config says."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    settings: dict[str, Any] = {}
    if type(config) in transformers.IMAGE_PROCESSOR_MAPPING:
        side = getattr(config, "image_size", None)
        if isinstance(side, int) and side != _DEFAULT_SIDE:
            settings["size"] = {"height": side, "width": side}
    elif type(config) in transformers.FEATURE_EXTRACTOR_MAPPING:
        if (bins := getattr(config, "num_mel_bins", None)) is not None:
            settings["feature_size"] = bins
    else:
        return  # a model of texts
    (folder / "preprocessor_config.json").write_text(json.dumps(settings), encoding="utf-8")
    assume(f"{name}: its processor is a stand-in with the defaults of transformers for {type(config).__name__}")
