"""How many elements parameters have whole, of which a rank holds a part."""
from __future__ import annotations

import torch

from .flat_parameter import list_flat_parameters, shapes_in, views_of


def count_whole(root: torch.nn.Module) -> int:
    """Elements of the whole parameters that ``root`` has a part of, each once: a DTensor tells its whole shape, a flat
    parameter those of the parameters in it.
    """
    flat = {id(parameter): parameter for parameter, _ in list_flat_parameters(root.modules())}
    views = {id(view) for parameter in flat.values() for view in views_of(parameter)}
    whole = sum(shape.numel() for parameter in flat.values() for shape in shapes_in(parameter))
    return whole + sum(p.numel() for p in root.parameters() if id(p) not in flat and id(p) not in views)
