"""Scalars that only data could give, where a stated rule answers for them: counts, and conditions that end loops.
Nothing here is guessed in silence: every answer is listed in the assumptions with its line.
"""
from __future__ import annotations

import ast
import functools
import linecache
from typing import Any

import torch

from analyzer.errors import DataDependentError
from analyzer.meta.source_line import user_frame
from analyzer.meta.state import MetaState

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


def expected_scalar(state: MetaState, tensor: torch.Tensor) -> Any:
    """What ``unknown_size`` and ``unknown_condition`` say that an unknown scalar is; None where they say nothing."""
    if state.tape is not None:
        return None
    return _condition(state, tensor) if tensor.dtype is torch.bool else _count(state, tensor)


def _count(state: MetaState, tensor: torch.Tensor) -> Any:
    """Lengths that a model computes from data, such as the sum of durations: see `expectation.expected_density`."""
    density, policy = getattr(tensor.untyped_storage(), "density", None), state.options.unknown_size
    if density is None or policy in ("worst", "error"):  # nothing bounds such a number
        return None
    if isinstance(policy, int):
        state.assume(f"a number that depends on data was taken as {policy} (the bound given) {state.where()}")
        return policy if not tensor.dtype.is_floating_point else float(policy)
    value = density if tensor.dtype.is_floating_point else round(density)
    state.assume(
        f"a number that depends on data was taken as {value:g}: counts are 1 per element (balanced) {state.where()}")
    return value


def _condition(state: MetaState, tensor: torch.Tensor) -> bool | None:
    density = getattr(tensor.untyped_storage(), "density", None)
    if density in (0.0, 1.0):  # a comparison of expected counts
        state.assume(
            f"a condition that depends on data is {bool(density)} for the expected counts (balanced) {state.where()}")
        return bool(density)
    policy = state.options.unknown_condition
    if policy == "error":
        return None
    state.assume(
        f"a condition that depends on data was taken as {policy} (unknown_condition={policy!r}) {state.where()}")
    return policy == "true"


# -- loops -------------------------------------------------------------------------------------------------------


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
    parts = test.values if isinstance(test, ast.BoolOp) else [test]
    for part in parts:
        turned = isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.Not)
        for line in range(part.lineno, (part.end_lineno or part.lineno) + 1):
            value = stays != turned
            found[line] = value if found.get(line, value) is value else None  # two that disagree on one line


def _leaves(body: list[ast.stmt]) -> bool:
    """Whether statements can leave the loop that they are in."""
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
