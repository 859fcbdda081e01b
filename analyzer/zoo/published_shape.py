"""Shapes of well-known open models by their names on the hub: the fields of their configs, each with its source.

They are data, a file a family in `published/`; nothing is ever looked up on a network.
"""
from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent / "published"

#: Endings of names that say how weights were trained or stored, not how many there are: hub names of Qwen, Llama,
#: Mistral, Gemma, unsloth and others. Each is tried to be left out, the last one first.
_ENDINGS = re.compile(
    r"[-_](?:instruct(?:-v?\d[\d.]*)?|chat(?:-hf)?|it|base|hf|pt|bnb(?:-4bit)?|unsloth|bf16|fp8|fp8-dynamic|nf4|awq|"
    r"gptq|gptq-int[48]|int[48]|4bit|8bit|thinking|dynamic|distill|sft|dpo|reward|rm|\d{4}|v\d[\d.]*|linearized|"
    r"128e|fused|quantized(?:\.w\d+a\d+)?|mxfp4|nvfp4|fp4|preview|text|mtp)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PublishedCount:
    """How many parameters others say that a model has."""

    parameters: int | str                    #: a number, or one rounded as it was published, e.g. "671B"
    source: str
    of: str | None = None                    #: the class that was counted, where it is not the one that is built
    more: int = 0                            #: what that class has here beyond it
    why: str | None = None                   #: of ``more``


@dataclass(frozen=True, slots=True)
class PublishedShape:
    """A model's config as it was published. What its weights are good for is no part of it."""

    name: str                                #: on the hub, organisation first
    alike: tuple[str, ...]                   #: names of models of the same shape
    parameters: int                          #: of the model that is built of it
    published: PublishedCount
    sources: tuple[str, ...]                 #: where the fields were seen: repositories with a path
    config: dict[str, Any]
    library: str = "transformers"

    @property
    def names(self) -> tuple[str, ...]:
        """All that it is called: with the organisation, without it, and without what only the hub adds to a name."""
        full = (self.name, *self.alike)
        short = [name.partition("/")[2] or name for name in full]
        plain = [name.removeprefix("Meta-").removesuffix("-hf") for name in short]
        return tuple(dict.fromkeys((*full, *short, *plain)))

    @property
    def model_class(self) -> str:
        """The class that is built where no other is asked for."""
        return str(self.config["architectures"][0] if "architectures" in self.config else self.config["_class_name"])

    @property
    def weights(self) -> str | None:
        """The type of most of its published weights; None where the config does not say."""
        packed = self.config.get("quantization_config", {}).get("quant_method")
        parts = self.config, self.config.get("text_config", {})
        return packed or next((part[key] for part in parts for key in ("torch_dtype", "dtype") if key in part), None)


@cache
def list_shapes() -> tuple[PublishedShape, ...]:
    """All published shapes, families by their names, in each the order of the file."""
    return tuple(PublishedShape(**{
        **entry, "alike": tuple(entry.get("alike", ())), "sources": tuple(entry.get("sources", ())),
        "published": PublishedCount(**entry["published"])})
        for path in sorted(_FOLDER.glob("*.json")) for entry in json.loads(path.read_text(encoding="utf-8")))


@cache
def _shapes_by_name() -> dict[str, PublishedShape]:
    return {name.lower(): shape for shape in reversed(list_shapes()) for name in reversed(shape.names)}


def find_shape(name: str) -> PublishedShape | None:
    """The shape of that name on the hub, with or without its organisation, in any case; None where there is none.

    >>> shape = find_shape("llama-3.1-8b")
    >>> shape.name, shape.parameters, shape.config["num_key_value_heads"], shape.weights
    ('meta-llama/Llama-3.1-8B', 8030261248, 8, 'bfloat16')
    """
    return _shapes_by_name().get(name.lower())


def find_alike(name: str) -> PublishedShape | None:
    """`find_shape` of a name, of it without its organisation, of what is left without its last endings, or of the only
    shape whose names without theirs are that.

    >>> find_alike("someone/Qwen2.5-7B-Instruct-GPTQ-Int4").name, find_alike("gemma-3-27b").name
    ('Qwen/Qwen2.5-7B', 'google/gemma-3-27b-it')
    """
    if (shape := find_shape(name)) is not None:
        return shape
    stems = list(_list_stems(name))
    for stem in stems:
        if (shape := find_shape(stem)) is not None:
            return shape
    return _shapes_by_stem().get(stems[-1].lower())


def _list_stems(name: str) -> Iterator[str]:
    """A name without its organisation, and what is left without its last endings, one after the other."""
    less, short = name.rstrip("/").rsplit("/", 1)[-1], ""
    while less != short:
        yield less
        short, less = less, _ENDINGS.sub("", less)


@cache
def _shapes_by_stem() -> dict[str, PublishedShape]:
    """Models of transformers by what is left of their names without endings; what is left of two is in it for neither.
    (Of a pipeline's part, as ``organisation/model/unet``, the last word would be left.)
    """
    found: dict[str, list[PublishedShape]] = {}
    for shape in list_shapes():
        if shape.library != "transformers":
            continue
        for stem in {list(_list_stems(name))[-1].lower() for name in shape.names}:
            found.setdefault(stem, []).append(shape)
    return {stem: shapes[0] for stem, shapes in found.items() if len(shapes) == 1}


#: What names say of the format of weights, the first that is there, by names of formats of servers.
_FORMATS = {"nvfp4": "nvfp4", "mxfp4": "mxfp4", "fp4": "nvfp4", "fp8": "fp8", "w8a8": "int8", "w8a16": "int8",
            "int8": "int8", "8bit": "int8", "w4a16": "int4", "int4": "int4", "4bit": "int4", "awq": "int4",
            "gptq": "int4"}


def tell_format(name: str) -> str | None:
    """The format of weights that a model's name says; None where it says none.

    >>> [tell_format(name) for name in ("nvidia/DeepSeek-R1-0528-NVFP4-v2", "Qwen/Qwen3-32B", "Qwen/Qwen3-32B-FP8")]
    ['nvfp4', None, 'fp8-block']
    """
    if re.match(r"(qwen/)?qwen3.*-fp8$", name.lower()):  # its cards: "fine-grained fp8 ... with block size of 128"
        return "fp8-block"
    return format_by_words(name)


def format_by_words(name: str) -> str | None:
    """The format of weights by the words of a model's name alone, whichever model it is.

    >>> format_by_words("someone/Qwen3-8B-AWQ")
    'int4'
    """
    short = name.rstrip("/").rsplit("/", 1)[-1].lower()
    return next((form for word, form in _FORMATS.items() if re.search(rf"[-_.]{word}(?![a-z])", short)), None)


@cache
def list_pipelines() -> dict[str, dict[str, Any]]:
    """Configs of the components of well-known pipelines of diffusers, by their names on the hub."""
    text = (_FOLDER / "pipelines" / "diffusion.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = json.loads(text)
    shared = found.pop("shared")
    return {name: {key: shared[value] if isinstance(value, str) and value in shared else value
                   for key, value in fields.items()} for name, fields in found.items()}


def find_pipeline(name: str) -> dict[str, Any] | None:
    """Configs of the components of a pipeline by its name on the hub, its organisation or none before it; None for one
    whose shapes do not ship.

    >>> find_pipeline("flux.1-dev")["_class_name"], find_pipeline("CompVis/stable-diffusion-v1-4")["_class_name"]
    ('FluxPipeline', 'StableDiffusionPipeline')
    """
    def plain(full: str) -> str:  # -Diffusers, -BF16: copies of the same shape
        return re.sub(r"[-_](diffusers|bf16)\b|[-_]bf16(?=[-_])", "", full.rpartition("/")[2].lower())

    pipelines, short = list_pipelines(), name.rpartition("/")[2]
    found = {plain(full): fields for full, fields in pipelines.items()}.get(plain(name))
    if found is None and (unet := find_alike(f"{short}/unet")) is not None and unet.library == "diffusers":
        # Stable Diffusion before XL has the encoder of texts and the autoencoder that XL has first.
        others = pipelines["stabilityai/stable-diffusion-xl-base-1.0"]
        found = {"_class_name": "StableDiffusionPipeline", "unet": unet.config, "text_encoder": others["text_encoder"],
                 "vae": others["vae"]}
    return found


#: Repositories of the autoencoder of Stable Diffusion alone, which are of one shape for all versions before 3.
_AUTOENCODERS = ("sd-vae-ft-ema", "sd-vae-ft-mse", "sdxl-vae", "sdxl-vae-fp16-fix")


def find_autoencoder(name: str) -> dict[str, Any] | None:
    """The config of an autoencoder that has a repository of its own; None of other names.

    >>> find_autoencoder("stabilityai/sd-vae-ft-mse")["latent_channels"]
    4
    """
    if name.rpartition("/")[2].lower() not in _AUTOENCODERS:
        return None
    config: dict[str, Any] = list_pipelines()["stabilityai/stable-diffusion-xl-base-1.0"]["vae"]
    return config


def list_names() -> Iterable[str]:
    return [name for shape in list_shapes() for name in shape.names]
