"""Scripts for DeepSpeed's profiler, flops-profiler and TIDSProfiler run with their import changed."""
import re

import pytest
import torch
from torch import nn

from analyzer.errors import InputError
from analyzer.tools.runtime import FlopsProfiler, TIDSProfiler, get_model_profile
from analyzer.zoo import MODELS
from examples.deepspeed_inference import profile_alexnet, profile_bert
from examples.flops_profiler_training import train

TINY_BERT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100
}
LATENCY = re.compile(r"fwd latency: +([0-9.]+) (s|ms|us)")


def test_deepspeeds_script_of_inference_runs(capsys):
    assert profile_alexnet(batch_size=2) == ("2.86 G", "1.43 GMACs", "61.1 M")
    printed = capsys.readouterr().out
    assert LATENCY.search(printed) and "(classifier): Sequential(" in printed and "depth 1:" in printed
    flops, macs, params = profile_bert(batch_size=2, seq_len=16, **TINY_BERT)
    # two layers of 4·32² + 2·32·64 weights on 32 tokens, products of attention of 2·16²·32 in each of 2 sequences,
    # pooler and classifier on 2
    assert macs == f"{(2 * (32 * (4 * 32**2 + 2 * 32 * 64) + 2 * 2 * 16**2 * 32) + 2 * (32**2 + 32 * 2)) / 1e3:g} KMACs"


def test_flops_profilers_script_of_training_runs(capsys):
    conv, linear = 8 * 16 * 32 * 32 * 27, 8 * 1024 * 10
    found = train()
    assert (found["macs"], found["params"]) == (conv + linear, 16 * 28 + 10250)
    assert "Profile Summary at step 2" in capsys.readouterr().out


def test_published_figures_are_measured():
    model = MODELS["resnet18"].factory().eval()
    with FlopsProfiler(model) as prof, torch.no_grad():
        model(torch.rand(16, 3, 224, 224))
    assert (prof.get_total_flops(True), prof.get_total_macs(True), prof.get_total_params(True)) == (
        "58.18 G", "29.03 GMACs", "11.69 M")
    seconds = prof.get_total_duration()
    assert 0.01 < seconds < 600 and prof.profile.kernel_seconds < seconds
    assert sum(child.fwd_seconds for child in prof.profile.modules.children) <= seconds


def test_the_published_bert_is_measured():
    transformers = pytest.importorskip("transformers")
    model = transformers.BertModel(transformers.BertConfig())
    inputs = {"input_ids": torch.ones(1, 128, dtype=torch.int64)}
    assert get_model_profile(model, kwargs=inputs, print_profile=False,
                             warm_up=0) == ("22.36 G", "11.17 GMACs", "109.48 M")


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 6), nn.Dropout()

    def forward(self, x, scale=1.0):
        return self.drop(self.layer(x)) * scale

    def encode(self, x):
        return self.layer(x)


@pytest.mark.parametrize("arguments", [
    {"input_shape": (3, 4)}, {"args": [torch.ones(3, 4)]}, {"args": (torch.ones(3, 4), 2.0)},
    {"args": torch.ones(3, 4)},
    {"kwargs": {"x": torch.ones(3, 4)}}, {"args": [torch.ones(3, 4)], "kwargs": {"scale": 2}},
    {"input_shape": (3, 4), "args": [], "kwargs": {}},
    {"input_shape": (3, 4), "func_name": "encode"}, {"input_shape": (3, 4), "mode": "forward"},
])
def test_the_ways_to_say_what_the_model_is_called_with(arguments):
    model = Scaled()
    model.drop.eval()
    assert get_model_profile(model, print_profile=False, as_string=False, **arguments) == (2 * 3 * 4 * 6, 3 * 4 * 6, 30)
    assert (model.training, model.layer.training, model.drop.training) == (True, True, False)


def test_the_report_goes_to_a_file_and_not_to_stdout(tmp_path, capsys):
    path = tmp_path / "new" / "report.txt"
    get_model_profile(Scaled(), (3, 4), output_file=str(path), detailed=False, top_modules=3, module_depth=1)
    assert capsys.readouterr().out == ""
    text = path.read_text()
    assert "fwd MACs per GPU" in text and "depth 0" in text and "depth 1" not in text and "(layer)" not in text


def test_ignored_modules_are_left_out_of_the_report(capsys):
    assert get_model_profile(Scaled(), (3, 4), ignore_modules=[nn.Linear], as_string=False)[:2] == (144, 72)
    printed = capsys.readouterr().out
    assert "Linear" not in printed and "(drop): Dropout" in printed


@pytest.mark.parametrize(("call", "message"), [
    (lambda: get_model_profile(Scaled()), "give input_shape, args or kwargs"),
    (lambda: get_model_profile(Scaled(), [3, 4]), r"input_shape=\[3, 4\]"),
    (lambda: get_model_profile(Scaled(), (3, 4), func_name="generate"),
     "func_name='generate'.*Scaled has no such method"),
    (lambda: get_model_profile("model", (3, 4)), r"FlopsProfiler\(str\)"),
    (lambda: FlopsProfiler(Scaled()).get_total_flops(), r"call start_profile\(\) first"),
    (lambda: FlopsProfiler(Scaled(), start_step=3, end_step=2), "start_step=3, end_step=2"),
    (lambda: FlopsProfiler(None), r"FlopsProfiler\(NoneType\)"),
])
def test_errors_repeat_what_was_given(call, message):
    with pytest.raises(InputError, match=message):
        call()


def test_a_profiler_that_waits_for_its_first_step_says_so():
    prof = FlopsProfiler(Scaled(), start_step=3)
    prof.start_profile()
    with pytest.raises(InputError, match="step 0 is before start_step=3"):
        prof.get_total_flops()
    prof.end_profile()


def test_the_script_of_tidsprofiler_runs():
    model = MODELS["resnet18"].factory()
    inputs = torch.randn(2, 3, 64, 64)
    prof = TIDSProfiler(model)
    prof.start_profile()
    model(inputs)
    profile = prof.generate_profile()
    lines = str(profile).splitlines()
    prof.end_profile()
    assert re.fullmatch(r"\(model\): ResNet, num_params 11689512, [\d.]+ms, 100.0% latency, input shape "
                        r"\[2, 3, 64, 64\], output shape \[2, 1000\]", lines[0])
    assert re.match(r" +\(conv1\): Conv2d, num_params 9408, [\d.]+ms, [\d.]+% latency, input shape \[2, 3, 64, 64\], "
                    r"output shape \[2, 64, 32, 32\]", lines[1])
    first = profile.children[0]
    assert (first.name, first.depth, first.macs, first.input_elem_bytes) == ("conv1", 1, 2 * 64 * 32 * 32 * 147, 4)
    assert sum(child.fwd_latency for child in profile.children) <= profile.fwd_latency
    assert round(sum(child.num_params_pctg for child in profile.children), 6) == 100
