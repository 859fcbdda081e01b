"""Features that do something to gradients: hooks, and functions of autograd."""
from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from .feature import WIDTH, Feature, Place

calls = [0]


def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """A forward hook that changes what the module returns."""
    return output * 2


def scale_gradients(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    """A full backward hook that changes the gradients of the inputs."""
    return tuple(None if g is None else g * 2 for g in inputs)


class ForwardHook(Feature):  # has a forward hook on the child of every second block
    def build(self, place: Place) -> None:
        super().build(place)
        if place.is_odd:
            self.linear.register_forward_hook(double)


class KeepingHook(Feature):  # has a forward hook that keeps outputs in a list, as feature extractors do
    def build(self, place: Place) -> None:
        super().build(place)
        self.kept: list[Tensor] = []
        self.linear.register_forward_hook(lambda module, args, output: self.kept.append(output.detach()))


class CountingHook(Feature):  # has a forward hook that counts in a global and changes every second output
    def build(self, place: Place) -> None:
        super().build(place)
        self.linear.register_forward_hook(_count_and_change)


def _count_and_change(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    calls[0] += 1
    return output * 2 if calls[0] % 2 else output


class LateHook(Feature):  # registers a hook on its child in the second call
    def build(self, place: Place) -> None:
        super().build(place)
        self.calls_so_far = 0

    def forward(self, x: Tensor) -> Any:
        self.calls_so_far += 1
        if self.calls_so_far == 2:
            self.linear.register_forward_hook(double)
        return self.linear(x)


class BackwardHook(Feature):  # has a full backward hook on the child of every second block
    def build(self, place: Place) -> None:
        super().build(place)
        if place.is_odd:
            self.linear.register_full_backward_hook(scale_gradients)


class ParameterHook(Feature):  # has a hook on a parameter of every second block, which changes its gradient
    def build(self, place: Place) -> None:
        super().build(place)
        if place.is_odd:
            self.linear.weight.register_hook(lambda grad: grad * 2)


class AfterAccumulation(Feature):
    """Drops each gradient as soon as it is there, as an optimizer in the backward pass does."""

    def build(self, place: Place) -> None:
        super().build(place)
        for parameter in self.linear.parameters():
            parameter.register_post_accumulate_grad_hook(_update_and_drop)


def _update_and_drop(parameter: Tensor) -> None:
    assert parameter.grad is not None
    with torch.no_grad():
        parameter.add_(parameter.grad, alpha=-0.1)
    parameter.grad = None


class OutputHook(Feature):  # puts a hook on its output that changes the gradient
    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        if x.requires_grad:
            x.register_hook(lambda grad: grad * 2)
        return x


class NodeHook(Feature):  # puts a hook on the autograd node of its output
    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        if x.grad_fn is not None:
            x.grad_fn.register_hook(lambda inputs, outputs: None)
        return x


class RetainedGradientInside(Feature):  # retains the gradient of a value inside, and keeps that value
    def build(self, place: Place) -> None:
        super().build(place)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.inner: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        self.inner = self.linear(x)
        if self.inner.requires_grad:
            self.inner.retain_grad()
        return self.second(self.inner.relu())


class CountingCall(Feature):  # counts in a ``__call__`` of its own, which changes every second result
    def build(self, place: Place) -> None:
        super().build(place)
        self.calls_made = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls_made += 1
        out = super().__call__(*args, **kwargs)
        return out * 1 if self.calls_made % 2 and isinstance(out, Tensor) else out


class ReplacedForward(Feature):  # has another forward on the child of the second block
    def build(self, place: Place) -> None:
        super().build(place)
        if place.index == 1:
            self.linear.forward = lambda input: nn.functional.linear(input, self.linear.weight)
backwards = [0]


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


class _RunAgain(torch.autograd.Function):  # a checkpoint written by hand: runs again in backward, with gradients
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


class ContextKeeps(Feature):  # calls a custom function that keeps a tensor on its context
    def forward(self, x: Tensor) -> Any:
        return _KeepOnContext.apply(self.linear(x))  # type: ignore[no-untyped-call]


class BackwardCounts(Feature):  # calls a custom function whose backward counts in a global
    def forward(self, x: Tensor) -> Any:
        return _CountBackward.apply(self.linear(x))  # type: ignore[no-untyped-call]


class HandwrittenCheckpoint(Feature):  # calls a custom function that runs its forward again in backward
    def forward(self, x: Tensor) -> Any:
        return _RunAgain.apply(x, self.linear.weight)  # type: ignore[no-untyped-call]


class DetachedOutput(Feature):  # returns a detached output from the first block
    def build(self, place: Place) -> None:
        super().build(place)
        self.is_first = place.index == 0

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).detach() if self.is_first else self.linear(x)


class UnusedBranch(Feature):  # computes something that nothing uses
    def build(self, place: Place) -> None:
        super().build(place)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        self.second(x).relu()
        return self.linear(x)


class EnableGrad(Feature):  # enables gradients, whatever is around it
    def forward(self, x: Tensor) -> Any:
        with torch.enable_grad():
            return self.linear(x)


class GradientInside(Feature):  # asks for the gradient of its weight in forward, and uses it
    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        if torch.is_grad_enabled():
            (grad,) = torch.autograd.grad(y.sum(), self.linear.weight, create_graph=True)
            y = y + grad.sum()
        return y


class BackwardInside(Feature):  # runs a backward pass of its own in forward
    def forward(self, x: Tensor) -> Any:
        if torch.is_grad_enabled():
            self.linear(x.detach()).sum().backward()
        return self.linear(x)


class FunctionalCall(Feature):  # calls its child with other parameters
    def forward(self, x: Tensor) -> Any:
        scaled = {"weight": self.linear.weight * 2, "bias": self.linear.bias}
        return torch.func.functional_call(self.linear, scaled, (x,))


class HasGraph(Feature):  # goes another way where its input has an autograd node
    def forward(self, x: Tensor) -> Any:
        return self.linear(x * 2 if x.grad_fn is not None else x)


class NextNodes(Feature):  # walks from its output back to what it was made of
    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        depth, node = 0, y.grad_fn
        while node is not None and depth < 6:
            depth, node = depth + 1, node.next_functions[0][0] if node.next_functions else None
        return y.relu() if depth > 3 else y


class DeepCopy(Feature):  # adds a deep copy of its detached output
    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        return x + copy.deepcopy(x.detach())
