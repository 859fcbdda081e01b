"""What a registered rule may say of an operator's memory."""
import pytest
import torch

from analyzer import profile, register_memory_impl, register_shape_impl
from analyzer.errors import InputError
from analyzer.meta import MemoryNeed, Stage
from tests.call import Call

MIB = 2**20
library = torch.library.Library("memory_rule", "DEF")
library.define("pair(Tensor x) -> (Tensor, Tensor)")


def peak(need):
    x = torch.empty(MIB, device="meta")  # 4 MiB, as is each output
    with register_shape_impl.scope(), register_memory_impl.scope():
        register_shape_impl(torch.ops.memory_rule.pair, lambda x: (x.new_empty(x.shape), x.new_empty(x.shape)))
        register_memory_impl(torch.ops.memory_rule.pair, lambda x, out: need)
        return profile(Call(lambda m, x: torch.ops.memory_rule.pair(x)), x, mode="infer").peak_allocated_bytes


@pytest.mark.parametrize(("need", "mib"), [
    (MemoryNeed(), 12), (MemoryNeed(workspace_bytes=8 * MIB), 20), (MemoryNeed(stages=(Stage((8 * MIB,)),)), 20),
    (MemoryNeed(stages=(Stage((8 * MIB,), before=0),)), 12),  # the input and it, then the input and both outputs
    (MemoryNeed(stages=(Stage((8 * MIB,), before=1),)), 16),
    (MemoryNeed(stages=(Stage((8 * MIB,), before=0, kept=True),)), 20),
    (MemoryNeed(2 * MIB, stages=(Stage((8 * MIB,)),)), 20), (MemoryNeed(output_order=(1, 0)), 12)])
def test_peaks_by_hand(need, mib):
    assert peak(need) == mib * MIB


@pytest.mark.parametrize(("need", "said"), [
    (None, "returned None: return a MemoryNeed, as in MemoryNeed(workspace_bytes=x.nbytes)"),
    (MemoryNeed(None), "workspace_bytes=None: must be a whole number of bytes, at least 0"),
    (MemoryNeed(-8), "workspace_bytes=-8: must be a whole number"),
    (MemoryNeed(saved_bytes=True), "saved_bytes=True: must be a whole number"),
    (MemoryNeed(stages=[Stage((8,))]), "stages=[Stage(blocks=(8,), before=None, kept=False)]: must be a tuple"),
    (MemoryNeed(stages=Stage((8,))), "stages=Stage(blocks=(8,), before=None, kept=False): must be a tuple of Stage"),
    (MemoryNeed(stages=(Stage(8),)), "Stage(blocks=8, before=None, kept=False): its blocks must be a tuple"),
    (MemoryNeed(stages=(Stage((8,), 2),)), "Stage(blocks=(8,), before=2, kept=False): this call has outputs 0 to 1"),
    (MemoryNeed(stages=(Stage((8,), "out"),)),
     "Stage(blocks=(8,), before='out', kept=False): this call has outputs 0 to 1"),
    (MemoryNeed(output_order=(0,)), "output_order=(0,): must be a tuple that holds each of 0 to 1 once"),
    (MemoryNeed(output_order=0), "output_order=0: must be"),
    (MemoryNeed(output_order=(-1, 0)), "output_order=(-1, 0): must be")])
def test_what_no_rule_may_return_is_refused(need, said):
    peak(MemoryNeed())  # the call is known by now: its outputs are made again by recipes
    with pytest.raises(InputError) as caught:
        peak(need)
    assert f"register_memory_impl(memory_rule.pair.default): {said}" in str(caught.value)
