"""Inputs of transformers' models: from their signatures, their configs, and the shapes that their docstrings state."""
from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.coverage.check import Inputs
from benchmarks.coverage.config import AHEAD, VOCABULARY, find_field, parts_of

BATCH, TOKENS, ANSWER = 2, 16, 8
LARGEST_FREE_IMAGE = 224  # side
PATCHES = 4  # patches to a side of images that come as patches
SQUARE = [1, PATCHES, PATCHES]  # time, height and width of such an image

_DOCUMENTED = re.compile(r"^\s*(\w+) \(([^\n]*of shape\s*\W?\(([^)\n]*)\)[^\n]*)", re.MULTILINE)
_OF_ITS_OWN = re.compile(
    r"embeds$|past_key|outputs$|label|head_mask|input_masks|image_embeddings|position_ids|cache|attention_similarity|target_embedding"
)
_DOCUMENTED_SIZES = {"batch_size": BATCH, "sequence_length": TOKENS, "seq_len": TOKENS, "seq_length": TOKENS,
                     "num_boxes": TOKENS, "target_sequence_length": ANSWER, "encoder_sequence_length": TOKENS}
_SOUNDS = ("input_features", "input_values", "audio_values")
_ANY_SIZE = 4  # of a dimension that the config does not name, such as corners of a box


def variants(model_class: Any, fields: dict[str, Any]) -> Iterator[tuple[str, Callable[[nn.Module, bool], Inputs]]]:
    """Ways to call the model, the richest first."""
    parameters = inspect.signature(model_class.forward).parameters
    main = _main_input(model_class, parameters)
    images = [("image", 0)] if main != "pixel_values" and "pixel_values" in parameters else []
    if main in _SOUNDS:
        media = [("audio", i) for i in range(3)]
    elif main in ("pixel_values", "pixel_values_videos"):
        media = [("image", i) for i in range(3)]
    else:
        sounds = [("audio", i) for i in range(2)] if any(n in parameters for n in _SOUNDS) else []
        media = [*images, ("text", 0), *sounds]
    for extra in ("", ", documented"):
        for labels in (", labels", ""):
            for kind, variant in media:
                make = partial(_make_inputs, model_class, fields, kind, variant, bool(labels), bool(extra), {})
                yield f"{kind} {variant}{labels}{extra}", make


def _main_input(model_class: Any, parameters: Any) -> str:
    main = model_class.main_input_name
    if isinstance(main, str) and main in parameters:
        return main
    return next((n for n in ("pixel_values", "input_values", "input_features") if n in parameters), "input_ids")


def _make_inputs(model_class: Any, fields: dict[str, Any], kind: str, variant: int, labels: bool, documented: bool,
                 counted: dict[str, int], model: nn.Module, train: bool) -> Inputs:
    torch.manual_seed(11)
    parameters = inspect.signature(model_class.forward).parameters
    name, main = model_class.__name__, _main_input(model_class, parameters)
    inputs: dict[str, Any] = {}
    if kind == "audio":
        sound = main if main in _SOUNDS else next(n for n in _SOUNDS if n in parameters)
        inputs[sound] = _audio(fields, variant, sound)
    elif kind == "image":
        key = main if main in ("pixel_values", "pixel_values_videos") else "pixel_values"
        inputs.update(_images(model_class, fields, parameters, variant, key))
    inputs.update(_series(fields, parameters))
    if "grid_thw" in parameters and "hidden_states" in parameters:
        grid, patches = _patches(fields)
        inputs.update(hidden_states=patches, grid_thw=grid)
        inputs.pop("pixel_values", None)
    if name.endswith("KeypointMatching") and "pixel_values" in inputs:
        inputs["pixel_values"] = torch.stack([inputs["pixel_values"]] * 2, dim=1)  # two images of one scene
    labelled_media = kind != "text" and "labels" in parameters and not name.endswith(
        ("ForImageClassification", "ForCTC", "ForAudioClassification"))
    required = "input_ids" in parameters and parameters["input_ids"].default is inspect.Parameter.empty
    encoder_decoder = fields.get("is_encoder_decoder") or "decoder_input_ids" in parameters
    text = (main == "input_ids" and "hidden_states" not in inputs and "past_values" not in parameters
            or "input_ids" in parameters and labelled_media or required)
    if "bbox" in parameters and main == "input_ids" and kind == "image" and "image" not in inputs:
        inputs["bbox"] = torch.randint(0, 50, (BATCH, TOKENS, 4)).cumsum(-1)
    if text:
        inputs["input_ids"] = _tokens(fields, TOKENS)
        image_token = find_field(fields, f"{kind}_token_id", f"{kind}_token_index") if kind in ("image",
                                                                                                "audio") else None
        if isinstance(image_token, int) and hasattr(model, f"get_{kind}_features"):
            rows = counted.get(kind)
            if rows is None:
                rows = counted[kind] = _count_features(getattr(model, f"get_{kind}_features"), inputs)
            per_sample = rows // BATCH
            inputs["input_ids"] = torch.cat([torch.full((BATCH, per_sample), image_token), inputs["input_ids"]], dim=1)
        elif name.endswith("SequenceClassification") and encoder_decoder and type(
                end := find_field(fields, "eos_token_id")) is int:
            inputs["input_ids"][:, -1] = end  # it is what they classify
        if name.endswith("MultipleChoice"):
            inputs["input_ids"] = inputs["input_ids"].view(BATCH, 1, -1).repeat(1, 2, 1)
        if "attention_mask" in parameters and kind == "text":
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if "mm_token_type_ids" in parameters and isinstance(image_token, int):
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == image_token).long()
    answers = encoder_decoder and "decoder_input_ids" in parameters and not name.endswith("SequenceClassification")
    if answers and not (labels and train and "labels" in parameters):
        inputs["decoder_input_ids"] = _tokens(
            fields, ANSWER, books=find_field(fields, "num_codebooks") if name.startswith("Musicgen") else 1)
    if labels and train:
        inputs.update(_labels(name, parameters, inputs, fields))
    _add_documented(model_class, parameters, inputs, fields, documented)
    return (), inputs


def _add_documented(model_class: Any, parameters: Any, inputs: dict[str, Any], fields: dict[str, Any],
                    all_of_them: bool) -> None:
    """What the model requires, and on demand what its docstring does not call optional, of the shapes stated there."""
    shapes = {m[1]: (m[2], m[3]) for m in _DOCUMENTED.finditer(model_class.forward.__doc__ or "")}
    for name, parameter in parameters.items():
        required = parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        text, shape = shapes.get(name, ("", ""))
        wanted = required or all_of_them and text and "*optional*" not in text and not _OF_ITS_OWN.search(name)
        if name in inputs or name == "self" or not wanted:
            continue
        if (made := _named(name, fields)) is not None:
            inputs[name] = made
        elif shape:
            inputs[name] = _of_shape(name, text,
                                     [_size(part, fields, inputs) for part in shape.split(",") if part.strip()])


def _named(name: str, fields: dict[str, Any]) -> torch.Tensor | None:  # inputs whose shapes no docstring states
    if name == "state" and (width := find_field(fields, "max_state_dim")):  # of a robot
        return torch.rand(BATCH, width)
    if name == "task_inputs" and (length := find_field(fields, "task_seq_len")):
        return torch.randint(1, 100, (BATCH, length))
    return None


def _size(part: str, fields: dict[str, Any], inputs: dict[str, Any]) -> int:
    name = part.strip(" `'").removeprefix("config.").removeprefix("self.")
    if name.isdigit():
        return int(name)
    if name in ("sequence_length", "num_boxes") and "input_ids" in inputs:
        return int(inputs["input_ids"].shape[-1])
    found = _DOCUMENTED_SIZES.get(name) or find_field(fields, name)
    return found if type(found) is int else _ANY_SIZE


def _of_shape(name: str, text: str, shape: list[int]) -> torch.Tensor:
    if "mask" in name:
        return torch.ones(shape, dtype=torch.bool if "Bool" in text else torch.int64)
    if name == "bbox":
        corners = torch.randint(0, 50, shape).cumsum(-1)
        return corners / 1000 if "Float" in text else corners
    if "Long" in text or "Int" in text or name.endswith(("_ids", "_index")):
        return torch.randint(0, 2, shape)
    return torch.rand(shape)


def _series(fields: dict[str, Any], parameters: Any) -> dict[str, torch.Tensor]:
    """The past of time series, with as many channels as the config says, and the features of those that forecast from
    features.
    """
    if "past_values" not in parameters:
        return {}
    length, channels = fields.get("context_length") or 64, fields.get("num_input_channels")
    if "future_time_features" not in parameters:
        return {"past_values": torch.rand(BATCH, length, channels) if channels else torch.rand(BATCH, length)}
    past, features = length + max(fields["lags_sequence"]), fields["num_time_features"]
    return {"past_values": torch.rand(BATCH, past), "past_time_features": torch.rand(BATCH, past, features),
            "past_observed_mask": torch.ones(BATCH, past), "future_values": torch.rand(BATCH, AHEAD),
            "future_time_features": torch.rand(BATCH, AHEAD, features)}


def _tokens(fields: dict[str, Any], count: int, books: int = 1) -> torch.Tensor:
    vocabulary = find_field(fields, "vocab_size", "num_embeddings") or VOCABULARY
    return torch.randint(min(200, vocabulary // 2), min(900, vocabulary), (BATCH * books, count))


def _audio(fields: dict[str, Any], variant: int, main: str) -> torch.Tensor:
    mels = find_field(fields, "feature_projection_input_dim", "num_mel_bins", "feature_size", "input_feat_per_channel",
                      "input_dim") or 80
    frames = 2 * positions if (positions := find_field(fields, "max_source_positions")) and positions <= 1500 else 256
    if main == "audio_values":
        return torch.rand(BATCH, 8, 16, 16)
    if main == "input_values":
        length = find_field(fields, "max_length") if find_field(fields, "num_mel_bins") else None
        return (torch.rand(BATCH, 16_000), torch.rand(BATCH, length or 256, mels), torch.rand(BATCH, 1,
                                                                                              16_000))[variant]
    return (torch.rand(BATCH, mels, frames), torch.rand(BATCH, 256, mels), torch.rand(BATCH, 1, 1024, 64))[variant]


def _vision(fields: dict[str, Any]) -> dict[str, Any]:
    return next((p for p in (fields.get("vision_config"), fields.get("backbone_config")) if isinstance(p, dict)),
                fields)


def _channels(fields: dict[str, Any]) -> int:
    vision = _vision(fields)
    found = vision.get("num_channels") or vision.get("in_channels") or find_field(fields, "num_channels") or 3
    return found if isinstance(found, int) else 3


def _patches(fields: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Images cut into patches: (their sizes, one row per patch)."""
    vision = _vision(fields)
    patch, frames = vision.get("patch_size") or 14, vision.get("temporal_patch_size") or 1
    grid = torch.tensor([SQUARE] * BATCH)
    return grid, torch.rand(int(grid.prod(1).sum()), _channels(fields) * frames * patch * patch)


def _processor_size(model_class: Any) -> tuple[int, int] | None:
    """Height and width that the model's own image processor makes."""
    import transformers
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    names = IMAGE_PROCESSOR_MAPPING_NAMES.get(model_class.config_class.model_type) or ()
    for name in names.values() if isinstance(names, dict) else names:
        size = getattr(getattr(transformers, name, None), "size", None) if name else None
        if isinstance(size, dict) and "height" in size and "width" in size:
            return size["height"], size["width"]
    return None


def _image_size(model_class: Any, fields: dict[str, Any], variant: int) -> tuple[int, int]:
    if variant == 2 and (found := _processor_size(model_class)) is not None:
        return found
    vision = _vision(fields)
    size = vision.get("image_size") or find_field(fields, "image_size", "max_img_size") or 224
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    # convolutions take any size
    if not any("patch_size" in part or "window_size" in part for part in parts_of(fields)):
        height, width = min(height, LARGEST_FREE_IMAGE), min(width, LARGEST_FREE_IMAGE)
    if type(vision.get("num_windows")) is int and type(vision.get("patch_size")) is int:
        step = vision["num_windows"] * vision["patch_size"]
        height, width = (-(-n // step) * step for n in (height, width))
    return height, width


def _images(model_class: Any, fields: dict[str, Any], parameters: Any, variant: int, key: str) -> dict[str, Any]:
    vision, channels = _vision(fields), _channels(fields)
    for name in ("image_grid_thw", "grid_thw"):
        if name in parameters:
            grid, patches = _patches(fields)
            return {key: patches, name: grid}
    if "spatial_shapes" in parameters:
        patch = vision.get("patch_size") or 16
        return {key: torch.rand(BATCH, PATCHES**2, channels * patch * patch),
                "spatial_shapes": torch.tensor([SQUARE[1:]] * BATCH),
                "pixel_attention_mask": torch.ones(BATCH, PATCHES**2, dtype=torch.int64)}
    height, width = _image_size(model_class, fields, variant)
    frames = vision.get("num_frames") or vision.get("frames_per_clip")
    image = torch.rand(BATCH, channels, height, width)
    if key == "pixel_values_videos" or (frames and variant == 0):
        return {key: torch.rand(BATCH, frames or 8, channels, height, width)}
    found = {key: image if variant != 1 or frames else torch.rand(BATCH, 1, channels, height, width)}
    if "image_sizes" in parameters:
        found["image_sizes"] = torch.tensor([[height, width]] * BATCH)
    return found


def _count_features(function: Any, inputs: dict[str, Any]) -> int:
    """How many rows the images or sounds become: so many of their tokens the text needs."""
    accepted = inspect.signature(function).parameters
    with torch.no_grad():
        result = function(**{k: v for k, v in inputs.items() if k in accepted and k != "input_ids"})
    result = getattr(result, "pooler_output", None) if not isinstance(result, (torch.Tensor, list, tuple)) else result
    parts = [result] if isinstance(result, torch.Tensor) else list(result or ())
    return sum(p.numel() // p.shape[-1] for p in parts)


def _labels(name: str, parameters: Any, inputs: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    ids, pixels = inputs.get("input_ids"), inputs.get("pixel_values")
    if name.endswith("QuestionAnswering") and "start_positions" in parameters:
        return {"start_positions": torch.tensor([1] * BATCH), "end_positions": torch.tensor([3] * BATCH)}
    if "labels" not in parameters:
        return {}
    if name.endswith(("SequenceClassification", "ImageClassification", "VideoClassification", "AudioClassification",
                      "MultipleChoice", "NextSentencePrediction", "ForImageClassificationWithTeacher")):
        return {"labels": torch.zeros(BATCH, dtype=torch.int64)}
    if name.endswith("SemanticSegmentation") and pixels is not None:
        return {"labels": torch.zeros(BATCH, *pixels.shape[-2:], dtype=torch.int64)}
    if name.endswith("ForObjectDetection"):
        return {"labels": [{"class_labels": torch.tensor([0, 1]),
                            "boxes": torch.tensor([[0.5, 0.5, 0.2, 0.3], [0.4, 0.6, 0.3, 0.2]])} for _ in range(BATCH)]}
    if name.endswith("ForCTC"):
        return {"labels": torch.randint(1, 10, (BATCH, 5))}
    if name.endswith("TokenClassification") and ids is not None:
        return {"labels": torch.zeros_like(ids)}
    if name.endswith(("LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration", "ForSpeechSeq2Seq")):
        if fields.get("is_encoder_decoder") or ids is None:
            return {"labels": _tokens(fields, ANSWER)}
        return {"labels": ids.clone()}
    return {}
