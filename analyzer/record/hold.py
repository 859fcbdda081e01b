"""Private torch API: whether somebody besides the caller still holds a tensor."""
from __future__ import annotations

import sys
from typing import Any

import torch


class Hold:
    """Counts of references to a tensor that the caller keeps, compared later.

    An input is alive for as long as its caller wants, so its life does not tell whether autograd saved it; a reference
    more than before the forward pass does: a saved variable shares the tensor or its storage, checkpointing keeps the
    Python object.
    """

    __slots__ = ("tensor", "_before")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._before = self._count()

    def _count(self) -> tuple[int, int, int]:
        storage = self.tensor.untyped_storage()
        tensor: Any = self.tensor
        return sys.getrefcount(tensor), tensor._use_count(), torch._C._storage_Use_Count(storage._cdata)

    def is_held(self) -> bool:
        """Whether there are more references than when this was made."""
        return any(now > before for now, before in zip(self._count(), self._before))


def is_autograds_alone(gradient: torch.Tensor) -> bool:
    """Whether nobody but the autograd node that was just given ``gradient`` holds it or a view of it.

    To be asked inside ``Function.backward``: the engine has moved the gradient there, so the tensor counts the Python
    object alone, its storage the tensor and the storage's Python object.
    """
    tensor: Any = gradient
    storage = tensor.untyped_storage()
    holders = torch._C._storage_Use_Count(storage._cdata)
    if not tensor._is_view():
        return bool(tensor._use_count() == 1 and holders == 2)
    # A view holds its base, which then counts once for the view and once for the object here; another view would hold
    # it too.
    return bool(tensor._use_count() == 1 and tensor._base._use_count() == 2 and holders == 3)
