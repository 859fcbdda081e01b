"""`hf:NAME`, `hf:CONFIG.json`, `hf:ConfigClass`, each with `:ModelClass` if need be: models of transformers without
weights.
"""
from __future__ import annotations

import copy
import inspect
from functools import partial
from pathlib import Path
from typing import Any

import torch

from analyzer.errors import TargetError, find_close
from analyzer.saved_format import load_json

from .input_spec import DEFAULT_BATCH, InputSpec, LabelRule, Target, import_extra
from .published_shape import find_alike, list_names
from .vision_models import DetectionRule, find_diffusion_model

# The task heads tried for a config that names no architecture, in this order: a model that fills in masked words is
# taken as that (BERT, though it has a causal head too), one that only continues text as that (GPT-2, Llama).
ENCODER_DECODER_HEADS = ("SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM")
HEADS = ("MASKED_LM", "CAUSAL_LM", "CTC", "IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION", "SEMANTIC_SEGMENTATION",
         "OBJECT_DETECTION", "IMAGE_TEXT_TO_TEXT", "AUDIO_CLASSIFICATION")

DEFAULT_TOKENS = 128  # the length at which BERT's published costs are given; fewer where a model has fewer positions
DEFAULT_IMAGE_SIZE = 224  # of convolutional models, whose configs need not name one: ImageNet's usual crop
SECOND_OF_SAMPLES = 16_000  # speech models are trained on 16 kHz audio (wav2vec 2.0, section 4)


def find_transformers_model(spec: str, target: str) -> Target:
    """The model of `CONFIG.json`, a folder with a config.json, a published shape, or `ConfigClass`, each optionally
    `:ModelClass`; else the first of the config's "architectures", the first task head (see `HEADS`), or its base model,
    in the config's dtype. Raises TargetError for no config and unknown names, MissingExtraError without the library.
    """
    source, _, model_name = (spec, "", "") if _is_path(spec) or ":" not in spec else spec.rpartition(":")
    shape = None if _is_path(source) else find_alike(source)
    if shape is not None and shape.library == "diffusers":
        return find_diffusion_model(shape, target)
    transformers = import_extra("transformers", target)
    if _is_path(source):
        config = _read_config(transformers,
                              Path(source, "config.json") if Path(source).is_dir() else Path(source), target)
    elif shape is not None:
        config = _make_config(transformers, shape.config, f"the published config of {shape.name}", target)
    else:
        config_class = _find_config_class(transformers, source, target)
        try:
            config = config_class()
        except Exception as error:  # a config made of others, which have no default
            raise TargetError(
                f"{target}: {config_class.__name__} has no default sizes: {error}; give a config.json") from error
    model_class = _choose_model_class(transformers, config, model_name, target)
    inputs = _derive_inputs(model_class, config)
    labels = _derive_labels(model_class, config, inputs) if inputs else ()
    return Target(target, partial(_build, model_class, config), inputs, labels)


def _is_path(source: str) -> bool:
    return source.endswith(".json") or Path(source).is_dir()


def _build(model_class: Any, config: Any) -> torch.nn.Module:
    model: torch.nn.Module = model_class._from_config(copy.deepcopy(config))  # a model keeps and may change its config
    return model


def _read_config(transformers: Any, path: Path, target: str) -> Any:
    try:
        fields = load_json(path)
    except OSError as error:
        raise TargetError(
            f"{target}: cannot read {path}: {error.strerror}; give the path of a model's config.json") from error
    except ValueError as error:
        raise TargetError(f"{target}: {path} is no config.json: {error}") from error
    if not isinstance(fields, dict):
        raise TargetError(
            f"{target}: {path} holds a JSON {type(fields).__name__}, not an object with a model's settings")
    return _make_config(transformers, fields, str(path), target)


def _make_config(transformers: Any, fields: dict[str, Any], path: str, target: str) -> Any:
    model_type, architectures = fields.get("model_type"), fields.get("architectures")
    known = transformers.CONFIG_MAPPING
    if isinstance(model_type, str) and model_type in known:
        config_class = known[model_type]
    elif isinstance(architectures, list) and architectures:
        config_class = _find_class(transformers, str(architectures[0]), target,
                                   f"{path} has the architecture").config_class
    elif model_type is None:
        raise TargetError(
            f'{target}: {path} has neither "model_type" nor "architectures", so it names no model of transformers')
    else:
        unknown = f"unknown to transformers {transformers.__version__}{find_close(str(model_type), known.keys())}"
        raise TargetError(f'{target}: {path} has the "model_type" {model_type!r}, {unknown}')
    try:
        config = config_class.from_dict(copy.deepcopy(fields))
    except Exception as error:  # each config class checks its fields in its own way
        raise TargetError(f"{target}: {path} is no {config_class.__name__}: {error}") from error
    if config.dtype is None:  # some configs of images and text give the type of all weights for the text alone
        config.dtype = getattr(getattr(config, "text_config", None), "dtype", None)
    return config


def _find_config_class(transformers: Any, name: str, target: str) -> Any:
    names = [n for n in dir(transformers) if n.endswith("Config")]
    if name in names:
        return getattr(transformers, name)
    by_type = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES.get(name)
    if "/" in name:
        raise TargetError(f"{target}: {name!r} is none of the published shapes, which `analyzer models` lists, and no "
                          f"folder{find_close(name, list_names())}; of another model, give its config.json")
    close = f"; did you mean {by_type}?" if by_type else find_close(name, [*names, *list_names()])
    raise TargetError(
        f"{target}: {name!r} is neither a config class of transformers nor a path that ends in .json{close}")


def _find_class(transformers: Any, name: str, target: str, what: str) -> Any:
    found = getattr(transformers, name, None)
    if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
        return found
    models = [n for n in dir(transformers) if "For" in n or n.endswith("Model")]
    close = find_close(name, models)
    raise TargetError(f"{target}: {what} {name!r}, which transformers {transformers.__version__} does not have{close}")


def _choose_model_class(transformers: Any, config: Any, name: str, target: str) -> Any:
    if name:
        return _find_class(transformers, name, target, "it asks for the model class")
    if config.architectures:
        return _find_class(transformers, config.architectures[0], target, "its config has the architecture")
    heads = (*ENCODER_DECODER_HEADS, *HEADS) if config.is_encoder_decoder else HEADS
    for mapping in [
            *(getattr(transformers, f"MODEL_FOR_{head}_MAPPING") for head in heads), transformers.MODEL_MAPPING]:
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found  # a few configs have several base models
    alone = type(config).__name__
    raise TargetError(f"{target}: transformers has no model for {alone} alone; name one: hf:{alone}:ModelClass")


def _find_setting(config: Any, *names: str) -> Any:
    for part in (config, getattr(config, "vision_config", None)):
        for name in names:
            value = getattr(part, name, None)
            if value is not None:
                return value
    return None


def _derive_inputs(model_class: Any, config: Any) -> tuple[InputSpec, ...] | None:
    main = model_class.main_input_name
    parameters = inspect.signature(model_class.forward).parameters
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    tokens = min(DEFAULT_TOKENS, positions) if isinstance(positions, int) and positions > 0 else DEFAULT_TOKENS
    text = InputSpec("input_ids", torch.int64, (DEFAULT_BATCH, tokens))
    floating = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32  # of the parameters
    shape = {"pixel_values": _image_shape, "input_values": _audio_shape, "input_features": spectrogram_shape}.get(main)
    if main == "input_ids":
        inputs = [text]
        if "pixel_values" in parameters and hasattr(config, "vision_config") and not model_class.can_generate():
            # a pair of encoders, like CLIP
            inputs.append(InputSpec("pixel_values", floating, _image_shape(config)))
    elif shape is not None and (sizes := shape(config)) is not None:
        inputs = [InputSpec(main, floating, sizes)]
        if "input_ids" in parameters and hasattr(config, "text_config"):
            inputs.append(text)  # a captioner, like BLIP
    else:
        return None
    if config.is_encoder_decoder and "decoder_input_ids" in parameters:
        inputs.append(InputSpec("decoder_input_ids", torch.int64, text.shape))
    return tuple(inputs)


def _image_shape(config: Any) -> tuple[int, ...]:
    size = _find_setting(config, "image_size") or DEFAULT_IMAGE_SIZE
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    image = (_find_setting(config, "num_channels") or 3, height, width)
    frames = getattr(config, "num_frames", None)
    return (DEFAULT_BATCH, *image) if frames is None else (DEFAULT_BATCH, frames, *image)


def _audio_shape(config: Any) -> tuple[int, ...]:
    has_length = hasattr(config, "num_mel_bins") and hasattr(config, "max_length")  # a spectrogram of that (AST)
    return (DEFAULT_BATCH, *((config.max_length, config.num_mel_bins) if has_length else (SECOND_OF_SAMPLES,)))


def spectrogram_shape(config: Any) -> tuple[int, ...] | None:
    """A batch of the spectrograms that a speech model reads, channels before frames; None where it does not say so."""
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        # Whisper: a convolution halves the length
        return (DEFAULT_BATCH, config.num_mel_bins, 2 * config.max_source_positions)
    return None


def _derive_labels(model_class: Any, config: Any, inputs: tuple[InputSpec, ...]) -> tuple[LabelRule, ...]:
    name, main, names = model_class.__name__, model_class.main_input_name, [spec.name for spec in inputs]
    parameters = inspect.signature(model_class.forward).parameters
    if name.endswith("ForQuestionAnswering") and "start_positions" in parameters:
        return LabelRule("start_positions", main, (0,)), LabelRule("end_positions", main, (0,))
    if "labels" not in parameters:
        return ()
    if name.endswith(tuple(f"For{what}Classification" for what in ("Sequence", "Image", "Video", "Audio"))):
        # One class, or several at once, are trained with floating labels.
        problem = getattr(config, "problem_type", None)
        one_of_many = config.num_labels > 1 and problem in (None, "single_label_classification")
        return (LabelRule("labels", main, (0,)),) if one_of_many else ()
    if name.endswith("ForObjectDetection"):
        return (DetectionRule("labels", main, keys=("class_labels", "boxes")),)
    if name.endswith("ForSemanticSegmentation"):
        return (LabelRule("labels", main, (0, 2, 3)),)
    heads = "LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration", "ForTokenClassification"
    if name.endswith(heads):
        tokens = "decoder_input_ids" if "decoder_input_ids" in names else "input_ids"
        return (LabelRule("labels", tokens),) if tokens in names else ()
    return ()
