"""Random programs: a profile with replay is that without, in every field (a sample of `fuzz.replay_equality`)."""
import warnings
from dataclasses import replace

import pytest

from benchmarks.fuzz.random_program import Program, draw_program
from benchmarks.fuzz.replay_equality import ALIKE, EQUAL, PER_SEED, compare, compare_number, show_difference

#: Numbers of programs whose replay is known to differ.
KNOWN: frozenset[int] = frozenset()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("first", range(PER_SEED, PER_SEED + 40, 10))
def test_replayed_equals_run(first):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {number: compare_number(number) for number in range(first, first + 10)}
    different = {number: verdict for number, verdict in found.items() if verdict.kind not in (EQUAL, ALIKE)}
    told = [f"{number}: {verdict.kind}: {draw_program(number)}: " + "; ".join(
        f"{name}: {show_difference(run, replayed)}" for name, run, replayed in verdict.differences[:3])
        for number, verdict in different.items() if number not in KNOWN]
    assert not told, "\n".join(told)


FOUND = {
    "the environment": Program(("hidden_state.Environment",), mode="infer"),
    "an attribute that is added to a class": Program(("layer.LowRank", "hidden_state.ClassCounter"),
                                                     layout="merged", blocks=5),
    "identities": Program(("parent.Identity", "layer.InPlaceActivation"), layout="merged"),
    "names in a __dict__": Program(("shared.ReadByMembership",), blocks=5),
    "names in dir()": Program(("shared.ReadByDir", "shared.TransposeTiedInside"), layout="merged", blocks=6),
    "gradients that are enabled inside": Program(("gradient.EnableGrad",), stack="NoGradFirst", mode="infer"),
    "a reentrant checkpoint": Program(("gradient.DeepCopy",), stack="CheckpointReentrant", input_requires_grad=True),
    "an argument without a gradient": Program(("gradient.DetachedOutput", "inplace.IndexFill"),
                                              input_requires_grad=True),
    "the cache of a function": Program(("hidden_state.FunctionCache", "hidden_state.OwnPythonGenerator"),
                                       layout="merged", steps=1),
    "gradients of parameters that are exchanged": Program(("state.ParameterReplaced",)),
    "views of a buffer in two calls": Program(("layer.MaskedAttention",), stack="Chunks", is_widened=True,
                                              mode="infer"),
    "a part of the first block that the next one calls, too": Program(("parent.UsesSibling",),
                                                                      stack="SameInputDetached", mode="infer"),
    "a hook that counts in a global": Program(("gradient.CountingHook",), blocks=5),
    "a tensor that autograd's C++ makes on the gradient's device": Program(("inplace.IndexPut",)),
    "a module outside of all blocks that each calls": Program(("shared.SharedModuleOutside",), layout="merged",
                                                              mode="infer"),
    "autograd nodes of a recomputation": Program(("inplace.CheckpointByIndex",), stack="Scaled"),
    "what a block that is not run gives is an output of the model": Program(
        ("inplace.IndexFill",), layout="merged", stack="ReturnsMiddle", convention="InputTwice", blocks=8,
        is_widened=True, is_factory=True, optimizer="sgd", loss="first"),
}


MORE = 5  # blocks with which a program has a chain, of which some need not run


@pytest.mark.sweep(8)
@pytest.mark.parametrize("program", FOUND.values(), ids=FOUND)
def test_programs_that_were_replayed_wrongly(program):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert compare(program) == (EQUAL, ())
        assert compare(replace(program, blocks=program.blocks + MORE)) == (EQUAL, ())


@pytest.mark.sweep(9)
@pytest.mark.parametrize("program", [
    *map(Program, [(f"hidden_state.{name}",) for name in ("GlobalInteger", "ClassCounter")]),
    *map(Program, [(f"state.{name}",) for name in ("BufferValue", "InitializedByData", "KeepsOutput")]),
    *map(Program, [(f"gradient.{name}",) for name in ("ContextKeeps", "HasGraph")]),
    *map(Program, [(f"inplace.{name}",) for name in ("InPlaceOnInput", "SavedTensorHooks")]),
    *map(Program, [(f"shared.{name}",) for name in ("SharedLinear", "Tagged")]),
    *map(Program, [(f"parent.{name}",) for name in ("Identity", "NewLinear")]),
    *(Program((), stack=name) for name in ("EachTwice", "UsesParametersAfter", "CheckpointSome")),
    Program((), convention="SharedMask"), Program((), convention="FirstInput", input_requires_grad=True)], ids=str)
def test_blocks_with_one_feature(program):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert compare(program).kind in (EQUAL, ALIKE)
        assert compare(replace(program, blocks=program.blocks + MORE)).kind in (EQUAL, ALIKE)
