"""The public namespace of ``torch.cuda`` and its neighbours: each function is answered, or raises one clear error."""
import types
from functools import partial

import pytest
import torch
import torch.accelerator
import torch.backends.cuda
import torch.backends.cudnn
import torch.cuda.memory
import torch.cuda.tunable
from torch import nn

from analyzer import MetaTensorMode, profile
from analyzer.cuda.binding import REFUSED
from analyzer.errors import AnalyzerError, InputError
from analyzer.record.options import ProfileOptions

MODULES = (torch.cuda, torch.cuda.memory, torch.accelerator, torch.backends.cuda, torch.backends.cudnn)
MIB = 1 << 20

#: arguments of what is not called without any; a name of a later torch that needs some must be added here
ARGUMENTS = {
    "CUDAPluggableAllocator": lambda: ("alloc.so", "alloc", "free"), "CudaError": lambda: (1,),
    "ExternalStream": lambda: (torch.cuda.Stream().cuda_stream,), "StreamContext": lambda: (torch.cuda.Stream(),),
    "caching_allocator_alloc": lambda: (100,),
    "caching_allocator_delete": lambda: (torch.cuda.caching_allocator_alloc(100),),
    "can_device_access_peer": lambda: (0, 0), "change_current_allocator": lambda: (None,), "check_error": lambda: (0,),
    "device": lambda: (0,), "device_of": lambda: (torch.empty(1, device="cuda"),),
    "get_stream_from_external": lambda: (torch.cuda.Stream().cuda_stream,),
    "graph": lambda: (torch.cuda.CUDAGraph(),),
    "make_graphed_callables": lambda: (nn.Linear(2, 2).cuda(), (torch.empty(1, 2, device="cuda"),)),
    "set_device": lambda: (0,), "set_device_idx": lambda: (0,), "set_device_index": lambda: (0,),
    "device_index": lambda: (0,), "set_per_process_memory_fraction": lambda: (0.5,),
    "set_rng_state": lambda: (torch.cuda.get_rng_state(),),
    "set_rng_state_all": lambda: (torch.cuda.get_rng_state_all(),), "set_stream": lambda: (torch.cuda.Stream(),),
    "set_sync_debug_mode": lambda: ("default",), "stream": lambda: (torch.cuda.Stream(),),
    "use_mem_pool": lambda: (torch.cuda.MemPool(),), "is_acceptable": lambda: (torch.empty(1, device="cuda"),),
    **{name: lambda: (True,) for name in (
        "enable_flash_sdp", "enable_math_sdp", "enable_mem_efficient_sdp", "enable_cudnn_sdp",
        "allow_fp16_bf16_reduction_math_sdp")},
    "SDPAParams": lambda: _attention(),
    **{f"can_use_{kind}_attention": lambda: (torch.backends.cuda.SDPAParams(*_attention()),)
       for kind in ("flash", "efficient", "cudnn")},
    "cuFFTPlanCache": lambda: (0,), "cuFFTPlanCacheAttrContextProp": lambda: (None, None),
    "CudnnModule": lambda: (torch.backends.cudnn, "cudnn"),
    "sdp_kernel": lambda: (),
}
#: names of the modules that are not theirs, or no functions: constants, helpers of the module's own, types of errors
NOT_CALLED = {"AcceleratorError", "OutOfMemoryError", "DeferredCudaCallError", "classproperty", "SDPBackend",
              "PropModule", "ContextProp"}


def _attention():
    x = torch.empty(1, 2, 8, 64, device="cuda", dtype=torch.float16)
    return x, x, x, None, 0.0, False, False


def _public_calls():
    for module in MODULES:
        owner = getattr(module, "m", module)  # torch.backends.cudnn stands before its module
        for name in sorted(getattr(owner, "__all__", None) or vars(owner)):
            value = getattr(owner, name)
            is_theirs = name in getattr(owner, "__all__", ()) or getattr(value, "__module__", None) == owner.__name__
            if (name.startswith("_") or name in NOT_CALLED or not is_theirs or not callable(value)
                    or isinstance(value, types.ModuleType) or name.endswith(("Storage", "Tensor"))):
                continue
            yield pytest.param(module, name, id=f"{module.__name__}.{name}")


@pytest.fixture(autouse=True)
def reductions():
    """Whether attention's products may add up in sixteen bits is a setting of the process: it is put back."""
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    yield
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


@pytest.mark.parametrize("module, name", list(_public_calls()))
@pytest.mark.filterwarnings("ignore")
def test_each_public_call_is_answered_or_refused_by_name(module, name):
    enabled = [getattr(torch.backends.cuda, f"{kind}_sdp_enabled")() for kind in ("flash", "math", "mem_efficient")]
    with MetaTensorMode():
        call = partial(getattr(module, name), *ARGUMENTS.get(name, tuple)())
        refused = {path.split(".")[0] for names in REFUSED.values() for path in names}
        try:
            answered = call()
            if hasattr(answered, "__exit__") and name not in ("CUDAGraph", "Graph", "graph", "device", "Event"):
                with answered:
                    pass
        except InputError as error:
            assert name in refused | {"caching_allocator_disabled"} and f"torch.cuda.{name}"[:24] in str(error)
        else:
            assert name not in refused - {"GreenContext"}
    assert enabled == [getattr(torch.backends.cuda, f"{kind}_sdp_enabled")() for kind in (
        "flash", "math", "mem_efficient")]


def test_a_profile_says_which_call_it_refuses():
    class Asks(nn.Linear):
        def forward(self, x):
            torch.cuda.temperature()
            return super().forward(x)

    with pytest.raises(AnalyzerError, match=r"torch\.cuda\.temperature\(\): it reads a sensor"):
        profile(Asks(4, 4), torch.empty(2, 4), device="h100")
    p = profile(Asks(4, 4), torch.empty(2, 4), device="h100", options=ProfileOptions(unknown_value="placeholder"))
    assert any(text.startswith("torch.cuda.temperature() was taken as 1: it reads a sensor") for text in p.assumptions)


def test_memory_stats_have_every_field(mode):
    x = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    y = torch.empty(100, dtype=torch.uint8, device="cuda")
    del x
    stats = torch.cuda.memory_stats()
    assert stats["allocation.all.allocated"] == 2 and stats["allocation.large_pool.freed"] == 1
    assert stats["allocated_bytes.small_pool.current"] == 512 and stats["num_device_alloc"] == 2
    assert stats["allocated_bytes.all.peak"] == 3 * MIB + 512 and stats["segment.all.current"] == 2
    assert torch.cuda.memory_stats_as_nested_dict()["reserved_bytes"]["small_pool"]["current"] == 2 * MIB
    assert "GPU reserved memory" in torch.cuda.memory_summary() and "%" not in torch.cuda.memory_summary(0, True)
    assert torch.accelerator.memory_stats()["active.all.current"] == 1
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    again = torch.cuda.memory_stats()
    assert (again["allocated_bytes.all.peak"], again["allocation.all.allocated"]) == (512, 0)
    assert not mode.state.assumptions
    del y


def test_a_profile_counts_from_the_first_question_on_and_says_so():
    seen = []

    class Asks(nn.Linear):
        def forward(self, x):
            seen.append(torch.cuda.memory_stats())
            return super().forward(x)

    found = profile(Asks(1024, 1024), torch.empty(8, 1024), device="h100")
    assert seen[0]["allocated_bytes.large_pool.current"] == 4 * MIB and seen[0]["allocation.all.current"] == 3
    assert any("torch.cuda.memory_stats()" in text for text in found.assumptions)


@pytest.mark.parametrize("ask", [torch.cuda.memory_snapshot, lambda: torch.cuda.caching_allocator_alloc(MIB),
                                 torch.cuda.memory_summary], ids=["snapshot", "memory", "summary"])
def test_each_of_a_chain_of_blocks_gets_an_answer_of_its_own(ask):
    asked = []

    class Asks(nn.Linear):
        def forward(self, x):
            asked.append(ask())
            return super().forward(x).relu()

    x = torch.rand(64, 256)
    found = []
    for reuse in (True, False):
        asked.clear()
        model = nn.Sequential(*(Asks(256, 256) for _ in range(10)))
        found.append((profile(model, x, device="h100", reuse=reuse), len(asked)))
    (repeated, asked_then), (run, asked_each) = found
    assert asked_then == asked_each and repeated == run


def test_memory_without_a_tensor_is_counted(mode):
    address = torch.cuda.caching_allocator_alloc(3 * MIB)
    assert torch.cuda.memory_allocated() == 3 * MIB
    torch.cuda.caching_allocator_delete(address)
    assert torch.cuda.memory_allocated() == 0
    with pytest.raises(InputError, match=f"{address}"):
        torch.cuda.caching_allocator_delete(address)


def test_a_handle_of_cublas_has_its_workspace(mode):
    assert torch.cuda.current_blas_handle() and torch.cuda.memory_allocated() == 32 * MIB
    assert torch.backends.cuda.cublas_workspace_size() == 32 * MIB


def test_what_the_machine_was_built_with_is_that_of_the_device(mode):
    assert torch.backends.cuda.is_built() and torch.cuda.get_arch_list() == ["sm_90"]
    assert torch.backends.cuda.can_use_flash_attention(torch.backends.cuda.SDPAParams(*_attention()))
    assert torch.cuda.cudart().cudaProfilerStart() == 0 and torch.cuda.nccl.version()[0] == 2
    torch.cuda.set_sync_debug_mode("warn")
    assert torch.cuda.get_sync_debug_mode() == 1
    torch.backends.cuda.cufft_plan_cache.max_size = 10
    assert torch.backends.cuda.cufft_plan_cache[0].max_size == 10


EARLY = {(module, name): getattr(module, name) for module, name in (one.values for one in _public_calls())
         if not isinstance(getattr(module, name), type)}
#: of which C++ makes classes that are not there without CUDA, or that keeps what it answered
NOT_EARLY = {"graph_pool_handle", "is_current_stream_capturing", "change_current_allocator", "get_device_capability",
             "manual_seed", "manual_seed_all"}


@pytest.mark.parametrize("module, name", [pytest.param(*key, id=f"{key[0].__name__}.{key[1]}") for key in EARLY])
@pytest.mark.filterwarnings("ignore")
def test_names_that_were_imported_before_the_mode_answer_too(module, name):
    with MetaTensorMode():
        try:
            EARLY[module, name](*ARGUMENTS.get(name, tuple)())
        except InputError:
            pass
        except (AttributeError, RuntimeError, TypeError):
            assert name in NOT_EARLY


def test_the_device_is_there_by_names_that_were_imported_before():
    early = EARLY[torch.cuda, "is_available"], EARLY[torch.cuda, "device_count"], EARLY[torch.cuda, "current_stream"]
    before = early[0](), early[1]()
    with MetaTensorMode():
        x = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
        assert early[0]() and early[1]() == 1 and early[2]() == torch.cuda.default_stream()
        assert EARLY[torch.cuda, "memory_allocated"]() == 3 * MIB
        del x
    assert (early[0](), early[1]()) == before


def test_after_the_mode_torch_answers_as_before():
    with MetaTensorMode():
        torch.cuda.memory_stats()
    assert not hasattr(torch._C, "_cuda_memoryStats") or torch.cuda.is_available()
    assert torch.backends.cuda.is_built() == hasattr(torch._C, "_cuda_getDeviceCount")


def test_what_scripts_set_of_tunable_op_is_told_as_they_set_it():
    """Defaults of aten/src/ATen/cuda/tunable/Tunable.h; the buffer is set in MB and told in kB."""
    tunable = torch.cuda.tunable
    for _ in range(2):  # the second mode begins with the defaults
        with MetaTensorMode():
            assert (tunable.is_enabled(), tunable.tuning_is_enabled(), tunable.record_untuned_is_enabled(),
                    tunable.get_max_tuning_duration(), tunable.get_max_tuning_iterations(), tunable.get_filename(),
                    tunable.get_results()) == (False, True, False, 30, 100, "tunableop_results.csv", ())
            assert tunable.get_rotating_buffer_size() == torch.cuda.get_device_properties().L2_cache_size // 1024
            tunable.enable()
            tunable.tuning_enable(False)
            tunable.set_max_tuning_iterations(7)
            tunable.set_rotating_buffer_size(2)
            tunable.set_filename("own.csv")
            assert (tunable.is_enabled(), tunable.tuning_is_enabled(), tunable.get_max_tuning_iterations(),
                    tunable.get_rotating_buffer_size(), tunable.get_filename(), tunable.read_file()) == (
                        True, False, 7, 2048, "own.csv", False)
