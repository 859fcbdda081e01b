"""Operators under the mode: outputs without data, claims, known contents, and one report per call."""
from __future__ import annotations

from typing import Any

import torch

from analyzer.cuda.kernel_registry import device_shapes, host_shapes
from analyzer.cuda.kernels.sparse import sparse_shapes
from analyzer.cuda.workspaces import convolution as convolution_workspace  # noqa: F401  four register their rules
from analyzer.cuda.workspaces.library import library_needs, take_library_workspaces
from analyzer.errors import UnsupportedOperatorError
from analyzer.memory.allocator import DeviceOutOfMemoryError
from analyzer.meta.intercept.gates import reopened
from analyzer.meta.intercept.mode_stack import DirectDispatchMode, without_modes
from analyzer.meta.value.data_dependent import answer_data_dependent
from analyzer.meta.value.density import CHOOSING, chosen_among, drawn_contents, expected_counts, expected_density
from analyzer.meta.value.finiteness import finite_answer
from analyzer.meta.value.known_value import (
    Call,
    Deferred,
    Known,
    ReadArgument,
    Result,
    Written,
    Zeros,
    covers_storage,
    small_enough,
    window_of,
    worth_following,
)

from . import output_cache  # noqa: F401  four register their rules
from .accumulation import ADD_IN_PLACE, is_engines_sum
from .current_device import selected
from .dtype_rule import check_dtypes
from .list_memo import ListMemo
from .memory_need import Stage, allocation_order, has_rule, hold_blocks, stages_of
from .operator_info import OperatorInfo, describe_operator
from .output_cache import NEW, SAME, VIEW, Entry, make_recipes, spec_of, to_specs
from .reserved_touch import ReservedTouch
from .shape_registry import register_shape_impl
from .signature import Signature
from .spec import TensorSpec
from .state import CPU, MetaState
from .storage import MetaStorage, attach
from .tensor import META, MetaTensor, claim_of, kernel

Tensor = torch.Tensor
_empty_strided = torch.empty_strided
_as_strided = torch.as_strided
_entries = output_cache.entries
_FULL = torch.ops.aten.full.default
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_AUTOGRAD = torch._C.DispatchKey.AutogradMeta


class MetaDispatchMode(DirectDispatchMode):
    """The dispatch half of `MetaTensorMode`."""

    def __init__(self) -> None:
        super().__init__()
        self.state: MetaState | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        for kind in types:
            if _dispatches(kind):  # a tensor around tensors (nested, quantised): what it does with them comes here
                from .mode import mode_in_force

                with self, reopened(), mode_in_force():
                    return kind.__torch_dispatch__(func, types, args, kwargs or {})
        if is_engines_sum(func, args):
            func = ADD_IN_PLACE
        with torch._C.DisableTorchFunction():  # backward calls this with the function mode still active
            result = self.handle(func, args, kwargs)
        assert self.state is not None
        if self.state.tape is not None:
            self.state.tape.dispatched(func, args, kwargs or {}, result)
        return result

    def handle(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, whole: bool = False) -> Any:
        try:
            return self._handle(func, args, kwargs, whole)
        except DeviceOutOfMemoryError as error:
            if self.state is not None and self.state.recorder is not None:
                self.state.recorder.ran_out(str(func), error)
            raise

    def _handle(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, whole: bool) -> Any:
        state = self.state
        assert state is not None
        info = describe_operator(func)
        if info.silent:
            return func(*args, **(kwargs or {}))
        if info.composite and not whole:
            with self, reopened():
                result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        pending = state.pending_claim
        tensors: list[Tensor] = []
        storages: list[MetaStorage] = []
        key: Any = [info, pending]  # not func: torch hashes operators in Python
        lists = state.lists
        if not _flatten(args, tensors, storages, key,
                        lists) or (kwargs and not _flatten_named(kwargs, tensors, storages, key, lists)):
            tensors.clear()
            storages.clear()
            args, kwargs = adopt_arguments(state, args), adopt_arguments(state, kwargs or {})
            if not (_flatten(args, tensors, storages, key := [info, pending])
                    and _flatten_named(kwargs, tensors, storages, key)):
                key = None  # sparse or another layout: no recipe
        if info.data_dependent:
            answer = answer_data_dependent(state, info, args, kwargs or {}, tensors)
            if answer is not NotImplemented:
                if has_rule(info):  # rules of these operators ask for the inputs only
                    signature = Signature(info.op, to_specs(args), to_specs(kwargs or {}),
                                          tuple(spec_of(t) for t in tensors), ())
                    for stage in stages_of(signature):
                        hold_blocks(state, _result_claim(state, storages, {}), stage.blocks)
                return answer
        if info.reads_offset and key is not None:
            key.append(tensors[0].storage_offset())

        entry = None
        kept: list[MetaStorage] = []
        frozen: Any = None
        if key is not None and info.cacheable:
            try:
                frozen = tuple(key)
                entry = _entries.get(frozen)
            except (TypeError, NotImplementedError):
                # an argument that cannot be hashed or compared, e.g. an object of C++: no recipe
                frozen = None
        if entry is not None and entry.recipes is not None:
            signature = entry.signature
            stages = stages_of(signature) if has_rule(info) else ()
            outputs, born = _build(state, entry.recipes, tensors, stages, entry.order, kept)
            result = outputs[0] if entry.structure is None else entry.structure(outputs)
        else:
            result, outputs, born, signature = _run(state, info, args, kwargs or {}, tensors, storages, frozen, kept)
            stages = stages_of(signature) if has_rule(info) else ()
        if not tensors or info.mutated or storages and _any_known(storages):
            _propagate_known(state, info, args, kwargs or {}, storages, outputs, born)
        if info.tests_finiteness and born and born[0] is not None and born[0].known is None:
            _assume_finite(state, info, args, outputs[0], born[0])
        if storages and born and born[0] is not None and not _is_exact(
                born[0]) and not outputs[0].dtype.is_floating_point:
            born[0].drawn_from = drawn_contents(info.name, storages)
        if (choice := CHOOSING.get(info.name)) is not None and (chosen :=
                                                                born[choice]) is not None and not _is_exact(chosen):
            chosen.drawn_from = chosen_among(info.name, args, kwargs or {})
        if state.options.unknown_size != "error":
            density = expected_density(info.name, args, storages)
            if density is not None and born and born[0] is not None:
                born[0].density = density
            counts = None
            if state.options.unknown_size == "balanced" or state.repeats:
                counts = expected_counts(info.name, args, kwargs or {}, state.placeholder if state.repeats else None)
            if counts is not None and born[0] is not None and born[0].known is None and state.expects_contents:
                state.assume(
                    f"{info.name}: unknown elements are taken to fall evenly into {len(counts)} bins (balanced) {state.where()}"
                )
                with without_modes():
                    born[0].known = Deferred(torch.tensor(counts, dtype=outputs[0].dtype))
        if needs := library_needs(signature):
            take_library_workspaces(state, signature, needs)
        for stage in stages:
            if stage.before is None:
                hold_blocks(state, _result_claim(state, storages, {}), stage.blocks)
        kept.clear()
        if state.recorder is not None:
            state.recorder.called(signature, storages, [_storage(o) for o in outputs if isinstance(o, Tensor)])
        return result


def _dispatches(kind: type) -> bool:
    return getattr(kind, "__torch_dispatch__", None) is not torch._C._disabled_torch_dispatch_impl


def _storage(tensor: Tensor) -> MetaStorage:
    part = tensor if tensor.layout is torch.strided else _parts(tensor)[-1]
    storage = part.untyped_storage()
    assert isinstance(storage, MetaStorage)
    return storage


def _is_exact(storage: MetaStorage) -> bool:
    return storage.known is not None and not storage.known.assumed


def _any_known(storages: list[MetaStorage]) -> bool:
    for s in storages:
        if s.known is not None:
            return True
    return False


_FLOATS = {float}


def _flatten(args: Any, tensors: list[Tensor], storages: list[MetaStorage], key: list[Any],
             lists: ListMemo | None = None) -> bool:
    """Collect tensors and the cache key; False where a tensor is not one of the mode's own."""
    for a in args:
        if isinstance(a, Tensor):
            if a.layout is not torch.strided:
                return False
            storage = a.untyped_storage()
            if type(storage) is not MetaStorage:
                return False
            tensors.append(a)
            storages.append(storage)
            key.append(a.shape)
            key.append(a.stride())
            key.append(a.dtype)
            key.append(storage.claim)
        elif isinstance(a, (list, tuple)):
            key.append(len(a))
            if a and isinstance(a[0], int):
                key.append(tuple(a))
            elif len(a) > 1 and type(a[0]) is float and set(map(type, a)) == _FLOATS:
                key.append(float)
                key.append(tuple(a))
            elif lists is not None and (kind := lists.take(a, tensors, storages)) is not None:
                key.append(kind)
            elif not _flatten(a, tensors, storages, key, lists):
                return False
        else:
            key.append(type(a))  # 1, 1.0 and True are equal as keys but promote differently
            key.append(a)
    return True


def _flatten_named(kwargs: dict[str, Any], tensors: list[Tensor], storages: list[MetaStorage], key: list[Any],
                   lists: ListMemo | None = None) -> bool:
    for name, value in kwargs.items():
        key.append(name)
        if not _flatten((value,), tensors, storages, key, lists):
            return False
    return True


def _build(state: MetaState, recipes: list[output_cache.Recipe], tensors: list[Tensor], stages: tuple[Stage, ...],
           order: tuple[int, ...] | None, kept: list[MetaStorage]) -> tuple[list[Any], list[MetaStorage | None]]:
    outputs: list[Any] = []
    born: list[MetaStorage | None] = []
    for i, r in enumerate(recipes if order is None else [recipes[k] for k in order]):
        kind = r.kind
        if kind == NEW:
            if stages:
                _hold_before(state, stages, i, r.claim, kept)
            out = _empty_strided(r.shape, r.stride, dtype=r.dtype, device=META)
            born.append(attach(out, r.claim, state.space))
            out.__class__ = MetaTensor
        elif kind == SAME:
            out = tensors[r.source]
            born.append(None)
        elif kind == VIEW:
            base = tensors[r.source]
            if base.requires_grad and not _is_excluded(_AUTOGRAD):
                # Autograd detaches a result that it saves while its own kernels are on: a view with a history would
                # hold its own node.
                base = base.data
            with kernel_running:
                out = _as_strided(base, r.shape, r.stride, base.storage_offset() + r.offset)
            out.__class__ = MetaTensor
            born.append(None)
        else:
            out = r.value
            born.append(None)
        outputs.append(out)
    if order is not None:
        returned = sorted(range(len(order)), key=order.__getitem__)
        return [outputs[k] for k in returned], [born[k] for k in returned]
    return outputs, born


def _hold_before(state: MetaState, stages: tuple[Stage, ...], output: int, claim: torch.device,
                 kept: list[MetaStorage]) -> None:
    for stage in stages:
        if stage.before != output:
            continue
        if not stage.kept:
            hold_blocks(state, claim, stage.blocks)
            continue
        for nbytes in stage.blocks:
            kept.append(attach(_empty_strided((nbytes,), (1,), dtype=torch.uint8, device=META), claim, state.space))
            if state.recorder is not None:
                state.recorder.holds_workspace(kept[-1])


class _KernelRunning:
    """Devices read as meta, and no function mode sees what a kernel written in Python calls."""

    def __enter__(self) -> None:
        kernel.depth += 1

    def __exit__(self, *exc: object) -> None:
        kernel.depth -= 1


kernel_running = _KernelRunning()


def _result_claim(state: MetaState, storages: list[MetaStorage], kwargs: dict[str, Any]) -> torch.device:
    """The device of new outputs: the one asked for, else the accelerator of any argument, else the host."""
    if state.pending_claim is not None:
        return state.pending_claim
    asked = kwargs.get("device")
    if asked is not None and asked.type != "meta":
        return claimed_device(asked)
    for s in storages:
        if s.claim.type != "cpu":
            return s.claim
    return CPU


def claimed_device(device: Any) -> torch.device:
    """``device`` with an index, as tensors report it: the current one where none is given."""
    device = torch.device(device) if not isinstance(device, int) else torch.device("cuda", device)
    if device.index is None and device.type not in ("cpu", "meta"):
        return torch.device(device.type, selected.index)
    return torch.device("cpu") if device.type == "cpu" else device


def _run(state: MetaState, info: OperatorInfo, args: Any, kwargs: dict[str, Any], tensors: list[Tensor],
         storages: list[MetaStorage], key: Any,
         kept: list[MetaStorage]) -> tuple[Any, list[Any], list[MetaStorage | None], Signature]:
    """Run the kernel on meta, give claims to what it returns and remember how to make it again; ``kept`` gets what is
    held to its end.
    """
    claim = _result_claim(state, storages, kwargs)
    spec_args, spec_kwargs = to_specs(args), to_specs(kwargs)
    inputs = tuple(spec_of(t) for t in tensors)
    result = _call_kernel(state, info, args, kwargs, claim)
    structure = type(result) if isinstance(result, (list, tuple)) else None
    outputs = list(result) if structure is not None else [result]
    born: list[MetaStorage | None] = [None] * len(outputs)
    stages = _early_stages(info, spec_args, spec_kwargs, inputs, outputs, str(claim)) if has_rule(info) else ()
    order = allocation_order(info.packet) if claim.type == "cuda" else None
    for position, i in enumerate(order or range(len(outputs))):
        out = outputs[i]
        if not isinstance(out, Tensor):
            continue
        if out.layout is not torch.strided:
            out.__dict__["_claim"] = claim
            out.__class__ = MetaTensor
            for part in _parts(out):
                if not isinstance(part.untyped_storage(), MetaStorage):
                    attach(part, claim, state.space)
            continue
        storage = out.untyped_storage()
        if type(storage) is MetaStorage:
            if any(out is t for t in tensors):
                continue
        else:
            if out.device.type != "meta":  # a kernel that made a constant on the host
                outputs[i] = adopt(state, out)
                continue
            if stages:
                _hold_before(state, stages, position, claim, kept)
            born[i] = attach(out, CPU if i in info.host_outputs else claim, state.space)
        if type(out) is Tensor:
            out.__class__ = MetaTensor
    for i, name, named in info.mutated:  # resize_ and out= variants can grow a storage
        for t in _as_list(kwargs.get(name) if named or i >= len(args) else args[i]):
            s = t.untyped_storage() if t.layout is torch.strided else None
            if isinstance(s, MetaStorage) and s.nbytes() > s.region.bytes:
                s.space.resize(s)
    if structure is not None:
        result = structure(outputs)
    else:
        result = outputs[0]
    signature = Signature(info.op, spec_args, spec_kwargs, inputs,
                          tuple(spec_of(o) for o in outputs if isinstance(o, Tensor)))
    if key is not None:
        recipes = make_recipes(outputs, tensors, storages, born)
        if recipes is not None:
            output_cache.remember(key, Entry(signature, recipes, structure, order))
    return result, outputs, born, signature


def _early_stages(info: OperatorInfo, args: Any, kwargs: dict[str, Any], inputs: tuple[Any, ...], outputs: list[Any],
                  claim: str) -> tuple[Stage, ...]:
    """What a call holds while it runs, asked before its outputs are allocated."""
    specs = tuple(TensorSpec.of(tuple(o.shape), o.stride(), o.dtype, claim) for o in outputs if isinstance(o, Tensor))
    return stages_of(Signature(info.op, args, kwargs, inputs, specs))


def _parts(out: Tensor) -> list[Tensor]:
    """The tensors that a sparse one is made of, its values last."""
    with without_modes():
        if out.layout is torch.sparse_coo:
            return [out._indices(), out._values()]
        if out.layout in (torch.sparse_csr, torch.sparse_bsr):
            return [out.crow_indices(), out.col_indices(), out.values()]
        return [out.ccol_indices(), out.row_indices(), out.values()]


def _as_list(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [v for v in value if isinstance(v, Tensor)] if isinstance(value, (list, tuple)) else []


def _call_kernel(state: MetaState, info: OperatorInfo, args: Any, kwargs: dict[str, Any], claim: torch.device) -> Any:
    func = info.op
    if "device" in kwargs:
        kwargs = {**kwargs, "device": META}
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    shape_impl = register_shape_impl.find(func) or register_shape_impl.find(func.overloadpacket)
    if shape_impl is None:
        shape_impl = (device_shapes if claim.type == "cuda" else host_shapes).find(func)
    check_dtypes(func, args)
    kernel.depth += 1
    try:
        with torch._C.DisableTorchFunction():
            if shape_impl is not None:
                return shape_impl(*args, **kwargs)
            try:
                return func(*args, **kwargs)
            except RuntimeError as error:  # of which NotImplementedError is one
                # torch/_library/custom_ops.py
                if not isinstance(error, NotImplementedError) and "no fake impl" not in str(error):
                    raise
                shape_impl = device_shapes.find(func) or sparse_shapes.find(func)
                if shape_impl is not None:
                    return shape_impl(*args, **kwargs)
                decomposition = torch._decomp.decomposition_table.get(func)
                if decomposition is not None:
                    return decomposition(*args, **kwargs)
                namespace, reason = func.namespace, str(error).splitlines()[0].partition(". ")[0]
                raise UnsupportedOperatorError(
                    f"{func} cannot run without data: it has no meta kernel ({reason}). {state.where()}\n"
                    f"Give it a shape: `@register_shape_impl(torch.ops.{namespace}.{func.__name__})` on a function of the "
                    f"same arguments that returns empty tensors, or `torch.library.register_fake`.") from error
    finally:
        kernel.depth -= 1


def adopt_arguments(state: MetaState, tree: Any) -> Any:
    """``tree`` with every tensor that is not the mode's own replaced by a stand-in without data."""
    if isinstance(tree, Tensor):
        if tree.layout is torch.strided and type(tree.untyped_storage()) is not MetaStorage:
            return adopt(state, tree)
        return tree
    if isinstance(tree, dict):
        return {k: adopt_arguments(state, v) for k, v in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(adopt_arguments(state, x) for x in tree)
    return tree


def adopt(state: MetaState, tensor: Tensor, claim: torch.device | None = None) -> Tensor:
    """A stand-in for a tensor with data; tensors that share a storage get stand-ins that do. Its data is not read."""
    real = tensor.untyped_storage()
    if real._cdata in state.reserved:
        raise ReservedTouch(state.reserved[real._cdata])
    found = state.stand_ins.get(real._cdata)
    if claim is None:
        claim = claim_of(tensor)
        claim = state.adopted_claim if claim.type in ("cpu", "meta") else claim
    with without_modes():  # function handlers ask while the modes are active
        if found is None:
            base = _empty_strided((real.nbytes(),), (1,), dtype=torch.uint8, device=META)
            storage = attach(base, claim, state.space)
            if tensor.device.type == "cpu" and small_enough(real.nbytes() // tensor.itemsize, tensor.dtype):
                storage.known = Deferred(tensor.detach())
            found = state.stand_ins[real._cdata] = (real, storage)
        out = torch.empty(0, dtype=tensor.dtype, device=META)
        out.set_(found[1], tensor.storage_offset(), tensor.size(), tensor.stride())
    out.__class__ = MetaTensor
    return out


def _defer(tree: Any, reads: list[ReadArgument], unknown: list[Tensor], expects: bool = False) -> Any:
    """``tree`` with every tensor replaced by a read of its known contents; tensors without any are collected, or taken
    as zero.
    """
    if isinstance(tree, Tensor):
        storage = tree.untyped_storage() if tree.layout is torch.strided else None
        if not isinstance(storage, MetaStorage):
            unknown.append(tree)
            return None
        known = storage.known
        if known is None and (not expects or not worth_following(_numel(storage, tree.dtype))):
            unknown.append(tree)
            return None
        read = ReadArgument(Zeros(_numel(storage, tree.dtype), tree.dtype) if known is None else known, window_of(tree))
        reads.append(read)
        return read
    if isinstance(tree, (list, tuple)):
        return [_defer(x, reads, unknown, expects) if isinstance(x, _DEFERRED) else x for x in tree]
    if isinstance(tree, dict):
        return {k: _defer(v, reads, unknown, expects) if isinstance(v, _DEFERRED) else v for k, v in tree.items()}
    return tree


_DEFERRED = (Tensor, list, tuple, dict)


def _expects(state: MetaState, info: OperatorInfo) -> bool:
    """Whether unknown arguments of a call are to be taken as zero; results of products and convolutions are unknown all
    the same.
    """
    return state.follows_expected and info.name not in _PRODUCTS


_PRODUCTS = {"convolution", "mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "_int_mm", "_scaled_mm"}


def _numel(storage: MetaStorage, dtype: torch.dtype) -> int:
    return storage.nbytes() // dtype.itemsize


def _propagate_known(state: MetaState, info: OperatorInfo, args: Any, kwargs: dict[str, Any],
                     storages: list[MetaStorage], outputs: list[Any], born: list[MetaStorage | None]) -> None:
    """Give new contents to storages that a call made or wrote, where they follow from what is known."""
    first: Any = outputs[0] if outputs else None
    if info.filler:
        if born and born[0] is not None and worth_following(_numel(born[0], first.dtype)):
            value = _fill_value(info, args, kwargs)
            if isinstance(value, (int, float, bool, complex)):
                window, numel = window_of(first), _numel(born[0], first.dtype)
                key = type(value), repr(value), window, numel, first.dtype  # 0.0 and -0.0 are equal
                known = state.fills.get(key)
                if known is None:
                    call = Call(_FULL, [window[0], value], {"dtype": first.dtype}, [])
                    known = state.fills[key] = Result(call, None, window, numel, first.dtype)
                born[0].known = known
        return
    if info.undefined:
        return
    reads: list[ReadArgument] = []
    unknown: list[Tensor] = []
    if info.mutated:
        _write_known(state, info, args, kwargs, storages)
        if not any(born):
            return
    if not info.runs_on_host:
        return
    if info.is_random:
        # Random scalars decide control flow (layer drop, stochastic depth): they get a value from a seed of their own.
        if not (born and born[0] is not None and first.numel() == 1 and not storages and info.name != "randperm"):
            return
        state.random_seed += 1
        seed: int | None = state.random_seed
        state.assume("random scalars that decide control flow are drawn from the profiler's own seed")
    else:
        seed = None
        if not storages and not info.enumerator:
            return
    if not any([
            b is not None and isinstance(o, Tensor) and worth_following(_numel(b, o.dtype))
            for o, b in zip(outputs, born)
    ]):
        return
    expects = _expects(state, info)
    call = Call(info.op, _defer(args, reads, unknown, expects), _defer(kwargs, reads, unknown, expects), reads, seed)
    if unknown or expects and all(isinstance(r.known, Zeros) for r in reads) and not info.enumerator:
        return
    single = len(outputs) == 1 and not info.returns_list
    for i, (out, storage) in enumerate(zip(outputs, born)):
        if storage is not None and worth_following(_numel(storage, out.dtype)):
            storage.known = Result(call, None if single else i, window_of(out), _numel(storage, out.dtype), out.dtype)


def _assume_finite(state: MetaState, info: OperatorInfo, args: Any, out: Tensor, storage: MetaStorage) -> None:
    answer = finite_answer(info.name, args)
    if answer is not None:
        state.assume("floating data is taken to be finite where the model asks")
        call = Call(_FULL, [tuple(out.shape), answer], {"dtype": out.dtype}, [])
        storage.known = Result(call, None, window_of(out), _numel(storage, out.dtype), out.dtype)


def _fill_value(info: OperatorInfo, args: Any, kwargs: dict[str, Any]) -> Any:
    if info.name.startswith(("zeros", "new_zeros")):
        return 0
    if info.name.startswith(("ones", "new_ones")):
        return 1
    position = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0}[info.name]
    return args[position] if position < len(args) else kwargs.get("fill_value", kwargs.get("s"))


def _write_known(state: MetaState, info: OperatorInfo, args: Any, kwargs: dict[str, Any],
                 storages: list[MetaStorage]) -> None:
    foreach = info.name.startswith("_foreach")
    if foreach and not info.is_random and not _any_known(storages):
        return  # each element is followed alone: what was not known stays so
    targets: list[tuple[tuple[int, ...], Tensor]] = []
    for i, name, named in info.mutated:
        if named or i >= len(args):
            for t in _as_list(kwargs.get(name)):
                t.untyped_storage(
                ).known = None  # type: ignore[attr-defined]  # out= variants: contents are not followed
        elif isinstance(args[i], Tensor):
            targets.append(((i,), args[i]))
        elif isinstance(args[i], (list, tuple)):
            targets.extend(((i, j), t) for j, t in enumerate(args[i]) if isinstance(t, Tensor))
    if not targets:
        return
    reads: list[ReadArgument] = []
    unknown: list[Tensor] = []
    written: list[tuple[MetaStorage, Known | None]] = []
    expects = _expects(state, info)
    whole = None if foreach else Call(info.op, _defer(args, reads, unknown, expects),
                                      _defer(kwargs, reads, unknown, expects), reads)
    expects = expects and any(not isinstance(r.known, Zeros) for r in reads)
    # Elements of one content to which a foreach call does the same have one content after it.
    same_for_all = foreach and not any(isinstance(a, (list, tuple)) for a in (*args[1:], *kwargs.values()))
    alike: dict[Any, Known] = {}
    for position, target in targets:
        storage = target.untyped_storage() if target.layout is torch.strided else None
        if not isinstance(storage, MetaStorage):
            continue
        new: Known | None = None
        if worth_following(_numel(storage, target.dtype)) and not info.is_random and info.runs_on_host:
            if whole is not None:
                others = [u for u in unknown if u is not target]
                overwritten = info.overwrites and covers_storage(target, storage)
                if not others and (storage.known is not None or overwritten or expects):
                    new = Written(None if overwritten else storage.known, whole, position, window_of(target),
                                  _numel(storage, target.dtype), target.dtype)
            elif storage.known is not None:
                key = (id(storage.known), window_of(target), storage.nbytes()) if same_for_all else None
                new = alike.get(key)
                if new is None:
                    new = _written_by_foreach(info, args, kwargs, position, target, storage)
                    if key is not None and new is not None:
                        alike[key] = new
        elif info.is_random and target.numel() == 1 and covers_storage(target, storage):
            state.random_seed += 1
            state.assume("random scalars that decide control flow are drawn from the profiler's own seed")
            call = Call(info.op, [None, *args[1:]], {k: v for k, v in kwargs.items() if k != "generator"}, [],
                        state.random_seed)
            if not any(isinstance(a, Tensor) for a in args[1:]):
                new = Written(None, call, (0,), window_of(target), _numel(storage, target.dtype), target.dtype)
        written.append((storage, new))
    for storage, new in written:
        storage.known = new


def _written_by_foreach(info: OperatorInfo, args: Any, kwargs: dict[str, Any], position: tuple[int, ...],
                        target: Tensor, storage: MetaStorage) -> Known | None:
    """One element of a foreach call, followed alone, so that unknown neighbours do not matter."""
    i, j = position
    size = len(args[i])
    row = [[a[j]] if isinstance(a, (list, tuple)) and len(a) == size else a for a in args]
    reads: list[ReadArgument] = []
    unknown: list[Tensor] = []
    call = Call(info.op, _defer(row, reads, unknown), _defer(kwargs, reads, unknown), reads)
    if unknown:
        return None
    return Written(storage.known, call, (i, 0), window_of(target), _numel(storage, target.dtype), target.dtype)
