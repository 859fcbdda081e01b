"""Features that use autograd by hand: custom functions, inner gradients, detached and graph-dependent values."""
from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .feature import WIDTH, Feature, Place

backwards = [0]


class _SaveInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0].sign()


class _KeepOnContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.kept = x.relu()
        return ctx.kept * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * (ctx.kept > 0)


class _CountBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        backwards[0] += 1
        return grad * 2 if backwards[0] % 2 else grad.relu() * 2


class _TwoOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        mask = x > 0
        ctx.mark_non_differentiable(mask)
        ctx.save_for_backward(mask)
        return x * 2, mask

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, of_mask: Tensor) -> Any:
        return grad * ctx.saved_tensors[0]


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * 2


class _RunAgain(torch.autograd.Function):
    """A checkpoint written by hand: runs again in backward, with gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Any:
        ctx.save_for_backward(x, weight)
        return (x @ weight).relu()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            out = (inputs[0] @ inputs[1]).relu()
        return torch.autograd.grad(out, inputs, grad)


class CustomFunction(Feature):
    """Calls a custom function that saves its input."""

    def forward(self, x: Tensor) -> Any:
        return _SaveInput.apply(self.linear(x))  # type: ignore[no-untyped-call]


class ContextKeeps(Feature):
    """Calls a custom function that keeps a tensor on its context."""

    def forward(self, x: Tensor) -> Any:
        return _KeepOnContext.apply(self.linear(x))  # type: ignore[no-untyped-call]


class BackwardCounts(Feature):
    """Calls a custom function whose backward counts in a global."""

    def forward(self, x: Tensor) -> Any:
        return _CountBackward.apply(self.linear(x))  # type: ignore[no-untyped-call]


class NonDifferentiableOutput(Feature):
    """Calls a custom function with an output that has no gradient."""

    def forward(self, x: Tensor) -> Any:
        out, mask = _TwoOutputs.apply(self.linear(x))  # type: ignore[no-untyped-call]
        return out * mask


class DirtyFunction(Feature):
    """Calls a custom function that writes to its input."""

    def forward(self, x: Tensor) -> Any:
        return _InPlace.apply(self.linear(x))  # type: ignore[no-untyped-call]


class HandwrittenCheckpoint(Feature):
    """Calls a custom function that runs its forward again in backward."""

    def forward(self, x: Tensor) -> Any:
        return _RunAgain.apply(x, self.linear.weight)  # type: ignore[no-untyped-call]


class Detached(Feature):
    """Gives its child a detached input."""

    def forward(self, x: Tensor) -> Any:
        return x + self.linear(x.detach())


class DetachedOutput(Feature):
    """Returns a detached output from the first block."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.is_first = place.index == 0

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).detach() if self.is_first else self.linear(x)


class StraightThrough(Feature):
    """Passes gradients past a rounding."""

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return y + (y.round() - y).detach()


class UnusedBranch(Feature):
    """Computes something that nothing uses."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        self.second(x).relu()
        return self.linear(x)


class CutBranch(Feature):
    """Multiplies with what has no gradient but parameters of its own."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            scale = self.second(x).sigmoid()
        return self.linear(x) * scale


class InferenceInside(Feature):
    """Computes a detached clone in inference mode."""

    def forward(self, x: Tensor) -> Any:
        with torch.inference_mode():
            scale = x.mean(-1, keepdim=True).sigmoid()
        return self.linear(x) * scale.clone().shape[0]


class EnableGrad(Feature):
    """Enables gradients, whatever is around it."""

    def forward(self, x: Tensor) -> Any:
        with torch.enable_grad():
            return self.linear(x)


class GradientInside(Feature):
    """Asks for the gradient of its weight in forward, and uses it."""

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        if torch.is_grad_enabled():
            (grad,) = torch.autograd.grad(y.sum(), self.linear.weight, create_graph=True)
            y = y + grad.sum()
        return y


class ForceFromEnergy(Feature):
    """Returns the gradient of an energy by its input, as interatomic potentials do."""

    def forward(self, x: Tensor) -> Any:
        with torch.enable_grad():
            at = x if x.requires_grad else x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.linear(at).square().sum(), at, create_graph=torch.is_grad_enabled())
        return x + force


class GradientPenalty(Feature):
    """Adds the norm of an inner gradient in training."""

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        if y.requires_grad:
            inner = x.detach().requires_grad_()
            (grad,) = torch.autograd.grad(self.linear(inner).tanh().sum(), inner, create_graph=True)
            y = y + grad.square().mean()
        return y


class BackwardInside(Feature):
    """Runs a backward pass of its own in forward."""

    def forward(self, x: Tensor) -> Any:
        if torch.is_grad_enabled():
            self.linear(x.detach()).sum().backward()
        return self.linear(x)


class FunctionalGradient(Feature):
    """Takes a gradient with torch.func."""

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) + torch.func.grad(lambda t: self.linear(t).square().sum())(x.detach())


class Vmap(Feature):
    """Maps its child over the batch."""

    def forward(self, x: Tensor) -> Any:
        return torch.vmap(self.linear)(x)


class FunctionalCall(Feature):
    """Calls its child with other parameters."""

    def forward(self, x: Tensor) -> Any:
        scaled = {"weight": self.linear.weight * 2, "bias": self.linear.bias}
        return torch.func.functional_call(self.linear, scaled, (x,))


class GradientOfWeight(Feature):
    """Goes another way where its weight has a gradient already."""

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if self.linear.weight.grad is not None else self.linear(x)


class HasGraph(Feature):
    """Goes another way where its input has an autograd node."""

    def forward(self, x: Tensor) -> Any:
        return self.linear(x * 2 if x.grad_fn is not None else x)


class IsLeaf(Feature):
    """Goes another way where its input is a leaf."""

    def forward(self, x: Tensor) -> Any:
        return self.linear(x * 2 if x.is_leaf else x)


class NodeName(Feature):
    """Goes another way by the name of its input's autograd node."""

    def forward(self, x: Tensor) -> Any:
        name = "" if x.grad_fn is None else x.grad_fn.name()
        return self.linear(x) if name.startswith("Add") else self.linear(x).relu()


class NextNodes(Feature):
    """Walks from its output back to what it was made of."""

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        depth, node = 0, y.grad_fn
        while node is not None and depth < 6:
            depth, node = depth + 1, node.next_functions[0][0] if node.next_functions else None
        return y.relu() if depth > 3 else y


class Version(Feature):
    """Goes another way where its input was written to."""

    def forward(self, x: Tensor) -> Any:
        return self.linear(x * 2 if x._version > 0 else x)


class RequiresGradient(Feature):
    """Goes another way where its input requires a gradient."""

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if x.requires_grad else self.linear(x)


class DeepCopy(Feature):
    """Adds a deep copy of its detached output."""

    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        return x + copy.deepcopy(x.detach())


class AnomalyMode(Feature):
    """Runs under autograd's detection of anomalies."""

    def forward(self, x: Tensor) -> Any:
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            return self.linear(x).relu()


class ForwardGradient(Feature):
    """Takes a derivative in forward mode of a detached value."""

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) * torch.func.jvp(torch.tanh, (x.detach(),), (torch.ones_like(x),))[1]
