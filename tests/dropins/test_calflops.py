"""`analyzer.dropins.calflops` beside calflops: the same figures and report, without data."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from analyzer import MetaTensorMode
from analyzer.dropins import calflops as ours
from analyzer.errors import InputError
from tests.dropins.sample_model import make_model


@pytest.fixture
def theirs():
    return pytest.importorskip("calflops", exc_type=ImportError)


def test_figures_are_those_of_calflops(theirs, evaluated):
    model, inputs = evaluated
    found = [lib.calculate_flops(model, args=list(inputs), output_as_string=False, print_results=False)
             for lib in (ours, theirs)]
    assert found[0] == found[1] and min(found[0]) > 0


# the note on how to read it is in our own words
@pytest.mark.parametrize("name", ["mixed", "resnet18"])
def test_the_report_is_that_of_calflops(theirs, name, capsys):
    model, inputs = make_model(name)
    model.requires_grad_(False).get_submodule("up" if name == "mixed" else "layer1").requires_grad_(True)
    texts = []
    for lib in (ours, theirs):
        result = lib.calculate_flops(model.eval(), args=list(inputs), include_backPropagation=True, output_precision=4)
        head, detail = capsys.readouterr().out.split(" Detailed Calculated FLOPs Results ")
        texts.append((result, head, detail[detail.index(type(model).__name__ + "("):]))
    assert texts[0] == texts[1]


class Functions(nn.Module):
    """Calls what the models of libraries do not, some of it in ways that are not counted."""

    def forward(self, x, y):
        f = nn.functional
        z = torch.addmm(x, x, y) + torch.add(x, y) * x.mul(2)
        z = torch.baddbmm(x[None], x[None], y[None]) + f.prelu(z, z.new_ones(1)) @ y
        image = z[None].add(1)
        return (f.interpolate(image, scale_factor=2), f.interpolate(image, size=(3, 5)), f.relu6(f.elu(f.silu(image))),
                f.adaptive_max_pool2d(f.avg_pool2d(image, 1), 2), f.instance_norm(image), f.group_norm(image, 1),
                f.conv_transpose2d(image, z.new_ones(1, 2, 3, 3), z.new_ones(2), 2, 1),
                torch.einsum("abcd,ce->abe", image, x),
                f.conv1d(z.view(-1, 1, 4), z.new_ones(2, 1, 3), z.new_ones(2), padding="valid"))


@pytest.mark.parametrize("module", [
    Functions(), nn.GRU(4, 4, 2, bias=False), nn.RNNCell(4, 4), nn.LSTMCell(4, 4), nn.RNN(4, 4, bidirectional=True),
    nn.Conv2d(1, 6, 3, 2, 1, 1, bias=True), nn.Bilinear(4, 4, 2), nn.Hardtanh()
])
def test_each_function_counts_as_there(theirs, module):
    image, rows = torch.rand(1, 1, 4, 4), torch.rand(4, 4)
    inputs = {nn.Conv2d: [image], Functions: [rows, rows], nn.Bilinear: [rows, rows], nn.GRU: [image[0]],
              nn.RNN: [image[0]]}.get(type(module), [rows])
    module = nn.Sequential(module) if len(inputs) == 1 else module
    if next(module.parameters(), None) is None:
        module.weight = nn.Parameter(torch.ones(1))  # it asks for the device of a parameter
    found = [lib.calculate_flops(module, args=inputs, output_as_string=False, print_results=False)
             for lib in (ours, theirs)]
    assert found[0] == found[1]


def test_ignored_modules_count_to_who_calls(theirs, capsys):
    model, inputs = make_model("resnet18")
    kinds = [nn.BatchNorm2d, nn.Sequential]
    texts = []
    for lib in (ours, theirs):
        lib.calculate_flops(model.eval(), args=list(inputs), ignore_modules=kinds)
        text = capsys.readouterr().out
        texts.append(text[text.index("ResNet("):])
    assert texts[0] == texts[1]


def test_inputs_are_made_for_a_tokenizer():
    class Tokenizer:
        pad_token_id = 7

        def __call__(self, text, add_special_tokens):
            return {"input_ids": [1, 2], "attention_mask": [1, 1]}

    made = ours.generate_transformer_input(Tokenizer(), (2, 4), "cpu")
    assert {name: t.tolist() for name, t in made.items()} == {
        "input_ids": [[1, 2, 7, 7]] * 2, "attention_mask": [[1, 1, 0, 0]] * 2}
    model = nn.ModuleDict({"words": nn.Embedding(8, 4), "head": nn.Linear(4, 8)})
    model.forward = lambda input_ids, attention_mask: model["head"](model["words"](input_ids))
    assert ours.calculate_flops(model, (2, 4), Tokenizer(), print_results=False,
                                output_as_string=False)[:2] == (2 * 2 * 4 * 4 * 8, 2 * 4 * 4 * 8)


def test_models_without_data():
    model, inputs = make_model("resnet18")
    expected = ours.calculate_flops(model, args=inputs, print_results=False)
    with torch.device("meta"):
        assert ours.calculate_flops(make_model("resnet18")[0], (1, 3, 64, 64), print_results=False) == expected
    with MetaTensorMode():
        model = make_model("resnet18")[0].cuda()
        assert ours.calculate_flops(model, (1, 3, 64, 64), print_results=False) == expected
    assert model.training


def test_arguments_that_cannot_be_used():
    with pytest.raises(InputError, match="give one of them"):
        ours.calculate_flops(nn.Linear(2, 2), (1, 2), args=[torch.ones(1, 2)])
    with pytest.raises(InputError, match="calculate_flops.*no such method"):
        ours.calculate_flops(nn.Linear(2, 2), (1, 2), forward_mode="generate")
