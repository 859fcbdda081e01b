"""`MetaTensor` called as a class: of a tensor, and of what else ``torch.Tensor`` takes."""
import pytest
import torch
from torch import nn

from analyzer import MetaTensor, MetaTensorMode
from analyzer.errors import InputError, UnsupportedOperatorError

CUDA = torch.device("cuda", 0)


def test_outside_of_the_mode_it_is_like_a_tensor_whose_data_stays_as_it_is():
    x = torch.arange(6.0).view(2, 3)
    fake = MetaTensor(x.t())
    assert (fake.shape, fake.stride(), fake.dtype, fake.device.type) == ((3, 2), (1, 3), torch.float32, "cpu")
    assert fake.data_ptr() != x.data_ptr() and fake.untyped_storage().nbytes() == 24
    with pytest.raises(UnsupportedOperatorError, match="no data"):
        fake.tolist()
    fake.fill_(7)
    assert x.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_it_is_on_the_device_that_is_asked():
    x = torch.rand(2, 3)
    assert MetaTensor(x, device="cuda").device == CUDA and MetaTensor(x.half(), device="cuda:0").dtype == torch.half
    assert MetaTensor(MetaTensor(x, device="cuda"), device="cpu").device.type == "cpu"
    with MetaTensorMode():
        assert (MetaTensor(x, device="cuda") + 1).device == CUDA
        assert torch.cuda.memory_allocated() == 0  # the sum and its operand are gone
        assert MetaTensor(x).device.type == "cpu"


@pytest.mark.parametrize("make", [lambda: torch.rand(2, 4, requires_grad=True), lambda: nn.Parameter(torch.rand(2, 4)),
                                  lambda: torch.rand(2, 4).requires_grad_() * 2])
@pytest.mark.parametrize("is_inside", [False, True])
def test_it_is_a_leaf_that_gets_the_gradient(make, is_inside):
    x = make()
    fake = None if is_inside else MetaTensor(x)
    with MetaTensorMode():
        fake = MetaTensor(x) if fake is None else fake
        assert fake.is_leaf and fake.requires_grad and isinstance(fake, nn.Parameter) == isinstance(x, nn.Parameter)
        (fake * 2).sum().backward()
    assert fake.grad.shape == (2, 4) and isinstance(fake.grad, MetaTensor)
    assert not x.is_leaf or x.grad is None


def test_of_anything_but_a_tensor_it_is_refused_outside_of_the_mode():
    with pytest.raises(InputError, match=r"MetaTensor\(2, 3\): .* made of a tensor. Way out: MetaTensor\(torch\.em"):
        MetaTensor(2, 3)
    with MetaTensorMode():
        x = torch.rand(4, requires_grad=True)
        assert type(x)(2, 3).shape == (2, 3) and type(x)([1.0, 2.0]).tolist() == [1.0, 2.0]
        assert type(x)(x).data_ptr() == x.data_ptr() and not type(x)(x).is_leaf  # as torch.Tensor(x)
