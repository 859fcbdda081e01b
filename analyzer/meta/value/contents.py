"""Contents of tensors as values: how large they may be, whether they are valid, and numbers that are not known."""
from __future__ import annotations

import ast
import dis
import functools
import linecache
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch.optim import lbfgs

from analyzer.errors import DataDependentError
from analyzer.meta.address_space import MetaStorage
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.source_line import first_frame, is_outside, is_user_code, user_frame
from analyzer.meta.state import MetaState

from .known_value import LARGEST_INTEGER, DeferredCall, Known, ReadArgument, Zeros, reads, window_of

Tensor = torch.Tensor


def worth_following(numel: int) -> bool:
    return numel <= LARGEST_INTEGER


def storage_numel(storage: MetaStorage, dtype: torch.dtype) -> int:
    return storage.nbytes() // dtype.itemsize


def covers_storage(tensor: Tensor, storage: MetaStorage) -> bool:
    return tensor.numel() * tensor.itemsize == storage.nbytes() and not any(s == 0 for s in tensor.stride())


def read_known(tensor: Tensor, assumed: bool = False) -> Tensor | None:
    """The value as a tensor on CPU, not to be written; with ``assumed`` also where something was taken as zero."""
    storage = tensor.untyped_storage()
    known = None if not isinstance(storage, MetaStorage) else storage.known if assumed else storage.exact
    if known is None:
        return None
    with without_modes():
        flat = known.work_out()
        if flat.dtype != tensor.dtype:
            if (flat.numel() * flat.itemsize) % tensor.itemsize:
                return None
            flat = flat.view(tensor.dtype)
        return flat.as_strided(*window_of(tensor))


def look_at(tensor: Tensor) -> Tensor | None:
    """The distinct places of a known value, for a check that no result depends on: no one learns that it was read.
    Dimensions that were expanded have size one.
    """
    storage = tensor.untyped_storage() if tensor.layout is torch.strided else None
    known = storage.known if isinstance(storage, MetaStorage) else None
    if known is None or known.assumed or known.varies and reads.hides_varying:
        return None
    with without_modes():
        flat = known.peek()
        if flat.dtype != tensor.dtype:
            return None
        shape, stride, offset = window_of(tensor)
        return flat.as_strided([n if s or not n else 1 for n, s in zip(shape, stride)], stride, offset)


ContentsOf = Callable[[Tensor, MetaStorage], "Known | None"]  #: what a tensor's storage holds, where that is told


def known_contents(tensor: Tensor, storage: MetaStorage) -> Known | None:
    return storage.known


def known_or_zeros(tensor: Tensor, storage: MetaStorage) -> Known | None:
    """Zeros are taken for what is not known."""
    if storage.known is not None:
        return storage.known
    numel = storage_numel(storage, tensor.dtype)
    return Zeros(numel, tensor.dtype) if worth_following(numel) else None


def defer_call(op: Any, args: Any, kwargs: Any, *, contents_of: ContentsOf = known_contents,
               seed: int | None = None) -> tuple[DeferredCall, list[Tensor]]:
    """A call on contents that are told, and the tensors of which none are."""
    reads: list[ReadArgument] = []
    unknown: list[Tensor] = []
    call = DeferredCall(op, _defer(args, reads, unknown, contents_of), _defer(kwargs, reads, unknown, contents_of),
                        reads, seed)
    return call, unknown


_DEFERRED = (Tensor, list, tuple, dict)


def _defer(tree: Any, reads: list[ReadArgument], unknown: list[Tensor], contents_of: ContentsOf) -> Any:
    if isinstance(tree, Tensor):
        storage = tree.untyped_storage() if tree.layout is torch.strided else None
        known = contents_of(tree, storage) if isinstance(storage, MetaStorage) else None
        if known is None:
            unknown.append(tree)
            return None
        reads.append(ReadArgument(known, window_of(tree)))
        return reads[-1]
    if isinstance(tree, (list, tuple)):
        return [_defer(x, reads, unknown, contents_of) if isinstance(x, _DEFERRED) else x for x in tree]
    if isinstance(tree, dict):
        return {k: _defer(v, reads, unknown, contents_of) if isinstance(v, _DEFERRED) else v for k, v in tree.items()}
    return tree


# Conditions on unknown data that only decide whether the code raises, as its bytecode tells: ``if (i >= n).any():
# raise``. No model is meant to fail its own checks, so the other branch is taken.

# What stands between a call that gives a truth value and the jump that it decides.
_BETWEEN = {"CACHE", "NOP", "TO_BOOL", "PRECALL", "EXTENDED_ARG", "NOT_TAKEN"}
_ENDS = ("RETURN", "YIELD", "RERAISE", "SEND", "FOR_ITER", "BEFORE_WITH", "SETUP")
_LONGEST = 200  #: instructions; a message that takes more to build is not looked for


def passing_value() -> bool | None:
    """The truth value with which the asking function goes on where the other makes it raise, else None."""
    frame = first_frame(is_outside)
    if frame is None:
        return None
    if frame.f_code is torch._check_tensor_all_with.__code__:  # what it asks is passed on to a function that raises
        return True
    return _find_passing_value(frame.f_code, frame.f_lasti)


@functools.lru_cache(maxsize=1 << 10)  # a loop asks at the same place again and again
def _find_passing_value(code: CodeType, offset: int) -> bool | None:
    instructions = list(dis.get_instructions(code))
    place = {i.offset: n for n, i in enumerate(instructions)}
    at = place.get(offset)
    if at is None:
        return None
    turned = False
    while not _jumps_on_truth(instructions[at]):
        at += 1
        if at >= len(instructions) or not (_jumps_on_truth(instructions[at])
                                           or instructions[at].opname in _BETWEEN | {"UNARY_NOT"}):
            return None
        turned ^= instructions[at].opname == "UNARY_NOT"
    jump = instructions[at]
    target = place.get(jump.argval)
    if target is None:
        return None
    jumping, falling = _raises(instructions, target), _raises(instructions, at + 1)
    if jumping == falling:
        return None
    value = ("TRUE" in jump.opname) != jumping  # a jump taken for the value, unless that is the way to the raise
    return value != turned


def _jumps_on_truth(instruction: dis.Instruction) -> bool:
    return instruction.opname.startswith(("POP_JUMP", "JUMP_IF")) and "NONE" not in instruction.opname


def _raises(instructions: list[dis.Instruction], start: int) -> bool:
    """Whether what begins at ``start`` raises without a choice."""
    for instruction in instructions[start:start + _LONGEST]:
        name = instruction.opname
        if name == "RAISE_VARARGS":
            return True
        if "JUMP" in name or name.startswith(_ENDS):
            return False
    return False


MOST_STEPS = 10_000  #: of a loop that data would end and nothing else does

_Loop = (ast.For, ast.While, ast.AsyncFor)


def going_on(state: MetaState, tensor: torch.Tensor) -> bool | None:
    """The answer that lets a loop go on which unknown data would end; None where the asking line ends no loop."""
    # a graph must hold for all data
    if tensor.dtype is not torch.bool or state.tape is not None or state.options.unknown_condition == "error":
        return None
    frame = user_frame()
    place = None if frame is None else (frame.f_code.co_filename, frame.f_lineno)
    answer = None if place is None else _staying_values(place[0]).get(place[1])
    if place is None or answer is None:
        return None
    state.conditions[place] = state.conditions.get(place, 0) + 1
    if state.conditions[place] > MOST_STEPS:
        raise DataDependentError(f"a loop that only data ends ran {MOST_STEPS} times. {state.where()}\n"
                                 f"Way out: give the loop a bound of its own, such as a largest number of steps.")
    state.assume(
        f"a condition on data that ends a loop is taken as never met: the loop runs to its own bound {state.where()}")
    return answer


#: Conditions of torch/optim/lbfgs.py that hold while it searches: a pair of vectors is kept, and the first length of a
#: line search is taken (strong Wolfe conditions). All others end the search, or belong to lengths that are not taken.
MET = ("if ys > 1e-10:", "if abs(gtd_new) <= -c2 * gtd:")


def searching_answer(state: MetaState, tensor: torch.Tensor) -> bool | float | None:
    """What LBFGS is told: whether a condition holds, or a loss below the one before; None where other code asks."""
    frame = first_frame(lambda filename: filename == lbfgs.__file__ or is_user_code(filename))
    if frame is None or frame.f_code.co_filename != lbfgs.__file__:
        return None
    state.assume("LBFGS: its search is assumed to go on: each pair of vectors is kept, the first length of a line "
                 f"search is taken, and no tolerance is met {state.where()}")
    if tensor.dtype is torch.bool:
        return linecache.getline(lbfgs.__file__, frame.f_lineno).strip() in MET
    state.unknown_sizes += 1
    return -float(state.unknown_sizes)


@functools.lru_cache(maxsize=256)
def _staying_values(filename: str) -> dict[int, bool | None]:
    """By line, the truth value of the condition on it that does not leave the loop around it; None where two disagree.
    ``if finished.all(): break`` gives False, ``while unfinished.any() and step < most`` gives True.
    """
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return {}
    found: dict[int, bool | None] = {}
    def visit(node: ast.AST, in_loop: bool) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            in_loop = False
        if isinstance(node, ast.While):
            _note(found, node.test, stays=True)
        if in_loop and isinstance(node, ast.If) and _leaves(node.body) != _leaves(node.orelse):
            _note(found, node.test, stays=not _leaves(node.body))
        for child in ast.iter_child_nodes(node):
            visit(child, in_loop or isinstance(node, _Loop))
    visit(tree, False)
    return found


def _note(found: dict[int, bool | None], test: ast.expr, stays: bool) -> None:
    for part in test.values if isinstance(test, ast.BoolOp) else [test]:
        turned = isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.Not)
        for line in range(part.lineno, (part.end_lineno or part.lineno) + 1):
            value = stays != turned
            found[line] = value if found.get(line, value) is value else None  # two that disagree on one line


def _leaves(body: list[ast.stmt]) -> bool:
    for statement in body:
        if isinstance(statement, (ast.Break, ast.Return)):
            return True
        inner = [*getattr(statement, "body", []), *getattr(statement, "orelse", [])]
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            continue
        if isinstance(statement, _Loop):
            inner = [s for s in ast.walk(statement) if isinstance(s, ast.Return)]
        if _leaves([s for s in inner if isinstance(s, ast.stmt)]):
            return True
    return False
