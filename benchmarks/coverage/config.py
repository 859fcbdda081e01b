"""Configs of transformers made complete, and made small by rules that know no model."""
from __future__ import annotations

import copy
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DEPTH, EXPERTS, VOCABULARY = 2, 8, 1024
LARGE_IMAGE = 512
AHEAD = 8  # steps of a time series that are forecast

_IS_DEPTH = re.compile(r"^(\w+_)?(layers?|depth|num_blocks)$")
_NO_DEPTH = re.compile(
    r"feature_layer|feat_extract|look_|max_window|cross_|iou_|max_|_shared|no_rope|adapter|insert|postnet|residual|spec|nextn|mtp"
)
_IS_HEADS = re.compile(r"(^|_)(heads?|num_heads|attention_heads|kv_heads|key_value_heads|n_groups)$")
_NO_HEADS = re.compile(r"use_|has_|tie_|head_type|d_head")
_IS_WIDTH = re.compile(
    r"hidden|embd|embed|dim$|d_model|d_ff|ffn|intermediate|width|inner|rank$|projection|channels$|units$|proj_size|_size$|d_latents"
    r"|mamba_d_ssm|bottleneck_features")
_NO_WIDTH = re.compile(
    r"head_dim|d_kv|patch|image|crop|kernel|vocab|window|num_|in_channels|audio_channels|codebook|state|batch|chunk|block|context|max_"
    r"|input|roi|segment|tubelet|grid|feature_|feat_|latent(?!s$)|qk_|head_size|d_head|merge|spatial|temporal|coordinate|shape|mel|min_"
    r"|rope|time|conv_dim|pool|codevector|quant")
_MAIN_WIDTH = re.compile(r"^(hidden_size|d_model|embed_dim|n_embd|dim|hidden_dim)$")
_FOLLOWS_WIDTH = re.compile(r"num_pos_feats|groups$")  # half a width, or as many groups as channels
_IS_INDICES = re.compile(r"(indexes|indices|_ids|_idx|index|_layers|layer_idxs?|attention_blocks)$")
_TOKEN = re.compile(r"(token_id|token_index|token_ids)$|^(audio|image|video)_token$")
# a model's own default, which need not fit its default widths
_SECTIONS = re.compile(r'get\("mrope_section", \[([\d, ]+)\]')
_ROPE_BASE = 10_000.0  # RoFormer (arXiv 2104.09864), section 3.2.2

# Parts that a config of several models has no default for: one of the models that checkpoints of the class are made of;
# and what the default config leaves out though the model asks for it, by model type: checkpoints give it. Of those,
# whole clips of tvp are 48 frames of 448 pixels; the product of reformer's shape is the length of the text; time series
# look as far back as `AHEAD`.
_TABLE: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())


def default_fields(model_class: Any) -> dict[str, Any]:
    """The default config of a model class as nested dictionaries, completed."""
    import transformers

    config_class, parts = model_class.config_class, {}
    for name, part_class in _TABLE["parts"].get(config_class.__name__, {}).items():
        parts[name] = getattr(transformers, part_class)()
        if name == "decoder" and "Encoder" in config_class.__name__:
            parts[name].is_decoder = parts[name].add_cross_attention = True
    fields: dict[str, Any] = config_class(**{k: v.to_dict() for k, v in parts.items()}).to_dict()
    _complete(fields, model_class)
    return fields


def _complete(fields: dict[str, Any], model_class: Any) -> None:
    """Give what the default config leaves out: the model would fail with it at any size."""
    from transformers import PreTrainedConfig

    common = PreTrainedConfig().to_dict()
    sections = _SECTIONS.search(inspect.getsource(sys.modules[model_class.__module__]))
    for part in parts_of(fields):
        part.update(copy.deepcopy(_TABLE["settings"].get(part.get("model_type", ""), {})))
        if "vocab_size" in part and part["vocab_size"] is None:
            part["vocab_size"] = VOCABULARY
        if "rope_parameters" in part and _heads_of(part) is not None:
            rope = part["rope_parameters"] = part["rope_parameters"] or {"rope_type": "default"}
            if "rope_theta" in rope or not any(isinstance(v, dict) for v in rope.values()):
                rope["rope_theta"] = rope.get("rope_theta") or _ROPE_BASE
                if sections:
                    rope.setdefault("mrope_section", [int(share) for share in sections[1].split(",")])
        if part is not fields:
            for key in [k for k, v in part.items() if k in common and common[k] == v and k != "model_type"]:
                del part[key]  # some configs of parts refuse what every config has


def parts_of(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:  # a config and the configs in it
    yield fields
    for key, value in fields.items():
        if isinstance(value, dict) and ("model_type" in value or key.endswith("_config")):
            yield from parts_of(value)


def find_field(fields: dict[str, Any], *names: str) -> Any:
    """The first of the settings that the config or a part of it has."""
    for part in parts_of(fields):
        for name in names:
            if part.get(name) is not None:
                return part[name]
    return None


def _integers(part: dict[str, Any], pattern: re.Pattern[str], but: re.Pattern[str]) -> Iterator[tuple[str, int]]:
    for key, value in list(part.items()):
        if type(value) is int and pattern.search(key) and not but.search(key):
            yield key, value


_NOTHING = re.compile("$^")


def _common_factor(fields: dict[str, Any]) -> int:
    """The largest power of two up to 16 that divides all numbers of heads and leaves widths of 32 at least."""
    factor = 16
    for part in parts_of(fields):
        for key, value in _integers(part, _IS_HEADS, _NO_HEADS):
            while factor > 1 and value > 1 and value % factor and "key_value" not in key and "kv" not in key:
                factor //= 2
        for _, value in _integers(part, _MAIN_WIDTH, _NOTHING):
            while factor > 1 and value // factor < 32:
                factor //= 2
    return factor


def scale(fields: dict[str, Any], depth: int | None = DEPTH) -> None:
    """Divide every width and every number of heads by the same power of two, so that relations between them stay."""
    factor = _common_factor(fields)
    for part in parts_of(fields):
        widths = {value for _, value in _integers(part, _MAIN_WIDTH, _NOTHING)}
        for key, value in _integers(part, _IS_HEADS, _NO_HEADS):
            part[key] = max(1, value // factor)
        for key, value in _integers(part, _IS_WIDTH, _NO_WIDTH):
            if not _IS_HEADS.search(key) and not _IS_DEPTH.search(key) and value % factor == 0 and value // factor >= 8:
                part[key] = value // factor
        for key, value in _integers(part, _FOLLOWS_WIDTH, _IS_HEADS):
            if value in widths or 2 * value in widths:
                part[key] = max(1, value // factor)
        for key, values in part.items():
            if not isinstance(values, list) or not values or any(type(v) is not int or v % factor for v in values):
                continue
            if sum(values) in widths or key.endswith("_per_stage") and {values[0], values[-1]} & widths:
                part[key] = [v // factor for v in values]  # shares of a width
    _shrink_images(fields)
    _shrink_tables(fields)
    if depth is not None:
        shorten(fields, depth)
    _fit_sections(fields)


def _shrink_images(fields: dict[str, Any]) -> None:
    """Images of a quarter of the side, in all parts alike, where they are as large as those that models segment."""
    sizes = [size for part in parts_of(fields) for size in _flat(part.get("image_size"))]
    if max(sizes, default=0) < LARGE_IMAGE or any(size % (4 * 16) for size in sizes):  # 16: the patches of those models
        return

    def quarter(value: Any) -> Any:
        return [quarter(v) for v in value] if isinstance(value, list) else value // 4

    for part in parts_of(fields):
        for key in ("image_size", "image_embedding_size", "backbone_feature_sizes"):
            if _flat(part.get(key)):
                part[key] = quarter(part[key])


def _flat(value: Any) -> list[int]:  # the integers of a setting that is one, or (nested) lists of them
    return [i for v in value for i in _flat(v)] if isinstance(value, list) else [value] if type(value) is int else []


def fix(fields: dict[str, Any]) -> None:  # give every width one value, every number of heads another
    for part in parts_of(fields):
        for key, value in _integers(part, _IS_HEADS, _NO_HEADS):
            part[key] = min(value, 2 if "key_value" in key or "kv" in key else 4)
        for key, value in _integers(part, _IS_WIDTH, _NO_WIDTH):
            if not _IS_HEADS.search(key) and not _IS_DEPTH.search(key) and value > 64:
                part[key] = 128 if re.search("ffn|intermediate|inner|d_ff", key) else 64
        for key in ("head_dim", "d_kv", "attention_head_dim"):
            if type(part.get(key)) is int and part[key] > 16:
                part[key] = 16
    _shrink_tables(fields)
    shorten(fields)
    _fit_sections(fields)


def _limit_experts(part: dict[str, Any]) -> None:  # few experts, and few of them at once
    for key, value in list(part.items()):
        if type(value) is int and re.search(r"(num_experts|routed_experts|local_experts|num_moe_experts)$", key):
            part[key] = min(value, EXPERTS)
        elif type(value) is int and re.search(r"experts_per_tok|moe_topk|moe_k$|top_k_experts|experts_top_k", key):
            part[key] = min(value, 2)
        elif key in ("n_group", "topk_group") and type(value) is int:
            part[key] = min(value, 2 if key == "n_group" else 1)
        elif key == "mm_tokens_per_image":
            part[key] = 4  # a square number of tokens that the small image has patches for


def shorten(fields: dict[str, Any], depth: int = DEPTH) -> None:
    """Few layers, with one of each kind of layer; few experts."""
    for part in parts_of(fields):
        stages = part.get("out_features")
        by_layer = isinstance(stages, list) and all(re.fullmatch(r"stage\d+", s) for s in stages) and \
            any(value + 1 == len(part.get("stage_names") or ()) for _, value in _integers(part, _IS_DEPTH, _NO_DEPTH))
        own = max(depth, len(stages)) if by_layer and stages else depth
        taken = [value for key, value in part.items() if key.endswith("out_indices") and isinstance(value, list)
                 and part.get("stage_names") is None]
        own = max([own, *map(len, taken)])  # a neck takes as many layers as it has inputs
        kinds = part.get("layer_types") or part.get("layers_block_type")
        own = max(own, len(dict.fromkeys(kinds)) if isinstance(kinds, list) else 0)
        before = {key: value for key, value in _integers(part, _IS_DEPTH, _NO_DEPTH) if value > own}
        for key in before:
            part[key] = own
        for key, value in list(part.items()):
            if isinstance(value, list) and value and len(value) in before.values():
                kept = list(dict.fromkeys(value)) if all(isinstance(v, str) for v in value) else []
                part[key] = (kept + value)[:own] if len(kept) <= own else value[:own]
            elif value in taken and before:
                part[key] = list(range(own - len(value), own))
            elif isinstance(value, list) and value and before and _IS_INDICES.search(key) and all(
                    type(v) is int for v in value):
                part[key] = list(dict.fromkeys(min(v, own - 1) for v in value))
            elif key in ("depths", "num_blocks", "stage_num_blocks", "blocks_per_stage", "layers") and isinstance(
                    value, list):
                part[key] = [min(v, 2) if type(v) is int else v for v in value]
        if before:
            for key in ("out_features", "out_indices", "stage_names"):
                part.pop(key, None)
            if by_layer and stages:
                part["out_features"] = [f"stage{i}" for i in range(own - len(stages) + 1, own + 1)]
            for key in ("first_k_dense_replace", "num_kv_shared_layers", "num_nextn_predict_layers"):
                if type(part.get(key)) is int:
                    part[key] = min(part[key], 1 if key == "first_k_dense_replace" else 0)
        _limit_experts(part)


def _heads_of(part: dict[str, Any]) -> int | None:
    found = part.get("num_attention_heads") or part.get("num_heads") or part.get("n_heads")
    return found if type(found) is int else None


def _fit_sections(fields: dict[str, Any]) -> None:
    """Heads without a width of their own get their share; shares of their rotary frequencies for time, height and width
    add up to them.
    """
    for part in parts_of(fields):
        rope, heads = part.get("rope_parameters"), _heads_of(part)
        if heads and "head_dim" in part and part["head_dim"] is None and type(part.get("hidden_size")) is int:
            part["head_dim"] = part["hidden_size"] // heads
        if not isinstance(rope, dict) or heads is None:
            continue
        head_dim = part.get("head_dim") or (part.get("hidden_size") or 0) // heads
        frequencies = int(head_dim * (rope.get("partial_rotary_factor") or 1.0)) // 2
        if not frequencies:
            continue
        before = rope.get("mrope_section")
        if before and sum(before) != frequencies:
            shares = [frequencies * share // sum(before) for share in before[1:]]
            rope["mrope_section"] = [frequencies - sum(shares), *shares]


def _shrink_tables(fields: dict[str, Any]) -> None:
    """A small vocabulary; the ids of special tokens that lie beyond it move to its end."""
    moved: dict[int, int] = {}

    def place(value: Any) -> Any:
        if isinstance(value, list):
            return [place(v) for v in value]
        if type(value) is not int or value < VOCABULARY - 64:
            return value
        return moved.setdefault(value, VOCABULARY - 1 - len(moved))

    for part in parts_of(fields):
        for key, value in _integers(part, re.compile("vocab_size|vocabulary_size"),
                                    re.compile("type_vocab|audio_vocab|input_vocab|codebook")):
            part[key] = min(value, VOCABULARY)
    for part in parts_of(fields):
        for key, value in list(part.items()):
            if _TOKEN.search(key):
                part[key] = place(value)
        if "pad_token_id" in part and part["pad_token_id"] is None:
            part["pad_token_id"] = 0  # sequence classifiers of a batch need one
