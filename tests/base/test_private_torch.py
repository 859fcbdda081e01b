"""Torch's private names that the package stands on: what each must do. A failure here says which file a change of torch
breaks.
"""
import contextlib
import importlib
import inspect
import subprocess
import sys
import weakref

import pytest
import torch
import torch._dispatch.python
import torch._subclasses.schema_check_mode
import torch.distributed.checkpoint.state_dict_saver
import torch.distributed.launcher.api
import torch.distributed.optim.zero_redundancy_optimizer
import torch.distributed.pipelining.schedules
import torch.utils.checkpoint
from torch import nn

from analyzer import MetaTensorMode
from analyzer.parallel import world

NAMES = {
    "meta/intercept/mode_stack.py": """
        torch._C._DisableTorchDispatch torch._C.DisableTorchFunction torch._C._EnableTorchFunction
        torch.utils._python_dispatch._get_current_dispatch_mode_stack torch.utils._python_dispatch._pop_mode
        torch.utils._python_dispatch._push_mode
        torch._C._len_torch_function_stack torch._C._pop_torch_function_stack
        torch.utils._python_dispatch.TorchDispatchMode._should_skip_dynamo""",
    "fx/module_borrow.py": """
        torch._C.ScriptMethod._debug_flush_compilation_cache torch._C.ScriptModule._method_names
        torch._C.ScriptModule._get_method""",
    "meta/tensor.py": """
        torch._C.TensorBase.device torch._C.TensorBase.data torch._C.TensorBase.data_ptr
        torch._C._disabled_torch_function_impl torch.overrides._pop_mode torch.overrides._push_mode
        torch._C._autograd._unsafe_set_version_counter torch.autograd.Function._backward_cls.__name__""",
    "meta/intercept/legacy_type.py": "torch.is_storage torch.set_default_tensor_type torch.cuda.BFloat16Tensor",
    "meta/function/mode.py": "torch.overrides._get_current_function_mode_stack",
    "meta/copied_tensor.py": """
        torch.serialization._save.__code__ torch.serialization._legacy_save.__code__
        torch.serialization._serialization_tls.map_location torch.serialization._get_restore_location
        torch._utils._rebuild_parameter torch._utils._rebuild_parameter_with_state
        torch._utils._rebuild_sparse_tensor torch._utils._rebuild_meta_tensor_no_storage""",
    "meta/address_space.py": "torch.UntypedStorage._set_from_file",
    "meta/intercept/program_mode.py": """
        torch._subclasses.fake_tensor.FakeTensorMode.__enter__
        torch._subclasses.fake_tensor.FakeTensorMode.from_tensor""",
    "meta/intercept/patch.py": """
        torch.fx.experimental.proxy_tensor.ProxyTorchDispatchMode.__enter__ torch.nn.functional.has_torch_function
        torch.nn.functional.has_torch_function_unary torch.nn.functional.has_torch_function_variadic
        torch.overrides.has_torch_function torch.utils._foreach_utils._foreach_supported_types
        torch._C._group_tensors_by_device_and_dtype torch.nn.init._no_grad_trunc_normal_
        torch.autograd._engine_run_backward torch.Tensor._make_wrapper_subclass torch.Tensor._make_subclass
        torch._C._autograd._push_saved_tensors_default_hooks torch.jit._builtins._find_builtin
        torch.ops.higher_order.cond.__class__ torch.ops.higher_order.while_loop.__class__
        torch.ops.higher_order.scan.__class__ torch.ops.higher_order.map_impl.__class__""",
    "meta/intercept/compiled_function.py": """
        torch._compile._disable_dynamo torch._dynamo.eval_frame._callback_from_stance
        torch._dynamo.eval_frame.DisableContext
        torch._dynamo.eval_frame._stance.stance torch._dynamo.eval_frame.set_fullgraph_compiled_frame_count
        torch._dynamo.compiled_autograd.compiled_autograd_enabled torch._dynamo.compiled_autograd._disable""",
    "cuda/kernels/attention.py": """
        torch._higher_order_ops.flex_attention.py_kernels torch._higher_order_ops.flex_attention.python_key_table
        torch._higher_order_ops.flex_attention._dispatch_cache""",
    "cuda/facade.py": """
        torch.nn.parallel.comm.scatter torch.nn.parallel._functions._get_stream torch.accelerator.device_index""",
    "cuda/binding.py": "torch.cuda._cudart torch._C._accelerator_getDeviceStats",
    "meta/simulated_device.py": """
        torch._C.DispatchKey.AutocastIPU torch._C.DispatchKey.AutocastHPU torch._C._dispatch_keyset_full_after
        torch._C._dispatch_tls_set_dispatch_key_included torch._C._dispatch_tls_set_dispatch_key_excluded
        torch.library.fallthrough_kernel""",
    "cuda/sdp_choice.py": "torch._C.DispatchKeySet torch.ops.aten._fused_sdp_choice.default.redispatch",
    "meta/spec.py": "torch.library.CustomOpDef._qualname",
    "meta/operator_info.py": """
        torch._C._dispatch_has_kernel_for_dispatch_key torch._C._dispatch_has_computed_kernel_for_dispatch_key
        torch.ops.aten.add.Tensor._schema torch.ops.aten.add.Tensor.tags""",
    "record/reference_count.py": """
        torch._C._autograd._get_sequence_nr torch._C._current_autograd_node
        torch._C._autograd._top_saved_tensors_default_hooks torch._C.TensorBase._use_count
        torch._C._storage_Use_Count""",
    "parallel/pipeline_schedule.py": """
        torch.distributed.pipelining.schedules._Action.computation_type
        torch.distributed.pipelining.schedules._Action.sub_actions
        torch.distributed.pipelining.schedules._ComputationType.OVERLAP_F_B
        torch.distributed.pipelining.schedules.Schedule1F1B._get_pipeline_order
        torch.distributed.pipelining.schedules.ScheduleGPipe._get_pipeline_order""",
    "distributed/process_group.py": """
        torch.distributed.distributed_c10d._pg_map torch.distributed.distributed_c10d._pg_names
        torch.distributed.distributed_c10d._pg_group_ranks torch.distributed.distributed_c10d._pg_backend_config
        torch.distributed.distributed_c10d._tags_to_pg torch.distributed.distributed_c10d._pg_to_tag
        torch.distributed.distributed_c10d._group_count torch.distributed.distributed_c10d._backend
        torch.distributed.distributed_c10d._default_pg_init_method
        torch.distributed.distributed_c10d._process_group_name
        torch.distributed.distributed_c10d._world.default_pg
        torch.distributed.distributed_c10d._world.pg_coalesce_state
        torch._C._distributed_c10d._register_process_group
        torch._C._distributed_c10d._unregister_all_process_groups torch._C._distributed_c10d.Store
        torch.distributed.distributed_c10d._get_default_group""",
    "distributed/collective.py": """
        torch._C.fork torch._C._distributed_c10d._create_work_from_future
        torch.distributed.optim.zero_redundancy_optimizer._broadcast_object""",
    "distributed/world_state.py": """
        torch._C._distributed_c10d._resolve_process_group torch.distributed.ProcessGroup.unbox""",
    "distributed/replacement.py": """
        torch.nn.parallel.distributed._verify_param_shape_across_processes
        torch.nn.parallel.distributed.DistributedDataParallel._ddp_init_helper
        torch.nn.parallel.distributed.DistributedDataParallel._check_comm_hook
        torch._C._distributed_c10d.Reducer._rebuild_buckets
        torch.distributed.pipelining.schedules._PipelineSchedule.__init__""",
    "distributed/dtensor.py": """
        torch.distributed.tensor._random.OffsetBasedRNGTracker._distribute_region
        torch.distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached
        torch.distributed.tensor._dtensor_spec.TensorMeta
        torch.distributed.tensor.placement_types._StridedShard.local_shard_size_and_offset
        torch.distributed.device_mesh.DeviceMesh._init_one_process_group
        torch.distributed.device_mesh.DeviceMesh._concatenate torch.distributed.tensor._redistribute
        torch.distributed.tensor._random._rng_tracker
        torch.distributed.tensor._collective_utils.MeshTopoInfo.build_from_mesh
        torch.distributed.tensor.DTensor._op_dispatcher._custom_op_handlers
        torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear""",
    "distributed/fsdp.py": """
        torch.distributed.fsdp._flat_param.FlatParameter._init_metadata
        torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.unshard
        torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.wait_for_unshard
        torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.post_backward
        torch.distributed.fsdp._runtime_utils._unshard torch.distributed.fsdp._runtime_utils._post_backward_hook
        torch.distributed.fsdp._fully_shard._fsdp_param._chunk_with_empty
        torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._pre_forward
        torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._post_forward""",
    "tools/dryrun/checkpoint.py": """
        torch.distributed.checkpoint.filesystem.FileSystem.create_stream
        torch.distributed.checkpoint.default_planner._validate_global_plan
        torch.distributed.checkpoint.state_dict_saver._ProcessBasedAsyncCheckpointExecutor
        torch.distributed.checkpoint._state_dict_stager.StateDictStager._offload_tensor""",
    "tools/dryrun/patch.py": "torch.distributed.launcher.api.launch_agent",
    "fx/graph/interpreter.py": "torch.fx.passes.shape_prop._extract_tensor_metadata",
    "fx/graph/offload.py": """
        torch.UntypedStorage._cdata torch._C._SetExcludeDispatchKeyGuard torch._C.DispatchKey.ADInplaceOrView""",
    "record/process_group.py": """
        torch._C._jit_get_all_schemas torch._C._dispatch_has_kernel_for_dispatch_key
        torch.distributed.distributed_c10d._world.pg_names
        torch.distributed.distributed_c10d._world.pg_group_ranks
        torch.distributed.device_mesh.DeviceMesh._get_root_mesh""",
    "profilers/operator/registration.py": "torch._C._get_fp32_precision_getter",
    "tools/runtime/clock.py": "torch.UntypedStorage._cdata",
    "cuda/kernel_registry.py": "torch._C._AutoDispatchBelowAutograd",
    "record/hooks.py": """
        torch.autograd._engine_run_backward torch.autograd.Variable._execution_engine.run_backward
        torch.distributed.pipelining.stage._PipelineStageBase.backward_one_chunk
        torch.distributed.pipelining.stage._PipelineStageBase.backward_weight_one_chunk
        torch.distributed.pipelining.stage._PipelineStageBase.perform_reduce_grad""",
    "compiled/lowering.py": """
        torch._inductor.compile_fx._recursive_post_grad_passes
        torch._inductor.compile_fx.record_original_output_strides
        torch._inductor.graph.GraphLowering.run torch._inductor.graph.GraphLowering.codegen
        torch._inductor.fx_passes.post_grad.view_to_reshape
        torch._inductor.fx_passes.pad_mm.get_padded_length torch._inductor.fx_passes.pad_mm.is_padded_faster
        torch._inductor.fx_passes.pad_mm.should_exclude_padding_time
        torch._inductor.codegen.common.get_scheduling_for_device
        torch._inductor.select_algorithm.ExternKernelCaller torch._inductor.select_algorithm.extern_kernels
        torch._inductor.virtualized.V.set_graph_handler torch._C._DisableAutocast""",
    "compiled/traced_tensor.py": """
        torch._C._swap_tensor_impl torch._C._is_view_replay_enabled torch._C._set_view_replay_enabled
        torch._C._autograd._top_saved_tensors_default_hooks torch._C._autograd._pop_saved_tensors_default_hooks
        torch._C._autograd._push_saved_tensors_default_hooks""",
    "compiled/frame.py": """
        torch._dynamo.trace_rules.check torch._dynamo.config.nested_graph_breaks
        torch._dynamo.symbolic_convert.InstructionTranslatorBase.maybe_has_backedge
        torch._dynamo.symbolic_convert.InstructionTranslatorBase.should_compile_partial_graph""",
    "compiled/generated_kernel.py": """
        torch._inductor.codegen.simd_kernel_features.EnableReduction torch._inductor.utils.get_fused_kernel_name
        torch._inductor.scheduler.BaseSchedulerNode.get_read_write_buffer_accesses""",
    "dropins/forward.py": """
        torch._C.DispatchKey.PreDispatch torch._dispatch.python.enable_pre_dispatch
        torch._dispatch.python.enable_python_dispatcher torch._subclasses.schema_check_mode.SchemaCheckMode""",
    "fx/trace/effect_patch.py": "torch.autograd.graph._MultiHandle",
    "fx/trace/module_state.py": """
        torch.nn.utils.parametrize._cache_enabled torch.nn.modules.module._global_forward_hooks""",
    "fx/trace/tracing_patch.py": """
        torch.utils.checkpoint._checkpoint_without_reentrant_generator
        torch.utils.checkpoint._checkpoint_without_reentrant_generator_impl
        torch.utils.checkpoint.CheckpointFunction""",
}

#: the version that has had a name first; in an older one the file does without
SINCE = {
    "torch._dynamo.eval_frame.set_fullgraph_compiled_frame_count": (2, 12),
    "torch.utils._python_dispatch.TorchDispatchMode._should_skip_dynamo": (2, 11),
    "torch.distributed.tensor.placement_types._StridedShard.local_shard_size_and_offset": (2, 10),
    "torch.distributed.device_mesh.DeviceMesh._get_root_mesh": (2, 10),
    "torch.distributed.device_mesh.DeviceMesh._init_one_process_group": (2, 10),
    "torch.distributed.device_mesh.DeviceMesh._concatenate": (2, 10),
    "torch.distributed.pipelining.stage._PipelineStageBase.perform_reduce_grad": (2, 10),
    "torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear": (2, 10),
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator_impl": (2, 14),
}


def resolve(name):
    value, path = torch, "torch"
    for part in name.split(".")[1:]:
        path += f".{part}"
        with contextlib.suppress(ImportError):  # a module that nothing has imported yet
            if not hasattr(value, part):
                importlib.import_module(path)
        value = getattr(value, part)
    return value


@pytest.mark.parametrize(("file", "name"), [(file, name) for file, names in NAMES.items() for name in names.split()])
def test_the_name_is_there(file, name):
    if torch.__version__ < (first := SINCE.get(name, (2, 9))):
        pytest.skip(f"{name} is of torch {first[0]}.{first[1]}")
    try:
        resolve(name)
    except AttributeError:
        pytest.fail(f"torch {torch.__version__} has no {name}: analyzer/{file} needs another way")


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="some of the fields are of torch 2.13")
def test_the_settings_of_fsdp2_are_where_they_are_looked_for():
    from torch.distributed.fsdp import fully_shard

    from analyzer.distributed import fsdp

    with world(2):
        module = fully_shard(nn.Linear(8, 8))
        state = module._get_fsdp_state()
        assert hasattr(state, "_fsdp_param_groups") and not fsdp.names_prefetched(state)
        fields = [(state, name) for name in fsdp._STATE] + [
            (group, name) for group in state._fsdp_param_groups for name in fsdp._GROUP]
        assert [name for holder, name in fields if not hasattr(holder, name)] == []
        assert fsdp.count_data_parallel(module) == 2


def test_a_storage_and_a_tensor_can_change_class_in_place_and_keep_it_through_cpp():
    class Storage(torch.UntypedStorage):
        pass

    class Tensor(torch.Tensor):
        pass

    x = torch.empty(4, device="meta")
    x.untyped_storage().__class__ = Storage
    x.__class__ = Tensor
    view = x.view(2, 2).detach()
    assert type(view.untyped_storage()) is Storage
    assert view.untyped_storage() is x.untyped_storage()


def test_a_storage_tells_when_it_dies_whoever_held_it_last():
    died = []

    class Storage(torch.UntypedStorage):
        def __del__(self):
            died.append(1)

    x = torch.empty(4, device="meta", requires_grad=True)
    y = x * 2
    y.untyped_storage().__class__ = Storage
    z = y.exp().sin() * y  # autograd saves y
    del y
    assert died == []
    del z
    assert died == [1]


def test_a_storage_has_one_python_object_until_it_dies():
    x = torch.rand(4, requires_grad=True)
    y = x * 2
    watch, address = weakref.ref(y.untyped_storage()), y.untyped_storage()._cdata
    z = y.exp().sin() * y  # autograd saves y
    view = y.view(2, 2)
    del y
    assert watch() is view.untyped_storage() and view.untyped_storage()._cdata == address
    del view
    assert watch() is not None
    z.sum().backward()  # which frees what was saved
    assert watch() is None


def test_the_stack_of_dispatch_modes_is_that_of_the_thread():
    from torch.utils._python_dispatch import TorchDispatchMode

    from analyzer.meta.intercept.mode_stack import is_active

    outer, inner = TorchDispatchMode(), TorchDispatchMode()
    with outer:
        assert is_active(outer) and not is_active(inner)
    assert not is_active(outer)


def test_optimizers_module_still_lists_the_types_of_its_foreach_path():
    assert torch.Tensor in sys.modules["torch.optim.optimizer"]._foreach_supported_types


def test_a_backward_node_has_the_number_of_its_forward():
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            node = torch._C._current_autograd_node()
            seen.append(
                (func.__name__, None if node is None else node._sequence_nr(), torch._C._autograd._get_sequence_nr()))
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True)
    with Watch():
        x.sin().sum().backward()
    forward = next(number - 1 for name, node, number in seen if name.startswith("sin") and node is None)
    assert [node for name, node, _ in seen if name.startswith("cos")] == [forward]


def test_reference_counts_say_who_holds_a_tensor():
    x = torch.ones(2)
    storage = x.untyped_storage()
    before = (x._use_count(), torch._C._storage_Use_Count(storage._cdata))
    y = x * torch.ones(2, requires_grad=True)  # saves x
    assert x._use_count() == before[0] + 1
    view = x.view(2)
    assert torch._C._storage_Use_Count(storage._cdata) == before[1] + 1
    del y, view
    assert (x._use_count(), torch._C._storage_Use_Count(storage._cdata)) == before


def test_module_calls_go_through_one_method():
    assert nn.Module.__call__ is nn.Module.__dict__["__call__"]
    assert "backward" in inspect.getsource(torch._tensor.Tensor.backward)
    assert "torch.autograd.backward(" in inspect.getsource(torch._tensor.Tensor.backward)


def test_an_alias_made_below_autograd_shares_the_version_only_with_the_guard():
    from torch.utils._python_dispatch import TorchDispatchMode

    from analyzer.fx.graph.offload import alias_with_version

    aliases = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            aliases.append((alias_with_version(out), out.detach()))
            return out

    with Mode():
        y = torch.ones(2).sin()
    y.add_(1)
    shared, own = aliases[-1]
    assert shared._version == y._version == 1 and own._version == 0


def test_the_dense_passes_of_flex_attention_take_what_they_are_given():
    module = sys.modules["torch._higher_order_ops.flex_attention"]
    forward = list(inspect.signature(module.sdpa_dense).parameters)
    assert forward == [
        "query", "key", "value", "score_mod", "block_mask", "scale", "kernel_options", "score_mod_other_buffers",
        "mask_mod_other_buffers"
    ]
    backward = list(inspect.signature(module.sdpa_dense_backward).parameters)
    assert backward == [
        "query", "key", "value", "out", "logsumexp", "grad_out", "grad_logsumexp", "fw_graph", "joint_graph",
        *forward[4:]
    ]


def test_nested_attention_asks_which_kernels_can_be_used():
    import torch.nested._internal.sdpa as sdpa

    for name in ("can_use_flash_attention", "can_use_efficient_attention", "can_use_cudnn_attention"):
        assert name in inspect.getsource(sdpa._select_sdp_backend)


def test_lbfgs_asks_what_is_answered():
    from torch.optim import lbfgs

    from analyzer.meta.value.contents import MET

    assert set(MET) <= {line.strip() for line in inspect.getsource(lbfgs).splitlines()}


_IMPORTS_COMPILER = """
import sys, torch, analyzer
class Net(torch.nn.Linear):
    def forward(self, x):
        import torch._dynamo
        return super().forward(x)
assert "torch._dynamo" not in sys.modules
print(analyzer.profile(Net(4, 4), args=(torch.empty(2, 4),), device="h100").fwd_flops)
from torch._dynamo.variables import PolyfilledFunctionVariable
assert torch.Tensor.__new__ in PolyfilledFunctionVariable._get_polyfill_handlers()
print(torch.compile(torch.nn.Linear(4, 4), backend="eager", fullgraph=True)(torch.ones(2, 4)).shape)
"""


def test_a_compiler_that_is_imported_under_the_mode_knows_torch_as_it_is():
    """It keeps functions of torch in tables by their identity, and compares their signatures with its own."""
    done = subprocess.run([sys.executable, "-c", _IMPORTS_COMPILER], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "72\ntorch.Size([2, 4])\n"), done.stderr


def test_what_is_not_to_be_compiled_imports_no_compiler_under_the_mode(monkeypatch):
    """``torch._compile`` asks a function for ``__dynamo_disable``, by ``getattr``, before it imports torch._dynamo."""
    for name in ("torch._dynamo", "torch._dynamo.eval_frame"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    called = torch._disable_dynamo(lambda: "called")
    with MetaTensorMode():
        assert called() == "called"
    assert "torch._dynamo" not in sys.modules and not hasattr(torch._compile, "getattr")
