"""A storage without data, which holds what its tensors share: claimed device, address, known contents."""
from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from analyzer.meta.intercept.mode_stack import without_modes

if TYPE_CHECKING:
    from analyzer.meta.value.known_value import Known

    from .address_space import AddressSpace, Region

next_number = itertools.count().__next__
_next_range = itertools.count(1).__next__


def take_numbers() -> int:
    """The first of a range of 2^32 numbers that nobody else gets."""
    return _next_range() << 32


class MetaStorage(torch.UntypedStorage):
    """The storage of one or more `MetaTensor`s.

    Real storages are turned into this class in place (``__class__`` is assigned), so views made by C++,
    and tensors that autograd unpacks as plain ``torch.Tensor``, still lead to what is known here.
    """

    claim: torch.device
    number: int                        #: unique in the process, in order of birth
    region: Region                     #: its place in the simulated memory
    space: AddressSpace
    known: Known | None = None         #: contents, where they follow from factories
    drawn_from: Known | None = None    #: where the contents are unknown: known ones among which each element is
    density: float | None = None       #: expected mean of the elements, where data-dependent sizes need one

    def data_ptr(self) -> int:
        return self.region.address

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.claim

    @property
    def is_cuda(self) -> bool:
        return self.claim.type == "cuda"

    def resize_(self, size: int) -> MetaStorage:  # FSDP frees and refills storages so
        super().resize_(size)
        self.space.resize(self)
        return self

    def give_back_early(self) -> None:
        """Free its memory in the books now, where the device would; the tensor itself lives on for a moment."""
        space = self.__dict__.pop("space", None)
        if space is not None:
            space.release(self)

    def give_away(self) -> Region:
        """Its place in memory, which somebody else gives back from now on."""
        del self.space
        return self.region

    def __del__(self) -> None:
        space = self.__dict__.get("space")
        if space is not None:
            space.release(self)


def find_storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The storage of a strided tensor, also behind the wrappers of vmap and functional gradients."""
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        if not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise
        return find_storage(torch._C._functorch.get_unwrapped(tensor))


def attach(tensor: torch.Tensor, claim: torch.device, space: AddressSpace) -> MetaStorage:
    """Turn the storage of a tensor on meta into a `MetaStorage` that claims ``claim``."""
    storage = tensor.untyped_storage()
    storage.__class__ = MetaStorage
    assert isinstance(storage, MetaStorage)
    storage.claim = claim
    storage.number = next_number()
    space.place(storage)
    storage.space = space  # last: a storage that found no place has none to give back
    return storage


def template(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same specs on a storage of its own that is in nobody's books."""
    with without_modes():
        return _like(tensor)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    nbytes = tensor.untyped_storage().nbytes()
    if tensor.is_contiguous() and tensor.numel() * tensor.itemsize == nbytes:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    storage = torch.empty(nbytes, dtype=torch.uint8, device="meta").untyped_storage()
    out = torch.empty(0, dtype=tensor.dtype, device="meta")
    return out.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor on the storage of ``tensor``, known to nobody: it keeps the storage alive and counts as a holder."""
    with without_modes():
        return tensor.detach()


def revive(like: torch.Tensor, claim: torch.device, number: int, region: Region, space: AddressSpace) -> torch.Tensor:
    """A tensor like ``like`` on a storage that has its number and its place already. To be called without modes."""
    from .tensor import MetaTensor

    out = _like(like)
    settle(out, claim, number, region, space)
    out.__class__ = MetaTensor
    return out


def settle(tensor: torch.Tensor, claim: torch.device, number: int, region: Region, space: AddressSpace) -> MetaStorage:
    """As `attach`, for a storage that has its number and its place already."""
    storage = tensor.untyped_storage()
    storage.__class__ = MetaStorage
    assert isinstance(storage, MetaStorage)
    storage.__dict__ = {"claim": claim, "number": number, "region": region, "space": space}
    return storage
