"""Puts a plan into a program, and says which results a region keeps."""
from __future__ import annotations

import copy
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.checkpoint import checkpoint

from analyzer.errors import InputError
from analyzer.fx.fake_tensor import GeneratorState
from analyzer.fx.graph.offload import StorageTable, alias_with_version
from analyzer.fx.graph.region_edit import find_nodes, set_region
from analyzer.fx.graph.statement import CheckpointRegion

from .block_copy import BlockCopies, CopyEngine, OffloadedTensor, can_wait_on_host

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
        elif name in self.skips and isinstance(result, torch.Tensor) and result.is_floating_point() and _tensors(
                (args, kwargs)):  # what is made of no tensor is made again
            self.skipped[name] = result.shape, result.dtype
        return result

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        if self.operators not in (None, self.names):
            self.skipped.clear()
        self.versions = {i: [t._version for t in _tensors(result)] for i, result in self.results.items()}
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
        if [t._version for t in _tensors(result)] != self.versions[name]:
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


def _tensors(result: Any) -> list[torch.Tensor]:
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
            for tensor in _tensors(result):
                self.given.put(tensor, True)
            return result
        if name in self.kept.skipped:
            shape, dtype = self.kept.skipped[name]
            source = _tensors((args, kwargs))[0]
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


@dataclass(frozen=True, slots=True)
class PlanRegion:
    """Nodes that run under one checkpoint."""

    nodes: tuple[str, ...]
    #: ordinals of the products (matrix products, convolutions, fused attention) whose results are kept
    keeps: tuple[int, ...] = ()
    products: int = 0                   #: that it calls
    #: ordinals of products that are not run again though nothing is kept of them: the region does not read them
    skips: tuple[int, ...] = ()
    cost: float = 0.0                   #: of running it again, in units of the plan's objective

    def __post_init__(self) -> None:
        if not self.nodes:
            raise InputError(f"nodes={self.nodes!r}: a checkpoint runs one node or more")


def apply_to_graph(gm: fx.GraphModule, regions: Iterable[PlanRegion], plan_name: str) -> fx.GraphModule:
    planned = copy_graph_module(gm)
    for i, region in enumerate(regions):
        nodes = find_nodes(planned, region.nodes, f"plan of {plan_name}, checkpoint {i}")
        norms = (planned.get_submodule(str(n.target)) for n in nodes if n.op == "call_module")
        set_region(planned, nodes, CheckpointRegion(i, context_fn=_context(region, norms)), recompile=False)
    planned.recompile()
    return planned


def copy_graph_module(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy that shares parameters, and whose annotations are its own."""
    copied = copy.copy(gm)
    copied.meta = dict(gm.meta)
    return copied


def _context(region: PlanRegion, modules: Iterable[nn.Module]) -> KeepResults | None:
    norms = tracked_norms(modules)
    keeps, skips = name_products(region.keeps), name_products(region.skips)
    return KeepResults(keeps, norms, skips) if keeps or norms or skips else None


def name_products(ordinals: Iterable[int]) -> tuple[str, ...]:
    return tuple(f"product#{ordinal}" for ordinal in ordinals)


def tracked_norms(modules: Iterable[nn.Module]) -> tuple[_NormBase, ...]:
    return tuple(m for m in modules if isinstance(m, _NormBase) and m.track_running_stats)


@dataclass(frozen=True, slots=True)
class BlockChoice:
    """What becomes of the saved tensors of one block, a module of the model. Where it ``runs_again``, under a
    checkpoint, all but the results it ``keeps``; without, autograd saves what it saves. Results are named as
    `KeepResults` says.
    """

    path: str
    runs_again: bool = False
    keeps: tuple[str, ...] = ()         #: results that stay on the device
    offloads: tuple[str, ...] = ()      #: results that wait on the host
    offloads_input: bool = False        #: the block's input waits there too
    skips: tuple[str, ...] = ()         #: results that are not computed again, as others alone read them
    kept_bytes: int = 0                 #: on the device, its input included
    offloaded_bytes: int = 0
    recompute_seconds: float = 0.0      #: of kernels that run again
    copy_seconds: float = 0.0           #: of copies that nothing hides
    operators: int | None = None        #: `digest_names` of all its results, as planned; None: nothing is skipped

    @property
    def kind(self) -> tuple[Any, ...]:
        """What blocks with the same choice share."""
        return self.runs_again, self.keeps, self.offloads, self.offloads_input, self.skips


class PlannedForward:
    """A block's forward as a plan has it, in the place of ``forward`` on the module; its class and hooks stay."""

    def __init__(self, module: nn.Module, choice: BlockChoice, engine: CopyEngine,
                 around: Callable[[str], AbstractContextManager[Any]] | None = None) -> None:
        self.module, self.choice, self.engine, self.around = module, choice, engine, around
        self.before = vars(module).get("forward")  #: what the user had put there

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.before or type(self.module).forward.__get__(self.module)
        choice = self.choice
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        copies = BlockCopies(self.engine)
        args, kwargs = tree_map(lambda value: value, (args, kwargs))  # lists that others append to, as of DenseNet
        if not choice.runs_again:
            with nullcontext() if self.around is None else self.around(choice.path):
                output = forward(*args, **kwargs)
        else:
            norms = tracked_norms(self.module.modules())
            skips = () if choice.operators is None else choice.skips
            context = KeepResults((*choice.keeps, *choice.offloads), norms, skips, choice.offloads, copies,
                                  choice.operators)
            with _sending(args, copies) if choice.offloads_input else nullcontext():
                # whose own keywords may have the same names
                output = checkpoint(partial(forward, **kwargs), *args, use_reentrant=False, context_fn=context)
        copies.end(next((t for t in _tensors(output) if t.requires_grad), None))
        return output


def _sending(args: tuple[Any, ...], copies: BlockCopies) -> AbstractContextManager[Any]:
    """Let those of ``args`` wait on the host that a checkpoint saves and that have a gradient."""
    storages = {t.untyped_storage()._cdata for t in _tensors(args) if t.requires_grad}

    def pack(tensor: torch.Tensor) -> Any:
        is_input = tensor.untyped_storage()._cdata in storages
        return copies.send(tensor) if is_input and can_wait_on_host(tensor) else tensor

    return saved_tensors_hooks(pack, lambda saved: saved.take() if isinstance(saved, OffloadedTensor) else saved)


def apply_choices(model: nn.Module, choices: Iterable[BlockChoice], caller: str,
                  around: Callable[[str], AbstractContextManager[Any]] | None = None) -> None:
    """Give the blocks of ``model`` a `PlannedForward`. Raises InputError, and changes none, where one is missing."""
    if not isinstance(model, nn.Module):
        raise InputError(f"{caller}: takes a torch.nn.Module")
    found, engine = [], CopyEngine()
    for choice in choices:
        try:
            module = model.get_submodule(choice.path)
        except AttributeError:
            raise InputError(f"{caller}: {type(model).__name__} has no module {choice.path!r}, which the plan is for"
                             ) from None
        if isinstance(vars(module).get("forward"), PlannedForward):
            raise InputError(f"{caller}: {choice.path} is under a plan already; plan.undo(model) first")
        found.append((module, choice))
    for module, choice in found:
        module.forward = PlannedForward(module, choice, engine, around)


def undo_choices(model: nn.Module, choices: Iterable[BlockChoice], caller: str) -> None:
    for choice in choices:
        module = model.get_submodule(choice.path)
        planned = vars(module).get("forward")
        if not isinstance(planned, PlannedForward):
            raise InputError(f"{caller}: {choice.path} is not under a plan")
        del module.forward
        if planned.before is not None:
            module.forward = planned.before
