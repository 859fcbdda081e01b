"""Features that run under contexts: autocast, checkpoints, saved-tensor hooks, streams, modes, compilation."""
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .feature import WIDTH, Feature, Place

offloaded: list[Tensor] = []


class Autocast(Feature):
    """Computes under autocast."""

    def forward(self, x: Tensor) -> Any:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            y = self.linear(x)
        return x + y.float()


class AutocastOff(Feature):
    """Computes with autocast switched off."""

    def forward(self, x: Tensor) -> Any:
        with torch.autocast(x.device.type, enabled=False):
            y = self.linear(x.float())
        return x + y


class AutocastByIndex(Feature):
    """Computes under autocast in odd blocks."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.casts = place.is_odd

    def forward(self, x: Tensor) -> Any:
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=self.casts):
            y = self.linear(x)
        return x + y.float()


class AutocastBranch(Feature):
    """Goes another way where autocast is enabled."""

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if torch.is_autocast_enabled(x.device.type) else self.linear(x)


class _FeedForward(Feature):
    def build(self, place: Place) -> None:
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def compute(self, x: Tensor) -> Any:
        """The layer itself."""
        return self.down(F.gelu(self.up(x)))


class Checkpoint(_FeedForward):
    """Checkpoints part of itself."""

    def forward(self, x: Tensor) -> Any:
        return x + checkpoint(self.compute, x, use_reentrant=False)


class ReentrantCheckpoint(_FeedForward):
    """Checkpoints part of itself in the old way."""

    def forward(self, x: Tensor) -> Any:
        return x + checkpoint(self.compute, x * self.up.bias.mean(), use_reentrant=True)


class CheckpointByIndex(_FeedForward):
    """Checkpoints part of itself in odd blocks."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.checkpoints = place.is_odd

    def forward(self, x: Tensor) -> Any:
        return x + (checkpoint(self.compute, x, use_reentrant=False) if self.checkpoints else self.compute(x))


class SelectiveCheckpoint(_FeedForward):
    """Checkpoints part of itself, products kept."""

    def forward(self, x: Tensor) -> Any:
        def keep_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
            return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = lambda: create_selective_checkpoint_contexts(keep_products)  # noqa: E731
        return x + checkpoint(self.compute, x, use_reentrant=False, context_fn=contexts)


class CheckpointedDropout(_FeedForward):
    """Checkpoints a dropout, whose generator is kept and put back."""

    def forward(self, x: Tensor) -> Any:
        return checkpoint(lambda t: F.dropout(self.compute(t), 0.1, self.training), x, use_reentrant=False)


class SavedTensorHooks(Feature):
    """Packs what is saved."""

    def forward(self, x: Tensor) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return self.linear(x).relu()


class PackedTensors(Feature):
    """Packs what is saved as smaller numbers."""

    def forward(self, x: Tensor) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.to(torch.bfloat16), lambda t: t.float()):
            return torch.tanh(self.linear(x))


class IndexedTensors(Feature):
    """Packs what is saved as a place in a global list."""

    def forward(self, x: Tensor) -> Any:
        def pack(t: Tensor) -> int:
            offloaded.append(t.detach())
            return len(offloaded) - 1

        with torch.autograd.graph.saved_tensors_hooks(pack, offloaded.__getitem__):
            return torch.tanh(self.linear(x))


class SaveOnHost(Feature):
    """Keeps what is saved on the host."""

    def forward(self, x: Tensor) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return self.linear(x).relu()


class OtherStream(Feature):
    """Computes on a stream of its own."""

    def forward(self, x: Tensor) -> Any:
        if not x.is_cuda:
            return self.linear(x)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            y = self.linear(x)
        torch.cuda.current_stream().wait_stream(stream)
        return y + 1


class DefaultDevice(Feature):
    """Makes a tensor under torch's default device."""

    def forward(self, x: Tensor) -> Any:
        with torch.device(x.device):
            shift = torch.ones(WIDTH)
        return self.linear(x) + shift


class DeviceBranch(Feature):
    """Goes another way on a GPU."""

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if x.is_cuda else self.linear(x)


class HostScalar(Feature):
    """Multiplies by a sum made on the host."""

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) * torch.ones(3, device="cpu").sum().to(x.device)


class DeterministicAlgorithms(Feature):
    """Goes another way by whether algorithms must be deterministic."""

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if torch.are_deterministic_algorithms_enabled() else self.linear(x)


class OneAttentionKernel(Feature):
    """Allows one kernel of attention, by the index."""

    def build(self, place: Place) -> None:
        super().build(place)
        kernels = torch.nn.attention.SDPBackend
        self.kernel = kernels.MATH if place.is_odd else kernels.EFFICIENT_ATTENTION

    def forward(self, x: Tensor) -> Any:
        heads = self.linear(x)[:, None]
        with torch.nn.attention.sdpa_kernel(self.kernel):
            return F.scaled_dot_product_attention(heads, heads, heads)[:, 0]


class _CountCalls(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


class FunctionMode(Feature):
    """Computes under a mode that counts torch functions, and asks it."""

    def forward(self, x: Tensor) -> Any:
        with _CountCalls() as mode:
            y = self.linear(x)
        return y.relu() if mode.calls % 2 else y


class _CountOperators(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


class DispatchMode(Feature):
    """Computes under a mode that counts operators."""

    def forward(self, x: Tensor) -> Any:
        with _CountOperators() as mode:  # type: ignore[no-untyped-call]
            y = self.linear(x)
        return y * float(mode.calls > 0)


class SubmoduleOutsideCheckpoint(Feature):
    """Calls a child twice, once in a checkpoint."""

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.linear, self.linear(x).relu(), use_reentrant=False)


class RandomStateForked(Feature):
    """Draws under a forked generator."""

    def forward(self, x: Tensor) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            mask = torch.rand(WIDTH) < 0.5
        return self.linear(x) * mask.to(x.device)


class CompiledChild(Feature):
    """Holds a compiled child."""

    def build(self, place: Place) -> None:
        self.compiled = torch.compile(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Any:
        return self.compiled(x)


@torch.compile
def scaled_relu(x: Tensor) -> Tensor:
    """A compiled function."""
    return x.relu() * 2


class CompiledFunction(Feature):
    """Calls a compiled function."""

    def forward(self, x: Tensor) -> Any:
        return scaled_relu(self.linear(x))


class ScriptedChild(Feature):
    """Holds a scripted child."""

    def build(self, place: Place) -> None:
        self.scripted = torch.jit.script(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Any:
        return self.scripted(x)


class Handled(Feature):
    """Goes on after an error that it expects."""

    def forward(self, x: Tensor) -> Any:
        try:
            y = x.view(-1, 7)
        except RuntimeError:
            y = self.linear(x)
        return y.view(x.shape)


class Asserted(Feature):
    """Checks its input."""

    def forward(self, x: Tensor) -> Any:
        assert x.dim() == 3 and x.shape[-1] == WIDTH
        torch._check(x.numel() > 0)
        return self.linear(x)


class RecordFunction(Feature):
    """Names a range for torch's profiler."""

    def forward(self, x: Tensor) -> Any:
        with torch.profiler.record_function("feature"):
            return self.linear(x)
