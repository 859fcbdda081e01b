"""What the tests of drop-ins share."""
import pytest

from tests.dropins.sample_model import VISION, make_model


@pytest.fixture(params=["mixed", *VISION, "bert", "hf_vit"])
def evaluated(request):
    """A model in evaluation mode, and its inputs."""
    model, inputs = make_model(request.param)
    return model.eval(), inputs
