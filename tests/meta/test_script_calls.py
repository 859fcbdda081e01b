"""What scripts do before they train: move a model by keywords, set a default dtype, format a loss, draw by weights."""
import pytest
import torch
from torch import nn

from analyzer import MetaTensorMode
from analyzer.errors import DataDependentError
from analyzer.meta.state import MetaOptions


@pytest.mark.parametrize("settings", [dict(device="cuda"), dict(device=torch.device("cuda"), dtype=torch.bfloat16),
                                      dict(device="cuda", memory_format=torch.channels_last)], ids=str)
def test_a_module_moves_by_keywords(settings):
    with MetaTensorMode():
        layer = nn.Conv2d(3, 8, 3).to(**settings)
        assert layer.weight.device == torch.device("cuda", 0)
        assert layer.weight.dtype == settings.get("dtype", torch.float32)
        assert layer(torch.randn(1, 3, 9, 9, device="cuda", dtype=layer.weight.dtype)).is_cuda


def test_a_tensor_of_one_number_is_formatted_as_the_number():
    with MetaTensorMode():
        assert f"{torch.tensor(2.5):.2f} {torch.tensor(3):>4} {torch.tensor(0.5)}" == "2.50    3 0.5"
        assert f"{torch.zeros(2)}".startswith("MetaTensor(") and f"{torch.randn(2).sum()}".startswith("MetaTensor(")
        with pytest.raises(DataDependentError):
            f"{torch.randn(2).sum():.2f}"
        with pytest.raises(TypeError):
            f"{torch.zeros(2):.2f}"
    with MetaTensorMode(MetaOptions(unknown_value="placeholder")):
        assert f"{torch.randn(2).sum():.2f}" == "1.00"


def test_a_draw_by_known_weights_is_one_of_them():
    with MetaTensorMode():
        assert [int(torch.multinomial(torch.tensor([0.0, 1.0, 0.0]), 1)) for _ in range(5)] == [1] * 5
        assert {int(torch.multinomial(torch.ones(2), 1)) for _ in range(40)} == {0, 1}
        share = float(torch.distributions.Beta(torch.tensor(0.2), torch.tensor(0.2)).sample())
        assert 0 <= share <= 1
        assert torch.distributions.Dirichlet(torch.ones(3, device="cuda")).sample((4,)).shape == (4, 3)
        assert torch._standard_gamma(torch.ones(5, device="cuda")).is_cuda


def test_a_product_with_an_output_dtype():
    """What is added may have the dtype of the result; the factors have one of their own."""
    with MetaTensorMode():
        a, b = (torch.empty(8, 8, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        wide = torch.empty(8, 8, device="cuda")
        assert torch.addmm(wide, a, b, out_dtype=torch.float32).dtype == torch.float32
        assert torch.mm(a, b, out_dtype=torch.float32).dtype == torch.float32
        with pytest.raises(RuntimeError, match="same dtype"):
            torch.addmm(wide, a, b)
        with pytest.raises(RuntimeError, match="same dtype"):
            torch.addmm(wide, a, wide, out_dtype=torch.float32)


def test_out_dtype_of_products_of_bytes():
    from torch._higher_order_ops.out_dtype import out_dtype

    with MetaTensorMode():
        a, b = (torch.empty(32, 32, dtype=torch.int8, device="cuda") for _ in range(2))
        assert out_dtype(torch.ops.aten.mm.default, torch.int32, a, b).dtype == torch.int32


def test_a_condition_that_one_side_decides_is_known():
    """A loop that makes text ends at its largest length, whatever the tokens are."""
    with MetaTensorMode():
        unknown = torch.randn(3, device="cuda") > 0
        yes, no = torch.ones(3, dtype=torch.bool, device="cuda"), torch.zeros(3, dtype=torch.bool, device="cuda")
        assert bool((unknown | yes).all()) and bool(torch.logical_or(yes, unknown).all())
        assert not bool((unknown & no).any()) and not bool(torch.logical_and(no, unknown).any())
        unfinished = torch.randint(2, (3,), device="cuda")  # as transformers keeps it
        assert (unfinished & ~yes).max().item() == 0
        for open_condition in (unknown | no, unknown & yes, unknown ^ yes):
            with pytest.raises(DataDependentError):
                open_condition.tolist()
