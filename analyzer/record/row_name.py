"""Names of rows of the node table."""
from __future__ import annotations

import functools
import re


@functools.lru_cache(maxsize=1 << 14)
def identifier(name: str) -> str:
    """``name`` as torch.fx would write it.

    >>> identifier("layers.0.fc"), identifier("0"), identifier("add")
    ('layers_0_fc', '_0', 'add')
    """
    if name.isidentifier():
        return name
    name = re.sub(r"\W", "_", name)
    return f"_{name}" if name[:1].isdigit() else name or "_"
