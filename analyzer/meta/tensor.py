"""A fake tensor: without data, on a simulated device, and how all of them are made."""
from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from analyzer.errors import UnsupportedOperatorError
from analyzer.meta.intercept.mode_stack import without_modes

from .address_space import UNFOLLOWED, AddressSpace, MetaStorage, find_storage
from .spec import SPARSE_LAYOUTS, strided_of
from .state import active, current
from .value.known_value import Deferred, small_enough


class _Kernel(threading.local):
    """Entered while a meta kernel runs: one in Python reads ``.device`` and must see where tensors really are."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *exc: object) -> None:
        self.depth -= 1


kernel = _Kernel()
META = torch.device("meta")
_F = TypeVar("_F", bound=type[torch.autograd.Function])
_DATA: Any = torch._C.TensorBase.data  # the property itself
_empty_strided = torch.empty_strided


def device_of(tensor: torch.Tensor) -> torch.device:
    """The simulated device of ``tensor``; the real one of a tensor with data."""
    if tensor.layout is torch.strided:
        storage = find_storage(tensor)
        if isinstance(storage, MetaStorage):
            return storage.device
    elif tensor.layout in SPARSE_LAYOUTS:
        return device_of(strided_of(tensor))
    if is_around_tensors(tensor):
        return device_of(getattr(tensor, names_of_parts(tensor)[0]))
    return torch._C.TensorBase.device.__get__(tensor)


def meta_storage_of(tensor: torch.Tensor) -> MetaStorage | None:
    """The storage of a fake tensor, of a sparse one that of its values; None of any other tensor."""
    with torch._C.DisableTorchFunction():
        tensor = strided_of(tensor)
        storage = find_storage(tensor) if tensor.layout is torch.strided else None
        return storage if isinstance(storage, MetaStorage) else None


def is_around_tensors(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is made of others (quantized, nested), which alone take memory."""
    return hasattr(tensor, "__tensor_flatten__")


class _Present(TorchFunctionMode):
    """In it a tensor without data is true: torchao's float8 weights ask whether there is a scale by its truth
    (``__tensor_flatten__`` in torchao/float8/fsdp_utils.py).
    """

    def __enter__(self) -> _Present:
        _push_mode(self)  # not as a program enters one, which is refused while a graph is traced
        return self

    def __exit__(self, *exc: object) -> None:
        _pop_mode()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.Tensor.__bool__ and isinstance(find_storage(args[0]), MetaStorage):
            return True
        return func(*args, **(kwargs or {}))


def name_of_node(node: Any) -> str:
    """What autograd calls a node. One of a function written in Python may have a ``ctx.name`` of its own, which hides
    the method.
    """
    name: str = type(node).name(node)
    return name


def with_node(name: str) -> Callable[[_F], _F]:
    """Let the nodes of an `autograd.Function` have the ``name`` that PyTorch gives those of what it stands for."""
    def rename(function: _F) -> _F:
        function._backward_cls.__name__ = name
        return function
    return rename


def names_of_parts(tensor: Any) -> list[str]:
    with torch._C._EnableTorchFunction(), _Present():
        names: list[str] = tensor.__tensor_flatten__()[0]
    return [name for name in names if isinstance(getattr(tensor, name), torch.Tensor)]  # DTensor's mesh is another


class _MetaTensorType(type(torch.Tensor)):  # type: ignore[misc]
    """What `isinstance` asks: tensors that have plain classes in a mode are fake ones too."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return type.__instancecheck__(cls, instance) or (
            isinstance(instance, torch.Tensor) and meta_storage_of(instance) is not None)


class MetaTensor(torch.Tensor, metaclass=_MetaTensorType):
    """A tensor with shape, strides, dtype, autograd and a simulated device, but no data.

    Made by any PyTorch code under `MetaTensorMode`. It keeps its device after the mode ends:

    >>> from analyzer import MetaTensorMode
    >>> with MetaTensorMode():
    ...     x = torch.rand(2, 3, device="cuda")
    >>> x.device, x.is_cuda, x.shape, x[1].data_ptr() - x.data_ptr()
    (device(type='cuda', index=0), True, torch.Size([2, 3]), 12)
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Outside of every mode what computes is refused. It is disabled under one: it switches fast paths off."""
        try:
            with torch._C.DisableTorchFunction():
                versions = _versions((*args, *(kwargs or {}).values()))
                result = func(*args, **(kwargs or {}))
                for tensor, version in versions:
                    if tensor._version != version:
                        _follow(tensor, args[1] if func is torch.Tensor.copy_ and len(args) > 1 else None)
        except (AssertionError, NotImplementedError, RuntimeError, TypeError) as error:
            raise _outside(func, str(error)) from error
        for value in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                if not isinstance(find_storage(value), MetaStorage):
                    raise _outside(func, "its result would hold whatever is in memory")
                keep_class(value)
        return result

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The simulated device; where it really is while a kernel runs."""
        return META if kernel.depth else device_of(self)

    def get_device(self) -> int:
        device = self.device
        return -1 if device.index is None else device.index

    def data_ptr(self) -> int:
        return data_ptr(self)

    def record_stream(self, stream: Any) -> None:
        """Say that it may be used on ``stream`` when it dies; its memory is free then all the same."""
        use_on(self, stream)

    @property
    def data(self) -> Any:
        return keep_class(_DATA.__get__(self))

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _DATA.__set__(self, value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"MetaTensor(size={tuple(self.shape)}, dtype={self.dtype}, device='{device_of(self)}'{grad})"


PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, MetaTensor})
"""Classes of tensors that are nothing but themselves: they override no function."""


def _outside(func: Any, reason: str) -> UnsupportedOperatorError:
    name = getattr(func, "__name__", str(func))
    return UnsupportedOperatorError(
        f"{name}: a MetaTensor has a shape and a device, but no data ({reason.splitlines()[0] if reason else name}).\n"
        f"Way out: run this inside `with MetaTensorMode():`, or hand the tensor or its model to `profile`.")


def _versions(args: tuple[Any, ...]) -> list[tuple[torch.Tensor, int]]:
    """The fake tensors among the arguments of a call, each with how often it was written to."""
    values = [t for value in args for t in (value if isinstance(value, (list, tuple)) else [value])]
    return [(t, t._version) for t in values if isinstance(t, torch.Tensor) and t.layout is torch.strided
            and not t.is_inference() and isinstance(find_storage(t), MetaStorage)]


def _follow(written: torch.Tensor, source: torch.Tensor | None) -> None:
    """Forget what the storage of ``written`` held, or know of it what is known of a ``source`` that is laid out alike.
    Without functions of torch.
    """
    storage: Any = find_storage(written)
    storage.followed, storage.barred = UNFOLLOWED, None
    if source is None or source.layout is not torch.strided or _layout(source) != _layout(written):
        return
    origin = find_storage(source)
    if isinstance(origin, MetaStorage):
        storage.followed = origin.followed
    elif source.device.type == "cpu" and small_enough(storage.nbytes() // source.itemsize, source.dtype):
        storage.known = Deferred(torch.empty_like(source).copy_(source))


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes())


def data_ptr(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()
    if not isinstance(storage, MetaStorage):
        return int(torch._C.TensorBase.data_ptr(tensor))
    if tensor.numel() == 0:
        return 0  # as PyTorch: an empty tensor has no data
    return storage.region.address + int(tensor.storage_offset()) * tensor.itemsize


def use_on(tensor: torch.Tensor, stream: Any) -> None:
    """``Tensor.record_stream``: tell the recorder, which knows what it may hold back."""
    state, storage = current(), tensor.untyped_storage()
    if state is None or not isinstance(storage, MetaStorage):
        return
    if state.recorder is None:
        state.assume("record_stream: the memory of a tensor that dies is assumed to be free at once, as if the other "
                     "stream had caught up")
    else:
        number = state.space.stream_number(stream.device.index or 0, int(stream.stream_id))
        state.recorder.memory.used_on(storage, number)


def take_class(tensor: torch.Tensor) -> torch.Tensor:
    """Let a tensor on a `MetaStorage` have the class that tensors have in the mode in force, or without one."""
    state = active.state
    if state is None or not state.has_plain_tensors:
        if type(tensor) is torch.nn.Parameter:
            vars(tensor)["_is_param"] = True  # what isinstance(x, Parameter) asks: torch/nn/parameter.py
        tensor.__class__ = MetaTensor
    return tensor


def keep_class(result: Any) -> Any:
    """Let a view made outside the mode be a `MetaTensor` too."""
    kind = type(result)
    if (kind is torch.Tensor or kind is torch.nn.Parameter) and not (
            torch._C._functorch.is_functorch_wrapped_tensor(result)) and isinstance(
            strided_of(result).untyped_storage(), MetaStorage):
        take_class(result)
    return result


def _keeping(name: str) -> Any:
    original = getattr(torch.Tensor, name)
    @functools.wraps(original, assigned=("__name__", "__qualname__"))
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return keep_class(original(self, *args, **kwargs))
    return method


# Views that code outside the mode takes of what was made under it: ``state_dict``, ``Parameter``, indexing.
for _name in ("detach", "__getitem__", "view", "view_as", "reshape", "t", "transpose", "permute", "squeeze",
              "unsqueeze", "flatten", "expand", "narrow"):
    setattr(MetaTensor, _name, _keeping(_name))


def _is_on(kind: str) -> property:
    return property(lambda self: self.device.type == kind)


for _name in ("cuda", "cpu", "meta"):
    setattr(MetaTensor, f"is_{_name}", _is_on(_name))


def new_tensor(shape: Any, stride: Any, dtype: torch.dtype, device: torch.device,
               space: AddressSpace) -> tuple[torch.Tensor, MetaStorage]:
    """A tensor and the storage that it has for its own, contiguous without a ``stride``. To be called without modes."""
    out = torch.empty(shape, dtype=dtype, device=META) if stride is None else _empty_strided(
        shape, stride, dtype=dtype, device=META)
    storage = space.attach(out, device)
    return take_class(out), storage


def tensor_on(storage: torch.UntypedStorage, dtype: torch.dtype, offset: Any, shape: Any, stride: Any) -> torch.Tensor:
    """A tensor on a storage that exists. To be called without modes."""
    out = torch.empty(0, dtype=dtype, device=META)
    out.set_(storage, offset, shape, stride)
    return take_class(out)


def count_on(fake: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """``fake``, which was written to as often as ``original``. To be called without modes."""
    if not fake.is_inference() and not original.is_inference() and fake._version != original._version:
        torch._C._autograd._unsafe_set_version_counter((fake,), (original._version,))
    return fake


def sparse_tensor(parts: list[torch.Tensor], shape: Any, layout: torch.layout,
                  is_coalesced: bool = True) -> torch.Tensor:
    """A sparse tensor of indices and values that exist. To be called without modes."""
    if layout is torch.sparse_coo:
        out = torch.sparse_coo_tensor(parts[0], parts[1], shape, check_invariants=False, is_coalesced=is_coalesced)
    else:
        one, other, values = parts
        out = torch.sparse_compressed_tensor(one, other, values, shape, layout=layout, check_invariants=False)
    return take_class(out)


def sparse_like(tensor: torch.Tensor, parts: list[torch.Tensor]) -> torch.Tensor:
    """A sparse tensor like another, of other indices and values. To be called without modes."""
    return sparse_tensor(parts, tensor.shape, tensor.layout,
                         tensor.layout is not torch.sparse_coo or tensor.is_coalesced())


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor on the storage of ``tensor``, which keeps the storage alive and counts as a reference."""
    with without_modes():
        return tensor.detach()
