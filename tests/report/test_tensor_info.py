"""The records by themselves."""
import dataclasses

import pytest

from analyzer.results.info import PhaseInfo
from analyzer.results.node_info import NodeInfo, TensorInfo
from analyzer.results.profile import Profile

CONTRACT = """params param_bytes buffer_bytes optimizer_bytes fwd_flops bwd_flops fwd_macs bwd_macs uncounted
    peak_allocated_bytes peak_reserved_bytes peak_by_category first_step phases fwd_seconds bwd_seconds
    optimizer_seconds step_seconds kernel_seconds nodes modules assumptions""".split()
NODE_CONTRACT = """op name target module_path accumulate_bytes incremental_bytes output_bytes temp_bytes param_bytes
    buffer_bytes backward_bytes fwd_flops bwd_flops fwd_macs bwd_macs fwd_comm_bytes bwd_comm_bytes fwd_seconds
    bwd_seconds inputs outputs aliases region""".split()
def test_shapes():
    scalar, empty = TensorInfo((), "float32", "cpu"), TensorInfo((3, 0), "int64", "cuda:0")
    assert (scalar.numel, scalar.nbytes, empty.nbytes) == (1, 4, 0)
    assert str(TensorInfo((8, 3), "bfloat16", "cuda:0")) == "bfloat16[8, 3]" and str(scalar) == "float32[]"


def test_contract_fields_exist():
    assert set(CONTRACT) <= {field.name for field in dataclasses.fields(Profile)}
    assert set(NODE_CONTRACT) <= {field.name for field in dataclasses.fields(NodeInfo)}
    assert {"allocated_bytes", "peak_allocated_bytes", "peak_reserved_bytes", "flops", "comm_bytes", "seconds"} <= {
        field.name for field in dataclasses.fields(PhaseInfo)}


def test_nodes_can_be_annotated_and_profiles_cannot_change(bare):
    node = NodeInfo("call_function", "add")
    node.fwd_flops = 3
    assert node.fwd_flops == 3
    with pytest.raises(AttributeError):
        node.colour = "red"
    with pytest.raises(dataclasses.FrozenInstanceError):
        bare.params = 1


def test_unknown_by_default(bare):
    given = {"name", "mode", "torch_version", "analyzer_version", "seconds_method", "flop_convention"}
    values = {field.name: getattr(bare, field.name) for field in dataclasses.fields(bare) if field.name not in given}
    assert all(value is None or value in ((), {}) for value in values.values()), values
