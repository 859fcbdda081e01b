"""Which results a checkpoint keeps: how they are named, and what is around a region when it runs and runs again."""
from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from analyzer.fx.fake_tensor import GeneratorState
from analyzer.fx.graph.offload import StorageTable, alias_with_version

from .block_copy import BlockCopies, OffloadedTensor

_PRODUCTS = frozenset("mm addmm bmm baddbmm addbmm mv addmv dot convolution convolution_overrideable cudnn_convolution "
                      "mkldnn_convolution _scaled_mm _grouped_mm".split())


def is_product(op: Any) -> bool:
    """Whether an operator is among a region's products: matrix products, convolutions, fused attention, by any backend.

    >>> is_product(torch.ops.aten.addmm.default), is_product(torch.ops.aten.add.Tensor)
    (True, False)
    """
    name = op._schema.name.partition("::")[2] if isinstance(op, torch._ops.OpOverload) else ""
    return name in _PRODUCTS or name.startswith("_scaled_dot_product_")


def result_key(op: Any) -> str:
    """What results of an operator are counted under: ``product`` for those that `is_product` tells, else its name.

    >>> result_key(torch.ops.aten.addmm.default), result_key(torch.ops.aten.silu.default)
    ('product', 'aten.silu.default')
    """
    return "product" if is_product(op) else str(op)


@dataclass(frozen=True)
class KeepResults:
    """The ``context_fn`` of a checkpoint: keeps some results and runs the rest again.

    A result is named by what `result_key` gives and its place among the region's calls of that key: ``product#0``,
    ``aten.silu.default#1``. Products count together, so that the same plan holds where attention or convolution run
    another kernel. Of ``keeps``, those that are in ``offloads`` too wait on the host (`BlockCopies`).
    Results at ``skips`` are not computed again either, and nothing is kept of them: they are read outside of the
    region alone, and all that a gradient needs of them are their inputs. In place of such a result there are NaNs that
    take no memory.

    What is written into a result in place right after (a bias, a mask) is kept with it. ``norms`` are normalization
    layers of the region whose running statistics the forward updates, once.
    ``operators`` is the `digest_names` of the region as planned: where other kernels run than those, a name is that of
    another result, and nothing is skipped. None: the program is the planned one.

    Raises RuntimeError in backward where a kept result was written to after the region.
    """

    keeps: tuple[str, ...] = ()
    norms: tuple[_NormBase, ...] = ()
    skips: tuple[str, ...] = ()
    offloads: tuple[str, ...] = ()
    copies: BlockCopies | None = None
    operators: int | None = None

    __name__ = "keep_results"  # in generated code

    def __call__(self) -> tuple[AbstractContextManager[Any], _Again]:
        kept = _KeepingMode(frozenset(self.keeps), frozenset(self.skips), frozenset(self.offloads), self.copies,
                            self.operators)
        return kept if kept.keeps or kept.skips else nullcontext(), _Again(kept, self.norms)


class _KeepingMode(TorchDispatchMode):
    """Is around the region when it runs, and holds the results that this run keeps."""

    def __init__(self, keeps: frozenset[str], skips: frozenset[str], offloads: frozenset[str],
                 copies: BlockCopies | None, operators: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keeps, self.skips, self.offloads, self.copies = keeps, skips, offloads, copies
        self.operators, self.names = operators, digest_names(())
        self.met: Counter[str] = Counter()
        self.skipped: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self.results: dict[str, Any] = {}
        self.generators: dict[str, GeneratorState | None] = {}
        self.versions: dict[str, list[int]] = {}  #: when the region has run: what is written later, it did not write

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = take_name(func, self.met)
        self.names = digest_names((name,), self.names)
        if name in self.keeps:
            self.results[name] = tree_map_only(torch.Tensor, alias_with_version, result)
            self.generators[name] = GeneratorState.after(func, result)
        elif name in self.skips and isinstance(result, torch.Tensor) and result.is_floating_point() and list_tensors(
                (args, kwargs)):  # what is made of no tensor is made again
            self.skipped[name] = result.shape, result.dtype
        return result

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        if self.operators not in (None, self.names):
            self.skipped.clear()
        self.versions = {i: [t._version for t in list_tensors(result)] for i, result in self.results.items()}
        if self.copies is not None and exc == (None, None, None):
            send = self.copies.send
            for name in self.offloads & self.results.keys():  # as the region leaves them
                self.results[name] = tree_map_only(torch.Tensor, send, self.results[name])

    def give(self, name: str) -> Any:
        """A kept result, which is given out once, so that it is freed as early as a saved tensor."""
        result = self.results.pop(name)
        if (generator := self.generators[name]) is not None:  # what draws after it draws the same numbers as before
            generator.restore()
        if name in self.offloads:
            return tree_map_only(OffloadedTensor, OffloadedTensor.take, result)
        if [t._version for t in list_tensors(result)] != self.versions[name]:
            raise RuntimeError(
                f"the result {name} that a checkpoint keeps was written to in place after the checkpointed region ran; "
                "make a plan that runs it again, or write to a copy of it")
        return tree_map_only(torch.Tensor, torch.Tensor.detach, result)


def take_name(op: Any, met: Counter[str]) -> str:
    """The name of the result of the next call of ``op``, which is counted in ``met``."""
    key = result_key(op)
    met[key] += 1
    return f"{key}#{met[key] - 1}"


def digest_names(names: Iterable[str], before: int = 0) -> int:
    """A number that tells operators of a region apart from others: of the names of their results, in order, after those
    ``before``. Autograd detaches a result of its own that it saves, unless a checkpoint is around: it counts for none.

    >>> digest_names(["product#0", "aten.mm#0"]) == digest_names(["aten.mm#0"], digest_names(["product#0"]))
    True
    """
    return zlib.crc32("".join(name for name in names if not name.startswith("aten.detach.")).encode(), before)


def list_tensors(result: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]


def _writes_first(op: Any) -> bool:
    if not isinstance(op, torch._ops.OpOverload) or not op._schema.is_mutable:
        return False
    first = op._schema.arguments[0]
    return first.alias_info is not None and first.alias_info.is_write and str(first.type) == "Tensor"


class _Giving(TorchDispatchMode):
    def __init__(self, kept: _KeepingMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept, self.met = kept, Counter[str]()
        self.given: StorageTable[bool] = StorageTable()  #: where results lie that were given out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = take_name(func, self.met)
        if name in self.kept.results:  # not in a second backward pass: then it runs again
            result = self.kept.give(name)
            for tensor in list_tensors(result):
                self.given.put(tensor, True)
            return result
        if name in self.kept.skipped:
            shape, dtype = self.kept.skipped[name]
            source = list_tensors((args, kwargs))[0]
            nothing = source.new_full((), math.nan, dtype=dtype).expand(shape)
            self.given.put(nothing, True)
            return nothing
        if args and _writes_first(func) and self.given.find(args[0]):
            return args[0]  # it was kept as this left it
        return func(*args, **(kwargs or {}))


class _Again:
    """What is around the region when it runs again; it can be entered again, for another backward pass."""

    def __init__(self, kept: _KeepingMode, norms: tuple[_NormBase, ...]) -> None:
        self.kept, self.norms = kept, norms
        self.undo = ExitStack()

    def __enter__(self) -> None:
        for m in self.norms:
            self.undo.callback(setattr, m, "momentum", m.momentum)
            m.momentum = 0.0  # the new statistics are the old ones
            if (tracked := m._buffers.get("num_batches_tracked")) is not None:
                self.undo.callback(m._buffers.__setitem__, "num_batches_tracked", tracked)
                m._buffers["num_batches_tracked"] = None
        if self.kept.keeps or self.kept.skips:
            self.undo.enter_context(_Giving(self.kept))

    def __exit__(self, *exc: Any) -> None:
        self.undo.__exit__(*exc)


def tracked_norms(modules: Iterable[nn.Module]) -> tuple[_NormBase, ...]:
    return tuple(m for m in modules if isinstance(m, _NormBase) and m.track_running_stats)
