"""Every ATen operator with a tensor result has a formula that takes its arguments, or a reason to have none."""
import inspect

import pytest
import torch

from analyzer.meta.spec import Signature, TensorSpec
from analyzer.profilers.flop_registry import FlopCount, count_call, find_formula, is_zero_flop_op, register_flop_impl
from analyzer.profilers.operator.registration import OfSignature

aten = torch.ops.aten

# What decides the count is data that no specification holds.
UNKNOWN = {
    "nonzeros of a sparse tensor": """
        _coalesce _sparse_addmm _sparse_csr_prod _sparse_csr_sum _sparse_log_softmax _sparse_log_softmax_backward_data
        _sparse_mm_reduce_impl _sparse_mm_reduce_impl_backward _sparse_softmax _sparse_softmax_backward_data
        _sparse_sparse_matmul _sparse_sum _sparse_sum_backward _spsolve hspmm sparse_sampled_addmm sspaddmm""",
    "trials of a rejection sampler": "_sample_dirichlet _standard_gamma binomial poisson",
    "another algorithm on each device (torch 2.14)": "linalg_matrix_sqrth linalg_polar",
    "weights packed in an opaque object": "quantized_gru quantized_lstm",
}
UNKNOWN_NAMES = {name for names in UNKNOWN.values() for name in names.split()}


def spec(*shape, dtype=torch.float32):
    return TensorSpec.of(shape, (1,) * len(shape), dtype, "cuda:0")


def operators():
    """Overloads of aten and prims that write or return tensors and that the dispatcher does not decompose."""
    for full_name in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, rest = full_name.partition("::")
        if namespace not in ("aten", "prims") or "_test_" in rest or rest.startswith("_foobar"):
            continue
        name, _, overload = rest.partition(".")
        if namespace == "prims" and name not in torch._prims.__all__:
            continue  # what Inductor adds for its own code when something imports it
        op = getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
        gives_tensors = any("Tensor" in str(r.type) for r in op._schema.returns)
        writes_tensors = any(a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments)
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
        if (gives_tensors or writes_tensors) and not composite:
            yield op


def test_every_operator_is_counted_or_known_not_to_be():
    missing = {op._schema.name for op in operators() if find_formula(op) is None and not is_zero_flop_op(op)}
    assert missing <= {f"aten::{name}" for name in UNKNOWN_NAMES}


def test_no_operator_is_both_counted_and_zero():
    twice = [op.name() for op in operators() if find_formula(op) is not None and is_zero_flop_op(op)]
    assert twice == []


def test_formulas_take_the_arguments_of_their_operators():
    """Both as a call that gives all arguments and as one that leaves out the optional ones."""
    wrong = []
    for op in operators():
        formula = find_formula(op)
        if formula is None or isinstance(formula, OfSignature):
            continue
        arguments = [a for a in op._schema.arguments if not a.is_out]
        for passed in (arguments, [a for a in arguments if not a.has_default_value()]):
            positional = [None for a in passed if not a.kwarg_only]
            keywords = {a.name: None for a in passed if a.kwarg_only}
            try:
                inspect.signature(formula).bind(*positional, out=None, **keywords)
            except TypeError as error:
                wrong.append((op.name(), str(error)))
    assert wrong == []


@pytest.mark.parametrize("op, args", [
    (aten.add.Tensor, (spec(4, dtype=torch.int64), spec(4, dtype=torch.int64))),
    (aten.mm.default, (spec(2, 2, dtype=torch.int32), spec(2, 2, dtype=torch.int32))),
    (aten.cumsum.default, (spec(8, dtype=torch.bool), 0)),
    (aten.sort.default, (spec(8, dtype=torch.int64),)),
])
def test_integers_do_no_floating_point_arithmetic(op, args):
    inputs = tuple(a for a in args if isinstance(a, TensorSpec))
    assert count_call(Signature(op, args, {}, inputs, (inputs[0],))) == FlopCount(0)


@pytest.mark.parametrize("op", [
    aten.gt.Scalar, aten.view.default, aten.copy_.default, aten.embedding.default, aten.where.self, aten.zero_.default,
    aten._foreach_copy_.default, aten.t_copy.default, aten._local_scalar_dense.default,
    torch.ops._c10d_functional.all_reduce.default])
def test_zero_operators(op):
    assert count_call(Signature(op, (spec(4),), {}, (spec(4),), (spec(4),))) == FlopCount(0)


@pytest.mark.parametrize("op", [aten.poisson.default, aten.hspmm.default])
def test_unknown_is_none(op):
    assert count_call(Signature(op, (spec(4),), {}, (spec(4),), (spec(4),))) is None


def test_variants_share_a_formula():
    a = spec(2, 3)
    add = find_formula(aten.add.Tensor)
    assert add is find_formula(aten.add_.Tensor) is find_formula(aten.add.out) is find_formula(
        torch.ops.prims.add.default)
    out_call = Signature(aten.mul.out, (a, a), {"out": a}, (a, a, a), (a,))
    assert count_call(out_call) == FlopCount(6)


def test_foreach_adds_over_the_list():
    a, b = spec(3), spec(5)
    steps = spec(dtype=torch.int64)
    assert count_call(Signature(aten._foreach_mul_.Scalar, ([a, b], 2.0), {}, (a, b), ())) == FlopCount(8)
    quotients = [a, b], [a, b], [a, b], [1.0, 2.0]
    assert count_call(Signature(aten._foreach_addcdiv_.ScalarList, quotients, {}, (a, b) * 3, ())) == FlopCount(24)
    assert count_call(Signature(aten._foreach_norm.Scalar, ([a, b],), {}, (a, b), (spec(), spec()))) == FlopCount(16)
    assert count_call(Signature(aten._foreach_add_.Scalar, ([a, steps], 1), {}, (a, steps), ())) == FlopCount(3)


@pytest.mark.skipif(not hasattr(aten, "_foreach_mm"), reason="this torch has no _foreach_mm")
def test_foreach_products():
    m = spec(2, 3), spec(3, 4), spec(2, 4)
    assert count_call(Signature(aten._foreach_mm.default, ([m[0]], [m[1]]), {}, m[:2], m[2:])) == FlopCount(48, 24)


def test_a_scoped_formula_replaces_and_gives_back():
    a, b, c = spec(2, 3), spec(3, 4), spec(2, 4)
    signature = Signature(aten.mm.default, (a, b), {}, (a, b), (c,))
    assert count_call(signature) == FlopCount(48, 24)
    with register_flop_impl.scope():
        register_flop_impl(aten.mm)(lambda x, y, out: out.numel)
        assert count_call(signature) == FlopCount(8)
        register_flop_impl(aten.mm.default)(lambda x, y, out: FlopCount(1, 1))  # an overload goes before its packet
        assert count_call(signature) == FlopCount(1, 1)
    assert count_call(signature) == FlopCount(48, 24)
    assert count_call(signature) is count_call(signature)  # remembered
