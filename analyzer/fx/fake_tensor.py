"""Tensors without data that take the place of a user's tensors."""
from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from analyzer.meta.state import CPU, MetaState
from analyzer.meta.storage import MetaStorage
from analyzer.meta.tensor import META, MetaTensor, attach, bytes_on_meta, device_of, tensor_on
from analyzer.meta.value.known_value import Deferred, small_enough

Tensor = torch.Tensor


class FakeTensors:
    """Makes fake tensors and remembers what stands for what.

    A fake tensor has the shape, strides, dtype and ``requires_grad`` of its original and none of its data. The same
    original gets the same fake tensor; originals that share a storage get some that do. Contents of small integer and
    boolean tensors, and of scalars, can be read where ``readable`` (they decide control flow), those of small
    constants, as arguments and plain attributes are, whatever their dtype. Fake tensors claim ``claim`` where given;
    where ``placed``, tensors made under a mode keep their own claims. Used inside `without_modes`.
    """

    def __init__(self, state: MetaState, claim: torch.device | None = None, placed: bool = False) -> None:
        self.state, self.claim, self.placed = state, claim, placed
        # by id of the original and of the fake tensor, which dies when the forward replaces what held it
        self._fakes: dict[int, tuple[Tensor, weakref.ref[Tensor]]] = {}
        self._originals: dict[int, tuple[Tensor, weakref.ref[Tensor]]] = {}
        self._adopted: list[int] = []  # keys put into state.fakes
        #: number and region for an original's storage, by its address
        self.places: dict[int, tuple[int, Any]] = {}

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of original and fake tensor, in order of making."""
        for original, ref in list(self._fakes.values()):
            if (fake := ref()) is not None:
                yield original, fake

    def of(self, original: Tensor) -> Tensor | None:
        """The fake tensor of ``original``, or None."""
        found = self._fakes.get(id(original))
        return None if found is None else found[1]()

    def original_of(self, fake: Tensor) -> Tensor | None:
        """The tensor whose place ``fake`` takes, or None."""
        found = self._originals.get(id(fake))
        return found[0] if found is not None and found[1]() is fake else None

    def make(self, original: Tensor, readable: bool, constant: bool = False) -> Tensor:
        """The fake tensor of ``original``, made at the first call; a fake tensor is its own."""
        found = self.of(original)
        if found is not None:
            return found
        if self.original_of(original) is not None:
            return original
        fake = self._make(original, readable, constant)
        self.stand_in(original, fake)
        return fake

    def stand_in(self, original: Tensor, fake: Tensor) -> None:
        """Let ``fake`` be the fake tensor of ``original``."""
        ref = weakref.ref(fake)
        self._fakes[id(original)] = (original, ref)
        self._originals[id(fake)] = (original, ref)

    def let_go(self) -> None:
        """Let later tensors with the originals' storages be adopted anew, and fake tensors die: one whose attribute
        leads to it by autograd's nodes, as that of a parameter does, is in a circle that Python does not see.
        """
        for _, fake in self:
            fake.__dict__.clear()
        for key in self._adopted:
            self.state.fakes.pop(key, None)
        self._adopted.clear()

    def _make(self, original: Tensor, readable: bool, constant: bool) -> Tensor:
        is_parameter = type(original) is nn.Parameter
        if not is_parameter:
            if isinstance(original, (UninitializedParameter, UninitializedBuffer)):
                return self._uninitialized(original)
            if is_traceable_wrapper_subclass(original):
                return self._wrapper(original, readable)
        if original.layout is not torch.strided:
            return original  # sparse tensors are adopted by the operators that meet them
        out = self._strided(original, readable, constant)
        out.__class__ = MetaTensor
        attributes = original.__dict__
        if is_parameter or isinstance(original, nn.Parameter):
            # what isinstance(x, Parameter) asks: torch/nn/parameter.py
            out.__dict__ = {**attributes, "_is_param": True}
            for name, value in () if is_parameter and not attributes else attributes.items():
                if isinstance(value, Tensor):  # scales of a quantized parameter
                    out.__dict__[name] = self.make(value, readable=False)
        elif attributes:
            out.__dict__.update(attributes)
        if original.requires_grad:
            out.requires_grad_()
        return out

    def _strided(self, original: Tensor, readable: bool, constant: bool) -> Tensor:
        real = original.untyped_storage()
        found = self.state.fakes.get(real._cdata)
        storage = None if found is None else found[1]()
        if storage is None:
            nbytes = real.nbytes()
            is_whole = original.storage_offset() == 0 and original.numel() * original.itemsize == nbytes
            fills = is_whole and original.is_contiguous()
            if fills:
                base = torch.empty_strided(original.shape, original.stride(), dtype=original.dtype, device=META)
            else:
                base = bytes_on_meta(nbytes)
            storage = attach(base, self._claim(original, real), self.state.space)
            if type(real) is MetaStorage:
                storage.copy_contents(real)
            elif readable and original.device.type == "cpu" and _is_readable(original, nbytes, constant):
                storage.known = Deferred(original.detach())
            self.state.fakes[real._cdata] = (real, weakref.ref(storage))
            self._adopted.append(real._cdata)
            if fills:
                return base
        return tensor_on(storage, original.dtype, int(original.storage_offset()), original.size(), original.stride())

    def _claim(self, original: Tensor, real: torch.UntypedStorage) -> torch.device:
        if type(real) is MetaStorage and (self.placed or self.claim is None):
            return real.device
        if self.claim is not None:
            return self.claim
        claim = device_of(original)
        return self.state.adopted_device if claim.type in ("cpu", "meta") else claim

    def _uninitialized(self, original: Any) -> Tensor:
        """A lazy parameter of its own, so that the user's is not materialised."""
        out = type(original)(requires_grad=original.requires_grad, device=META, dtype=original.dtype)
        attach(out, self.claim or CPU, self.state.space)
        return out  # type: ignore[no-any-return]

    def _wrapper(self, original: Any, readable: bool) -> Tensor:
        """A wrapper subclass (DTensor, quantised tensors) around fake tensors of what it wraps."""
        names, context = original.__tensor_flatten__()
        inner = {name: self.make(getattr(original, name), readable) for name in names}
        out = type(original).__tensor_unflatten__(inner, context, original.size(), original.stride())
        if isinstance(original, nn.Parameter):
            return nn.Parameter(out, requires_grad=original.requires_grad)
        return out.requires_grad_(original.requires_grad)  # type: ignore[no-any-return]


def _is_readable(original: Tensor, nbytes: int, constant: bool) -> bool:
    if not constant and (original.dtype.is_floating_point or original.dtype.is_complex):
        return original.numel() == 1
    return small_enough(nbytes // original.itemsize, original.dtype)
