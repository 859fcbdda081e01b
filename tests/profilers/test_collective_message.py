"""Every operator of torch.distributed: its kind, whole bytes and bytes on the wire, derived by hand."""
import pytest
import torch
import torch.distributed._functional_collectives  # defines operators, as do the others
import torch.distributed._symmetric_memory
import torch.distributed.tensor  # noqa: F401

from analyzer.meta.spec import Signature, TensorSpec
from analyzer.profilers import collective as rule
from analyzer.profilers.collective import NOT_UNDERSTOOD, SILENT
from analyzer.record.process_group import ProcessGroupSpec

# Four ranks of a larger world; this is the second of them.
GROUP = ProcessGroupSpec("7", "mesh_dp", 4, (2, 6, 10, 14), 1)


def t(*shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec.of(shape, tuple(torch.empty(shape, device="meta").stride()), dtype, "cuda:0")


def flatten(value):
    return [value] if isinstance(value, TensorSpec) else [x for one in value for x in flatten(one)] if isinstance(
        value, (list, tuple)) else []


def find(name, given, result=()):
    """The message of a call with these arguments and results."""
    op = getattr(torch.ops, name.partition("::")[0])
    op = getattr(op, name.partition("::")[2]).default
    args = tuple(given.get(a.name) for a in op._schema.arguments)
    return rule.message_of(Signature(op, args, {}, tuple(flatten(list(args))), tuple(flatten(result))), GROUP)


X, QUARTER = t(10, 10), t(25)        # 400 bytes, 100 bytes
EVEN, UNEVEN = [QUARTER] * 4, [t(1), t(2), t(3), t(4)]  # 400 bytes; 4, 8, 12 and 16
FLAGS = [t(10, dtype=torch.bool)] * 4
FUNCTIONAL, AUTOGRAD = "_c10d_functional::", "_c10d_functional_autograd::"

# operator, arguments, result; kind, whole bytes, bytes that this rank sends, global rank of the peer if there is one
CASES = [
    # an all-reduce sends 2 * 3/4 of its buffer
    ("c10d::allreduce_", {"tensors": [X]}, (), "all_reduce", 400, 600),
    ("c10d::allreduce_coalesced_", {"tensors": [X, QUARTER]}, (), "all_reduce", 500, 750),
    (FUNCTIONAL + "all_reduce", {"input": t(10, dtype=torch.bfloat16)}, (), "all_reduce", 20, 30),
    (FUNCTIONAL + "all_reduce_", {"input": X}, X, "all_reduce", 400, 600),
    (FUNCTIONAL + "all_reduce_coalesced", {"inputs": [X, X]}, [X, X], "all_reduce", 800, 1200),
    (FUNCTIONAL + "all_reduce_coalesced_", {"inputs": [X, X]}, [X, X], "all_reduce", 800, 1200),
    # a buffer that no whole blocks divide: 2 * 3/4 * 1 byte, rounded up
    (FUNCTIONAL + "all_reduce", {"input": t(1, dtype=torch.bool)}, (), "all_reduce", 1, 2),
    # an all-gather sends 3/4 of what is gathered: all blocks but that of the next rank, the third
    ("c10d::_allgather_base_", {"output_tensor": X, "input_tensor": QUARTER}, (), "all_gather", 400, 300),
    ("c10d::allgather_", {"output_tensors": [EVEN], "input_tensors": [QUARTER]}, (), "all_gather", 400, 300),
    ("c10d::allgather_", {"output_tensors": [FLAGS], "input_tensors": FLAGS[:1]}, (), "all_gather", 40, 30),
    ("c10d::allgather_", {"output_tensors": [UNEVEN], "input_tensors": [t(2)]}, (), "all_gather", 40, 28),
    ("c10d::allgather_coalesced_", {"output_lists": [EVEN, FLAGS], "input_list": [QUARTER, FLAGS[0]]}, (),
     "all_gather", 440, 330),
    ("c10d::allgather_into_tensor_coalesced_", {"outputs": [X, X], "inputs": [QUARTER] * 2}, (), "all_gather", 800,
     600),
    (FUNCTIONAL + "all_gather_into_tensor", {"input": QUARTER, "group_size": 4}, X, "all_gather", 400, 300),
    (AUTOGRAD + "all_gather_into_tensor", {"input": QUARTER, "group_size": 4}, X, "all_gather", 400, 300),
    (FUNCTIONAL + "all_gather_into_tensor_out", {"input": QUARTER, "out": X}, X, "all_gather", 400, 300),
    (FUNCTIONAL + "all_gather_into_tensor_coalesced", {"inputs": [QUARTER] * 2}, [X, X], "all_gather", 800, 600),
    # a reduce-scatter sends 3/4 of its input: all blocks but its own, the second
    ("c10d::_reduce_scatter_base_", {"output_tensor": QUARTER, "input_tensor": X}, (), "reduce_scatter", 400, 300),
    ("c10d::reduce_scatter_", {"output_tensors": [QUARTER], "input_tensors": [EVEN]}, (), "reduce_scatter", 400, 300),
    ("c10d::reduce_scatter_", {"output_tensors": [t(2)], "input_tensors": [UNEVEN]}, (), "reduce_scatter", 40, 32),
    ("c10d::reduce_scatter_tensor_coalesced_", {"outputs": [QUARTER] * 2, "inputs": [X, X]}, (), "reduce_scatter", 800,
     600),
    (FUNCTIONAL + "reduce_scatter_tensor", {"input": X}, QUARTER, "reduce_scatter", 400, 300),
    (AUTOGRAD + "reduce_scatter_tensor", {"input": X}, QUARTER, "reduce_scatter", 400, 300),
    (FUNCTIONAL + "reduce_scatter_tensor_out", {"input": X, "out": QUARTER}, QUARTER, "reduce_scatter", 400, 300),
    (FUNCTIONAL + "reduce_scatter_tensor_coalesced", {"inputs": [X, X]}, [QUARTER] * 2, "reduce_scatter", 800, 600),
    # an all-to-all sends all parts but its own, the second
    ("c10d::alltoall_", {"output_tensors": EVEN, "input_tensors": EVEN}, (), "all_to_all", 400, 300),
    ("c10d::alltoall_", {"output_tensors": UNEVEN, "input_tensors": UNEVEN}, (), "all_to_all", 40, 32),
    ("c10d::alltoall_base_", {"output": t(40), "input": t(40), "output_split_sizes": [], "input_split_sizes": []}, (),
     "all_to_all", 160, 120),
    ("c10d::alltoall_base_", {"output": t(7, 8), "input": t(10, 8), "input_split_sizes": [1, 2, 3, 4]}, (),
     "all_to_all", 320, 256),  # eight of ten rows
    (FUNCTIONAL + "all_to_all_single", {"input": t(10, 8), "input_split_sizes": [0, 10, 0, 0]}, t(10, 8), "all_to_all",
     320, 0),                  # all rows stay
    (AUTOGRAD + "all_to_all_single", {"input": t(8, 8), "input_split_sizes": [2, 2, 2, 2]}, t(8, 8), "all_to_all", 256,
     192),
    (FUNCTIONAL + "all_to_all_single", {"input": t(0, 8), "input_split_sizes": [0, 0, 0, 0]}, t(0, 8), "all_to_all", 0,
     0),
    ("_dtensor::shard_dim_alltoall", {"input": X, "gather_dim": 0, "shard_dim": 1}, X, "all_to_all", 400, 300),
    # chains: a rank passes on what it was sent, the root of a reduction sends nothing
    ("c10d::broadcast_", {"tensors": [X], "root_rank": 0}, (), "broadcast", 400, 400, 2),
    (FUNCTIONAL + "broadcast", {"input": X, "src": 3}, X, "broadcast", 400, 400, 14),
    (FUNCTIONAL + "broadcast_", {"input": X, "src": 1}, X, "broadcast", 400, 400, 6),
    ("c10d::reduce_", {"tensors": [X], "root_rank": 0}, (), "reduce", 400, 400, 2),
    ("c10d::reduce_", {"tensors": [X], "root_rank": 1}, (), "reduce", 400, 0, 6),
    # of a gather the root receives three parts, of a scatter it sends them; the others have no list
    ("c10d::gather_", {"output_tensors": [], "input_tensors": [QUARTER], "root_rank": 0}, (), "gather", 400, 100, 2),
    ("c10d::gather_", {"output_tensors": [EVEN], "input_tensors": [QUARTER], "root_rank": 1}, (), "gather", 400, 0, 6),
    ("c10d::gather_into_tensor_", {"output_tensor": t(0), "input_tensor": QUARTER, "root_rank": 0}, (), "gather", 400,
     100, 2),
    ("c10d::scatter_", {"output_tensors": [QUARTER], "input_tensors": [], "root_rank": 0}, (), "scatter", 400, 0, 2),
    ("c10d::scatter_", {"output_tensors": [QUARTER], "input_tensors": [EVEN], "root_rank": 1}, (), "scatter", 400, 300,
     6),
    # c10d counts peers in the group, functional operators in the world
    ("c10d::send", {"tensors": [X], "dst": 2}, (), "send", 400, 400, 10),
    ("c10d::recv_", {"tensors": [X], "src": 2}, (), "recv", 400, 0, 10),
    ("c10d::recv_any_source_", {"tensors": [X]}, (), "recv", 400, 0),
    (FUNCTIONAL + "isend", {"tensor": X, "dst": 10}, X, "send", 400, 400, 10),
    (FUNCTIONAL + "irecv", {"tensor": X, "src": 10}, X, "recv", 400, 0, 10),
    (FUNCTIONAL + "batch_p2p_ops", {"op_list": ["isend", "irecv", "isend"], "peer_list": [2, 2, 10],
                                    "tag_list": [0, 0, 0], "tensors": [X, QUARTER, QUARTER]}, [X, QUARTER, QUARTER],
     "send_recv", 600, 500),
    (FUNCTIONAL + "batch_p2p_ops", {"op_list": ["isend"], "peer_list": [2], "tag_list": [0], "tensors": [X]}, [X],
     "send", 400, 400),
    ("c10d::barrier", {"tensor": t(1)}, (), "barrier", 0, 0),
    ("c10d::monitored_barrier_", {"tensor": t(1)}, (), "barrier", 0, 0),
    # symmetric memory: shards are read by three other ranks, or the whole buffer is
    ("symm_mem::_low_contention_all_gather", {"tensor": QUARTER}, X, "all_gather", 400, 300),
    ("symm_mem::_low_contention_reduce_scatter", {"tensor": X}, QUARTER, "reduce_scatter", 400, 300),
    ("symm_mem::reduce_scatter_out", {"input": X, "output": QUARTER}, QUARTER, "reduce_scatter", 400, 300),
    ("symm_mem::fused_all_gather_matmul", {"A": QUARTER, "Bs": [t(25, 8)]}, [X, t(4, 8)], "all_gather", 400, 300),
    ("symm_mem::fused_matmul_reduce_scatter", {"A": X, "B": X}, QUARTER, "reduce_scatter", 400, 300),
    ("symm_mem::fused_scaled_matmul_reduce_scatter", {"A": X, "B": X}, QUARTER, "reduce_scatter", 400, 300),
    ("symm_mem::one_shot_all_reduce", {"input": X}, X, "all_reduce", 400, 1200),
    ("symm_mem::one_shot_all_reduce_out", {"input": X, "out": X}, X, "all_reduce", 400, 1200),
    ("symm_mem::one_shot_all_reduce_copy", {"symm_buffer": t(100, 100), "local_input": X}, X, "all_reduce", 400, 1200),
    ("symm_mem::one_shot_all_reduce_copy_out", {"symm_buffer": t(100, 100), "local_input": X, "out": X}, X,
     "all_reduce", 400, 1200),
    ("symm_mem::two_shot_all_reduce_", {"input": X}, X, "all_reduce", 400, 600),
    ("symm_mem::two_shot_all_reduce_out", {"input": X, "output": X}, X, "all_reduce", 400, 600),
]
#: What torch has from 2.14 on.
LATER = {"c10d::gather_into_tensor_", "symm_mem::_low_contention_all_gather_ce_multicast",
         "symm_mem::_low_contention_all_gather_ce_multicast_out", "symm_mem::memcpy_to_multicast_",
         "symm_mem::nccl_all_to_all_nd", "symm_mem::nccl_get_out", "symm_mem::nvshmem_get_out"}
ABSENT = LATER if torch.__version__ < (2, 14) else set()
if torch.__version__ < (2, 12):
    ABSENT |= {*SILENT, *NOT_UNDERSTOOD, *(case[0] for case in CASES)} - {
        schema.name for schema in torch._C._jit_get_all_schemas()}
CASES = [(*case, None)[:7] for case in CASES if case[0] not in ABSENT]


@pytest.mark.parametrize(("name", "given", "result", "kind", "nbytes", "wire_bytes", "peer"), CASES,
                         ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)])
def test_bytes(name, given, result, kind, nbytes, wire_bytes, peer):
    assert find(name, given, result) == (kind, nbytes, wire_bytes, peer)


def test_every_operator_of_torch_that_communicates_is_known():
    namespaces = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem")
    names = {schema.name for schema in torch._C._jit_get_all_schemas()
             if schema.name.partition("::")[0] in namespaces or any(
                 "ProcessGroup" in str(a.type) or a.name == "group_name" for a in schema.arguments)}
    names = {name for name in names if not name.startswith("comm_row::")}  # another test's own
    composite = {name for name in names if torch._C._dispatch_has_kernel_for_dispatch_key(
        name, "CompositeImplicitAutograd")}  # nobody sees these: they call the others
    assert {name.partition("::")[0] for name in composite} == (
        {"c10d_functional"} if torch.__version__ >= (2, 12) else set())
    names -= composite
    assert len(names) > (80 if torch.__version__ >= (2, 12) else 60)
    tested = {case[0] for case in CASES}
    assert {name for name in names if name in rule._RULES} == tested
    assert sorted(names - tested) == sorted({*SILENT, *NOT_UNDERSTOOD} - ABSENT), "say what it communicates, or why not"


def test_a_group_of_one_sends_nothing():
    alone = ProcessGroupSpec("1", "undefined", 1, (3,), 0)
    for name, given, result, _, _, _, _ in CASES:
        if name.startswith("c10d::") and name not in ("c10d::send", "c10d::recv_", "c10d::recv_any_source_"):
            op = getattr(torch.ops.c10d, name.partition("::")[2]).default
            args = tuple({**given, "root_rank": 0}.get(a.name) for a in op._schema.arguments)
            signature = Signature(op, args, {}, tuple(flatten(list(args))), tuple(flatten(result)))
            assert rule.message_of(signature, alone).wire_bytes == 0, name


def test_what_is_unknown_is_none():
    signature = Signature(torch.ops.c10d.allreduce_.default, ([X],), {}, (X,), (X,))
    assert rule.message_of(signature, None) == ("all_reduce", 400, None, None), "no group any more"
    sparse = TensorSpec.of((10, 10), (), torch.float32, "cuda:0")
    assert find("c10d::allreduce_", {"tensors": [sparse]}) == ("all_reduce", None, None, None)
    assert find("symm_mem::multimem_all_reduce_", {"input": X}) == (None, None, None, None)
    assert find("_c10d_functional::wait_tensor", {"tensor": X}) is None
    unknown_rank = ProcessGroupSpec("7", "", 4)
    uneven = Signature(torch.ops.c10d.alltoall_.default, (UNEVEN, UNEVEN), {}, (), ())
    assert rule.message_of(uneven, unknown_rank) == ("all_to_all", 40, None, None)
