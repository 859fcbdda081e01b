"""Features with hooks: on modules, parameters, tensors and autograd nodes."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .feature import WIDTH, Feature, Place

calls = [0]


def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """A forward hook that changes what the module returns."""
    return output * 2


def add_one(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A hook before forward that changes what the module gets."""
    return (args[0] + 1, *args[1:])


def add_one_with_kwargs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As `add_one`, with named arguments."""
    return (args[0] + 1, *args[1:]), kwargs


def scale_gradients(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    """A full backward hook that changes the gradients of the inputs."""
    return tuple(None if g is None else g * 2 for g in inputs)


class ForwardHook(Feature):
    """Has a forward hook on the child of every second block."""

    def build(self, place: Place) -> None:
        super().build(place)
        if place.is_odd:
            self.linear.register_forward_hook(double)


class ForwardHookEverywhere(Feature):
    """Has a forward hook on each child."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.linear.register_forward_hook(double)


class LambdaHook(Feature):
    """Has a forward hook on each child, a lambda that knows the block's index."""

    def build(self, place: Place) -> None:
        super().build(place)
        index = place.index
        self.linear.register_forward_hook(lambda module, args, output: output.relu() if index % 2 else output)


class BlockPreHook(Feature):
    """Has a hook before forward on the second block."""

    def build(self, place: Place) -> None:
        super().build(place)
        if place.index == 1:
            self.register_forward_pre_hook(add_one)


class BlockPreHookWithKwargs(Feature):
    """Has a hook before forward that takes named arguments, on the last block."""

    def build(self, place: Place) -> None:
        super().build(place)
        if place.index == place.count - 1:
            self.register_forward_pre_hook(add_one_with_kwargs, with_kwargs=True)


class KeepingHook(Feature):
    """Has a forward hook that keeps outputs in a list, as feature extractors do."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.kept: list[Tensor] = []
        self.linear.register_forward_hook(lambda module, args, output: self.kept.append(output.detach()))


class CountingHook(Feature):
    """Has a forward hook that counts in a global and changes every second output."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.linear.register_forward_hook(_count_and_change)


def _count_and_change(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    calls[0] += 1
    return output * 2 if calls[0] % 2 else output


class LateHook(Feature):
    """Registers a hook on its child in the second call."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.calls_so_far = 0

    def forward(self, x: Tensor) -> Any:
        self.calls_so_far += 1
        if self.calls_so_far == 2:
            self.linear.register_forward_hook(double)
        return self.linear(x)


class BackwardHook(Feature):
    """Has a full backward hook on the child of every second block."""

    def build(self, place: Place) -> None:
        super().build(place)
        if place.is_odd:
            self.linear.register_full_backward_hook(scale_gradients)


class BackwardPreHook(Feature):
    """Has a hook before backward on each child."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.linear.register_full_backward_pre_hook(lambda module, grads: tuple(g * 1.5 for g in grads))


class BlockBackwardHook(Feature):
    """Has a full backward hook on the block itself."""

    def build(self, place: Place) -> None:
        super().build(place)
        if place.index == 2:
            self.register_full_backward_hook(scale_gradients)


class ParameterHook(Feature):
    """Has a hook on a parameter of every second block, which changes its gradient."""

    def build(self, place: Place) -> None:
        super().build(place)
        if place.is_odd:
            self.linear.weight.register_hook(lambda grad: grad * 2)


class ParameterHookEverywhere(Feature):
    """Has a hook on each weight."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.linear.weight.register_hook(lambda grad: grad.clamp(-1, 1))


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


class AfterAccumulationOfOne(Feature):
    """Reads the gradient of one weight when it is there."""

    def build(self, place: Place) -> None:
        super().build(place)
        if place.index == 1:
            self.linear.weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.shape[0]))


class OutputHook(Feature):
    """Puts a hook on its output that changes the gradient."""

    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        if x.requires_grad:
            x.register_hook(lambda grad: grad * 2)
        return x


class OutputHookWithState(Feature):
    """Puts a hook on its output that counts in a global."""

    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        if x.requires_grad:
            x.register_hook(_count_in_backward)
        return x


def _count_in_backward(grad: Tensor) -> Tensor | None:
    calls[0] += 1
    return grad * 2 if calls[0] % 2 else None


class InputHook(Feature):
    """Puts a hook on its input."""

    def forward(self, x: Tensor) -> Any:
        if x.requires_grad:
            x.register_hook(lambda grad: grad + 0.5)
        return self.linear(x)


class NodeHook(Feature):
    """Puts a hook on the autograd node of its output."""

    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        if x.grad_fn is not None:
            x.grad_fn.register_hook(lambda inputs, outputs: None)
        return x


class NodePreHook(Feature):
    """Puts a hook before the autograd node of its output, which changes what comes in."""

    def forward(self, x: Tensor) -> Any:
        x = self.linear(x).relu()
        if x.grad_fn is not None:
            x.grad_fn.register_prehook(lambda outputs: tuple(g * 2 for g in outputs))
        return x


class RetainedGradient(Feature):
    """Retains the gradient of its output."""

    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        if x.requires_grad:
            x.retain_grad()
        return x


class RetainedGradientInside(Feature):
    """Retains the gradient of a value inside, and keeps that value."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.inner: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        self.inner = self.linear(x)
        if self.inner.requires_grad:
            self.inner.retain_grad()
        return self.second(self.inner.relu())


class StateDictHook(Feature):
    """Has a hook on its state dict, which no forward calls."""

    def build(self, place: Place) -> None:
        super().build(place)
        register: Any = self.register_state_dict_post_hook
        register(lambda *args: None)


class OwnCall(Feature):
    """Has a ``__call__`` of its own around the usual one."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


class CountingCall(Feature):
    """Counts in a ``__call__`` of its own, which changes every second result."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.calls_made = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls_made += 1
        out = super().__call__(*args, **kwargs)
        return out * 1 if self.calls_made % 2 and isinstance(out, Tensor) else out


class ReplacedForward(Feature):
    """Has another forward on the child of the second block."""

    def build(self, place: Place) -> None:
        super().build(place)
        if place.index == 1:
            self.linear.forward = lambda input: nn.functional.linear(input, self.linear.weight)


class ReplacedForwardEverywhere(Feature):
    """Has another forward on each child, a method of another function."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.linear.forward = _forward_relu.__get__(self.linear)


def _forward_relu(self: nn.Linear, input: Tensor) -> Tensor:
    return nn.functional.linear(input, self.weight, self.bias).relu()


class WrappedForward(Feature):
    """Has its own forward wrapped, as accelerators wrap it."""

    def build(self, place: Place) -> None:
        super().build(place)
        old = self.forward
        index = place.index

        def forward(*args: Any, **kwargs: Any) -> Any:
            out = old(*args, **kwargs)
            return out * 2 if index == 2 and isinstance(out, Tensor) else out

        self.forward = forward  # type: ignore[method-assign]
