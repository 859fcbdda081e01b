"""The process group that a call is for."""
from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def find_process_group(given: dict[str, Any]) -> Any:
    """The group among the arguments of an operator, or None. Raises RuntimeError, as torch does, for no such name."""
    name = given.get("group_name")
    if isinstance(name, str):
        resolve: Any = torch._C._distributed_c10d._resolve_process_group  # names have a type of their own since 2.11
        return resolve(name)
    for value in given.values():
        if isinstance(value, dist.ProcessGroup):  # `Any group_name` of the functional collectives takes both
            return value
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value)
    return None
