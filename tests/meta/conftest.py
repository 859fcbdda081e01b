"""A mode whose operator calls are kept."""
import pytest

from analyzer import MetaTensorMode


class Recorder:
    """Keeps the signatures of the calls that the mode reports."""

    def __init__(self):
        self.signatures = []
        self.memory = self.modules = self.calls = self

    def called(self, signature, inputs, outputs):
        self.signatures.append(signature)

    def took_workspace(self, *args): ...
    def holds_workspace(self, storage): ...
    def kept_workspace(self, *args): ...
    def adopted(self, storage): ...
    def ordered(self, *args): ...

    def clear(self):
        self.signatures.clear()

    def where(self):
        return ""

    def names(self):
        return [c.op._schema.name.removeprefix("aten::") for c in self.signatures]

    def find(self, name):
        return [c for c in self.signatures if c.op._schema.name == f"aten::{name}"]

    def casts(self):
        """(shape, dtype) of every cast, in order."""
        return [(tuple(c.outputs[0]), c.outputs[0].dtype) for c in self.find("_to_copy")]


@pytest.fixture
def make_recorder():
    return Recorder


@pytest.fixture
def mode():
    with MetaTensorMode() as mode:
        mode.state.recorder = Recorder()
        yield mode
