"""The examples of tracing do what they say."""
import pytest
import torch

einops = pytest.importorskip("einops")

from examples import custom_operator, einops_model  # noqa: E402


def test_einops_needs_no_registration() -> None:
    torch.manual_seed(0)
    model, images = einops_model.PatchAttention(), torch.rand(2, 3, 32, 32)
    plain, whole = einops_model.trace_as_torch(model, images), einops_model.trace_as_einops(model, images)
    expected = model(images)
    torch.testing.assert_close(plain(images), expected)
    torch.testing.assert_close(whole(images), expected)
    assert not any(n.target is einops.rearrange for n in plain.graph.nodes)
    patterns = [n.args[1] for n in whole.graph.nodes if n.target is einops.rearrange]
    assert patterns == ["b n (three heads d) -> three b heads n d", "b heads n d -> b n (heads d)"]


def test_custom_operator() -> None:
    gm = custom_operator.trace_rotator(64, 128)
    node = next(n for n in gm.graph.nodes if n.target is custom_operator.rotate_rows)
    info = node.meta["info"]
    assert info.fwd_flops == 6 * 64 * 64 + 2 * 64
    assert info.outputs[0].shape == (64, 128)
    x = torch.rand(64, 128)
    torch.testing.assert_close(gm(x).norm(dim=1), gm.fc(x).norm(dim=1)), "a rotation"
