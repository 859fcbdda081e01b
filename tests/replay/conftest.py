"""What is replayed, where this torch is one that replay is tested with; elsewhere nothing is."""
import pytest

from analyzer.replay.support import why_unsupported


@pytest.fixture(autouse=True)
def supported_torch():
    if reason := why_unsupported():
        pytest.skip(reason)
