"""What installed libraries ask of tensors, and whether a tensor without data answers as one with data does.

    python -m benchmarks.fuzz.run questions                 # docs/reliability.md: all questions of four libraries
    python -m benchmarks.fuzz.run questions --differing     # a line for each that differs, also for those in `KNOWN`
    python -m benchmarks.fuzz.run questions --only is_leaf --only type

A parser (`ast`) finds the questions: attributes by the names that tensors have, classes that ``isinstance`` and
``type(x) is`` compare with, names that ``hasattr`` and ``getattr`` look for, and functions ``torch.is_…``. Each is
asked of tensors of many kinds, once with data and once within a profile of the same module.
"""
from __future__ import annotations

import argparse
import ast
import builtins
import importlib
import importlib.util
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from analyzer import profile
from analyzer.errors import AnalyzerError

LIBRARIES = ("transformers", "timm", "diffusers", "torchvision")
AGREES, REFUSED, DIFFERS = "same answer", "refused by name", "another answer"


class Question(NamedTuple):
    """What code asks of a tensor; ``text`` names the attribute, class or function."""

    kind: str  #: "attribute", "called", "class", "type", "has" or "function"
    text: str


def find_questions(libraries: Iterable[str] = LIBRARIES) -> Counter[Question]:
    """The questions in the source of the libraries that are installed, and how often each is asked."""
    found: Counter[Question] = Counter()
    for library in libraries:
        spec = importlib.util.find_spec(library)
        if spec is not None and spec.origin is not None:
            for path in sorted(Path(spec.origin).parent.rglob("*.py")):
                _Finder(found).visit(ast.parse(path.read_text(encoding="utf-8")))
    return found


class _Finder(ast.NodeVisitor):
    def __init__(self, found: Counter[Question]) -> None:
        self._found = found

    def visit_Attribute(self, node: ast.Attribute) -> None:  # noqa: N802
        if hasattr(torch.Tensor, node.attr) and not _names_library(node.value):
            self._found[Question("attribute", node.attr)] += 1
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:  # noqa: N802
        name = ast.unparse(node.func)
        if isinstance(node.func, ast.Attribute) and not (node.args or node.keywords):
            if hasattr(torch.Tensor, node.func.attr) and not _names_library(node.func.value):
                self._found[Question("called", node.func.attr)] += 1
        if name == "isinstance" and len(node.args) == 2:
            self._add_classes("class", node.args[1])
        elif name in ("hasattr", "getattr") and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            self._found[Question("has", str(node.args[1].value))] += 1
        elif name.startswith("torch.is_") and len(node.args) == 1:
            self._found[Question("function", name)] += 1
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:  # noqa: N802
        if isinstance(node.left, ast.Call) and ast.unparse(node.left.func) == "type":
            for one in node.comparators:
                self._add_classes("type", one)
        self.generic_visit(node)

    def _add_classes(self, kind: str, node: ast.expr) -> None:
        for one in node.elts if isinstance(node, (ast.Tuple, ast.List, ast.Set)) else (node,):
            text = ast.unparse(one)
            if _find_class(text) is not None:
                self._found[Question(kind, text)] += 1


def _names_library(node: ast.expr) -> bool:
    """Whether an attribute is that of a module: ``torch.device`` is no question of a tensor."""
    return isinstance(node, ast.Name) and node.id in ("torch", "np", "nn", "F", "math", "os", "self")


def _find_class(text: str) -> type | None:
    """The class of a name as code writes it; None where it is none of torch's, numpy's or Python's."""
    path = text.replace("np.", "numpy.", 1) if text.startswith("np.") else text
    if path.startswith("nn."):
        path = f"torch.{path}"
    owner: Any = builtins
    for number, name in enumerate(path.split(".")):
        if number == 0 and name in ("torch", "numpy", "collections"):
            owner = importlib.import_module(name)
        else:
            owner = getattr(owner, name, None)
    if owner is None:
        owner = getattr(torch, text, None) or getattr(nn, text, None)
    return owner if isinstance(owner, type) else None


class Asked(nn.Module):
    """A module whose pass asks questions of tensors of each kind, and tells the answers by question and kind."""

    def __init__(self, questions: Sequence[Question], tell: Callable[[Question, str, str], None]) -> None:
        super().__init__()
        self.table: torch.Tensor
        self.questions, self.tell = questions, tell
        self.layer = nn.Linear(4, 4)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for question in self.questions:
            for kind, make in self.kinds(x):
                self.tell(question, kind, _ask(question, make))
        result: torch.Tensor = self.layer(x).sum()
        return result

    def kinds(self, x: torch.Tensor) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        yield "input", lambda: x
        yield "parameter", lambda: self.layer.weight
        yield "frozen parameter", lambda: self.frozen
        yield "buffer", lambda: self.table
        yield "result", lambda: self.layer(x) + 1
        yield "view", lambda: self.layer(x).transpose(0, 1)
        yield "part", lambda: self.layer(x)[:, :1]
        yield "half", lambda: x.half()
        yield "indices", lambda: torch.arange(x.shape[1], device=x.device)
        yield "mask", lambda: torch.arange(x.shape[1], device=x.device) > 1
        yield "detached", lambda: self.layer(x).detach()
        yield "scalar", lambda: self.layer(x).sum()
        yield "expanded", lambda: self.table.expand(3, 4)


def _ask(question: Question, make: Callable[[], torch.Tensor]) -> str:
    kind, text = question
    x = make()
    if text.endswith("_") and not text.endswith("__"):
        x = x.clone()  # which the question writes to
    try:
        if kind == "attribute":
            return describe(getattr(x, text))
        if kind == "called":
            return describe(getattr(x, text)())
        if kind == "has":
            return describe(hasattr(x, text))
        if kind == "function":
            return describe(eval(text, {"torch": torch})(x))
        cls = _find_class(text)
        assert cls is not None
        return describe(isinstance(x, cls) if kind == "class" else (type(x) is cls, x.__class__ is cls))
    except Exception as error:
        return f"raises {_kind_of(error)}"


def _kind_of(error: Exception) -> str:
    return "AnalyzerError" if isinstance(error, AnalyzerError) else type(error).__name__


def describe(answer: object) -> str:
    """An answer without its data and its place in memory."""
    if isinstance(answer, torch.Tensor):
        return (f"{type(answer).__name__}{tuple(answer.shape)} {answer.dtype} {answer.device} {answer.stride()} "
                f"{answer.requires_grad} {answer.is_leaf}")
    if callable(answer):
        return "callable"
    if isinstance(answer, (tuple, list)):
        return f"{type(answer).__name__}({', '.join(map(describe, answer))})"
    if answer is None or isinstance(answer, (bool, int, float, str, torch.dtype, torch.device, torch.layout)):
        return repr(answer)
    return type(answer).__name__


def compare(questions: Sequence[Question], device: str = "cpu") -> dict[tuple[Question, str], tuple[str, str]]:
    """The right answer and that within a profile, by question and kind of tensor."""
    real: dict[tuple[Question, str], str] = {}
    simulated: dict[tuple[Question, str], str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        Asked(questions, lambda question, kind, answer: real.update({(question, kind): answer}))(torch.ones(2, 4))
        module = Asked(questions, lambda question, kind, answer: simulated.update({(question, kind): answer}))
        profile(module, torch.ones(2, 4), device=device, reuse=False)
    translate = (lambda question, answer: answer) if device == "cpu" else as_on_cuda
    return {key: (translate(key[0], answer), simulated[key]) for key, answer in real.items()}


#: by question: what a tensor on CUDA answers where that is not the CPU's answer with the device's name in it
ON_CUDA = {
    Question("attribute", "is_cuda"): "True", Question("attribute", "is_cpu"): "False",
    Question("called", "get_device"): "0", Question("called", "numpy"): "raises TypeError",
}


#: questions that are answered otherwise, and why
KNOWN = {Question(kind, text): why for kind, text, why in json.loads(
    Path(__file__).with_name("known.json").read_text())["questions"]}


def as_on_cuda(question: Question, answer: str) -> str:
    """The answer of the same tensor on CUDA, from that on the CPU."""
    if question.text == "__class__":  # which makes a tensor anew
        return answer
    if question in ON_CUDA:
        return ON_CUDA[question]
    if question.kind in ("class", "type") and question.text.startswith("torch.") and question.text.endswith("Tensor"):
        return answer if _find_class(question.text) is torch.Tensor else answer.replace("True", "False")
    text = answer.replace(" cpu ", " cuda:0 ").replace("device(type='cpu')", "device(type='cuda', index=0)")
    return text.replace("'torch.", "'torch.cuda.") if question.text == "type" else text


def judge(real: str, simulated: str) -> str:
    if real == simulated or _is_kind_of(simulated, real):
        return AGREES
    return REFUSED if simulated == "raises AnalyzerError" else DIFFERS


def _is_kind_of(simulated: str, real: str) -> bool:
    """Whether an error is one of a kind of the other: NotImplementedError is a RuntimeError."""
    return (simulated, real) == ("raises NotImplementedError", "raises RuntimeError")


def tell(options: argparse.Namespace) -> bool:
    """Print how many answers are equal, and what differs without a reason. Returns whether none does. Right answers of
    CUDA are those of the CPU with another device in them.
    """
    asked = find_questions()
    questions = sorted(q for q in asked if not options.only or q.text in options.only)
    count: Counter[str] = Counter()
    known = 0
    for (question, kind), (real, simulated) in compare(questions, options.device or "cpu").items():
        verdict = judge(real, simulated)
        count[verdict] += 1
        if verdict == DIFFERS:
            known += question in KNOWN
            if options.differing or question not in KNOWN:
                print(f"{question.kind} {question.text} of {kind}: {simulated} where it is {real}"
                      f"{' (' + KNOWN[question] + ')' if question in KNOWN else ''}")
    print(f"{len(questions)} questions, {sum(count.values())} answers:",
          ", ".join(f"{number} {verdict}" for verdict, number in count.items()),
          f"of which {known} with a reason")
    return count[DIFFERS] == known
