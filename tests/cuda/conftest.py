"""A mode whose operator calls are kept, as in the tests of the mode itself."""
from tests.meta.conftest import make_recorder, mode  # noqa: F401
