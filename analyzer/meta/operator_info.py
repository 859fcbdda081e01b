"""What is known of an operator: its schema, and its registered shape."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from analyzer.errors import InputError
from analyzer.registry import Call, Registry

from .spec import check_operator, compositions
from .value.expectation import ESTIMATED, TESTS
from .value.nonzero_bound import BOUNDING

# Shapes of operators that torch cannot run without data.

Impl = Callable[..., Any]


def check_loaded_operator(key: Any, caller: str) -> Any:
    """The operator that ``key`` stands for, or a Python function with a registered shape. Raises InputError else."""
    return _refuse_name(check_operator(key, caller, register_shape_impl), caller)


def _check_shaped(key: Any, caller: str) -> Any:
    return _refuse_name(check_operator(key, caller, None), caller)


def _refuse_name(key: Any, caller: str) -> Any:
    if isinstance(key, str):
        raise InputError(f"{caller}: no library that is loaded defines it; import it before, or pass the operator")
    return key


register_shape_impl: Registry[Any, Impl] = Registry(
    "register_shape_impl", _check_shaped, Call("f(*args, **kwargs)"))
"""Register the shape of an operator: a function of its arguments that returns empty tensors of the right specs.

The key is a ``torch.ops`` operator (one overload or all), what ``@torch.library.custom_op`` made, or a Python function
of the user's, which is one operator in traced graphs. The tensors that the function gets are on meta; make the result
with ``x.new_empty(...)``. An operator with a registered shape and no autograd formula is one autograd node that saves
its tensor inputs and gives gradients to its floating inputs. Raises InputError for another key."""

device_shapes: Registry[Any, Impl] = Registry("device_shapes")
"""What an operator's CUDA kernel returns, where torch's meta kernel differs or lacks: a function of meta tensors."""

host_shapes: Registry[Any, Impl] = Registry("host_shapes")
"""The same for what the CPU kernel returns."""

sparse_shapes: Registry[Any, Impl] = Registry("sparse_shapes")
"""What an operator returns where an argument is sparse, for operators whose meta kernels take dense ones alone."""


# What an operator's schema says about aliases and data.

#: of torch.distributed's operators
COLLECTIVE_NAMESPACES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"})
_FILLERS = {"full", "zeros", "ones", "full_like", "zeros_like", "ones_like", "new_full", "new_zeros", "new_ones",
            "scalar_tensor"}
_ENUMERATORS = {"arange", "eye", "linspace", "logspace", "tril_indices", "triu_indices"}
_UNDEFINED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted",
              "_efficientzerotensor"}
_OVERWRITES = {"fill_", "zero_", "copy_"}
# These change the metadata of a tensor that exists, or a storage's size: the result depends on more than specs. The
# last makes a tensor that C++ knows to be zero (its dispatch key ZeroTensor), which takes other ways through autograd.
_UNCACHED = {"resize_", "resize_as_", "set_", "_resize_output_", "record_stream", "_local_scalar_dense", "as_strided_",
             "view_as_complex", "_efficientzerotensor"}

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


class OperatorInfo:
    """Facts about one overload, read from its schema once."""

    __slots__ = ("op", "packet", "text", "rules_seen", "has_rule", "name", "silent", "mutated", "cacheable",
                 "is_random", "filler", "enumerator", "undefined", "overwrites", "composite", "reads_offset",
                 "data_dependent", "arguments", "host_outputs", "tests_finiteness", "runs_on_host", "returns_list",
                 "is_foreach", "is_estimated", "bounds_nonzero", "composition", "communicates", "refuses_overlaps",
                 "packed")

    def __init__(self, op: Any) -> None:
        schema = op._schema
        self.op, self.packet, self.text = op, op.overloadpacket, str(op)
        self.rules_seen, self.has_rule = -1, False  # what `memory_need.has_rule` found out, and when
        self.name: str = schema.name.rpartition("::")[2]
        #: of tensors, alone
        self.returns_list = len(schema.returns) == 1 and schema.returns[0].type.isSubtypeOf(
            torch._C.ListType.ofTensors())
        self.communicates = op.namespace in COLLECTIVE_NAMESPACES
        self.silent = op.namespace == "profiler"  # torch.profiler's own marks: nothing runs on a device
        self.arguments = tuple(a.name for a in schema.arguments)
        self.packed = tuple(i for i, a in enumerate(schema.arguments) if a.name in _PACKED)
        self.mutated = tuple(
            (i, a.name, a.kwarg_only) for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write)
        tags = op.tags
        self.is_random = torch.Tag.nondeterministic_seeded in tags
        tagged = torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
        self.data_dependent = tagged or self.name in ("equal", "allclose", "nms")
        out_variant = any(a.is_out for a in schema.arguments)
        # a group's name does not say how large it is, which decides shapes; functional collectives are told besides
        by_name = "group_name" in self.arguments and not op.namespace.startswith("_c10d_functional")
        self.cacheable = (self.name == "index" or self.name not in _UNCACHED and torch.Tag.inplace_view not in tags
                          and not out_variant and not self.data_dependent and op.namespace != "c10d" and not by_name)
        self.filler = self.name in _FILLERS
        self.tests_finiteness = self.name in TESTS and not self.mutated
        self.is_foreach = self.name.startswith("_foreach")
        is_inplace = self.name.endswith("_") and (not self.name.startswith("_") or self.is_foreach)
        self.refuses_overlaps = (op.namespace == "aten" and is_inplace and torch.Tag.inplace_view not in tags
                                 and self.name not in _UNCACHED
                                 and self.text.removeprefix("aten.").removesuffix(".default") not in _WRITES_OVERLAPS)
        self.is_estimated = self.name in ESTIMATED  # something is expected of contents that are not known
        self.bounds_nonzero = self.name in BOUNDING  # elements that were zero stay so, but for as many as are written
        self.enumerator = self.name in _ENUMERATORS
        self.undefined = self.name in _UNDEFINED
        self.overwrites = self.name in _OVERWRITES
        self.reads_offset = self.name.startswith("as_strided")
        self.host_outputs = _HOST_OUTPUTS.get(self.name, ())
        self.composite = bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"))
        #: what the device runs instead, None where it is one kernel or a composite of torch's
        self.composition = compositions.find(schema.name)
        # Contents are worked out on the host, where the kernels of cuDNN and other libraries of a device are not.
        self.runs_on_host: bool = torch._C._dispatch_has_computed_kernel_for_dispatch_key(op.name(), "CPU")


_infos: dict[Any, OperatorInfo] = {}


def describe_operator(op: Any) -> OperatorInfo:
    """The facts about ``op``, cached."""
    info = _infos.get(op)
    if info is None:
        info = _infos[op] = OperatorInfo(op)
    return info
