"""`symbolic_trace`: from a module to a graph."""
from __future__ import annotations

import copy
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from analyzer.errors import AnalyzerError, InputError
from analyzer.fx.graph.graph_module import GraphModule, RegionCodeGen
from analyzer.fx.module_borrow import Borrowed, borrow_module
from analyzer.fx.module_wrapper import (
    count_devices,
    exported_module,
    find_place,
    find_replica,
    refuse_sharded,
    uncompiled,
)
from analyzer.fx.surroundings import keep_surroundings, leaves_no_tensor
from analyzer.fx.tensor_key import TensorKeys
from analyzer.hardware.catalogue import named_spec
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.intercept.replacement import InterruptsDeferred
from analyzer.meta.mode import MetaTensorMode
from analyzer.meta.source_line import is_user_code
from analyzer.meta.spec import LITERALS
from analyzer.meta.state import MetaOptions, current
from analyzer.meta.structure import holds_tensor, replace_tensors, tensors_of
from analyzer.meta.tensor import take_class
from analyzer.meta.value.known_value import Watched
from analyzer.on_use import rare_collections
from analyzer.record.failure import telling_depth
from analyzer.record.tensor_walk import walk_modules

from .data_watch import DataWatch
from .effect_patch import RandomWatch
from .function_call import HeldModule
from .input_check import (
    Asked,
    Bound,
    ContentWatch,
    Expected,
    bind_arguments,
    compares_identity,
    expectations,
    name_spec,
)
from .leak import LeakError
from .outline import Site, code_of
from .tape import Tape
from .tracing_patch import tracing_patches
from .unknown_size import known_contents

_LITERALS = (*LITERALS, torch.dtype)


@leaves_no_tensor
def symbolic_trace(root: nn.Module | Callable[..., Any], concrete_args: Mapping[str, Any] | None = None,
                   meta_args: Mapping[str, Any] | None = None, trace_act_ckpt: bool = False,
                   bias_addition_split: bool = False) -> GraphModule:
    """Trace ``root`` into a graph module that shares its parameters and buffers and gives its results.

    ``root`` is a module, a function or a program by ``torch.export``. Its own code runs once, on fake tensors, and
    every torch function that it calls becomes a node; so control flow, shapes and containers are what they are in
    Python, and constants of the graph. ``meta_args`` maps argument names to tensors (with or without data, on any
    device), also nested in containers, dataclasses and objects; ``concrete_args`` maps names to constants, tensors too,
    which are part of the graph: it is called without them. For ``*args`` give a tuple by its name; other names go to
    ``**kwargs``. What forward asks of the machine, such as ``torch.cuda.is_available()``, this machine answers, or
    where a tensor is on an accelerator, one that has it.

    With ``trace_act_ckpt`` the graph's code uses ``torch.utils.checkpoint`` where ``root`` does, else its nodes are
    only annotated. With ``bias_addition_split``, nodes of their own add the biases of linear and convolution layers.

    Raises InputError for arguments that do not fit or that forward fails for and for models sharded over ranks,
    DataDependentError where forward asks for contents that only data could give, UnsupportedOperatorError for an
    operator without a shape.

    >>> model = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    >>> gm = symbolic_trace(model, meta_args={"input": torch.empty(3, 4, device="meta")})
    >>> [(node.op, node.target) for node in gm.graph.nodes]
    [('placeholder', 'input'), ('call_module', '0'), ('call_module', '1'), ('output', 'output')]
    >>> gm(torch.ones(3, 4)).shape
    torch.Size([3, 2])
    """
    root = exported_module(root)
    if isinstance(root, torch.jit.ScriptModule):
        raise InputError(f"root is a {type(root).__name__}: TorchScript has no Python code to trace. Trace the module "
                         "that it was made from, or a module that has it as a submodule, where it is one node")
    if not callable(root):
        raise InputError(f"root must be a module or a function, got {root!r}")
    if isinstance(root, nn.Module):
        module = uncompiled(root)
    else:
        module = nn.Module()
        module.forward = root
    refuse_sharded(walk_modules(module))
    bound = bind_arguments(module.forward, {} if meta_args is None else meta_args,
                           {} if concrete_args is None else concrete_args)
    outlined: dict[Site, str] = {}
    unknown: frozenset[int] | None = frozenset()  # None where changed contents are constants that the graph checks
    first: AnalyzerError | None = None
    given = list(map(id, tensors_of(tuple(bound.given.values()))))
    given_twice, merges = len(given) > len(set(given)), False  # whether such a tensor is one object in the trace, too
    while True:
        attempt = _Attempt(module, bound, meta_args or {}, outlined, unknown, merges)
        try:
            with telling_depth():
                graph = attempt.run(trace_act_ckpt, bias_addition_split)
        except AnalyzerError as error:
            first = first or error
            if not attempt.wanted and not unknown:
                if first is error or isinstance(error, LeakError):
                    raise
                raise first from error
        if attempt.wanted:
            outlined |= attempt.wanted
        elif unknown and attempt.asks:
            outlined, unknown, first = {}, None, None
        elif unknown is not None and attempt.changed:
            unknown |= attempt.changed
        elif attempt.compares_identity and given_twice and not merges:
            merges = True
        else:
            break
        attempt.put_back()  # also plain values: the next run is to find what this one found
    name = type(root).__name__ if isinstance(root, nn.Module) else getattr(root, "__name__", "function")
    gm = GraphModule(build_skeleton(module, attempt.contents), graph, name if name.isidentifier() else "GraphModule")
    gm.meta["assumptions"] = attempt.assumptions
    gm.expect(attempt.expected, attempt.compares_identity, attempt.asked)
    return gm


@dataclass
class _Attempt:
    """One run of a forward: what is in ``outlined`` is one node each, contents of ``unknown`` tensors are hidden."""

    module: nn.Module
    bound: Bound
    meta_args: Mapping[str, Any]
    outlined: Mapping[Site, str]
    unknown: frozenset[int] | None
    merges: bool
    changed: frozenset[int] = frozenset()  #: ids of tensors whose contents were read and changed
    asks: bool = True  #: whether the root itself asks for something that only data could give
    expected: list[Expected] = field(default_factory=list)  #: what arguments of the graph must be like
    asked: list[Asked] = field(default_factory=list)  #: and the modes around it
    compares_identity: bool = False  #: whether its code asks if two values are one object
    wanted: dict[Site, str] = field(default_factory=dict)  #: what must be outlined too: the result is not to be used
    put_back: Callable[[], None] = lambda: None  #: what the run changed outside of the module

    def run(self, trace_act_ckpt: bool, bias_addition_split: bool) -> fx.Graph:
        module, bound = self.module, self.bound
        outer = current()
        is_here = named_spec() is None and find_place(module, bound.given).type == "cpu"
        options = MetaOptions(devices=count_devices(module, bound.given)) if outer is None else outer.options
        mode = MetaTensorMode(options, is_this_machine=is_here, has_plain_tensors=True)
        with (rare_collections(), InterruptsDeferred(), mode, keep_surroundings(module, values=bound.given) as found,
              borrow_module(module) as borrowed, DataWatch(found.unrecorded) as data, tracing_patches(self.outlined)):
            if borrowed.compiled:
                mode.state.assume("a module under torch.compile is traced as the module that it wraps")
            self.put_back = found.put_back_all
            lazy = [path for path, _, original in (*borrowed.parameters, *borrowed.buffers) if is_lazy(original)]
            if lazy:
                raise InputError(f"{', '.join(lazy[:3])}: not initialised, as its lazy module has not run; run the "
                                 "model once on a real input")
            if (replica := find_replica(borrowed.walked)) is not None:
                mode.state.assume(f"{replica or 'the model'}: DistributedDataParallel is traced as the module that it "
                                  "wraps; what ranks exchange is not in the graph")
            mode.state.follows_expected = bool(self.outlined)
            tape = Tape(mode.state, borrowed, trace_act_ckpt, bias_addition_split, self.outlined)
            self.wanted = tape.wanted
            watch = tape.contents = ContentWatch(borrowed, self.unknown or frozenset())
            values = _make_fakes(bound, borrowed, self.merges)
            _write_placeholders(tape, bound, values)
            args, kwargs = bound.call_arguments(values)
            fakes = {bound.name_in_graph(p): values.get(p.name) for p in bound.parameters}
            # what arguments of the graph must be like, each with what is in its place
            places = [(e, e.find(fakes[e.argument]) if e.varies else None)
                      for e in expectations(bound)]
            assignments, random = Assignments(borrowed, values), RandomWatch(borrowed)
            if self.outlined:
                tape.leaks.begin(module.forward, (module, values))
            mode.state.tape = tape
            try:
                with TensorKeys(borrowed, found.records):
                    result = module(*args, **kwargs)
            except Exception as error:
                read = None if isinstance(error, AnalyzerError) else tape.leaks.explain(error)
                raise locate(read or error, tape, self.meta_args) from error
            finally:
                mode.state.tape = None
                tape.leaks.show()
            tape.leaks.check(borrowed, tape.outlined)
            changed = watch.find_changed(assignments.write(tape, result))
            random.check(mode.state)
            tape.regions.check_end()
            self.changed, self.asks = frozenset(changed), tape.asks
            for content in changed.values() if self.unknown is None else ():
                tape.check_content(*content)
            tape.states.tell(mode.state)
            tape.leaks.tell(found, borrowed, mode.state)
            data.tell(mode.state)
            tape.output(result)
            self.assumptions = list(mode.state.assumptions)
            for e, fake in places:
                states = tape.read_states.get(id(fake), {})
                self.expected.append(e._replace(states=tuple((key, told) for key, (told, _) in states.items())))
                self.assumptions += [f"{key[0]} of {e} was {told} when traced and is a constant of the graph, which "
                                     f"raises where it is another, at {line}" for key, (told, line) in states.items()]
            self.asked = [Asked(*key, *told) for key, told in tape.regions.asked.items()]
            self.contents = collect_contents(tape, borrowed)
            tape.codes |= {code for _, m in borrowed.walked if (code := code_of(m.forward)) is not None}
            self.compares_identity = any(map(compares_identity, tape.codes))
        tape.graph.set_codegen(RegionCodeGen(
            bound.name_in_graph(p) for p in bound.parameters if p.kind is Parameter.KEYWORD_ONLY))
        return tape.graph


def _make_fakes(bound: Bound, borrowed: Borrowed, merges: bool) -> dict[str, Any]:
    """The given values with a fake tensor for every tensor: one for each place, or with ``merges`` for each tensor, and
    of those that are part of the graph.
    """
    parts = {id(tensor) for tensor in tensors_of(bound.concrete_parts(bound.given))}
    made: dict[int, Tensor] = {}

    def make(tensor: Tensor) -> Tensor:
        if id(tensor) in parts:
            return borrowed.fakes.make(tensor, readable=True, constant=True)
        if merges and id(tensor) in made:
            return made[id(tensor)]
        again = borrowed.fakes.of(tensor)
        if again is None:
            fake = borrowed.fakes.make(tensor, readable=True, constant=True)
            for _, known in known_contents([fake]):
                if known is not None:
                    fake.untyped_storage().known = Watched(known, varies=True)  # type: ignore[attr-defined]
        else:
            fake = again.detach().requires_grad_(again.requires_grad)
            take_class(fake)
        made[id(tensor)] = fake
        return fake

    # an argument on meta tells a shape: it is where the model is, before an operator uses it
    keeps_meta, borrowed.fakes.keeps_meta = borrowed.fakes.keeps_meta, False
    try:
        with without_modes():
            return {name: replace_tensors(value, make) for name, value in bound.given.items()}
    finally:
        borrowed.fakes.keeps_meta = keeps_meta


def _write_placeholders(tape: Tape, bound: Bound, values: dict[str, Any]) -> None:
    defaults: dict[str, tuple[Any, ...]] = {}  # in the generated signature: forward's, or the constants given
    for p in bound.parameters:
        value = values.get(p.name, p.default)
        needed = p.default is Parameter.empty and p.name not in bound.concrete and holds_tensor(value)
        defaults[p.name] = (value,) if isinstance(value, _LITERALS) else () if needed else (None,)
    by_position = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in bound.parameters if p.kind in by_position and not defaults[p.name]]
    before = bound.parameters[:bound.parameters.index(required[-1])] if required else []
    if any(p.name in bound.concrete and holds_tensor(values[p.name]) for p in before):
        defaults.update({p.name: (None,) for p in required})  # those after it are given by name, which the graph checks
    else:
        defaults.update({p.name: () for p in before})  # a constant before an argument that must be given
    for p in bound.parameters:
        if p.kind is Parameter.VAR_POSITIONAL:
            tape.placeholder("*" + bound.name_in_graph(p), (), values.get(p.name, ()))
        elif p.kind is Parameter.VAR_KEYWORD:
            tape.placeholder("**" + bound.name_in_graph(p), (), values.get(p.name, {}))
        else:
            tape.placeholder(bound.name_in_graph(p), defaults[p.name], values.get(p.name))
    tape.unbind(tensors_of(bound.concrete_parts(values)))


def locate(error: Exception, tape: Tape, meta_args: Mapping[str, Any]) -> AnalyzerError:
    """An error of a forward with the module, the line and the arguments that it came from, as one of this package."""
    line = ""
    frame: types.TracebackType | None = error.__traceback__
    while frame is not None:
        if is_user_code(frame.tb_frame.f_code.co_filename):
            line = f" at {frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}"
        frame = frame.tb_next
    path, kind = tape.failed_in or ("", "")
    module = f"module {path!r} ({kind.rpartition('.')[2]})" if path else "the root module"
    place = f"in {module}{line}"
    given = ", ".join(f"{name}={name_spec(v.shape, v.dtype) if isinstance(v, Tensor) else type(v).__name__}"
                      for name, v in meta_args.items()) or "no arguments"
    if isinstance(error, AnalyzerError):
        located = copy.copy(error)  # its class may be made of more than a text
        located.args = (f"{error}\nWhile tracing with {given}, {place}.",)
        return located
    return InputError(f"forward failed {place}, traced with {given}: {type(error).__name__}: {error}")


class Assignments:
    """What modules and the arguments of forward hold when it begins, for `write` when it ends."""

    def __init__(self, borrowed: Borrowed, arguments: Mapping[str, Any]) -> None:
        self.borrowed, self.arguments = borrowed, arguments
        self.before = self._list_held()
        self.given = {name: list(tensors_of(value)) for name, value in arguments.items()}

    def _list_held(self) -> dict[tuple[str, str], Any]:
        return {(path, name): value for path, module in self.borrowed.walked
                if not isinstance(module, torch.jit.ScriptModule)
                for held in (vars(module), module._parameters, module._buffers, module._modules)
                for name, value in held.items() if isinstance(value, (Tensor, nn.Module))}

    def write(self, tape: Tape, result: Any) -> frozenset[int]:
        """Let the graph give replaced buffers their new contents, and nothing else; the ids of the old ones."""
        now, named = self._list_held(), {path: fake for path, fake, _ in self.borrowed.buffers}
        replaced: list[tuple[Tensor, Tensor]] = []
        for place in {**self.before, **now}:
            value = now.get(place)
            is_new = isinstance(value, Tensor) and self.borrowed.original_of(value) is None
            if value is self.before.get(place) or is_new and tape.find(value) is None:
                continue  # as it was, or set by what is one node
            name = ".".join(filter(None, place))
            fake = named.get(name)
            is_recorded = is_new or not tape.outlined
            if (isinstance(value, Tensor) and fake is not None and is_recorded
                    and sum(held is fake for held in self.before.values()) == 1):
                replaced.append((fake, value))
                continue
            what = "another module" if isinstance(value, nn.Module) else "None"
            if isinstance(value, Tensor):
                what = "a tensor, which is not a registered buffer of that name alone"
            tape.state.assume(f"forward sets {name} to {what}: the graph does not set it")
        for name, given in self.given.items():
            if list(map(id, tensors_of(self.arguments[name]))) != list(map(id, given)):
                tape.state.assume(f"forward puts other tensors into {name}, a container or an object that it is given: "
                                  "the graph does not")
        old = frozenset(id(fake) for fake, _ in replaced)
        targets = [tape.node_of(fake) for fake, _ in replaced]
        for tensor in tensors_of(([value for _, value in replaced], result)):
            if id(tensor) in old:  # the buffer itself, which is about to have other contents
                tape.map(tensor, tape.call_method("view_as", *[tape.node_of(tensor)] * 2))
        for target, value in zip(targets, [tape.node_of(value) for _, value in replaced]):
            tape.call(assign_buffer, target, value)
        return old


def assign_buffer(buffer: Tensor, value: Tensor) -> None:
    """Give ``buffer`` the contents of ``value``, whatever its shape, keeping its identity."""
    buffer.data = value.detach()


def collect_contents(tape: Tape, borrowed: Borrowed) -> dict[str, Any]:
    """What the graph module holds, by path: modules, original tensors and constants."""
    originals = {path: original for group in (borrowed.parameters, borrowed.buffers) for path, _, original in group}
    contents: dict[str, Any] = {}
    for target in dict.fromkeys(n.target for n in tape.graph.nodes if n.op in ("call_module", "get_attr")):
        held = tape.constants.get(target, originals.get(target))
        contents[target] = borrowed.by_path[target] if held is None else held
    # code of the root may use whatever the root has
    if any(isinstance(held, HeldModule) for held in contents.values()):
        contents.update({name: child for name, child in borrowed.root._modules.items() if child is not None})
        contents.update({path: original for path, original in originals.items() if "." not in path})
    return contents


def build_skeleton(root: nn.Module, contents: dict[str, Any]) -> nn.Module:
    """A module that holds ``contents`` at their paths, in bare modules with the training flags of the originals."""
    top = nn.Module()
    top.training = root.training
    whole = {path for path, value in contents.items() if isinstance(value, nn.Module)}
    for path in sorted(contents, key=lambda p: p.count(".")):
        *owners, name = path.split(".")
        if any(".".join(owners[:i]) in whole for i in range(1, len(owners) + 1)):
            continue  # comes with a module that is there as a whole
        owner: Any = top
        source: Any = root
        for part in owners:
            source = uncompiled(source._modules.get(part, source) or source)
            if part not in owner._modules:
                owner._modules[part] = nn.Module()
                owner._modules[part].training = source.training
            owner = owner._modules[part]
        value = contents[path]
        if isinstance(value, nn.Module):
            owner._modules[name] = value
        elif isinstance(value, nn.Parameter):
            owner._parameters[name] = value
        elif isinstance(value, Tensor):
            owner._buffers[name] = value
            if name.startswith("_tensor_constant") or name in source._non_persistent_buffers_set:
                owner._non_persistent_buffers_set.add(name)
        else:
            object.__setattr__(owner, name, value)
    return top
