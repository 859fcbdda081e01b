"""The call of a compiled function under the mode, for the sake of the joint graphs that are made of it."""
from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodWrapperType
from typing import Any

import torch
from torch._dynamo import config as dynamo_config
from torch._dynamo.utils import get_optimize_ddp_mode
from torch.distributed import _DEFAULT_FIRST_BUCKET_BYTES  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from analyzer.errors import AnalyzerError
from analyzer.memory.allocator import DeviceOutOfMemoryError
from analyzer.meta.address_space import AddressSpace
from analyzer.meta.intercept.mode_stack import put_modes_back, take_off_ignoring_modes
from analyzer.meta.intercept.replacement import InterruptsHeld
from analyzer.meta.state import MetaState, mode_in_force
from analyzer.meta.tensor import device_of

from .checkpoint import tagged_checkpoints
from .frame import Frames, Root, list_frames
from .graph_end import GraphEnd, StandIns
from .graph_tape import GraphTape
from .joint_graph import JointGraph
from .traced_tensor import (
    GraphBreak,
    Hooks,
    is_held,
    is_in_transform,
    is_plain,
    is_wrapped,
    parts_of,
    put_saved_tensor_hooks,
    replay_views,
    space_of,
    take_saved_tensor_hooks,
)

Tensor = torch.Tensor

#: What ``nn.RNN``, ``nn.LSTM`` and ``nn.GRU`` call.
_RECURRENT = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})


class BucketEnds:
    """Where the graph of a module in `DistributedDataParallel` ends: before the parameter with which a bucket is full,
    counted from the last module on. Modules are assumed to run in the order in which they are registered, as DDP takes
    them at first.

    Source: ``DDPOptimizer`` in torch/_dynamo/backends/distributed.py: a graph gives all its gradients at its end, so
    that one of the whole model would leave nothing for its all-reduces to run beside.
    """

    def __init__(self, module: torch.nn.Module, bucket_bytes: int) -> None:
        held = [[p for p in m._parameters.values() if p is not None and p.requires_grad and not getattr(
            p, "_ddp_ignored", False)] for m in module.modules()]
        self._firsts: list[set[int]] = []  # parameters of the modules with which a graph begins
        size, cap, first = 0, min(_DEFAULT_FIRST_BUCKET_BYTES, bucket_bytes), set[int]()
        for parameters in reversed([one for one in held if one]):
            if size >= cap:
                self._firsts.append(first)
                size, cap = 0, bucket_bytes
            size += sum([p.untyped_storage().nbytes() for p in parameters])
            first = set(map(id, parameters))

    @classmethod
    def of_running(cls, function: Any) -> BucketEnds | None:
        """Those of a function of the wrapped model that runs; None where none does, or its user wants one graph."""
        wrapper: Any = DistributedDataParallel._get_active_ddp_module()
        if wrapper is None or get_optimize_ddp_mode() != "ddp_optimizer":
            return None
        owner = getattr(function, "__self__", None)
        return cls(owner if isinstance(owner, torch.nn.Module) else wrapper.module, wrapper.bucket_bytes_cap)

    def is_before(self, args: Iterable[Any]) -> bool:
        """Whether a graph ends before the torch function that is called with ``args``; each end is told once."""
        if not self._firsts:
            return False
        given = {id(a) for a in args}
        begun = [first for first in self._firsts if not first.isdisjoint(given)]
        self._firsts = [first for first in self._firsts if first not in begun]
        return bool(begun)


class FunctionTrace:
    """One call of a compiled function. Its code runs once, in a memory of its own; where a graph ends, ``run`` is given
    it and runs it for real, and tensors that the code still holds become the graph's results in place: whatever holds
    them, the function's result, lists, attributes of modules, has the real ones.

    ``end`` is told why a graph ends before the function does. What Python runs as it is written between two graphs,
    some frames among it (`frame.Frames`), has no tape.
    """

    def __init__(self, state: MetaState, decompositions: Mapping[Any, Callable[..., Any]],
                 run: Callable[[JointGraph], Sequence[Tensor | None]], end: Callable[[str], None],
                 config: dict[str, Any], buckets: BucketEnds | None = None, frames: Frames | None = None) -> None:
        self.state, self.decompositions, self._run, self._end = state, decompositions, run, end
        self.config = config  #: of the compiler
        self._buckets, self._depth = buckets, 0  # how many torch functions run that others call
        self._frames = frames or Frames()
        self._graph: tuple[Root, int] | str | None = None  # which is made, or why what runs is in none
        self._told: set[str] = set()
        self.space, self.outside_space = AddressSpace(), state.space
        self.tape: GraphTape | None = None
        self._made: dict[int, weakref.ref[Tensor]] = {}
        self._stand_ins = StandIns()
        self._with_gradient: dict[int, Tensor] = {}  # to which a gradient was assigned
        # around the call: hooks, dispatch modes that see a graph when it runs alone, whether autograd replays views
        self._hooks: Hooks | None = None
        self._modes: list[Any] = []
        self._keeps_casts = True  #: whether autocast does around the call
        self._replayed_views = False
        self._given = 0  # how many primals are arguments
        self.tag: Any = None  #: of the checkpoint that is under way: `checkpoint.Tag`

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``function`` gives for these arguments."""
        around = self.state.tracing  # of a function that runs as it is written, and calls this one
        self._keeps_casts = torch.is_autocast_cache_enabled()
        if self._frames.why_top_is_skipped is None:
            self._begin([t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)])
        else:
            self.state.tracing, self._graph = self, self._frames.why_top_is_skipped
            self._told.add(self._graph)
        try:
            with tagged_checkpoints(self):
                result = function(*args, **kwargs)
            self._note(tree_leaves(result))  # a transform's are not seen as they are made
            self.cut()
            return result
        except Exception as error:
            if not isinstance(error, (AnalyzerError, DeviceOutOfMemoryError)):
                self.cut()  # what the function did until then has its tensors, as where nothing is compiled
            raise
        finally:
            self._leave()
            self.state.tracing = around

    # ---- what the mode tells

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]) -> Any:
        """A torch function is called, or a custom function applied; one that needs contents runs between two graphs."""
        if self.tape is not None and (self.tape.in_backward or self.tape.called is not None):  # a part of an operator
            return call(func, args, kwargs)
        if not self._depth and not self._frames.are_plain and type(func) is not MethodWrapperType:
            self._follow_frames(args)
        if self.tape is None:
            return call(func, args, kwargs)
        with torch._C.DisableTorchFunction():
            is_counted = self._buckets is not None and not self._depth and type(func) is not MethodWrapperType
            ends = is_counted and self._buckets.is_before(args)  # type: ignore[union-attr]
        if ends:
            with self.between():
                pass
        with torch._C.DisableTorchFunction():
            for value in (*args, *kwargs.values()):
                for tensor in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(tensor, Tensor):
                        self._stand_ins.replace(tensor)
        self._depth += 1
        try:
            if func is torch.gru_cell:
                raise GraphBreak("PyTorch's compiler has no kernel for the shapes of aten._thnn_fused_gru_cell")
            if func in _RECURRENT and not dynamo_config.allow_rnn:
                raise GraphBreak("Dynamo takes no nn.RNN, nn.LSTM or nn.GRU")
            name, scaled = _SCALED.get(func, ("", func))
            if isinstance(kwargs.get(name), Tensor):
                func = scaled
            result = call(func, args, kwargs)
        except GraphBreak as reason:
            if is_in_transform():
                raise
            with self.outside(str(reason)):
                return call(func, args, kwargs)
        finally:
            self._depth -= 1
        if type(func) is MethodWrapperType and getattr(func.__self__, "__name__", "") == "grad":
            if len(args) > 1:
                self._with_gradient[id(args[0])] = args[0]
            return result  # it is another tensor's
        self._note(result if isinstance(result, (list, tuple)) else (result,))
        return result

    def _note(self, results: Iterable[Any]) -> None:
        for made in results:
            if isinstance(made, Tensor) and (is_wrapped(made) or is_plain(made)):
                before = self._made.get(id(made))
                if before is None or before() is not made:
                    self._made.pop(id(made), None)  # of one that is gone, whose turn this one would have
                    self._made[id(made)] = weakref.ref(made)

    def is_transforming(self) -> bool:
        """Whether a transform of ``torch.func`` runs, whose gradients are a part of the graph."""
        return is_in_transform()

    @contextmanager
    def outside(self, reason: str) -> Iterator[None]:
        """A block that runs as it is written, between two graphs or where Python runs what is around it."""
        if self.tape is None:
            self.state.tracing = None
            try:
                yield
            finally:
                self.state.tracing = self
            return
        self._end(reason)
        if self.tag is not None:
            # Dynamo gives up the checkpoint then, and calls it as it is written (CheckpointHigherOrderVariable of
            # torch/_dynamo/variables/higher_order_ops.py); what was traced of it cannot be undone here
            self.state.assume(f"a graph ends inside of a checkpoint ({reason}): what its graphs save is kept here, "
                              "where PyTorch runs them again in the backward pass, so memory is told too high")
        frames = list_frames(_CALL)
        is_empty = all(node.op == "placeholder" for node in self.tape.graph.nodes)
        if frames and not dynamo_config.nested_graph_breaks:
            self._frames.note_break(frames, reason, is_empty)
            self._graph = self._frames.find_graph(frames)
        del frames
        with self.between():
            yield

    def _follow_frames(self, args: tuple[Any, ...]) -> None:
        """End the graph where what runs belongs to another one, or to none."""
        frames = list_frames(_CALL)
        if not frames:  # what is called when the function has ended
            return
        graph = self._frames.find_graph(frames)
        if graph == self._graph and (self.tape is None) == isinstance(graph, str):
            return
        is_first, self._graph = self._graph is None, graph
        if isinstance(graph, str):
            if self.tape is not None:
                if graph not in self._told:
                    self._told.add(graph)
                    self._end(graph)
                self.cut()
                self.state.tracing = self  # to be told where the next one begins
        elif self.tape is None:
            with torch._C.DisableTorchFunction():
                self._begin([t for t in tree_leaves(args)
                             if isinstance(t, Tensor) and not isinstance(t, torch.nn.Parameter)])
        elif not is_first:
            with self.between():
                pass

    @contextmanager
    def between(self) -> Iterator[None]:
        """A block between two graphs, for which no compiler breaks them."""
        if self.tape is None:
            yield
            return
        self.cut()
        try:
            yield
        finally:
            self._begin([t for ref in self._made.values() if (t := ref()) is not None])

    # ---- one graph

    def _begin(self, tensors: Iterable[Tensor]) -> None:
        with InterruptsHeld():
            self._enter(tensors)

    def _enter(self, tensors: Iterable[Tensor]) -> None:
        state = self.state
        running = (lambda: 0) if state.recorder is None else state.recorder.modules.running
        self.tape = GraphTape(self.decompositions, running, lambda: self.tag)
        self._made, self._with_gradient, self._stand_ins = {}, {}, StandIns()
        state.space, state.graph, state.tracing = self.space, self.tape, self
        self._modes = take_off_ignoring_modes()
        torch.set_autocast_cache_enabled(False)  # ``disable_autocast_cache`` of torch/fx/experimental/proxy_tensor.py
        hooks = take_saved_tensor_hooks()  # those around the call are for what the compiled graph saves
        if self._hooks is None:
            self._hooks = hooks
        put_saved_tensor_hooks(hooks[len(self._hooks):])
        with torch._C.DisableTorchFunction():
            for tensor in tensors:
                self._stand_ins.replace(tensor)
                for part in parts_of(tensor):
                    if is_plain(part):
                        self.tape.value(part)
        self._replayed_views = replay_views(True)
        self._given = len(self.tape.primals)

    def _leave(self) -> None:
        state = self.state
        torch.set_autocast_cache_enabled(self._keeps_casts)
        if self.tape is None:
            state.tracing = None
            return
        with InterruptsHeld():
            state.space, state.graph, state.tracing, self.tape = self.outside_space, None, None, None
            replay_views(self._replayed_views)
            self._stand_ins.put_back()
            put_modes_back(self._modes)
            put_saved_tensor_hooks([*(self._hooks or ()), *take_saved_tensor_hooks()])

    def cut(self) -> None:
        """The graph ends here, and runs."""
        if self.tape is None:
            return
        with torch._C.DisableTorchFunction(), _unheard(self.state):
            gradients = [(t, t.grad) for t in self._with_gradient.values() if t.grad is not None]
            end = GraphEnd(self.tape, self.space, self._stand_ins, gradients)
            joint = end.close(self.list_live(), self._given)
        self._leave()
        with mode_in_force():
            with torch._C._EnableTorchFunction():
                results: Sequence[Any] = ()
                if joint is not None:
                    joint.primals = [_place_constant(self.state, p) if space_of(p) is self.space else p
                                     for p in joint.primals]
                    results = self._run(joint)
            with torch._C.DisableTorchFunction():
                end.finish(results)

    def list_live(self) -> list[Tensor]:
        """The tensors that were made and that Python code holds."""
        if any(is_wrapped(tensor) for made in self._made.values() if (tensor := made()) is not None):
            # what DTensor's propagation of shardings raised and caught is in a cycle with frames that hold its
            # arguments (``decomp_exception`` in torch/distributed/tensor/_sharding_prop.py)
            gc.collect(1)
        found = []
        for made in self._made.values():
            tensor = made()
            if tensor is not None and is_held(tensor):
                found.append(tensor)
        return found


#: Writes of what a tensor scales, whose number they ask for, by what scales: in Dynamo they are sums that do not.
#: Source: ``method_add_``, ``method_addcmul_`` and ``method_addcdiv_`` of torch/_dynamo/variables/tensor.py.
_SCALED: dict[Any, tuple[str, Callable[..., Tensor]]] = {
    Tensor.add_: ("alpha", lambda x, other, alpha: x.add_(other * alpha)),
    Tensor.addcmul_: ("value", lambda x, one, other, value: x.add_(one * other * value)),
    Tensor.addcdiv_: ("value", lambda x, one, other, value: x.add_(one / other * value))}


_CALL = FunctionTrace.call.__code__


def _place_constant(state: MetaState, tensor: Tensor) -> Tensor:
    """What stands for a tensor that the function made of numbers, as torch.tensor does: the compiler has it ready."""
    with _unheard(state):
        found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device_of(tensor))
        found.untyped_storage().followed = tensor.untyped_storage().followed  # type: ignore[attr-defined]
    return found


@contextmanager
def _unheard(state: MetaState) -> Iterator[None]:
    before, state.recorder, tracing, state.tracing = state.recorder, None, state.tracing, None
    try:
        yield
    finally:
        state.recorder, state.tracing = before, tracing
