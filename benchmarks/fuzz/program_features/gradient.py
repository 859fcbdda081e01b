"""Features that do something to gradients: hooks, and functions of autograd."""
from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from .feature import Feature, Place, feature, linear

calls, backwards = [0], [0]


def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """A forward hook that changes what the module returns."""
    return output * 2


def scale_gradients(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    """A full backward hook that changes the gradients of the inputs."""
    return tuple(None if g is None else g * 2 for g in inputs)


# has a forward hook on the child of every second block
ForwardHook = feature(lambda self, x: self.linear(x),
                      also=lambda self, at: at.is_odd and self.linear.register_forward_hook(double))
# has a forward hook that keeps outputs in a list, as feature extractors do
KeepingHook = feature(lambda self, x: self.linear(x), kept=lambda at: [], also=lambda self, at: (
    self.linear.register_forward_hook(lambda module, args, output: self.kept.append(output.detach()))))


def _count_and_change(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    calls[0] += 1
    return output * 2 if calls[0] % 2 else output


# has a forward hook that counts in a global and changes every second output
CountingHook = feature(lambda self, x: self.linear(x),
                       also=lambda self, at: self.linear.register_forward_hook(_count_and_change))


@feature(calls_so_far=0)  # registers a hook on its child in the second call
def LateHook(self: Any, x: Tensor) -> Any:
    self.calls_so_far += 1
    if self.calls_so_far == 2:
        self.linear.register_forward_hook(double)
    return self.linear(x)


# has a full backward hook on the child of every second block
BackwardHook = feature(lambda self, x: self.linear(x),
                       also=lambda self, at: at.is_odd and self.linear.register_full_backward_hook(scale_gradients))
# has a hook on a parameter of every second block, which changes its gradient
ParameterHook = feature(lambda self, x: self.linear(x), also=lambda self, at: (
    at.is_odd and self.linear.weight.register_hook(lambda grad: grad * 2)))


def _update_and_drop(parameter: Tensor) -> None:
    assert parameter.grad is not None
    with torch.no_grad():
        parameter.add_(parameter.grad, alpha=-0.1)
    parameter.grad = None


# drops each gradient as soon as it is there, as an optimizer in the backward pass does
AfterAccumulation = feature(lambda self, x: self.linear(x), also=lambda self, at: [
    parameter.register_post_accumulate_grad_hook(_update_and_drop) for parameter in self.linear.parameters()])


@feature  # puts a hook on its output that changes the gradient
def OutputHook(self: Any, x: Tensor) -> Any:
    x = self.linear(x)
    if x.requires_grad:
        x.register_hook(lambda grad: grad * 2)
    return x


@feature  # puts a hook on the autograd node of its output
def NodeHook(self: Any, x: Tensor) -> Any:
    x = self.linear(x)
    if x.grad_fn is not None:
        x.grad_fn.register_hook(lambda inputs, outputs: None)
    return x


@feature(second=lambda at: linear(), inner=None)  # retains the gradient of a value inside, and keeps that value
def RetainedGradientInside(self: Any, x: Tensor) -> Any:
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


def _replace_forward(self: Any, at: Place) -> None:
    if at.index == 1:
        self.linear.forward = lambda input: nn.functional.linear(input, self.linear.weight)


# has another forward on the child of the second block
ReplacedForward = feature(lambda self, x: self.linear(x), also=_replace_forward)


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


_apply_kept: Any = _KeepOnContext.apply
_apply_counted: Any = _CountBackward.apply
_apply_again: Any = _RunAgain.apply
# call custom functions: one that keeps a tensor on its context, one whose backward counts in a global, and one that
# runs its forward again in backward
ContextKeeps = feature(lambda self, x: _apply_kept(self.linear(x)))
BackwardCounts = feature(lambda self, x: _apply_counted(self.linear(x)))
HandwrittenCheckpoint = feature(lambda self, x: _apply_again(x, self.linear.weight))
# returns a detached output from the first block
DetachedOutput = feature(lambda self, x: self.linear(x).detach() if self.is_first else self.linear(x),
                         is_first=lambda at: at.index == 0)
# computes something that nothing uses
UnusedBranch = feature(lambda self, x: self.linear(x) if self.second(x).relu() is not None else x,
                       second=lambda at: linear())


@feature  # enables gradients, whatever is around it
def EnableGrad(self: Any, x: Tensor) -> Any:
    with torch.enable_grad():
        return self.linear(x)


@feature  # asks for the gradient of its weight in forward, and uses it
def GradientInside(self: Any, x: Tensor) -> Any:
    y = self.linear(x)
    if torch.is_grad_enabled():
        (grad,) = torch.autograd.grad(y.sum(), self.linear.weight, create_graph=True)
        y = y + grad.sum()
    return y


@feature  # runs a backward pass of its own in forward
def BackwardInside(self: Any, x: Tensor) -> Any:
    if torch.is_grad_enabled():
        self.linear(x.detach()).sum().backward()
    return self.linear(x)


# calls its child with other parameters
FunctionalCall = feature(lambda self, x: torch.func.functional_call(
    self.linear, {"weight": self.linear.weight * 2, "bias": self.linear.bias}, (x,)))
# goes another way where its input has an autograd node
HasGraph = feature(lambda self, x: self.linear(x * 2 if x.grad_fn is not None else x))


@feature  # walks from its output back to what it was made of
def NextNodes(self: Any, x: Tensor) -> Any:
    y = self.linear(x)
    depth, node = 0, y.grad_fn
    while node is not None and depth < 6:
        depth, node = depth + 1, node.next_functions[0][0] if node.next_functions else None
    return y.relu() if depth > 3 else y


@feature  # adds a deep copy of its detached output
def DeepCopy(self: Any, x: Tensor) -> Any:
    x = self.linear(x)
    return x + copy.deepcopy(x.detach())
