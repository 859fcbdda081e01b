"""`analyzer.dropins.deepspeed` and `flops_profiler`: text that scripts parse, attributes of modules, configurations."""
import json
import os
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from analyzer.dropins import deepspeed, flops_profiler
from analyzer.errors import InputError
from tests.dropins.sample_model import make_model


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.layers = nn.Conv2d(3, 8, 3), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        x = nn.functional.relu(self.conv(x)).mean((2, 3))
        for layer in self.layers:
            x = layer(x)
        return x


SHAPE = (2, 3, 6, 6)
CONV = 2 * 16 * 8 * 27           # MACs
LINEAR = 2 * 64                  # of each
MACS = CONV + 3 * LINEAR
FLOPS = 2 * MACS + 2 * 16 * 8 + 2 * 16 * 8  # the convolution's bias, and ReLU
# labels of lines, in order: deepspeed/profiling/flops_profiler/profiler.py, print_model_profile
OF_ENGINE = ["world size", "data parallel size", "model parallel size", "batch size per GPU"]
FORWARD = ["params per GPU", "params of model = params per GPU * mp_size", "fwd MACs per GPU", "fwd flops per GPU",
           "fwd flops of model = fwd flops per GPU * mp_size", "fwd latency",
           "fwd FLOPS per GPU = fwd flops per GPU / fwd latency"]
BACKWARD = ["bwd latency", "bwd FLOPS per GPU = 3 * fwd flops per GPU / bwd latency",
            "fwd+bwd FLOPS per GPU = 4 * fwd flops per GPU / (fwd+bwd latency)", "step latency", "iter latency",
            "FLOPS per GPU = 4 * fwd flops per GPU / iter latency", "samples/second"]
LINE = re.compile(r"^(.+?): +  (\S+(?: \S+)?) *$", re.M)
DETAIL = re.compile(r"([\d.]+(?: \w)?) = (\S+)% Params, (\S+ \w*MACs) = (\S+)% MACs, (\S+(?: \w+)?) = (\S+)% latency")


def parse(text):
    """Figures by label, as a script would read them."""
    head = text[text.index("Profile Summary"):text.index("Aggregated Profile")]
    return {label: value.strip() for label, value in LINE.findall(head.partition("\n\n")[2])}


def test_a_script_finds_every_label_in_its_place(capsys):
    assert deepspeed.get_model_profile(Net(), SHAPE) == ("15.1 K", "7.3 KMACs", "440")
    text = capsys.readouterr().out
    figures = parse(text)
    assert list(figures) == FORWARD
    assert [figures[label] for label in FORWARD[:5]] == ["440", "440", "7.3 KMACs", "15.1 K", "15.1 K"]
    assert re.fullmatch(r"[\d.]+ (s|ms|us)", figures["fwd latency"])
    lines = text.splitlines()
    assert lines[1:3] == ["-------------------------- DeepSpeed Flops Profiler --------------------------",
                          "Profile Summary at step 1:"]
    assert "----------------------------- Aggregated Profile per GPU -----------------------------" in lines
    assert "------------------------------ Detailed Profile per GPU ------------------------------" in lines
    top = lines[lines.index("depth 1:"):][:4]
    assert top[1:3] == ["    params      - {'Conv2d': '224'}", "    MACs        - {'Conv2d': '6.91 KMACs'}"]
    assert top[3].startswith("    fwd latency - {'") and "depth 2:" not in lines
    tree = text[text.index("\nNet("):].splitlines()[1:]
    assert [re.sub(r"\(.*", "", line) for line in (tree[0], tree[3].strip(), tree[4].strip())] == ["Net", "", ""]
    assert tree[3] == "  (layers): ModuleList(" and tree[-1] == "-" * 78
    found = [DETAIL.search(line) for line in (tree[1], tree[2], tree[4])]
    assert [match.group(1, 2, 3, 4) for match in found] == [
        ("440", "100", "7.3 KMACs", "100"), ("224", "50.91", "6.91 KMACs", "94.74"),
        ("72", "16.36", "128 MACs", "1.75")]
    assert tree[2].endswith(", 3, 8, kernel_size=(3, 3), stride=(1, 1))")


def test_an_engine_and_its_times(capsys):
    class Engine:
        world_size, dp_world_size, mp_world_size = 4, 2, 2
        breaks_down = True

        def train_micro_batch_size_per_gpu(self):
            return 2

        def wall_clock_breakdown(self):
            return self.breaks_down

    model, engine = Net(), Engine()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    prof = deepspeed.FlopsProfiler(model, engine, recompute_fwd_factor=1.0)
    prof.start_profile()
    model(torch.ones(SHAPE)).sum().backward()
    optimizer.step()
    prof.print_model_profile(profile_step=7, detailed=False)
    figures = parse(capsys.readouterr().out)
    assert list(figures) == OF_ENGINE + FORWARD + BACKWARD
    assert [figures[label] for label in OF_ENGINE + FORWARD[:2]] == ["4", "2", "2", "2", "440", "880"]
    engine.breaks_down = False
    prof.print_model_profile()
    assert list(parse(capsys.readouterr().out)) == OF_ENGINE + FORWARD
    prof.print_model_aggregated_profile(module_depth=1, top_modules=2)
    assert capsys.readouterr().out.splitlines()[:2] == [
        "Top 2 modules in terms of params, MACs or fwd latency at different model depths:", "depth 0:"]
    prof.end_profile()


def test_an_engine_that_divides_sequences_has_replicas_of_its_own_count(capsys):
    engine = SimpleNamespace(world_size=8, dp_world_size=None, seq_dp_world_size=4, mp_world_size=1,
                             train_micro_batch_size_per_gpu=lambda: 1)
    model = Net()
    prof = deepspeed.FlopsProfiler(model)
    prof.ds_engine = engine
    prof.start_profile()
    model(torch.ones(SHAPE))
    prof.print_model_profile(detailed=False)
    assert parse(capsys.readouterr().out)["data parallel size"] == "4"
    prof.end_profile()


def test_a_path_is_any_object_that_stands_for_one(tmp_path):
    class Place(os.PathLike):
        def __init__(self, name):
            self.name = name

        def __fspath__(self):
            return str(tmp_path / self.name)

    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    for lib, options in ((flops_profiler, {}), (deepspeed, {"config": Place("ds.json")})):
        lib.get_model_profile(Net(), SHAPE, output_file=Place(lib.__name__), **options)
        assert "Profile Summary" in (tmp_path / lib.__name__).read_text()
    with pytest.raises(InputError, match="'.*nowhere.json': No such file"):
        deepspeed.FlopsProfilerConfig.read(Place("nowhere.json"))


def costs(module):
    return module.__flops__, module.__macs__, module.__params__


def test_modules_have_what_deepspeed_leaves_on_them():
    model = Net()
    prof = deepspeed.FlopsProfiler(model)
    prof.start_profile()
    assert costs(model.conv) == (0, 0, 224) and model.__duration__ == 0
    model(torch.ones(SHAPE))
    assert costs(model) == (256, 0, 440) and costs(model.conv) == (2 * CONV + 256, CONV, 224)
    assert costs(model.layers) == (0, 0, 216) and costs(model.layers[0]) == (2 * LINEAR, LINEAR, 72)
    assert model.__duration__ > model.conv.__duration__ > 0
    model(torch.ones(SHAPE))  # is added
    assert costs(model.conv) == (4 * CONV + 512, 2 * CONV, 224)
    model.conv(torch.ones(SHAPE))
    prof.stop_profile()
    assert model.__duration__ == pytest.approx(prof.get_total_duration(), rel=1e-9)
    assert costs(model.conv) == (6 * CONV + 768, 3 * CONV, 224)
    prof.reset_profile()
    assert costs(model.conv) == (0, 0, 224)
    prof.end_profile()
    prof.reset_profile()  # which puts nothing on modules that have nothing
    assert not [name for module in model.modules() for name in vars(module) if name.startswith("__")]


def test_modules_without_data_have_no_duration():
    with torch.device("meta"):
        model = Net()
    prof = flops_profiler.FlopsProfiler(model)
    prof.start_profile()
    model(torch.ones(SHAPE, device="meta"))
    table = model.conv.__profile_table__
    assert {name: (cost.flops, cost.macs, cost.duration) for name, cost in table.items()} == {
        "conv2d": (2 * CONV + 256, CONV, None)}
    assert (model.__flops__, model.__duration__, model.conv.__duration__) == (256, None, None)
    prof.end_profile()


def test_defaults_of_flops_profiler(capsys):
    model = Net()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    assert flops_profiler.get_model_profile(model, SHAPE) == (FLOPS, MACS, 440) and len(calls) == 3 + 1
    text = capsys.readouterr().out
    assert "Profile on Device: cpu\nProfile Summary at step 3:" in text and "Top 10 modules" in text
    assert [label.replace("device", "GPU") for label in parse(text)] == FORWARD
    assert "functionals = {'conv2d': {'flops': '14.08 K', 'macs': '6.91 KMACs', " in text
    assert flops_profiler.get_model_profile(model, SHAPE, print_profile=False, warm_up=0,
                                            as_string=True) == ("15.1 K", "7.3 KMACs", "440")


def masked(text):
    """Without times and what follows from them, and in our own words: the notations and the note."""
    text = re.sub(r"'[\d.e-]+ ?(s|ms|us|\w?FLOPS)?'|[\d.e-]+ (s|ms|us|\w?FLOPS)\b", "T", text)
    text = re.sub(r"('duration%[^']*': ')[\d.]+%", r"\1", text)
    text = re.sub(r"(Notations:\n).*?\n\n", r"\1", text, flags=re.S)
    text = re.sub(r"(Detailed Profile per Device -+\n).*?(\n\w+\()", r"\1\2", text, flags=re.S)
    text = re.sub(r"fwd latency - .*|functionals = .*|functionals_duration.*", "", text)
    return [line.rstrip() for line in text.splitlines()]


def test_the_text_is_that_of_flops_profiler(capsys):
    theirs = pytest.importorskip("flops_profiler.profiler", exc_type=ImportError)
    model, inputs = make_model("resnet18")
    found, texts = [], []
    for lib in (flops_profiler, theirs):
        found.append(lib.get_model_profile(model, args=list(inputs), warm_up=0))
        texts.append(masked(capsys.readouterr().out))
    assert found[0] == found[1] and texts[0] == texts[1]


CONFIG = {"train_batch_size": 8, "gradient_accumulation_steps": 2, "wall_clock_breakdown": True,
          "flops_profiler": {"enabled": True, "profile_step": 2, "top_modules": 3, "detailed": False}}


def train(prof, model, steps=4):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        for _ in range(2):
            model(torch.ones(4, 3, 6, 6)).sum().backward()
        optimizer.step()
        prof.step()


def test_a_configuration_profiles_its_step(tmp_path, capsys):
    path = tmp_path / "ds_config.json"
    config = {**CONFIG, "flops_profiler": {**CONFIG["flops_profiler"], "output_file": str(tmp_path / "report.txt")}}
    path.write_text(json.dumps(config))
    model = Net()
    train(deepspeed.profile_with_config(model, path), model)
    text = (tmp_path / "report.txt").read_text()
    figures = parse(text)
    assert capsys.readouterr().out == "" and not hasattr(model, "__flops__")
    assert "Profile Summary at step 2:" in text and "Top 3 modules" in text and "Detailed" not in text
    assert list(figures)[:4] == OF_ENGINE and figures["batch size per GPU"] == "8"
    assert "bwd FLOPS per GPU = 2 * fwd flops per GPU / bwd latency" in figures
    # one step of two micro-batches of four
    assert figures["fwd MACs per GPU"] == f"{4 * MACS / 1e3:.2f} KMACs"


def test_get_model_profile_takes_a_configuration(capsys):
    deepspeed.get_model_profile(Net(), SHAPE, config=CONFIG)
    printed = capsys.readouterr().out
    assert "Top 3 modules" in printed and "Detailed" not in printed


@pytest.mark.parametrize(("config", "says"), [
    ({"flops_profiler": {"enable": True}}, "no setting 'enable'; settings are enabled,"),
    ({"flops_profiler": {"profile_step": -1}}, "a step is 0 or more"), ({"flops_profiler": 1}, "object of settings"),
    (7, "must be a configuration"), ("nowhere.json", "'nowhere.json': No such file")])
def test_configurations_that_are_none(config, says):
    with pytest.raises(InputError, match=says):
        deepspeed.FlopsProfilerConfig.read(config)
