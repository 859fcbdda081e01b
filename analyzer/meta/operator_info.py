"""What is known of an operator: its schema, its registered shape, and the memory that its kernel needs."""
from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch._library.custom_ops import OPDEFS

from analyzer.errors import InputError, is_count
from analyzer.hardware.catalogue import ask_apart, simulated_spec
from analyzer.registry import Form, Registry, adding_to

from .address_space import MetaStorage, new_storage
from .refusal.overlap import looks_in_place
from .refusal.value import value_rules
from .spec import Signature, check_operator, compositions
from .state import MetaState
from .value.barred import FOLLOWED
from .value.expectation import ESTIMATED
from .value.nonzero_bound import BOUNDING
from .value.sample import STARTS

Impl = Callable[..., Any]


def _refuse_name(key: Any, caller: str) -> Any:
    if isinstance(key, str):
        raise InputError(f"{caller}: no library that is loaded defines it; import it before, or pass the operator")
    return key


register_shape_impl: Registry[Any, Impl] = Registry(
    "register_shape_impl", lambda key, caller: _refuse_name(check_operator(key, caller, None), caller),
    Form("f(*args, **kwargs)"))
"""Register the shape of an operator: a function of its arguments that returns empty tensors of the right specs.

The key is a ``torch.ops`` operator (one overload or all), what ``@torch.library.custom_op`` made, or a Python function
of the user's, which is one operator in traced graphs. The tensors that the function gets are on meta; make the result
with ``x.new_empty(...)``. An operator with a registered shape and no autograd formula is one autograd node that saves
its tensor inputs and gives gradients to its floating inputs. Raises InputError for another key."""

device_shapes: dict[Any, Impl] = {}
"""What an operator's CUDA kernel returns, where torch's meta kernel differs or lacks: a function of meta tensors."""

host_shapes: dict[Any, Impl] = {}
"""The same for what the CPU kernel returns."""

sparse_shapes: dict[Any, Impl] = {}
"""What an operator returns where an argument is sparse, for operators whose meta kernels take dense ones alone."""


#: of torch.distributed's operators
COLLECTIVE_NAMESPACES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"})
_FILLERS = {"full", "zeros", "ones", "full_like", "zeros_like", "ones_like", "new_full", "new_zeros", "new_ones",
            "scalar_tensor"}
#: which ask whether data is finite, by the numbers of a tensor alone or beside others
_FINITENESS = {"isnan", "isinf", "isposinf", "isneginf", "isfinite", "eq", "ne"}
_ENUMERATORS = {"arange", "eye", "linspace", "logspace", "tril_indices", "triu_indices", "iota"}
_UNDEFINED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted",
              "_efficientzerotensor"}
_OVERWRITES = {"fill_", "zero_", "copy_"}
# These change the metadata of a tensor that exists, or a storage's size: the result depends on more than specs. The
# last makes a tensor that C++ knows to be zero (its dispatch key ZeroTensor), which takes other ways through autograd.
_UNCACHED = {"resize_", "resize_as_", "set_", "_resize_output_", "record_stream", "_local_scalar_dense", "as_strided_",
             "view_as_complex", "_efficientzerotensor", "_fused_moving_avg_obs_fq_helper"}

# What may be written to a tensor whose elements lie one over another: what gives each the same (no check of overlaps in
# Fill.cpp and Activation.cpp), what only warns (TensorAdvancedIndexing.cpp), and kernels without TensorIterator. All
# others refuse it: assert_no_internal_overlap in MemoryOverlap.cpp.
_WRITES_OVERLAPS = {"fill_.Scalar", "zero_", "_foreach_zero_", "fill_diagonal_", "threshold_", "masked_fill_.Scalar",
                    "masked_fill_.Tensor", "index_fill_.int_Scalar", "index_fill_.int_Tensor", "index_put_", "tril_",
                    "triu_", "conj_physical_", "addmv_", "baddbmm_"}

# Outputs that CUDA kernels put on the host: seed and offset of the random numbers, outside of graph capture
# (_efficient_attention_forward in aten/src/ATen/native/transformers/cuda/attention.cu).
_HOST_OUTPUTS = {"_scaled_dot_product_efficient_attention": (2, 3), "_efficient_attention_forward": (2, 3)}

# Where the sequences begin that were packed into one: attention within each costs what their lengths say.
_PACKED = {"cum_seq_q", "cum_seq_k", "cu_seqlens_q", "cu_seqlens_k", "cu_seq_q", "cu_seq_k"}


class OperatorFacts:
    """Facts about one overload, read from its schema once."""

    def __init__(self, op: Any) -> None:
        schema = op._schema
        self.op, self.packet, self.text = op, op.overloadpacket, str(op)
        self.rules_seen, self.has_rule = -1, False  # what `has_rule` found out, and when
        self.name: str = schema.name.rpartition("::")[2]
        #: of tensors, alone
        self.returns_list = len(schema.returns) == 1 and schema.returns[0].type.isSubtypeOf(
            torch._C.ListType.ofTensors())
        self.communicates = op.namespace in COLLECTIVE_NAMESPACES
        self.silent = op.namespace == "profiler"  # torch.profiler's own marks: nothing runs on a device
        #: whether it runs on no device where there are zero tensors: their kernels find shapes on meta, as torch._refs
        #: does, by operators of its own (get_out_like and mul_zerotensor in BinaryOps.cpp)
        self.may_be_silent = self.silent or op.namespace == "prims"
        self.arguments = tuple(a.name for a in schema.arguments)
        self.packed = tuple(i for i, a in enumerate(schema.arguments) if a.name in _PACKED)
        self.mutated = tuple(
            (i, a.name, a.kwarg_only) for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write)
        tags = op.tags
        self.is_random = torch.Tag.nondeterministic_seeded in tags
        tagged = torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
        self.data_dependent = tagged or self.name in ("equal", "allclose", "nms")
        self.has_out = any(a.is_out for a in schema.arguments)
        # a group's name does not say how large it is, which decides shapes; functional collectives are told besides
        by_name = "group_name" in self.arguments and not op.namespace.startswith("_c10d_functional")
        self.cacheable = (self.name == "index" or self.name not in _UNCACHED and torch.Tag.inplace_view not in tags
                          and not self.has_out and not self.data_dependent and op.namespace != "c10d" and not by_name)
        self.filler = self.name in _FILLERS
        self.tests_finiteness = self.name in _FINITENESS and not self.mutated
        self.is_foreach = self.name.startswith("_foreach")
        #: that of tensors, which autograd leaves to kernels: single calls, increment_version in native/cuda/Foreach*.cu
        self.counts_versions = self.is_foreach and bool(self.mutated)
        is_inplace = self.name.endswith("_") and (not self.name.startswith("_") or self.is_foreach)
        self.refuses_overlaps = (op.namespace == "aten" and is_inplace and torch.Tag.inplace_view not in tags
                                 and self.name not in _UNCACHED
                                 and self.text.removeprefix("aten.").removesuffix(".default") not in _WRITES_OVERLAPS)
        #: whether it looks for memory that what it writes to shares with what it reads
        self.looks_in_place = bool(self.mutated) and not self.has_out and looks_in_place(op, self.name)
        self.is_estimated = self.name in ESTIMATED  # something is expected of contents that are not known
        self.bars = op.namespace == "aten" and self.name in FOLLOWED  # columns of scores, or keeps them barred
        self.bounds_nonzero = self.name in BOUNDING  # elements that were zero stay so, but for as many as are written
        self.is_followed = bool(self.mutated or self.filler or self.tests_finiteness or self.is_estimated
                                or self.name in STARTS or self.name in _UNDEFINED)
        #: what contents it refuses, where they are known
        self.check_values = value_rules.get(self.name) if op.namespace == "aten" else None
        self.enumerator = self.name in _ENUMERATORS
        self.undefined = self.name in _UNDEFINED
        self.overwrites = self.name in _OVERWRITES
        self.reads_offset = self.name.startswith("as_strided")
        self.host_outputs = _HOST_OUTPUTS.get(self.name, ())
        self.composite = bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"))
        self.composition = compositions.get(schema.name)  #: what the device runs instead of one kernel
        #: what ``torch.library.custom_op`` made of a function that is no communication
        self.written: Any = None if self.communicates or "group_name" in self.arguments else OPDEFS.get(schema.name)
        # Contents are worked out on the host, where the kernels of cuDNN and other libraries of a device are not.
        self.runs_on_host: bool = torch._C._dispatch_has_computed_kernel_for_dispatch_key(op.name(), "CPU")


_facts: dict[int, OperatorFacts] = {}  # by id of the operator, which they keep alive: torch hashes those in Python


def describe_operator(op: Any) -> OperatorFacts:
    """The facts about an operator."""
    found = _facts.get(id(op))
    if found is None:
        found = _facts[id(op)] = OperatorFacts(op)
    return found


other_rules: list[Callable[[Any], bool]] = []
"""Each tells of an operator whether a room above has a rule for it: of its FLOPs or its time."""


def is_described(info: OperatorFacts) -> bool:
    """Whether anything is registered of an operator, which then is one call, whatever it does inside."""
    return (has_rule(info) or any(key in register_shape_impl for key in (info.op, info.packet))
            or any(knows(info.op) for knows in other_rules))


_AT_LEAST_0 = "a whole number of bytes, at least 0"


class Stage(NamedTuple):
    """A part of an operator's run: blocks of these sizes are held together, then given back. ``before`` is the number,
    in the order of allocation, of the output that is allocated only after this stage, None where all outputs are there
    by then. A stage before an output whose blocks are ``kept`` gives them back only when the operator ends.
    """

    blocks: tuple[int, ...]
    before: int | None = None
    kept: bool = False


class MemoryNeed(NamedTuple):
    """What an operator takes besides its inputs and outputs, in bytes, and when."""

    workspace_bytes: int = 0  #: held once the outputs are there: a stage of its own, after all others
    #: held from forward until backward, besides saved inputs and outputs, by an operator with `register_shape_impl`;
    #: one with an autograd formula of its own holds what that saves
    saved_bytes: int = 0
    stages: tuple[Stage, ...] = ()  #: what is held while the kernel runs, where one block at its end does not say it
    output_order: tuple[int, ...] | None = None
    """The numbers of the outputs in the order in which the kernel allocates them, None where it is that of the result.
    It decides which of the allocator's free blocks each of them gets."""


register_memory_impl: Registry[Any, Callable[..., MemoryNeed]] = Registry(
    "register_memory_impl",
    lambda key, caller: _refuse_name(check_operator(key, caller, register_shape_impl), caller),
    Form("f(*args, out=..., **kwargs)", keywords=("out",)))
"""Register what an operator needs while it runs and saves: a function of its arguments' specs and ``out`` (the spec of
the output, or a tuple of them) that returns a `MemoryNeed`. The key is a ``torch.ops`` operator, one overload or all,
what ``@torch.library.custom_op`` made, or a Python function with a registered shape. Raises InputError for another key.
A rule that depends on the device's generation reads `analyzer.hardware.catalogue.simulated_spec`."""

class Held(NamedTuple):
    """A stage of a call, and what it holds in its place on other devices that share the run, by their names."""

    blocks: tuple[int, ...]
    before: int | None = None
    kept: bool = False
    elsewhere: tuple[tuple[str, tuple[int, ...]], ...] = ()


KernelMemory = tuple[tuple[Stage, ...], "tuple[int, ...] | None"]
"""What a call holds while it runs, and the order in which its outputs are allocated (None: that of the result)."""
HeldMemory = tuple[tuple[Held, ...], "tuple[int, ...] | None"]
"""The same, with what is held on other devices."""
_rules: dict[Any, Callable[[Signature], tuple[Stage, ...]]] = {}
_host_rules: dict[Any, Callable[[Signature], KernelMemory]] = {}


kernel_stages = adding_to(_rules)
"""Decorator: what CUDA kernels of operators hold while they run, from the specs of a call. For PyTorch's own;
`register_memory_impl` says as much from outside, and goes before it."""
host_memory = adding_to(_host_rules)
"""Decorator: the same of the CPU's kernels of operators, with the order of outputs."""

# As `MemoryNeed.output_order`, of CUDA's kernels: Dropout.cu, dropout_cuda (the mask first); cudnn/RNN.cpp, _cudnn_rnn
# (a buffer of weights before what is reserved).
_ORDERS: dict[Any, tuple[int, ...]] = {torch.ops.aten.native_dropout: (1, 0),
                                       torch.ops.aten._cudnn_rnn: (0, 1, 2, 4, 3)}


def has_rule(info: OperatorFacts) -> bool:
    rules = len(_rules) + len(_host_rules) + register_memory_impl.version  # none of which ever shrinks
    if info.rules_seen != rules:
        info.rules_seen = rules
        info.has_rule = (info.packet in _rules or info.packet in _ORDERS or info.packet in _host_rules
                         or info.op in register_memory_impl or info.packet in register_memory_impl)
    return info.has_rule


def registered_need(signature: Signature) -> MemoryNeed | None:
    """What the registered rule says of a call, None without one. Raises InputError for what no rule may return."""
    op, outputs = signature.op, signature.outputs
    rule = register_memory_impl.find(op) or register_memory_impl.find(getattr(op, "overloadpacket", None))
    if rule is None:
        return None
    need = rule(*signature.args, out=outputs[0] if len(outputs) == 1 else outputs, **signature.kwargs)
    def refuse(found: str, problem: str) -> InputError:
        return InputError(f"register_memory_impl({signature.op}): {found}: {problem}")
    if not isinstance(need, MemoryNeed):
        raise refuse(f"returned {need!r}", "return a MemoryNeed, as in MemoryNeed(workspace_bytes=x.nbytes)")
    for name in ("workspace_bytes", "saved_bytes"):
        if not is_count(getattr(need, name)):
            raise refuse(f"{name}={getattr(need, name)!r}", f"must be {_AT_LEAST_0}")
    # where some returns are None, they are counted too; a list of tensors is one return
    schema = getattr(signature.op, "_schema", None)  # a Python function has none
    count = max(len(signature.outputs), len(schema.returns) if schema else 0)
    if not isinstance(need.stages, tuple) or not all(isinstance(stage, Stage) for stage in need.stages):
        raise refuse(f"stages={need.stages!r}", "must be a tuple of Stage, as in (Stage((x.nbytes,), before=0),)")
    for stage in need.stages:
        if not isinstance(stage.blocks, tuple) or not all(map(is_count, stage.blocks)):
            raise refuse(f"{stage!r}", f"its blocks must be a tuple, of each block {_AT_LEAST_0}")
        if stage.before is not None and not (is_count(stage.before) and stage.before < count):
            raise refuse(f"{stage!r}", f"this call has outputs 0 to {count - 1}; None: after the last one")
    order = need.output_order
    if order is not None and not (isinstance(order, tuple) and all(map(is_count, order))
                                  and sorted(order) == list(range(count))):
        raise refuse(f"output_order={order!r}", f"must be a tuple that holds each of 0 to {count - 1} once")
    return need


def kernel_memory(signature: Signature) -> HeldMemory:
    """What a call holds on the simulated device, and beside it what it holds on others that may share the run: those
    on which more differs than the blocks that are held and given back have another run.
    """
    return ask_apart(_ask_memory, (signature,), _join_memory)


def _join_memory(found: HeldMemory, others: dict[str, HeldMemory]) -> tuple[HeldMemory, list[str]]:
    stages, order = found
    refused = []
    for name, (theirs, its_order) in others.items():
        joined = _join_stages(stages, name, theirs) if its_order == order else None
        if joined is None:
            refused.append(name)
        else:
            stages = joined
    return (stages, order), refused


def _join_stages(stages: tuple[Held, ...], name: str, theirs: tuple[Held, ...]) -> tuple[Held, ...] | None:
    """``stages``, beside each what another device holds in its place: before the same output, between the same blocks
    that are kept. One that a device lacks is there without blocks. None where it cannot be told which stage is which.
    """
    places = [_place_of(stage.before) for stage in stages]
    if places != sorted(places):
        return None
    joined: list[Held] = []
    for before in sorted({stage.before for stage in (*stages, *theirs)}, key=_place_of):
        kept, gaps = _split_at_kept(stages, before)
        its_kept, its_gaps = _split_at_kept(theirs, before)
        if [one.blocks for one in kept] != [one.blocks for one in its_kept]:
            return None
        for gap, its_gap, after in zip(gaps, its_gaps, [*kept, None]):
            if gap and its_gap and len(gap) != len(its_gap):
                return None
            for one, its in zip_longest(gap, its_gap):
                one, blocks = one or Held((), before), its.blocks if its else ()
                joined.append(one if blocks == one.blocks else one._replace(
                    elsewhere=(*one.elsewhere, (name, blocks))))
            joined += [] if after is None else [after]
    return tuple(joined)


def _place_of(before: int | None) -> tuple[bool, int]:
    """Outputs in order, then the end of the call."""
    return before is None, before or 0


def _split_at_kept(stages: tuple[Held, ...], before: int | None) -> tuple[list[Held], list[list[Held]]]:
    """The stages before an output whose blocks are kept, and those before, between and behind them."""
    kept: list[Held] = []
    gaps: list[list[Held]] = [[]]
    for stage in stages:
        if stage.before != before:
            continue
        if stage.kept:
            kept.append(stage)
            gaps.append([])
        else:
            gaps[-1].append(stage)
    return kept, gaps


def _ask_memory(signature: Signature) -> HeldMemory:
    packet = getattr(signature.op, "overloadpacket", None)
    need = registered_need(signature)
    if need is not None:
        stages = need.stages + ((Stage((need.workspace_bytes,)),) if need.workspace_bytes else ())
        return _as_held(stages), need.output_order
    key = ("kernel memory", simulated_spec().name)  # rules may ask for the device's generation
    found: HeldMemory | None = signature.memo.get(key)
    if found is None:
        if signature.is_sparse:
            found = (), None
        elif any(s.device.startswith("cuda") for s in (*signature.inputs, *signature.outputs)):
            rule = _rules.get(packet)
            found = _as_held(rule(signature)) if rule else (), _ORDERS.get(packet)
        else:
            stages, order = _host_rules[packet](signature) if packet in _host_rules else ((), None)
            found = _as_held(stages), order
        signature.memo[key] = found
    return found


def _as_held(stages: tuple[Stage, ...]) -> tuple[Held, ...]:
    return tuple([Held(*stage) for stage in stages])


def hold_blocks(state: MetaState, device: torch.device, blocks: tuple[int, ...],
                elsewhere: tuple[tuple[str, tuple[int, ...]], ...] = ()) -> None:
    """Allocate ``blocks`` one after the other, then free them: what an allocator sees of a kernel's temporaries, which
    are those of ``elsewhere`` on other devices.
    """
    space = state.space
    regions = []
    try:
        for nbytes in blocks:
            regions.append(space.reserve(device, nbytes))
        if state.recorder is not None:
            state.recorder.memory.took_workspace(sum(r.bytes for r in regions), device, blocks, elsewhere)
    finally:  # also where memory runs out midway
        for region in regions:
            space.give_back(device, region)


def hold_before(state: MetaState, stages: tuple[Held, ...], output: int, device: torch.device,
                kept: list[MetaStorage]) -> None:
    """Hold what a kernel holds before it allocates an output; ``kept`` gets what stays until it ends."""
    if state.graph is not None:  # only a graph is made of it
        return
    for stage in stages:
        if stage.before != output:
            continue
        if not stage.kept:
            hold_blocks(state, device, stage.blocks, stage.elsewhere)
            continue
        for nbytes in stage.blocks:
            kept.append(new_storage(nbytes, device, state.space))
            if state.recorder is not None:
                state.recorder.memory.holds_workspace(kept[-1])
