"""Storages without data, and the memories that place them."""
from __future__ import annotations

import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import get_ident
from typing import Any
from weakref import WeakSet

import torch

from analyzer.errors import InputError
from analyzer.hardware.catalogue import simulated_memory
from analyzer.memory.allocator import AllocatorOptions, Block, CachingAllocator
from analyzer.memory.host_memory import HostMemory, HostRegion, NoRegion, Unplaced
from analyzer.memory.segment_memory import PoolStreams, PrivatePool

from .intercept.mode_stack import without_modes
from .value.known_value import Deferred, Known, reads, small_enough

_META = torch.device("meta")
_empty_strided = torch.empty_strided
_META_BASE = 0x4500_0000_0000    # only has to differ from the host's and the accelerators' addresses
_DEVICE_TOP = 0x7F00_0000_0000  # where CUDA's unified addressing puts device memory
_next_private = itertools.count(1 << 32).__next__  # numbers of streams that are none
_UNPLACED_TOP = 0x4400_0000_0000  # only has to differ from all others' addresses
_DEVICE_SPAN = 1 << 48           # one accelerator's share of addresses, which the allocator never uses twice
STREAMS_A_DEVICE = 1 << 20       #: numbers of streams that each of several devices has

Region = Block | HostRegion | NoRegion
"""A place in memory."""

_TORCH_VERSION = int(torch.__version__.split(".")[0]), int(torch.__version__.split(".")[1])
tell_settings: list[Callable[[Any], object]] = []  #: are told of settings that the environment has, in a sentence
spaces: WeakSet[AddressSpace] = WeakSet()  #: all that are in use: a storage without data keeps its space alive


def find_device_index(address: int) -> int:
    """The index of the device that has an address of a block or segment."""
    return address // _DEVICE_SPAN


def check_address(address: int, index: int, nbytes: int) -> None:
    """Raises InputError where so many bytes of an accelerator would lie below its addresses."""
    if address < index * _DEVICE_SPAN:
        raise InputError(f"{nbytes:,} bytes more at once than a device has addresses for, {_DEVICE_TOP:,}; "
                         "profile fewer layers of the model, or one rank's share of it (--world)")


class AddressSpace:
    """The memory of the machine that tensors are simulated on. It outlives the mode as long as a tensor does."""

    def __init__(self, options: AllocatorOptions | None = None, capacity_bytes: int | None = None,
                 devices: int = 1) -> None:
        spaces.add(self)
        self.options = options  #: None: those of the environment, which are read for the first allocator
        self.capacity_bytes = capacity_bytes
        self.devices = devices  #: that the process has to itself; a rank of a job has one of its host's
        self.allocators: dict[int, CachingAllocator] = {}
        self.counts = False  #: whether allocators count blocks one by one from the beginning
        self.listener: Any = None  #: told of storages: `born`, `died`, `resized`
        self.stream = 0  #: the number of the current stream; of several devices that of the first
        self._streams: dict[int, int] = {}  # numbers of the current streams of the others, by index
        self.streams_taken: Counter[tuple[int, int]] = Counter()  #: how many were made, by device and priority
        self.capture: dict[int, int] | None = None  #: while a CUDA graph is captured: what stands for each stream
        self.pooled: PoolStreams | None = None  #: the same, while a ``torch.cuda.MemPool`` takes what is allocated
        self.is_replaying = False  #: whether that graph was captured before: what it holds is no allocator's
        self._private: dict[object, tuple[PoolStreams, list[None]]] = {}  # by pool: these, and an entry a user
        self.outgrows: Callable[[Any], bool] | None = None  #: that of each allocator (`SegmentMemory`)
        self.host = HostMemory()
        self.unplaced: Unplaced | None = None  #: while devices' allocators are not asked: they place all of it later
        self.nowhere = HostMemory(_META_BASE)  #: of what the program puts on meta, which takes no memory
        self.library_workspaces: dict[tuple[object, ...], Region] = {}  #: by library, device, thread and stream
        self.turn: AbstractContextManager[object] = nullcontext()  #: held by one of several threads while it works
        self.is_shared = False
        self.owner: int | None = None  #: the thread whose mode is in force; None: any may give memory back
        self._is_busy = False  # a region is taken or given back, and the books are told of it
        # what died meanwhile, or in a thread that takes no part: a collection of garbage frees tensors at any place,
        # and in whichever thread it begins
        self._waiting: deque[tuple[int, torch.device, Region]] = deque()

    def share(self) -> None:
        if not self.is_shared:
            self.turn, self.is_shared = threading.RLock(), True

    def memory(self, device: torch.device) -> CachingAllocator | HostMemory:
        self.settle()
        return self.host if device.type in ("cpu", "meta") else self.allocator(device.index or 0)

    def let_outgrow(self, outgrows: Callable[[Any], bool] | None) -> None:
        """Ask this of an error where a request fails: whether it is served all the same (`SegmentMemory.outgrows`)."""
        self.outgrows = outgrows
        for allocator in self.allocators.values():
            allocator.outgrows = outgrows

    def describe_settings(self, device: torch.device) -> str | None:
        """The settings of the allocator of ``device`` as text; None where it has none."""
        return None if device.type in ("cpu", "meta") or self.options is None else self.options.text

    def allocator(self, index: int = 0) -> CachingAllocator:
        if index not in self.allocators:
            if self.options is None:
                self.options, said = AllocatorOptions.from_environment(_TORCH_VERSION)
                for tell in tell_settings if said is not None else ():
                    tell(said)
            made = self.allocators[index] = CachingAllocator(
                self.capacity_bytes, self.options, top_address=_DEVICE_TOP + index * _DEVICE_SPAN,
                total_bytes=simulated_memory, counts=self.counts)
            made.device = f"cuda:{index}" if self.devices > 1 else None
            made.outgrows = self.outgrows
        return self.allocators[index]

    def reserve(self, device: torch.device, nbytes: int) -> Region:
        """A new region of the memory of ``device``. Raises InputError where it has no addresses left."""
        self.settle()
        before, self._is_busy = self._is_busy, True
        try:
            return self._reserve(device, nbytes)
        finally:
            self._is_busy = before

    def _reserve(self, device: torch.device, nbytes: int) -> Region:
        kind, index = device.type, device.index or 0
        if kind == "cpu" or kind == "meta":
            return (self.host if kind == "cpu" else self.nowhere).allocate(nbytes)
        if self.unplaced is not None:
            region: Region = self.unplaced.allocate(nbytes)
        else:
            allocator = self.allocator(index)
            region = (allocator.place if self.is_replaying else allocator.allocate)(nbytes, self._pool_key(index))
        check_address(region.address, index, nbytes)
        return region

    def stream_number(self, index: int, stream_id: int) -> int:
        """The number of a stream of a device: its id, among several devices with what tells these apart."""
        return stream_id if self.devices == 1 else index * STREAMS_A_DEVICE + stream_id

    def current_stream(self, index: int) -> int:
        """The number of the current stream of a device."""
        if self.devices == 1 or index == 0:
            return self.stream
        return self._streams.get(index, index * STREAMS_A_DEVICE)

    def set_stream(self, number: int) -> bool:
        """Make a stream the current one of its device; False where it is that already."""
        index = number // STREAMS_A_DEVICE
        if self.current_stream(index) == number:
            return False
        if index == 0:
            self.stream = number
        else:
            self._streams[index] = number
        return True

    def _pool_key(self, index: int) -> int:
        stream = self.stream if self.devices == 1 else self.current_stream(index)
        streams = self.pooled if self.capture is None else self.capture
        if streams is None:
            return stream
        key = streams.get(stream)
        if key is None:
            key = streams[stream] = _next_private()
            for index in self.allocators or (0,):
                self.allocator(index).kept_streams.add(key)
                if isinstance(streams, PoolStreams):
                    self.allocator(index).private_pools[key] = PrivatePool(streams.handle, stream, streams.splits)
        return key

    def begin_capture(self, handle: tuple[int, int]) -> None:
        self.capture = self.join_pool(handle)

    def join_pool(self, handle: tuple[int, int], splits: bool = True) -> PoolStreams:
        """What stands for each stream in a private pool, which has one user more until `leave_pool`."""
        streams, users = self._private.setdefault(handle, (PoolStreams(handle, splits), []))
        users.append(None)
        return streams

    def leave_pool(self, handle: object) -> None:
        """One graph less uses a private pool; without any, what is free in it can be given back."""
        keys, users = self._private[handle]
        users.pop()
        if not users:
            del self._private[handle]
            for allocator in self.allocators.values():
                allocator.kept_streams.difference_update(keys.values())

    def give_back(self, device: torch.device, region: Region) -> None:
        before, self._is_busy = self._is_busy, True
        try:
            self._give_back(device, region)
        finally:
            self._is_busy = before

    def _give_back(self, device: torch.device, region: Region) -> None:
        if isinstance(region, Block):
            self.allocator(device.index or 0).free(region)
        elif isinstance(region, HostRegion):
            (self.nowhere if device.type == "meta" else self.host).free(region)

    def attach(self, tensor: torch.Tensor, device: torch.device, *, is_zero: bool = False) -> MetaStorage:
        """Turn the storage of a tensor on meta into a `MetaStorage` on ``device``, with a place here. One of a zero
        tensor takes no bytes: at::_efficientzerotensor gives it no memory (ZeroTensorAllocator in TensorFactories.h).
        """
        storage = tensor.untyped_storage()
        storage.__class__ = MetaStorage
        assert isinstance(storage, MetaStorage)
        storage.device, storage.number = device, next_number()
        if self._waiting:
            self.settle()
        before, self._is_busy = self._is_busy, True
        try:
            storage.region = self._reserve(device, 0 if is_zero else storage.nbytes())
            if self.listener is not None:
                self.listener.born(storage)
        finally:
            self._is_busy = before
        storage.space = self  # last: a storage that found no place has none to give back
        if self._waiting:
            self.settle()
        return storage

    def bury(self, storage: MetaStorage) -> None:
        """Give back the region of a storage that died: now, or once what is under way has ended."""
        self._waiting.append((storage.number, storage.device, storage.region))
        self.settle()

    @contextmanager
    def placing_later(self) -> Iterator[None]:
        """A block in which what is asked of a device gets an address alone: its allocator takes the events later."""
        self.unplaced = Unplaced(_UNPLACED_TOP)
        try:
            yield
        finally:
            self.unplaced = None

    def settle(self) -> None:
        """Give back the regions of what died in the meantime, where this thread may."""
        if self._waiting and not self._is_busy and (self.is_shared or self.owner in (None, get_ident())):
            if self.is_shared:
                with self.turn:
                    self._bury_waiting()
            else:
                self._bury_waiting()

    def _bury_waiting(self) -> None:
        self._is_busy = True
        try:
            while self._waiting:
                number, device, region = self._waiting.popleft()
                if self.listener is not None:
                    self.listener.died(number)
                self._give_back(device, region)
        finally:
            self._is_busy = False

    def give_to(self, owner: int | None) -> None:
        """Let a thread own this memory: what dies in another one is given back when that one asks for memory."""
        self.settle()
        self.owner = owner

    def resize(self, storage: MetaStorage, number: int, device: torch.device | None = None) -> None:
        """Give a storage that changed its size, or its ``device``, another region: to the listener it is another
        storage, of ``number``.
        """
        self.bury(storage)
        before = storage.number
        del storage.space
        if device is not None:
            storage.device = device
        storage.number, storage.region = number, self.reserve(storage.device, storage.nbytes())
        if self.listener is not None:
            self.listener.born(storage)
            self.listener.resized(before, storage)
        storage.space = self


next_number = itertools.count().__next__
Followed = tuple["Known | None", "Known | None", "float | None", Any, Any]  #: what is known, or expected, of contents
UNFOLLOWED: Followed = (None, None, None, None, None)


class MetaStorage(torch.UntypedStorage):
    """The storage of one or more `MetaTensor`s. Real storages become it in place (``__class__`` is assigned), so views
    made by C++, and tensors that autograd unpacks as plain ones, still lead to what is known here.
    """

    device: torch.device = torch.device("meta")  #: the simulated device or the host; shadows torch's property
    number: int                        #: unique in the process, in order of birth; another one after a resize
    region: Region                     #: its place in the simulated memory
    space: AddressSpace
    is_met: bool = False               #: of data met on the way, or made of such: it may as well be on the host
    known: Known | None = None         #: contents, where they follow from factories
    is_blank: bool = False             #: whether the contents are undefined: a kernel may find them to be anything
    drawn_from: Known | None = None    #: where the contents are unknown: known ones among which each element is
    density: float | None = None       #: expected mean of the elements, where data-dependent sizes need one
    origin: torch.UntypedStorage | None = None  #: one with data that a file was read into, until its dtype is known
    barred: Any = None                 #: `Bars`: columns of scores on which no choice falls
    nonzero_bound: Any = None          #: `NonzeroBound`: where the contents are unknown, how many can be nonzero
    sample: Any = None                 #: `Sample`: where the contents are unknown, some that may be

    def data_ptr(self) -> int:
        return self.region.address

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def resize_(self, size: int) -> MetaStorage:  # FSDP frees and refills storages so
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

    @property
    def followed(self) -> Followed:
        return self.known, self.drawn_from, self.density, self.nonzero_bound, self.sample

    @followed.setter
    def followed(self, followed: Followed) -> None:
        self.known, self.drawn_from, self.density, self.nonzero_bound, self.sample = followed

    def copy_to(self, device: torch.device) -> MetaStorage:
        with without_modes():
            made = new_storage(self.nbytes(), device, self.space)
        made.followed, made.origin = self.followed, self.origin
        return made

    def cpu(self) -> MetaStorage:
        return self if self.device.type == "cpu" else self.copy_to(torch.device("cpu"))

    def clone(self) -> MetaStorage:
        return self.copy_to(self.device)

    def _set_from_file(self, file: Any, offset: int | None, is_file: bool, element_bytes: int) -> None:
        """What `torch.load` reads after it gave the storage its place, from files of the format before torch 1.6."""
        real = torch.UntypedStorage(self.nbytes()) if self.origin is None else self.origin
        real._set_from_file(file, offset, is_file, element_bytes)
        self.origin = None

    def follow_origin(self, dtype: torch.dtype) -> None:
        """Know the contents that were read, now that their dtype is known, where they are few enough."""
        real = self.origin
        if real is None:
            return
        if small_enough(real.nbytes() // dtype.itemsize, dtype):
            with without_modes():
                self.known = Deferred(torch.empty(0, dtype=dtype).set_(real))
        if not hasattr(real, "_torch_load_uninitialized"):  # else it is read later, at once
            self.origin = None

    def __del__(self) -> None:
        space = self.__dict__.get("space")
        if space is not None:
            space.bury(self)


MetaStorage.__name__, MetaStorage.__module__ = "UntypedStorage", "torch.storage"  # what code calls a storage by


def bytes_on_meta(nbytes: int) -> torch.Tensor:
    return _empty_strided((nbytes,), (1,), dtype=torch.uint8, device=_META)


def new_storage(nbytes: int, device: torch.device, space: AddressSpace) -> MetaStorage:
    """A storage of ``nbytes`` on ``device``. To be called without modes."""
    return space.attach(bytes_on_meta(nbytes), device)


def find_storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The storage of a strided tensor, also behind the wrappers of vmap and functional gradients."""
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        if not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise
        return find_storage(torch._C._functorch.get_unwrapped(tensor))
