"""How many patches and tokens servers make of a picture, by the rules of the models' own processors.

Bounds of a picture's size are those of the preprocessor_config.json that models are published with; where transformers'
own defaults differ, servers take the former.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from analyzer.errors import InputError


class Pictured(NamedTuple):
    """What a tower reads of a picture or a video, and what the model of language reads in its place.

    - ``groups``: tiles of a picture, or frames, whose patches see each other; ``patches``: of each.
    - ``windows``, ``window_patches``: parts of all groups to which some of a tower's layers look; 0: none.
    - ``rows``: tokens that are projected from patches; ``tokens``: these and those that separate them.
    """

    groups: int
    patches: int
    rows: int
    tokens: int
    windows: int = 0
    window_patches: int = 0


class Size(NamedTuple):
    """Pixels of a picture, or of ``frames`` of a video (0: a picture)."""

    width: int
    height: int
    frames: int = 0

    def __str__(self) -> str:
        return f"{self.width}x{self.height}" + (f", {self.frames} frames" if self.frames else "")


Rule = Callable[[Any, Size], Pictured]


def count_pictured(config: Any, size: Size) -> Pictured:
    """What a model of this config makes of a picture. Raises InputError where its rule is not known, or has no place
    for a video.
    """
    rule = RULES.get(config.model_type)
    if rule is None:
        raise InputError(f"a picture of {size}: how many tokens {config.model_type} makes of it is not known; those "
                         f"known are {', '.join(RULES)}. Add its tokens to the prompt's, without --images")
    if min(size.width, size.height) < 1 or size.frames < 0:
        raise InputError(f"a picture of {size}: width and height are 1 pixel or more")
    if size.frames and rule not in (_count_bounded, _count_qwen3):
        raise InputError(f"a video of {size}: how {config.model_type} reads videos is not known; give its frames as "
                         "--images")
    return rule(config, size)


# --- pictures of any size, within bounds ---

def _resize(size: Size, factor: int, least: int, most: int, frames: int = 1) -> tuple[int, int]:
    """Height and width in multiples of ``factor``, with ``least`` to ``most`` pixels of all frames: transformers'
    `smart_resize` of models/qwen2_vl/image_processing_qwen2_vl.py and models/qwen3_vl/video_processing_qwen3_vl.py.
    """
    _, _, count = size
    height, width = (round(side / factor) * factor for side in (size.height, size.width))
    if max(size.height, size.width) > 200 * min(size.height, size.width):
        raise InputError(f"a picture of {size}: these models take sides that differ by a factor of 200 at most")
    share = math.sqrt((count or 1) * size.height * size.width / most)
    if frames * height * width > most:
        return (max(factor, math.floor(size.height / share / factor) * factor),
                max(factor, math.floor(size.width / share / factor) * factor))
    if frames * height * width < least:
        share = math.sqrt(least / ((count or 1) * size.height * size.width))
        return math.ceil(size.height * share / factor) * factor, math.ceil(size.width * share / factor) * factor
    return height, width


def _divide(config: Any, height: int, width: int, steps: int, extra: int) -> Pictured:
    """Patches of a picture, or of ``steps`` pairs of frames, of which squares become a token."""
    vision = config.vision_config
    patch, merge = vision.patch_size, vision.spatial_merge_size
    rows, columns = height // patch, width // patch
    found = Pictured(steps, rows * columns, steps * rows * columns // merge ** 2,
                     steps * rows * columns // merge ** 2 + extra)
    side = getattr(vision, "window_size", None)
    if not side:
        return found
    side //= patch  # patches; windows at the edges are padded where they are cut, or are smaller
    windows = steps * math.ceil(rows / side) * math.ceil(columns / side)
    return found._replace(windows=windows, window_patches=max(1, round(steps * rows * columns / windows)))


def _count_bounded(config: Any, size: Size) -> Pictured:
    """Qwen2-VL, Qwen2.5-VL and the Omni models: each frame has the bounds of a picture (Qwen2.5-VL-7B-Instruct,
    preprocessor_config.json: min_pixels 3,136, max_pixels 12,845,056), and a token stands before and after all.
    """
    vision = config.vision_config
    height, width = _resize(size._replace(frames=0), vision.patch_size * vision.spatial_merge_size, 3136, 12_845_056)
    return _divide(config, height, width, _count_steps(config, size), 2)


def _count_steps(config: Any, size: Size) -> int:
    """Pairs of frames, of which patches are made together."""
    step: int = config.vision_config.temporal_patch_size
    return max(1, -(-size.frames // step))


def _count_qwen3(config: Any, size: Size) -> Pictured:
    """Qwen3-VL and Qwen3.5: bounds of a picture, or of a video's frames together (Qwen3-VL-8B-Instruct,
    preprocessor_config.json: 65,536 and 16,777,216; video_preprocessor_config.json: 4,096 and 25,165,824). Before each
    pair of frames stands its time as text, about 6 tokens (processing_qwen3_vl.py, `replace_video_token`).
    """
    vision = config.vision_config
    factor, steps = vision.patch_size * vision.spatial_merge_size, _count_steps(config, size)
    if not size.frames:
        return _divide(config, *_resize(size, factor, 65_536, 16_777_216), 1, 2)
    height, width = _resize(size, factor, 4096, 25_165_824, steps * vision.temporal_patch_size)
    return _divide(config, height, width, steps, steps * (2 + 6))


def _count_pixtral(config: Any, size: Size) -> Pictured:
    """Pixtral and Mistral Small: the longest side is at most that of the config, and a token ends each row
    (transformers, models/pixtral/image_processing_pixtral.py, `get_resize_output_image_size`).
    """
    vision, merge = config.vision_config, getattr(config, "spatial_merge_size", 1)
    ratio, side = max(1.0, size.height / vision.image_size, size.width / vision.image_size), vision.patch_size * merge
    rows, columns = (math.ceil(math.floor(pixels / ratio) / side) for pixels in (size.height, size.width))
    return Pictured(1, rows * columns * merge ** 2, rows * columns, rows * (columns + 1))


def _count_gemma4(config: Any, size: Size) -> Pictured:
    """Gemma 4: the largest size of that shape whose tokens are at most those of the config (transformers,
    models/gemma4/image_processing_gemma4.py, `get_aspect_ratio_preserving_size`), and a token before and after them.
    """
    vision = config.vision_config
    pool, most = vision.pooling_kernel_size, config.vision_soft_tokens_per_image
    side = pool * vision.patch_size
    share = math.sqrt(most * side ** 2 / (size.height * size.width))
    rows, columns = (math.floor(share * pixels / side) for pixels in (size.height, size.width))
    if not rows:
        rows, columns = 1, min(max(1, size.width // size.height), most)
    elif not columns:
        rows, columns = min(max(1, size.height // size.width), most), 1
    return Pictured(1, rows * columns * pool ** 2, rows * columns, rows * columns + 2)


# --- tiles of one size ---

def _count_tile(config: Any) -> int:
    """Patches of a tile, without a class token."""
    side, patch = (_of_square(getattr(config.vision_config, name)) for name in ("image_size", "patch_size"))
    return (side // patch) ** 2


def _of_square(size: int | Sequence[int]) -> int:
    return size if isinstance(size, int) else size[0]


def _count_gemma3(config: Any, size: Size) -> Pictured:
    """Gemma 3: each picture is one tile, and two tokens stand before it and behind it (processing_gemma3.py)."""
    rows = config.mm_tokens_per_image
    return Pictured(1, _count_tile(config), rows, rows + 4)


def _count_llama4(config: Any, size: Size) -> Pictured:
    """Llama 4: 16 tiles at most, and one of the whole picture where there are several; separators are tokens
    (transformers, models/llama4/image_processing_llama4.py, `get_best_fit`, processing_llama4.py).
    """
    vision = config.vision_config
    side, patches = vision.image_size, _count_tile(config)
    rows = round(patches * vision.pixel_shuffle_ratio ** 2)
    scales = {(down, across): min(down * side / size.height, across * side / size.width)
              for down, across in _list_grids(1, 16)}
    up = [scale for scale in scales.values() if scale >= 1]
    chosen = min(up) if up else max(scales.values())
    down, across = min((grid for grid, scale in scales.items() if scale == chosen), key=math.prod)
    if down * across == 1:
        return Pictured(1, patches + 1, rows, rows + 3)
    tiles = down * across + 1
    return Pictured(tiles, patches + 1, tiles * rows, tiles * rows + down * across + 3)


def _list_grids(least: int, most: int) -> Iterator[tuple[int, int]]:
    """Arrangements of so many tiles, those of fewer first."""
    for tiles in range(least, most + 1):
        for first in range(1, tiles + 1):
            if tiles % first == 0:
                yield first, tiles // first


def _count_internvl(config: Any, size: Size) -> Pictured:
    """InternVL: 12 tiles at most, of the grid nearest in shape, and one of the whole picture where there are several
    (transformers, models/got_ocr2/image_processing_got_ocr2.py, `get_optimal_tiled_canvas`).
    """
    patches, rows, ratio = _count_tile(config), config.image_seq_length, size.width / size.height
    side = _of_square(config.vision_config.image_size)
    best, nearest = 1, math.inf
    for across, down in _list_grids(1, 12):
        off = abs(ratio - across / down)
        if off < nearest or off == nearest and size.width * size.height > 0.5 * side ** 2 * across * down:
            best, nearest = across * down, off
    tiles = best + (best > 1)
    return Pictured(tiles, patches + 1, tiles * rows, tiles * rows + 2)


def _count_llava(config: Any, size: Size) -> Pictured:
    """LLaVA 1.5: each picture is one tile, whose class token is dropped."""
    patches = _count_tile(config)
    return Pictured(1, patches + 1, patches, patches)


def _count_llava_next(config: Any, size: Size) -> Pictured:
    """LLaVA-NeXT: tiles of the grid that wastes least, and one of the whole picture; rows of patches that are padding
    are dropped, and a token ends each other one (transformers, models/llava_next/processing_llava_next.py).
    """
    patches, side = _count_tile(config), config.vision_config.image_size
    each = math.isqrt(patches)

    def fit(grid: tuple[int, int]) -> tuple[int, int]:
        height, width = grid
        scale = min(width / size.width, height / size.height)
        used = min(int(size.width * scale) * int(size.height * scale), size.width * size.height)
        return used, -(width * height - used)

    height, width = max((tuple(grid) for grid in config.image_grid_pinpoints), key=fit)
    down, across = height // side, width // side
    rows, columns = each * down, each * across
    if size.width / size.height > columns / rows:
        rows -= (rows - int(round(size.height * columns / size.width, 7))) // 2 * 2
    else:
        columns -= (columns - int(round(size.width * rows / size.height, 7))) // 2 * 2
    tokens = rows * columns + rows + patches
    return Pictured(down * across + 1, patches + 1, (down * across + 1) * patches, tokens)


#: By transformers' names of kinds of models.
RULES: dict[str, Rule] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"), _count_bounded),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _count_qwen3),
    "mistral3": _count_pixtral, "gemma3": _count_gemma3, "gemma4": _count_gemma4, "llama4": _count_llama4,
    "internvl": _count_internvl, "llava": _count_llava, "llava_next": _count_llava_next}
