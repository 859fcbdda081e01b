"""Results of some calls in a checkpointed function that are kept, on the device or the host, and not computed again."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from analyzer.fx.fake_tensor import GeneratorState
from analyzer.meta.operator_info import describe_operator

from .offload import HostCopy, HostTensor, StorageTable, alias_with_version

_CAST = torch.ops.aten._to_copy.default


class KeptResults:
    """What ``torch.utils.checkpoint`` needs to leave out some of a function's calls when it runs it again: those inside
    ``with kept:`` (or ``with kept.on_host:``) in a function checkpointed with ``context_fn=kept.contexts``. Each result
    is given out once, so that it is freed as early as a saved tensor; in a second backward pass the operators run.
    Operators that write in place to kept results, or to buffers, are left out too. Random numbers that kept calls drew
    are skipped where ``skips_draws``. The second run leaves buffers of the modules of ``root`` at ``paths`` as they
    were. Use one object for each call. Raises RuntimeError in backward where a kept result was written to after the
    function returned.
    """

    def __init__(self, root: nn.Module | None = None, *paths: str, skips_draws: bool = True) -> None:
        self.skips_draws = skips_draws
        self._modules = [] if root is None else [root.get_submodule(path) for path in paths]
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self._calls: list[_KeptCall] = []
        self._next = 0
        self._mode: type[_Recording] | type[_Replaying] | None = None
        self._entered: list[_Recording | _Replaying | None] = []
        #: the results in each storage, while the function runs for the first time
        self.owned: StorageTable[list[_KeptResult]] = StorageTable()
        #: storages of what was given out in the present recomputation
        self.given: StorageTable[bool] = StorageTable()
        self.on_host = _KeptBlock(partial(self.enter, offloads=True), self.__exit__)

    def contexts(self) -> tuple[_KeptBlock, _KeptBlock]:
        """What is around the function, and what is around it when it runs again."""
        first, again = (partial(self.begin, mode) for mode in (_Recording, _Replaying))
        return _KeptBlock(first, self.end), _KeptBlock(again, self.end)

    def begin(self, mode: type[_Recording] | type[_Replaying]) -> None:
        self._mode, self._next, self.given = mode, 0, StorageTable()
        if mode is _Replaying:
            self._buffers = [(b, b.detach().clone()) for module in self._modules if module.training
                             for b in module.buffers()]

    def end(self, *exc: Any) -> None:
        if self._mode is _Recording:
            for result in tree_leaves([ret.value for call in self._calls for row in call.returns.values()
                                       for ret in row if ret is not None]):
                if isinstance(result, _KeptResult) and isinstance(result.tensor, Tensor):
                    result.version = result.tensor._version
            self.owned = StorageTable()
        for buffer, before in self._buffers:
            # .data: autograd need not know, as the gradient of a normalisation does not read them
            buffer.data.copy_(before)
        self._buffers = []
        self._mode = None

    def enter(self, offloads: bool) -> None:
        if self._mode is None:  # without gradients, nothing is checkpointed
            self._entered.append(None)
            return
        if self._next == len(self._calls):
            self._calls.append(_KeptCall(offloads))
        mode = self._mode(self, self._calls[self._next])
        self._next += 1
        mode.__enter__()  # type: ignore[no-untyped-call]
        self._entered.append(mode)

    def __enter__(self) -> None:
        self.enter(offloads=False)

    def __exit__(self, *exc: Any) -> None:
        mode = self._entered.pop()
        if mode is not None:
            mode.__exit__(*exc)  # type: ignore[no-untyped-call]
            mode.finish()


@dataclass
class _KeptBlock:
    """A block that can be entered again, as a recomputation is."""

    enter: Callable[[], None]
    leave: Callable[..., None]

    def __enter__(self) -> None:
        self.enter()

    def __exit__(self, *exc: Any) -> None:
        self.leave(*exc)


class _KeptResult:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | HostTensor | None = alias_with_version(tensor)
        self.version = -1

    def give(self) -> Tensor:
        assert self.tensor is not None
        if isinstance(self.tensor, HostTensor):
            return self.tensor.bring_back()
        if self.tensor._version != self.version:
            raise RuntimeError(f"a result of shape {tuple(self.tensor.shape)} that a checkpoint keeps was changed in "
                               "place after the checkpointed function returned; recompute it instead, or change a copy "
                               "of it")
        return self.tensor.detach()  # with versions of its own: what is left out when it runs again still counts them


@dataclass(frozen=True)
class _WrittenArgument:
    """In place of a result: it is the ``index``-th of the tensors that the operator wrote to."""

    index: int


class _Return(NamedTuple):
    value: Any
    writes_to_owned: bool
    generator: GeneratorState | None  #: after it ran


@dataclass
class _KeptCall:
    offloads: bool
    returns: dict[Any, list[_Return | None]] = field(default_factory=dict)  #: by operator; None where given out


class _Recording(TorchDispatchMode):
    def __init__(self, kept: KeptResults, call: _KeptCall) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owned, self._call = kept.owned, call
        self._to_host: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(func, torch._ops.OpOverload) and any(
                r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
            return out  # which shows memory of an argument that the operator does not write to
        written = _written(func, args, kwargs or {})
        before = [self._owned.find(t) or [] for t in written]
        self._to_host += [t for t, results in zip(written, before)
                          if any(isinstance(r.tensor, HostTensor) for r in results)]

        def note(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            for i, tensor in enumerate(written):
                if value is tensor:
                    return _WrittenArgument(i)
            result = _KeptResult(value)
            self._owned.put(value, [*(self._owned.find(value) or ()), result])
            if self._call.offloads:
                self._to_host.append(value)
            return result

        noted = _Return(tree_map(note, out), any(before), GeneratorState.after(func, out))
        self._call.returns.setdefault(func, []).append(noted)
        return out

    def finish(self) -> None:
        """The call has ended: results that wait on the host go there as it leaves them."""
        returns = self._call.returns
        # autocast's, which in a recomputation may find them in its cache: not counted on
        if _CAST in returns and len(returns) > 1:
            for ret in returns.pop(_CAST):
                assert ret is not None
                ret.value.tensor = None
        moved: StorageTable[bool] = StorageTable()
        for tensor in self._to_host:
            results = [r for r in self._owned.find(tensor) or () if r.tensor is not None]
            if results and not moved.find(tensor):
                moved.put(tensor, True)
                copy = HostCopy(tensor)
                for result in results:
                    old = result.tensor
                    result.tensor = copy.describe(old) if isinstance(old, Tensor) else old._replace(  # type: ignore
                        copy=copy)
        self._to_host.clear()


class _Replaying(TorchDispatchMode):
    def __init__(self, kept: KeptResults, call: _KeptCall) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._given, self._returns, self._skips_draws = kept.given, call.returns, kept.skips_draws
        self._position: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        row, at = self._returns.get(func, ()), self._position[func]
        self._position[func] += 1
        ret = row[at] if at < len(row) else None
        if ret is None:
            return func(*args, **(kwargs or {}))
        row[at] = None  # type: ignore[index]
        written = _written(func, args, kwargs or {})
        if ret.writes_to_owned and not all(self._given.find(t) for t in written):
            # what it writes to was given out in an earlier recomputation, and computed in this one
            return func(*args, **(kwargs or {}))

        def give(value: Any) -> Any:
            if isinstance(value, _KeptResult):
                value = value.give()
                self._given.put(value, True)
            return written[value.index] if isinstance(value, _WrittenArgument) else value

        if ret.generator is not None and self._skips_draws:
            ret.generator.restore()
        return tree_map(give, ret.value)

    def finish(self) -> None:
        pass


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    if not isinstance(func, torch._ops.OpOverload):
        return []
    found = [args[i] if i < len(args) else kwargs.get(name) for i, name, _ in describe_operator(func).mutated]
    return [t for t in tree_leaves(found) if isinstance(t, Tensor)]
