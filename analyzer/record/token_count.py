"""How many tokens a model is given: positions of sequences, of all samples."""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch

from analyzer.meta.structure import tensor_paths

_NOT_TOKENS = ("mask", "label", "target", "position", "segment", "type")  # in names of other inputs of that shape
_EMBEDDED = "inputs_embeds"  # as transformers calls tokens that are embedded already


class Shaped(Protocol):
    """A tensor, or what is known of one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""

    @property
    def dtype(self) -> object:
        """Of its elements, or its name."""


def count_tokens(inputs: Iterable[tuple[str, Shaped]]) -> int | None:
    """Batch times sequence length of the first input that holds indices of tokens: 32- or 64-bit integers in two
    dimensions, whose name says nothing else (a mask, labels, positions); else of embedded tokens, which transformers
    calls ``inputs_embeds``. None where there is neither, as of images and of classes.

    >>> ids, image, classes = torch.empty(8, 512, dtype=torch.int64), torch.empty(8, 3, 224, 224), torch.arange(8)
    >>> count_tokens([("attention_mask", ids), ("input_ids", ids)]), count_tokens([("x", image), ("y", classes)])
    (4096, None)
    """
    embedded = None
    for name, tensor in inputs:
        is_index = str(tensor.dtype).endswith(("int64", "int32")) and not any(word in name for word in _NOT_TOKENS)
        if len(tensor.shape) == 2 and is_index:
            return int(tensor.shape[0] * tensor.shape[1])
        if name == _EMBEDDED and len(tensor.shape) == 3:
            embedded = int(tensor.shape[0] * tensor.shape[1])
    return embedded


def name_tensors(arguments: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors among the arguments of a call with the innermost names that lead to them, "" of positional ones."""
    for path, tensor in tensor_paths(arguments):
        yield next((access.key for access in reversed(path) if isinstance(access.key, str)), ""), tensor
