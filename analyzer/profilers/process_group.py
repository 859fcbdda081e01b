"""How many ranks a collective has, from what it was called with. The only file that unpacks torch's process groups."""
from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from analyzer.meta.signature import Signature


def count_ranks(signature: Signature) -> int | None:
    """The size of the group of a collective: an argument that says so, the group that it names or is given; None where
    there is none any more.
    """
    given = signature.named_arguments()
    size = given.get("group_size")
    if isinstance(size, int):
        return size
    if not dist.is_available():
        return None
    try:
        group = _find_group(given)
    except RuntimeError:  # torch's answer where a group of that name was destroyed
        return None
    return None if group is None else int(group.size())


def _find_group(given: dict[str, Any]) -> Any:
    name = given.get("group_name")
    if isinstance(name, str):
        resolve: Any = torch._C._distributed_c10d._resolve_process_group  # names have a type of their own since 2.11
        return resolve(name)
    for value in given.values():
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value)
    return None
