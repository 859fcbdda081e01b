"""A storage without data, which holds what its tensors share: device, address, known contents."""
from __future__ import annotations

import itertools

import torch

from .address_space import AddressSpace, Region
from .value.known_value import Known, reads

next_number = itertools.count().__next__
_next_range = itertools.count(1).__next__


def take_numbers() -> int:
    """The first of a range of 2^32 numbers, each of which is given out once."""
    return _next_range() << 32


class MetaStorage(torch.UntypedStorage):
    """The storage of one or more `MetaTensor`s. Real storages are turned into this class in place (``__class__`` is
    assigned), so views made by C++, and tensors that autograd unpacks as plain ``torch.Tensor``, still lead to what is
    known here.
    """

    device: torch.device = torch.device("meta")  #: the simulated device or the host; shadows torch's property
    number: int                        #: unique in the process, in order of birth; another one after a resize
    region: Region                     #: its place in the simulated memory
    space: AddressSpace
    known: Known | None = None         #: contents, where they follow from factories
    drawn_from: Known | None = None    #: where the contents are unknown: known ones among which each element is
    density: float | None = None       #: expected mean of the elements, where data-dependent sizes need one

    def data_ptr(self) -> int:
        """Its address in the simulated memory."""
        return self.region.address

    @property
    def is_cuda(self) -> bool:
        """Whether it is on a simulated GPU."""
        return self.device.type == "cuda"

    def resize_(self, size: int) -> MetaStorage:  # FSDP frees and refills storages so
        """Change its size, and with it its place."""
        super().resize_(size)
        self.space.resize(self, next_number())
        return self

    @property
    def exact(self) -> Known | None:
        """Its contents, where nothing unknown was taken as zero on the way to them."""
        known = self.known
        if known is None or known.assumed:
            return None
        if known.varies:
            reads.varying += 1
            return None if reads.hides_varying else known
        return known

    def copy_contents(self, other: MetaStorage) -> None:
        """Know of the contents what ``other`` knows of its own."""
        self.known, self.drawn_from, self.density = other.known, other.drawn_from, other.density

    def give_back_early(self) -> None:
        """Free its memory in the books now, where the device would; the tensor itself lives on for a moment."""
        space = self.__dict__.pop("space", None)
        if space is not None:
            space.release(self)

    def give_away(self) -> Region:
        """Its place in memory, which the caller gives back from now on."""
        del self.space
        return self.region

    def __del__(self) -> None:
        space = self.__dict__.get("space")
        if space is not None:
            if space.is_shared:
                with space.turn:
                    space.release(self)
            else:
                space.release(self)


def find_storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The storage of a strided tensor, also behind the wrappers of vmap and functional gradients."""
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        if not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise
        return find_storage(torch._C._functorch.get_unwrapped(tensor))
