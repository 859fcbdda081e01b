"""A tower that reads pictures for a model of language: its kernels, by its modules."""
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn

from .served_model import AttentionKernel, Kernel, PassKernel, Product, Tower

_PROJECTORS = ("multi_modal_projector", "embed_vision")  # transformers' names of what lies outside of the tower
_EMBEDS = re.compile(r"(^|\.)patch_(embed|conv)")         # of what reads patches of pixels
_ROWS = re.compile(r"(^|\.)(o_proj|out_proj|proj|projection_layer|fc2|linear_fc2|down_proj)(\.linear)?$")
_MERGED = re.compile(r"(^|\.)([qkv]_proj|gate_proj|up_proj)(\.linear)?$")  # columns of one product, by servers


def read_tower(model: nn.Module) -> Tower | None:
    """The tower of a model of transformers, None where it has none, or its layers are not found."""
    config: Any = getattr(model, "config", None)
    vision = getattr(config, "vision_config", None)
    parts = dict(model.named_modules())
    path = next((name for name, module in parts.items() if name and vision is not None
                 and type(getattr(module, "config", None)) is type(vision)), None)
    if path is None:
        return None
    tower = parts[path]
    lists = [(name, module) for name, module in tower.named_modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        return None
    where, blocks = max(lists, key=lambda item: len(item[1]))
    last = getattr(config, "vision_feature_layer", None)  # of LLaVA: later ones are not run
    used = len(blocks) + 1 + last if isinstance(last, int) and last < 0 else len(blocks)
    patches: Counter[Kernel] = Counter()
    tokens: Counter[Kernel] = Counter()
    for block in list(blocks)[:used]:
        patches.update(_list_products(block))
    for prefix, part in [(path, tower), *((name, module) for name, module in parts.items()
                                          if name.rpartition(".")[2] in _PROJECTORS)]:
        for name, module in part.named_modules():
            if isinstance(module, (nn.Linear, nn.Conv2d, nn.Conv3d)) and not (
                    prefix == path and name.startswith(f"{where}.")):
                weight = module.weight
                kernel = Product((weight.shape[0],), weight[0].numel(), is_held=False)
                (patches if _EMBEDS.search(name) else tokens)[kernel] += 1
    return _add_attention(vision, patches, tokens, used, config)


def _list_products(block: nn.Module) -> Iterator[Product]:
    """Of a block, those of the same rows merged as servers merge them."""
    merged: dict[tuple[str, int], list[int]] = {}
    for name, module in block.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        columns, inner = module.weight.shape
        if _MERGED.search(name):
            merged.setdefault((name.removesuffix(".linear").rpartition(".")[0], inner), []).append(columns)
        else:
            yield Product((columns,), inner, split="row" if _ROWS.search(name) else "column", is_held=False)
    for (_, inner), parts in merged.items():
        yield Product(tuple(parts), inner, split="column", is_held=False)


def _add_attention(vision: Any, patches: Counter[Kernel], tokens: Counter[Kernel], blocks: int,
                   config: Any) -> Tower | None:
    """Attention, and what moves bytes between products: two norms with the sums before them, an activation, and where
    positions are rotated, two kernels that rotate.
    """
    def find(*names: str) -> Any:
        return next((value for name in names if (value := getattr(vision, name, None)) is not None), None)

    heads, hidden = find("num_heads", "num_attention_heads", "attention_heads"), find("embed_dim", "hidden_size")
    if not isinstance(heads, int) or not isinstance(hidden, int):
        return None
    head = find("head_dim") or hidden // heads
    attention = AttentionKernel(heads, heads, head, head)
    whole = find("fullatt_block_indexes")
    windows = blocks - len(whole) if whole is not None and find("window_size") else 0
    # of a product of two parts one is a gate, and the activation writes half as much as it reads
    moved = max((product.n * (4 if len(product.parts) == 1 else 3) for product in patches
                 if isinstance(product, Product) and product.split == "column" and product.n != 3 * heads * head),
                default=0)
    patches[attention] += blocks - windows
    patches[PassKernel("residual add and norm", 8 * hidden)] += 2 * blocks
    patches[PassKernel("rotary embedding", 8 * hidden, kernels=2, is_split=True)] += blocks
    patches[PassKernel("activation", moved, is_split=True)] += blocks
    return Tower(dict(patches), {attention: windows} if windows else {}, dict(tokens), config)

