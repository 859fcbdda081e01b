"""Pictures in rows of text: what a model that sees is given beside its tokens."""
from __future__ import annotations

import inspect
import math
from typing import Any

import torch

from analyzer.errors import InputError


def show_pictures(build: Any, rows: int, length: int, pixels: int) -> tuple[dict[str, Any], str]:
    """Tokens of rows that each begin with one picture, with the picture, and a sentence on its size. A model that takes
    pictures of any size is given a square one of at most ``pixels``, others one of their own size (transformers,
    models/qwen2_vl/image_processing_qwen2_vl.py, `smart_resize`; models/gemma3/processing_gemma3.py). Of a model of
    which that is not known rows are text alone. Raises InputError where a picture has no place in a row.
    """
    kind, config = build.args[:2]
    vision: Any = getattr(config, "vision_config", None)
    token = next((found for name in ("image_token_id", "image_token_index")
                  if (found := getattr(config, name, None)) is not None), None)
    ids = torch.zeros(rows, length, dtype=torch.int64)
    patch, merge, size = (getattr(vision, name, None) for name in ("patch_size", "spatial_merge_size", "image_size"))
    is_any = merge is not None and hasattr(vision, "temporal_patch_size")
    if token is None or not isinstance(patch, int) or not is_any and not isinstance(size, int):
        return {"input_ids": ids}, f"rows are text alone: how {kind.__name__} is given pictures is not known here"
    given: dict[str, Any]
    if is_any:
        assert isinstance(merge, int)
        most = min(pixels // (patch * merge) ** 2, length - 1)
        side = math.isqrt(most) * merge
        if not side:
            raise InputError(f"{kind.__name__}: pictures of {pixels} pixels are smaller than one token of it")
        count, size = (side // merge) ** 2, side * patch
        channels = getattr(vision, "in_channels", 3) * vision.temporal_patch_size * patch ** 2
        given = {"pixel_values": torch.empty(rows * side * side, channels, device="meta"),
                 "image_grid_thw": torch.tensor([[1, side, side]] * rows)}
    else:
        assert isinstance(size, int)
        count = getattr(config, "mm_tokens_per_image", None) or (size // patch) ** 2
        given = {"pixel_values": torch.empty(rows, 3, size, size, device="meta")}
    if count >= length:
        raise InputError(f"{kind.__name__}: a picture has {count} tokens, and rows have {length}")
    ids[:, :count] = token
    takes = inspect.signature(kind.forward).parameters
    kinds = {name: (ids == token).long() for name in ("mm_token_type_ids", "token_type_ids") if name in takes}
    return {"input_ids": ids, **given, **kinds}, (
        f"each row has one picture of {size} x {size} pixels, which is {count:,} of its {length:,} tokens")
