"""What TorchInductor's objects of a kernel that it generates tell of it: its tensors, its loops, what it computes."""
from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch._inductor import ir, scheduler, select_algorithm
from torch._inductor.codegen import common, simd, simd_kernel_features, triton_combo_kernel
from torch._inductor.runtime import hints
from torch._inductor.utils import get_fused_kernel_name
from torch._inductor.virtualized import V
from torch.utils._pytree import tree_leaves, tree_map

from analyzer.hardware.kernel_time.generated import INNER, MIXED, OUTER, PERSISTENT, POINTWISE, TILED
from analyzer.meta.fused_kernel import DOUBLE, FusedKernel
from analyzer.meta.spec import Signature, TensorSpec


def name_of(nodes: Sequence[Any], kernel: Any) -> str:
    """As Inductor names its kernels, without its number."""
    kind = "cpp"
    if isinstance(kernel, select_algorithm.TritonTemplateKernel):
        kind = "tem"
    elif isinstance(kernel, triton_combo_kernel.ComboKernel):
        kind = "for"
    elif isinstance(kernel, simd.SIMDKernel):
        kind = "poi" if not kernel.inside_reduction else "per" if kernel.persistent_reduction else "red"
    return f"{kind}_{get_fused_kernel_name(nodes, 'original_aten')}"


def list_buffers(arguments: Any) -> tuple[dict[str, str], dict[str, str]]:
    """The buffers that a kernel reads and writes, by name, without those that live in registers alone; each with the
    name that the program has for it when the kernel runs: one that is written in place has its new one by then.
    """
    read: dict[str, str] = {}
    written: dict[str, str] = {}
    inplace = {id(a): a for a in arguments.inplace_buffers.values() if not isinstance(a, common.RemovedArg)}
    for argument in inplace.values():
        read[argument.other_names[0]] = written[argument.other_names[-1]] = argument.other_names[-1]
    for names, found in ((arguments.input_buffers, read), (arguments.output_buffers, written)):
        found.update({outer: outer for outer, inner in names.items()
                      if outer not in arguments.inplace_buffers and not isinstance(inner, common.RemovedArg)
                      and outer not in V.graph.removed_buffers})
    written.update({a.outer_name: a.outer_name for a in arguments.workspace_args})
    return read, written


def describe(name: str, kernel: Any, parts: Sequence[Any], read: Iterable[str],
             written: Iterable[str]) -> tuple[FusedKernel, str]:
    """What a kernel of the scheduler's ``parts`` is, and the operators that it computes, by `places_of`."""
    nodes = [node for part in parts if isinstance(part, scheduler.BaseSchedulerNode) for node in part.get_nodes()]
    touched: list[dict[str, int]] = [{}, {}]
    origins: dict[fx.Node, None] = {}
    own_names = V.graph.scheduler.mutation_real_name  # of what is written in place: each write has a name, too
    for node in nodes:
        for accesses, is_read in zip(touched, (True, False)):
            for name_then, nbytes in node.get_read_write_buffer_accesses(is_read, not is_read).items():
                buffer = own_names.get(name_then, name_then)
                accesses[buffer] = max(accesses.get(buffer, 0), nbytes)
        origins.update(dict.fromkeys(() if node.node is None else node.node.get_origins()))
    sizes = list(_sizes_of(kernel, nodes)) or [(1, 1)]
    elements, reduced = max(sizes, key=math.prod)
    if isinstance(kernel, triton_combo_kernel.ComboKernel):  # whose parts lie side by side
        elements = sum(part for part, _ in sizes)
    workspaces = {a.outer_name: int(a.count) * a.dtype.itemsize
                  for a in getattr(kernel, "args", kernel).workspace_args}
    made = {name for node in nodes for name in node.get_buffer_names()}
    origins = _drop_made_before(origins, [name for name in read if name not in made])  # some it makes and reads again
    alone = {own for node in V.graph.scheduler.nodes if node.is_extern() for own in origins_of_extern(node.node)}
    origins = {node: None for node in origins if node not in alone}  # whose tensors it may prepare
    signatures = tuple([_signature_of(origin) for origin in origins
                        if origin.op == "call_function" and origin.target is not operator.getitem])
    found = FusedKernel(name, elements, reduced, tuple([touched[0].get(b, 0) for b in read]),
                        tuple([touched[1].get(b, workspaces.get(b, 0)) for b in written]),
                        tuple([str(signature.op) for signature in signatures]), signatures, _kind_of(kernel),
                        _reread_bytes(kernel, parts), _count_scattered(kernel, reduced),
                        _count_spread(kernel, nodes))
    return found, places_of(origins)


def origins_of_extern(buffer: Any) -> list[fx.Node]:
    """The operator that a library's kernel is for: Inductor names those of what it reads too."""
    if buffer is None:
        return []
    own, operator = buffer.get_origin_node(), getattr(buffer, "op_overload", None)
    return [own] if own is not None else [node for node in buffer.get_origins() if node.target is operator]


def _drop_made_before(origins: Mapping[fx.Node, None], read: Iterable[str]) -> dict[fx.Node, None]:
    """Of the nodes that Inductor names as a kernel's origins those that it computes, not those behind what it reads."""
    buffers = [V.graph.try_get_buffer(name) for name in read]
    given = {buffer.get_origin_node() for buffer in buffers if isinstance(buffer, ir.Buffer)}
    found = {node for node in origins if not any(user in origins for user in node.users)}
    stack = list(found)
    while stack:
        for node in stack.pop().all_input_nodes:
            if node in origins and node not in given and node not in found:
                found.add(node)
                stack.append(node)
    return {node: None for node in origins if node in found}


def _kind_of(kernel: Any) -> str:
    """How a kernel runs."""
    if not isinstance(kernel, simd.SIMDKernel) or not kernel.inside_reduction:
        return TILED if "y" in getattr(kernel, "numels", ()) else POINTWISE
    if kernel.mix_order_reduction:
        return MIXED
    if kernel.persistent_reduction:
        return PERSISTENT
    hint = kernel.features.get_reduction_hint()
    return OUTER if hint in (hints.ReductionHint.OUTER, hints.ReductionHint.OUTER_TINY) else INNER


def _reread_bytes(kernel: Any, nodes: Sequence[Any]) -> int:
    """What loops of a kernel read that the loops before them touched already."""
    if _kind_of(kernel) not in (INNER, OUTER):
        return 0
    again, before, touched = 0, set[str](), dict[str, int]()
    for node in (*nodes, simd_kernel_features.EnableReduction):
        if node is simd_kernel_features.EnableReduction:  # a loop ends
            again += sum(nbytes for buffer, nbytes in touched.items() if buffer in before)
            before.update(touched)
            touched = {}
        elif isinstance(node, scheduler.BaseSchedulerNode):
            touched.update(node.get_read_write_buffer_accesses(True, True))
    return again


#: Of rows that are longer a kernel that keeps them has one in a block (``MAX_PERSISTENT_BLOCK_NUMEL`` of
#: ``torch/_inductor/runtime/triton_heuristics.py`` is 4,096 elements, and blocks are of 1 or 8 rows).
_ROWS_TOGETHER = 512


def _count_scattered(kernel: Any, reduced: int) -> int:
    """How many elements a kernel that has one row in a block writes where its row does not lead: a transposed copy.
    Where Inductor times several shapes of blocks (`ReductionHint.DEFAULT` of a loop) some have rows side by side.
    """
    if not isinstance(kernel, simd.SIMDKernel) or not kernel.inside_reduction:
        return 0
    hint = kernel.features.get_reduction_hint(getattr(kernel, "tiling_scores", None))
    is_alone = reduced > _ROWS_TOGETHER if kernel.persistent_reduction else hint is hints.ReductionHint.INNER
    if not is_alone or hint in (hints.ReductionHint.OUTER, hints.ReductionHint.OUTER_TINY):
        return 0
    features = kernel.features
    found = simd_kernel_features.MemoryEstimator(features, (features.numel, features.reduction_numel))
    loops = [found.persistent] if kernel.persistent_reduction else [found.outside_loop, *found.loops]
    writes = [dep for loop in loops for deps in loop.writes.values() for dep in deps]
    return sum(_as_int(dep.get_numel()) for dep in writes
               if V.graph.sizevars.stride_vars(dep.index, found.symbols)[-1] not in (0, 1))


#: Of functions that Inductor's loops have, those that take many instructions of a vector's elements.
_SPREAD = frozenset(("exp", "exp2", "log", "log2", "rsqrt", "sqrt", "tanh", "sigmoid"))


def _count_spread(kernel: Any, nodes: Sequence[Any]) -> tuple[tuple[str, int], ...]:
    """Functions of vectors that lie along a kernel's rows (of any, without rows), by name: for each element of its
    loops, as the source has them there. Blocks of tiles share them among many, and a row's own are once for it.
    """
    found = Counter[str]()
    kind = _kind_of(kernel)
    for node in nodes if kind != TILED else ():
        if not isinstance(node, scheduler.SchedulerNode) or node._body is None:  # a template's
            continue
        body, reach = node._body, dict[fx.Node, set[Any]]()
        sizes = {var: _as_int(size) for var, size in body.var_ranges.items() if _as_int(size) > 1}
        along = set(list(sizes)[-1:] if kind != POINTWISE else sizes)
        for step in body.root_block.graph.nodes:
            reach[step] = set().union(*[reach[given] for given in step.all_input_nodes])
            if step.target == "get_index":
                reach[step] = {var for var in sizes if var in body.indexing_exprs[step.args[0]].free_symbols}
            name = DOUBLE if step.target == "to_dtype" and torch.float64 in step.args else step.target
            if (name in _SPREAD or name == DOUBLE) and reach[step] & along and reach[step] != set(sizes):
                found[name] += math.prod(sizes.values())
    return tuple(sorted(found.items()))


def _sizes_of(kernel: Any, nodes: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """Of each loop nest of a kernel how many results it gives, and of how many elements each."""
    for part in getattr(kernel, "sub_kernels", [kernel]):
        if isinstance(part, simd.SIMDKernel):
            numels = {prefix: _as_int(n) for prefix, n in part.numels.items()}
            yield (math.prod(n for prefix, n in numels.items() if not prefix.startswith("r")),
                   math.prod(n for prefix, n in numels.items() if prefix.startswith("r")))
        else:
            for node in nodes:
                if isinstance(node, scheduler.SchedulerNode):
                    yield tuple(math.prod(map(_as_int, sizes)) for sizes in node.get_ranges())  # type: ignore[misc]


def _as_int(size: Any) -> int:
    return int(V.graph.sizevars.optimization_hint(size))


def places_of(origins: Iterable[fx.Node]) -> str:
    """The operators that a kernel computes, of those that stem from the joint graph, as a program names them."""
    return " ".join(map(name_place, sorted({origin.meta["place"] for origin in origins if "place" in origin.meta})))


def name_place(place: int) -> str:
    """A program's name for the operator at a place in the joint graph, a word as names of buffers are."""
    return f"o{place}"


@lru_cache(None)
def read_places(names: str) -> tuple[int, ...]:
    """The places that `places_of` names."""
    return tuple([int(name[1:]) for name in names.split()])


def _signature_of(node: fx.Node) -> Signature:
    """A node of a graph as the call of an operator."""
    def specify(value: Any) -> Any:
        if isinstance(value, fx.Node):
            value = value.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return value
        shape, stride = tuple(map(int, value.shape)), tuple(map(int, value.stride()))
        return TensorSpec.of(shape, stride, value.dtype, str(value.device))

    args, kwargs = tree_map(specify, (node.args, node.kwargs), is_leaf=lambda x: isinstance(x, fx.Node))
    inputs = [spec for spec in tree_leaves((args, kwargs), is_leaf=lambda x: isinstance(x, TensorSpec))
              if isinstance(spec, TensorSpec)]
    outputs = tuple([specify(t) for t in tree_leaves(node.meta.get("val")) if isinstance(t, torch.Tensor)])
    target = node.target.default if isinstance(node.target, torch._ops.OpOverloadPacket) else node.target  # of a pass
    return Signature(target, args, kwargs, tuple(inputs), outputs)  # type: ignore[arg-type]
