"""How a forward controls random numbers: seeds and states that it sets, and generators that it makes, are nodes."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from analyzer.cuda.stream import SimulatedGenerator, simulated_class
from analyzer.errors import InputError
from analyzer.fx.fake_tensor import save_generators
from analyzer.fx.module_borrow import Borrowed
from analyzer.meta.intercept.replacement import Undo, replace
from analyzer.meta.source_line import user_line
from analyzer.meta.state import MetaState, active, indexed_device

from .function_call import CallByName, NodeCall
from .recording import recording_tape, while_recording
from .tape import Tape

_STATES = ("get_rng_state", "set_rng_state", "manual_seed", "seed", "initial_seed")
_OF_ALL = ("get_rng_state_all", "set_rng_state_all", "manual_seed_all", "seed_all")


def random_replacements() -> Iterator[Undo]:
    """What tells the tape of random number generators."""
    for path, owners, names in (("torch.random", (torch, torch.random), _STATES),
                                ("torch.cuda.random", (torch.cuda, torch.cuda.random), _STATES + _OF_ALL)):
        for name in names:
            for owner in owners:
                yield replace(owner, name, while_recording(partial(_control, f"{path}.{name}")))
    yield replace(torch, "Generator", lambda f: simulated_class(f, RecordedGenerator, _records))


def _control(path: str, tape: Tape, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``original``, which torch has under the name ``path``, as a node."""
    with tape.pause:
        result = original(*args, **kwargs)
    return _note(tape, NodeCall("call_function", CallByName(path), args, kwargs), result)


def _note(tape: Tape, call: NodeCall, result: Any) -> Any:
    """Write down ``call``, which gave a state, a generator or a seed."""
    node = tape.create(call)
    if isinstance(result, torch.Generator):
        tape.map(result, node)
    elif isinstance(result, int):
        tape.state.assume(f"a random seed that forward asks for was {result} when traced and is a constant of the "
                          f"graph at {user_line()}")
    else:
        tape.bind(result, node)
    return result


def _records(*args: Any, **kwargs: Any) -> bool:
    return recording_tape() is not None


class RecordedGenerator(SimulatedGenerator):
    """A generator that forward makes: what is asked of it is written down."""

    def __new__(cls, device: Any = "cpu") -> RecordedGenerator:
        """Make one that says ``device``."""
        made = _stand_in(cls, indexed_device(device))
        tape = recording_tape()
        assert tape is not None
        tape.map(made, tape.call(CallByName("torch.Generator"), str(device)))
        return made


def _method(name: str) -> Callable[..., Any]:
    def method(self: RecordedGenerator, *args: Any) -> Any:
        tape = recording_tape()
        if tape is None:
            return getattr(SimulatedGenerator, name)(self, *args)
        with tape.pause:
            kind = SimulatedGenerator if self.device.type == "cuda" else torch._C.Generator
            result = getattr(kind, name)(self, *args)
        return _note(tape, NodeCall("call_method", name, (self, *args), {}), result)

    return method


for _name in ("manual_seed", "seed", "initial_seed", "get_state", "set_state"):
    setattr(RecordedGenerator, _name, _method(_name))


class RandomWatch:
    """Stands in for the generators that modules hold, and tells what forward did to others that no node repeats."""

    def __init__(self, tape: Tape, borrowed: Borrowed) -> None:
        made: dict[int, RecordedGenerator] = {}
        for _, module in borrowed.walked:
            for name, value in vars(module).items():
                if type(value) is torch._C.Generator:
                    if id(value) not in made:
                        made[id(value)] = _stand_in(RecordedGenerator, value.device)
                        tape.hold_instead(made[id(value)], value)
                    vars(module)[name] = made[id(value)]
        self.moves, self.states = active.generator_moves, _describe_states()

    def check(self, state: MetaState) -> None:
        """Raise InputError where forward sets torch's generator by a method of it; note draws outside of torch."""
        changed = [a != b for a, b in zip(self.states, _describe_states())]
        if changed[0] and self.moves == active.generator_moves:
            raise InputError("forward sets torch.default_generator in a way that a graph does not repeat: by a method "
                             "of it, or by a function imported out of torch. Call torch.manual_seed or "
                             "torch.set_rng_state as such")
        for name, is_changed in zip(("Python", "numpy"), changed[1:]):
            if is_changed:
                state.assume(f"forward seeds {name}'s random numbers or draws some: what it drew is a constant of the "
                             "graph, which neither seeds nor draws them")


def _describe_states() -> list[str]:
    torchs, *others = save_generators()
    return [str(torchs.tolist()), *map(repr, others)]


def _stand_in(cls: type[RecordedGenerator], device: torch.device) -> RecordedGenerator:
    made: RecordedGenerator = torch._C.Generator.__new__(
        cls, "cpu")  # type: ignore[call-arg]  # torch.Generator is replaced
    made.device = device
    return made
