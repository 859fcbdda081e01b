"""Model classes of transformers with a head (and those that have none), from configs made small by rules that know no model."""
from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from .coverage_case import Candidate, Case, Inputs

BATCH, TOKENS = 2, 16
DEPTH, EXPERTS, VOCABULARY = 2, 8, 1024

_IS_DEPTH = re.compile(r"^(\w+_)?(layers?|depth|num_blocks)$")
_NO_DEPTH = re.compile(r"feature_layer|feat_extract|look_|max_window|cross_|iou_|max_|_shared|no_rope|adapter|insert|postnet|residual|spec|nextn|mtp")
_IS_HEADS = re.compile(r"(^|_)(heads?|num_heads|attention_heads|kv_heads|key_value_heads|n_groups)$")
_NO_HEADS = re.compile(r"use_|has_|tie_|head_type")
_IS_WIDTH = re.compile(r"hidden|embd|embed|dim$|d_model|d_ff|ffn|intermediate|width|inner|rank$|projection|channels$|units$|proj_size|_size$")
_NO_WIDTH = re.compile(r"head_dim|d_kv|patch|image|crop|kernel|vocab|window|num_|in_channels|audio_channels|codebook|state|batch|chunk|block|context|max_"
                       r"|input|roi|segment|tubelet|grid|feature_|feat_|latent|qk_|head_size|d_head|merge|spatial|temporal|coordinate|shape|mel|min_|rope"
                       r"|time|conv_dim|pool|codevector|quant")
_IS_INDICES = re.compile(r"(indexes|indices|_ids|_idx|index|_layers|layer_idxs?|attention_blocks)$")
_TOKEN = re.compile(r"(token_id|token_index|token_ids)$|^(audio|image|video)_token$")


def transformers_cases() -> list[Case]:
    from transformers.models.auto import modeling_auto

    found: dict[str, Case] = {}
    with_head: set[str] = set()
    mappings = {n: getattr(modeling_auto, n) for n in dir(modeling_auto) if re.fullmatch(r"MODEL_FOR_\w+_MAPPING_NAMES", n)}
    mappings.pop("MODEL_FOR_IMAGE_MAPPING_NAMES", None)  # base models
    for name, mapping in {**mappings, "MODEL_BASE_MAPPING_NAMES": modeling_auto.MODEL_MAPPING_NAMES}.items():
        group = name.removeprefix("MODEL_").removeprefix("FOR_").removesuffix("_MAPPING_NAMES").lower()
        for kind, classes in mapping.items():
            if group == "base" and kind in with_head:
                continue
            with_head.add(kind)
            for class_name in classes if isinstance(classes, (tuple, list)) else (classes,):
                case = Case(f"transformers:{class_name}", "transformers", group, partial(_candidates, class_name))
                found.setdefault(case.name, case)
    return list(found.values())


def _candidates(class_name: str) -> list[Candidate]:
    import transformers

    model_class = getattr(transformers, class_name)
    full = model_class.config_class()
    found: list[Candidate] = []
    for label, shrink in (("scaled", _scale), ("scaled, all layers", partial(_scale, depth=None)), ("small", _fix), ("few layers", _shorten),
                          ("as published", lambda c: None)):
        fields = full.to_dict()
        shrink(fields)
        variants = list(_variants(model_class, fields))
        for name, make_inputs in variants:
            found.append(Candidate(f"{label}, {name}", partial(_build, model_class, fields), make_inputs, variant=name))
    return found


def _build(model_class: Any, fields: dict[str, Any]) -> nn.Module:
    config = model_class.config_class.from_dict(copy.deepcopy(fields))
    model: nn.Module = model_class._from_config(config)
    return model


# -- small configs -----------------------------------------------------------------------------------------------


def _parts(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A config and the configs in it."""
    yield fields
    for key, value in fields.items():
        if isinstance(value, dict) and ("model_type" in value or key.endswith("_config")):
            yield from _parts(value)


def _integers(part: dict[str, Any], pattern: re.Pattern[str], but: re.Pattern[str]) -> Iterator[tuple[str, int]]:
    for key, value in list(part.items()):
        if type(value) is int and pattern.search(key) and not but.search(key):
            yield key, value


def _scale(fields: dict[str, Any], depth: int | None = DEPTH) -> None:
    """Divide every width and every number of heads by the same power of two, so that relations between them stay."""
    factor = 16
    for part in _parts(fields):
        for key, value in _integers(part, _IS_HEADS, _NO_HEADS):
            while factor > 1 and value % factor and "key_value" not in key and "kv" not in key:
                factor //= 2
        for key, value in _integers(part, re.compile(r"^(hidden_size|d_model|embed_dim|n_embd|dim|hidden_dim)$"), re.compile("$^")):
            while factor > 1 and value // factor < 32:
                factor //= 2
    for part in _parts(fields):
        for key, value in _integers(part, _IS_HEADS, _NO_HEADS):
            part[key] = max(1, value // factor)
        for key, value in _integers(part, _IS_WIDTH, _NO_WIDTH):
            if not _IS_HEADS.search(key) and not _IS_DEPTH.search(key) and value % factor == 0 and value // factor >= 8:
                part[key] = value // factor
    _shrink_tables(fields)
    if depth is not None:
        _shorten(fields, depth)


def _fix(fields: dict[str, Any]) -> None:
    """Give every width one value, every number of heads another."""
    for part in _parts(fields):
        for key, value in _integers(part, _IS_HEADS, _NO_HEADS):
            part[key] = min(value, 2 if "key_value" in key or "kv" in key else 4)
        for key, value in _integers(part, _IS_WIDTH, _NO_WIDTH):
            if not _IS_HEADS.search(key) and not _IS_DEPTH.search(key) and value > 64:
                part[key] = 128 if re.search("ffn|intermediate|inner|d_ff", key) else 64
        for key in ("head_dim", "d_kv", "attention_head_dim"):
            if type(part.get(key)) is int and part[key] > 16:
                part[key] = 16
    _shrink_tables(fields)
    _shorten(fields)


def _shorten(fields: dict[str, Any], depth: int = DEPTH) -> None:
    """Few layers, with one of each kind of layer; few experts."""
    for part in _parts(fields):
        before = {key: value for key, value in _integers(part, _IS_DEPTH, _NO_DEPTH) if value > depth}
        kinds = part.get("layer_types") or part.get("layers_block_type")
        distinct = list(dict.fromkeys(kinds)) if isinstance(kinds, list) else []
        own = max(depth, len(distinct))
        for key in before:
            part[key] = own
        for key, value in list(part.items()):
            if isinstance(value, list) and value and len(value) in before.values():
                kept = list(dict.fromkeys(value)) if all(isinstance(v, str) for v in value) else []
                part[key] = (kept + value)[:own] if len(kept) <= own else value[:own]
            elif isinstance(value, list) and value and all(type(v) is int for v in value) and before and _IS_INDICES.search(key):
                part[key] = list(dict.fromkeys(min(v, own - 1) for v in value))
            elif key in ("depths", "num_blocks", "stage_num_blocks", "blocks_per_stage", "layers") and isinstance(value, list):
                part[key] = [min(v, 2) if type(v) is int else v for v in value]
        if before:
            for key in ("out_features", "out_indices", "stage_names"):
                part.pop(key, None)
            for key in ("first_k_dense_replace", "num_kv_shared_layers", "num_nextn_predict_layers"):
                if type(part.get(key)) is int:
                    part[key] = min(part[key], 1 if key == "first_k_dense_replace" else 0)
        for key, value in list(part.items()):
            if type(value) is int and re.search(r"(num_experts|routed_experts|local_experts|num_moe_experts)$", key):
                part[key] = min(value, EXPERTS)
            elif type(value) is int and re.search(r"experts_per_tok|moe_topk|moe_k$|top_k_experts|experts_top_k", key):
                part[key] = min(value, 2)
            elif key in ("n_group", "topk_group") and type(value) is int:
                part[key] = min(value, 2 if key == "n_group" else 1)


def _shrink_tables(fields: dict[str, Any]) -> None:
    """A small vocabulary; the ids of special tokens that lie beyond it move to its end."""
    moved: dict[int, int] = {}

    def place(value: Any) -> Any:
        if isinstance(value, list):
            return [place(v) for v in value]
        if type(value) is not int or value < VOCABULARY - 64:
            return value
        return moved.setdefault(value, VOCABULARY - 1 - len(moved))

    for part in _parts(fields):
        for key, value in _integers(part, re.compile("vocab_size|vocabulary_size"), re.compile("type_vocab|audio_vocab|input_vocab|codebook")):
            part[key] = min(value, VOCABULARY)
    for part in _parts(fields):
        for key, value in list(part.items()):
            if _TOKEN.search(key):
                part[key] = place(value)
        if "pad_token_id" in part and part["pad_token_id"] is None:
            part["pad_token_id"] = 0  # sequence classifiers of a batch need one


# -- inputs ------------------------------------------------------------------------------------------------------


def _variants(model_class: Any, fields: dict[str, Any]) -> Iterator[tuple[str, Callable[[nn.Module, bool], Inputs]]]:
    """Ways to call the model, the richest first."""
    parameters = inspect.signature(model_class.forward).parameters
    main = model_class.main_input_name
    images = [("image", 0)] if main != "pixel_values" and "pixel_values" in parameters else []
    if main in ("input_features", "input_values", "audio_values"):
        media = [("audio", i) for i in range(3)]
    elif main in ("pixel_values", "pixel_values_videos"):
        media = [("image", i) for i in range(2)]
    else:
        media = [*images, ("text", 0)]
    for labels in (True, False):
        for kind, variant in media:
            yield f"{kind} {variant}{', labels' if labels else ''}", partial(_make_inputs, model_class, fields, kind, variant, labels, {})


def _find(fields: dict[str, Any], *names: str) -> Any:
    for part in _parts(fields):
        for name in names:
            if part.get(name) is not None:
                return part[name]
    return None


def _make_inputs(model_class: Any, fields: dict[str, Any], kind: str, variant: int, labels: bool, counted: dict[str, int],
                 model: nn.Module, train: bool) -> Inputs:
    torch.manual_seed(11)
    parameters = inspect.signature(model_class.forward).parameters
    name, main = model_class.__name__, model_class.main_input_name
    inputs: dict[str, Any] = {}
    if kind == "audio":
        inputs[main] = _audio(fields, variant, main)
    elif kind == "image":
        key = main if main in ("pixel_values", "pixel_values_videos") else "pixel_values"
        inputs.update(_images(fields, parameters, variant, key))
    inputs.update(_series(fields, parameters))
    if name.endswith("KeypointMatching") and "pixel_values" in inputs:
        inputs["pixel_values"] = torch.stack([inputs["pixel_values"]] * 2, dim=1)  # two images of one scene
    labelled_media = kind != "text" and "labels" in parameters and not name.endswith(("ForImageClassification", "ForCTC", "ForAudioClassification"))
    required = "input_ids" in parameters and parameters["input_ids"].default is inspect.Parameter.empty
    text = main == "input_ids" and "past_values" not in parameters or "input_ids" in parameters and labelled_media or required
    if "bbox" in parameters and main == "input_ids" and kind == "image" and "image" not in inputs:
        inputs["bbox"] = torch.randint(0, 50, (BATCH, TOKENS, 4)).cumsum(-1)
    if text:
        inputs["input_ids"] = _tokens(fields, TOKENS)
        image_token = _find(fields, "image_token_id", "image_token_index") if kind == "image" else None
        if isinstance(image_token, int) and hasattr(model, "get_image_features"):
            rows = counted.get("image")
            if rows is None:
                rows = counted["image"] = _count_features(model, inputs, parameters)
            per_sample = rows // BATCH
            inputs["input_ids"] = torch.cat([torch.full((BATCH, per_sample), image_token), inputs["input_ids"]], dim=1)
        if name.endswith("MultipleChoice"):
            inputs["input_ids"] = inputs["input_ids"].view(BATCH, 1, -1).repeat(1, 2, 1)
        if "attention_mask" in parameters and kind == "text":
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if "mm_token_type_ids" in parameters and isinstance(image_token, int):
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == image_token).long()
    encoder_decoder = fields.get("is_encoder_decoder") or "decoder_input_ids" in parameters
    if encoder_decoder and "decoder_input_ids" in parameters and not (labels and train and "labels" in parameters):
        inputs["decoder_input_ids"] = _tokens(fields, 8)
    if labels and train:
        inputs.update(_labels(name, parameters, inputs, fields))
    return (), inputs


def _series(fields: dict[str, Any], parameters: Any) -> dict[str, torch.Tensor]:
    """The past of time series, with as many channels as the config says."""
    if "past_values" not in parameters or "future_time_features" in parameters:
        return {}
    length, channels = fields.get("context_length") or 64, fields.get("num_input_channels")
    return {"past_values": torch.rand(BATCH, length, channels) if channels else torch.rand(BATCH, length)}


def _tokens(fields: dict[str, Any], count: int) -> torch.Tensor:
    vocabulary = _find(fields, "vocab_size", "num_embeddings") or VOCABULARY
    return torch.randint(min(200, vocabulary // 2), min(900, vocabulary), (BATCH, count))


def _audio(fields: dict[str, Any], variant: int, main: str) -> torch.Tensor:
    mels = _find(fields, "feature_projection_input_dim", "num_mel_bins", "feature_size", "input_feat_per_channel", "input_dim") or 80
    frames = 2 * positions if (positions := _find(fields, "max_source_positions")) and positions <= 1500 else 256
    if main == "audio_values":
        return torch.rand(BATCH, 8, 16, 16)
    if main == "input_values":
        length = _find(fields, "max_length") if _find(fields, "num_mel_bins") else None
        return (torch.rand(BATCH, 16_000), torch.rand(BATCH, length or 256, mels), torch.rand(BATCH, 1, 16_000))[variant]
    return (torch.rand(BATCH, mels, frames), torch.rand(BATCH, 256, mels), torch.rand(BATCH, 1, 1024, 64))[variant]


def _images(fields: dict[str, Any], parameters: Any, variant: int, key: str) -> dict[str, Any]:
    vision = next((p for p in (fields.get("vision_config"), fields.get("backbone_config")) if isinstance(p, dict)), fields)
    size = vision.get("image_size") or _find(fields, "image_size") or 224
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    channels = vision.get("num_channels") or vision.get("in_channels") or _find(fields, "num_channels") or 3
    channels = channels if isinstance(channels, int) else 3
    if "image_grid_thw" in parameters:
        patch, frames = vision.get("patch_size") or 14, vision.get("temporal_patch_size") or 1
        grid = torch.tensor([[1, 4, 4]] * BATCH)
        return {key: torch.rand(int(grid.prod(1).sum()), channels * frames * patch * patch), "image_grid_thw": grid}
    frames = vision.get("num_frames") or vision.get("frames_per_clip")
    image = torch.rand(BATCH, channels, height, width)
    if key == "pixel_values_videos" or (frames and variant == 0):
        return {key: torch.rand(BATCH, frames or 8, channels, height, width)}
    found = {key: image if variant == 0 or frames else torch.rand(BATCH, 1, channels, height, width)}
    if "image_sizes" in parameters:
        found["image_sizes"] = torch.tensor([[height, width]] * BATCH)
    return found


def _count_features(model: nn.Module, inputs: dict[str, Any], parameters: Any) -> int:
    """How many rows the images become: so many image tokens the text needs."""
    function: Any = model.get_image_features
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
    if name.endswith(("SequenceClassification", "ImageClassification", "VideoClassification", "AudioClassification", "MultipleChoice",
                      "NextSentencePrediction", "ForImageClassificationWithTeacher")):
        return {"labels": torch.zeros(BATCH, dtype=torch.int64)}
    if name.endswith("SemanticSegmentation") and pixels is not None:
        return {"labels": torch.zeros(BATCH, *pixels.shape[-2:], dtype=torch.int64)}
    if name.endswith("ForObjectDetection"):
        return {"labels": [{"class_labels": torch.tensor([0, 1]), "boxes": torch.tensor([[0.5, 0.5, 0.2, 0.3], [0.4, 0.6, 0.3, 0.2]])}
                           for _ in range(BATCH)]}
    if name.endswith("ForCTC"):
        return {"labels": torch.randint(1, 10, (BATCH, 5))}
    if name.endswith("TokenClassification") and ids is not None:
        return {"labels": torch.zeros_like(ids)}
    if name.endswith(("LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration", "ForSpeechSeq2Seq")):
        if fields.get("is_encoder_decoder") or ids is None:
            return {"labels": _tokens(fields, 8)}
        return {"labels": ids.clone()}
    return {}
