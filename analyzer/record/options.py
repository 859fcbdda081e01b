"""Options of a run, and how many samples and tokens its batches have."""
from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from analyzer.errors import InputError, is_count
from analyzer.meta.state import MetaOptions
from analyzer.meta.structure import holds_tensor, tensor_paths, tensors_of


@dataclass(frozen=True)
class ProfileOptions(MetaOptions):
    """Settings of `profile`: those of `MetaOptions` and the step's own.

    Unknown scalars are ``"expected"`` unless ``unknown_value`` says otherwise; one that follows from nothing known
    raises DataDependentError.
    ``unknown_condition`` is ``"false"`` here: a profile says what it took for granted, and goes on.
    ``steps`` training steps are run; the first makes gradients and optimizer states, the last is the steady state.
    ``set_to_none`` is what ``zero_grad`` gets. An inference step runs under ``torch.no_grad``, with ``inference_mode``
    under that: from torch 2.11 on autocast keeps no casts of weights in it.
    ``keep_events`` keeps the memory timeline and the allocator's events.
    With ``capacity_bytes`` the device has that much for the allocator, with ``limit_to_device`` what the profiled
    device has (less what is known to be taken outside the allocator); a step that needs more ends where it runs out and
    `Profile.out_of_memory` tells where.

    Without ``compiles`` what is under ``torch.compile`` runs as it is written: the eager step of the same model.

    Raises InputError where both limits are given, and for a capacity that is not positive.
    """

    unknown_value: Literal["error", "expected", "placeholder"] = "expected"
    unknown_condition: Literal["false", "true", "error"] = "false"
    steps: int = 2
    set_to_none: bool = True
    keep_events: bool = True
    limit_to_device: bool = False
    compiles: bool = True
    inference_mode: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.capacity_bytes is not None and not is_count(self.capacity_bytes, 1):
            raise InputError(f"capacity_bytes={self.capacity_bytes!r}: must be positive, a whole number of bytes such "
                             "as analyzer.units.parse_bytes('80GB') gives, or None for no limit")
        if self.limit_to_device and self.capacity_bytes is not None:
            raise InputError(f"limit_to_device=True and capacity_bytes={self.capacity_bytes!r}: give one of them")
        if not isinstance(self.inference_mode, bool):
            raise InputError(f"inference_mode={self.inference_mode!r}: must be True or False")

    @property
    def grad_mode(self) -> str:
        """The name in torch of what an inference step runs under."""
        return "inference_mode" if self.inference_mode else "no_grad"

    def without_gradients(self) -> AbstractContextManager[object]:
        return torch.inference_mode() if self.inference_mode else torch.no_grad()


def count_listed(arguments: Collection[Any]) -> tuple[int, ...]:
    """How many samples the arguments of a call may be, where the first is a list of tensors: as many as these are
    (images), or as each has rows (features), of which other arguments say which. Empty where it is no such list.

    >>> images = [torch.empty(3, 8, 8), torch.empty(3, 8, 8)]
    >>> count_listed([images, [{}, {}]]), count_listed([images, torch.empty(3)]), count_listed([images])
    ((2,), (3,), (2, 3))
    """
    first = next((value for value in arguments if holds_tensor(value)), None)
    if type(first) is not list or not all(isinstance(item, torch.Tensor) and item.dim() for item in first):
        return ()
    rows = {int(item.shape[0]) for item in first}
    found = {len(first), *(rows if len(rows) == 1 else ())}
    said = {len(value) for value in arguments if value is not first and (
        value.dim() if isinstance(value, torch.Tensor) else isinstance(value, list))}
    return tuple(sorted(found & said or found))


def count_samples(arguments: Collection[Any]) -> int | None:
    """How many samples the arguments of a call are: the rows of the first tensor, or as `count_listed`; else None."""
    rows = next((int(t.shape[0]) for t in tensors_of(list(arguments)) if t.dim()), None)
    return choose_samples(count_listed(arguments), rows)


def choose_samples(listed: tuple[int, ...], rows: int | None) -> int | None:
    """The ``rows`` of the first tensor, or of a list of tensors what `count_listed` gave, if that is one number."""
    if not listed:
        return rows
    return listed[0] if len(listed) == 1 else None


# How many tokens a model is given: positions of sequences, of all samples.

_NOT_TOKENS = ("mask", "label", "target", "position", "segment", "type")  # in names of other inputs of that shape
_EMBEDDED = "inputs_embeds"  # as transformers calls tokens that are embedded already


def count_tokens(inputs: Iterable[tuple[str, Any]]) -> int | None:
    """Of tensors, or what has their shape and dtype, by name: batch times sequence length of the first input that holds
    indices of tokens: 32- or 64-bit integers in two dimensions, whose name says nothing else (a mask, labels,
    positions); else of embedded tokens, which transformers calls ``inputs_embeds``. None where there is neither, as of
    images and of classes.

    >>> ids, image, classes = torch.empty(8, 512, dtype=torch.int64), torch.empty(8, 3, 224, 224), torch.arange(8)
    >>> count_tokens([("attention_mask", ids), ("input_ids", ids)]), count_tokens([("x", image), ("y", classes)])
    (4096, None)
    """
    embedded = None
    for name, tensor in inputs:
        is_index = str(tensor.dtype).endswith(("int64", "int32")) and not any(word in name for word in _NOT_TOKENS)
        if len(tensor.shape) == 2 and is_index:
            if getattr(tensor, "is_nested", False):  # rows of different lengths, one after another in its values
                return int(tensor._values.shape[0])
            return int(tensor.shape[0] * tensor.shape[1])
        if name == _EMBEDDED and len(tensor.shape) == 3:
            embedded = int(tensor.shape[0] * tensor.shape[1])
    return embedded


def name_tensors(arguments: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors among the arguments of a call with the innermost names that lead to them, "" of positional ones."""
    for path, tensor in tensor_paths(arguments):
        yield next((access.key for access in reversed(path) if isinstance(access.key, str)), ""), tensor
