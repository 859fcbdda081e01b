import json
import sys
from pathlib import Path

import pytest
import torch

from analyzer.errors import AnalyzerError, MissingExtraError, TargetError, how_to_install
from analyzer.zoo import MODELS
from analyzer.zoo.input_spec import InputSpec, parse_inputs
from analyzer.zoo.target import LabelRule, Target, load_target


def build(target: Target) -> torch.nn.Module:
    with torch.device("meta"):
        return target.build()


def count(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def call(target: Target, train: bool = False, given: tuple[str, ...] = ()) -> object:
    """Build the model and run its forward on the inputs that the target chooses, all on meta."""
    inputs = target.choose_inputs(parse_inputs(given), train=train)
    assert inputs is not None
    args = [spec.make() for spec in inputs if spec.name is None]
    kwargs = {spec.name: spec.make() for spec in inputs if spec.name is not None}
    with torch.device("meta"):
        return target.build()(*args, **kwargs)


def show(target: Target, train: bool, given: tuple[str, ...] = ()) -> list[str]:
    return [str(spec) for spec in target.choose_inputs(parse_inputs(given), train=train) or ()]


def fail(text: str, kind: type[AnalyzerError] = TargetError) -> str:
    with pytest.raises(kind) as caught:
        load_target(text)
    assert str(caught.value).startswith(f"{text}: ")  # every error repeats what the caller wrote
    return str(caught.value)


@pytest.mark.parametrize("name", MODELS)
def test_shipped_models_run_on_their_default_inputs(name: str) -> None:
    target = load_target(name)
    assert target.name == name
    output = call(target, train=True)
    assert (getattr(output, "loss", None) is not None) == MODELS[name].labelled
    assert isinstance(call(target, train=False), torch.Tensor)


def test_unknown_name() -> None:
    assert "ships with analyzer; did you mean resnet18 or resnet50? TARGET is one of" in fail("resnet_18")
    message = fail("quux")
    assert ("no model of that name ships with analyzer; TARGET is one of vit_b_16, resnet18, resnet50, gpt2, llama_1b, "
            "llama_405b") in message
    assert message.endswith("torchvision:NAME, timm:NAME, hf:CONFIG.json, hf:ConfigClass, package.module:factory")
    assert "nothing follows the colon" in fail("timm:")
    pytest.importorskip("torchvision")
    assert "; did you mean torchvision:fcos_resnet50_fpn? " in fail("fcos_resnet50_fpn")


PAIR = Target(
    "pair",
    torch.nn.Identity,
    (InputSpec("input_ids", torch.int64, (8, 128)), InputSpec("decoder_input_ids", torch.int64, (8, 64))),
    (LabelRule("labels", like="decoder_input_ids"),),
)


@pytest.mark.parametrize(("given", "train", "chosen"), [
    ((), False, ["input_ids=int64:8x128", "decoder_input_ids=int64:8x64"]),
    ((), True, ["input_ids=int64:8x128", "decoder_input_ids=int64:8x64", "labels=int64:8x64"]),
    (("input_ids=int64:2x16",), True,
     ["input_ids=int64:2x16", "decoder_input_ids=int64:2x64", "labels=int64:2x64"]),
    (
        ("decoder_input_ids=int64:2x7", "input_ids=int64:2x16"), True,
        ["decoder_input_ids=int64:2x7", "input_ids=int64:2x16", "labels=int64:2x7"],
    ),
    (
        ("input_ids=int64:2x16", "labels=int64:2x9"), True,
        ["input_ids=int64:2x16", "labels=int64:2x9", "decoder_input_ids=int64:2x64"],
    ),
    (("inputs_embeds=2x16x8",), True, ["inputs_embeds=float32:2x16x8"]),  # no main input: nothing is guessed
    (("int64:3x5",), True, ["int64:3x5", "labels=int64:3x5"]),
])
def test_chosen_inputs(given: tuple[str, ...], train: bool, chosen: list[str]) -> None:
    assert show(PAIR, train, given) == chosen


@pytest.mark.parametrize(("dims", "shape"), [(None, (8, 3, 4, 5)), ((0,), (8,)), ((0, 2, 3), (8, 4, 5))])
def test_label_takes_its_shape_from_an_input(dims: tuple[int, ...] | None, shape: tuple[int, ...]) -> None:
    rule = LabelRule("labels", "pixel_values", dims)
    assert rule.apply([InputSpec("pixel_values", torch.float32, (8, 3, 4, 5))]) == InputSpec(
        "labels", torch.int64, shape)


@pytest.mark.parametrize(("name", "inputs"), [
    ("resnet18", ["float32:8x3x224x224"]),
    ("inception_v3", ["float32:8x3x299x299"]),
    ("vit_h_14", ["float32:8x3x224x224"]),  # its best weights are for 518, the model without weights is not
    ("lraspp_mobilenet_v3_large", ["float32:8x3x520x520"]),
    ("r3d_18", ["float32:8x3x16x112x112"]),
    ("raft_small", ["float32:2x3x368x496", "float32:2x3x368x496"]),
])
def test_torchvision(name: str, inputs: list[str]) -> None:
    target = load_target(f"torchvision:{name}")
    assert show(target, train=True) == inputs
    assert call(target) is not None


def test_torchvision_detection_builds_without_downloading(monkeypatch: pytest.MonkeyPatch) -> None:
    target = load_target("torchvision:fasterrcnn_resnet50_fpn")
    import torchvision

    def refuse(self: object, *args: object, **kwargs: object) -> None:
        raise AssertionError("weights were asked for")

    monkeypatch.setattr(torchvision.models.WeightsEnum, "get_state_dict", refuse)
    published = torchvision.models.get_model_weights("fasterrcnn_resnet50_fpn").DEFAULT.meta["num_params"]
    # Published with frozen batch norms, whose 2 x 26,560 weights are buffers; a backbone without weights has trainable
    # ones.
    assert count(build(target)) == published + 2 * 26_560
    assert show(target, train=False) == ["float32:2x3x800x800"]
    assert build(load_target("torchvision:deeplabv3_resnet50")) is not None


def test_torchvision_unknown() -> None:
    message = fail("torchvision:resnet19")
    assert "torchvision has no model 'resnet19'; did you mean resnet18" in message


@pytest.mark.parametrize(("name", "parameters", "inputs"), [
    # figures of timm's results-imagenet.csv: 22.05, 28.59, 22.06 M
    ("vit_small_patch16_224", 22_050_664, ["float32:8x3x224x224"]),
    ("convnext_tiny", 28_589_128, ["float32:8x3x224x224"]),
    ("vit_small_patch14_dinov2.lvd142m", 22_056_192, ["float32:8x3x518x518"]),
])
def test_timm(name: str, parameters: int, inputs: list[str]) -> None:
    target = load_target(f"timm:{name}")
    assert count(build(target)) == parameters
    assert show(target, train=True) == inputs
    assert isinstance(call(target), torch.Tensor)


def test_timm_unknown() -> None:
    assert "timm has no model 'vit_smal_patch16_224'; did you mean vit_small_patch16_224" in fail(
        "timm:vit_smal_patch16_224")
    assert "timm's resnet50 has no tag 'a1_in1l'; did you mean resnet50.a1_in1k" in fail("timm:resnet50.a1_in1l")


IDS, LABELS, DECODER = "input_ids=int64:8x128", "labels=int64:8x128", "decoder_input_ids=int64:8x128"


@pytest.mark.parametrize(("spec", "model_class", "inputs"), [
    ("BertConfig", "BertForMaskedLM", [IDS, LABELS]),
    ("GPT2Config", "GPT2LMHeadModel", [IDS, LABELS]),
    ("LlamaConfig", "LlamaForCausalLM", [IDS, LABELS]),
    ("T5Config", "T5ForConditionalGeneration", [IDS, DECODER, LABELS]),
    ("MixtralConfig", "MixtralForCausalLM", [IDS, LABELS]),
    ("WhisperConfig", "WhisperForConditionalGeneration", ["input_features=float32:8x80x3000", DECODER, LABELS]),
    ("ViTConfig", "ViTForImageClassification", ["pixel_values=float32:8x3x224x224", "labels=int64:8"]),
    ("VideoMAEConfig", "VideoMAEForVideoClassification", ["pixel_values=float32:8x16x3x224x224", "labels=int64:8"]),
    ("Wav2Vec2Config", "Wav2Vec2ForCTC", ["input_values=float32:8x16000"]),
    ("ASTConfig", "ASTForAudioClassification", ["input_values=float32:8x1024x128", "labels=int64:8"]),
    ("BlipConfig", "BlipForConditionalGeneration", ["pixel_values=float32:8x3x384x384", IDS, LABELS]),
    ("SiglipVisionConfig", "SiglipVisionModel", ["pixel_values=float32:8x3x224x224"]),
    ("BertConfig:BertModel", "BertModel", [IDS]),
    ("CLIPConfig:CLIPModel", "CLIPModel", ["input_ids=int64:8x77", "pixel_values=float32:8x3x224x224"]),
    ("BertConfig:BertForSequenceClassification", "BertForSequenceClassification", [IDS, "labels=int64:8"]),
    ("BertConfig:BertForQuestionAnswering", "BertForQuestionAnswering",
     [IDS, "start_positions=int64:8", "end_positions=int64:8"]),
    (
        "SegformerConfig:SegformerForSemanticSegmentation", "SegformerForSemanticSegmentation",
        ["pixel_values=float32:8x3x224x224", "labels=int64:8x224x224"],
    ),
    ("T5Config:T5EncoderModel", "T5EncoderModel", [IDS]),
])
def test_transformers_classes_and_inputs(spec: str, model_class: str, inputs: list[str]) -> None:
    target = load_target(f"hf:{spec}")
    assert show(target, train=True) == inputs
    assert show(target,
                train=False) == [i for i in inputs if not i.startswith(("labels", "start_positions", "end_positions"))]
    assert type(build(target)).__name__ == model_class


def test_transformers_encoder_decoder_follows_a_given_batch() -> None:
    assert call(load_target("hf:T5Config"), given=("input_ids=int64:3x40",)).logits.shape == (3, 128, 32128)


LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48,
         "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
         "max_position_embeddings": 64, "torch_dtype": "bfloat16"}


def write(folder: Path, content: object, name: str = "config.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_config_file(tmp_path: Path) -> None:
    path = write(tmp_path, LLAMA)
    for text in (f"hf:{path}", f"hf:{tmp_path}"):
        target = load_target(text)
        model = build(target)
        assert type(model).__name__ == "LlamaForCausalLM"
        # embedding and head, q and o, k and v, the three of the MLP, three norms
        assert count(model) == 2 * 100 * 32 + 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 3 * 32
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}  # as the config says
        # no more tokens than positions
        assert show(target, train=True) == ["input_ids=int64:8x64", "labels=int64:8x64"]
        assert call(target, train=True).loss.shape == ()
    other = load_target(f"hf:{path}:LlamaForSequenceClassification")
    assert type(build(other)).__name__ == "LlamaForSequenceClassification"


def test_config_file_may_leave_out_either_name(tmp_path: Path) -> None:
    for left_out in ("model_type", "architectures"):
        fields = {key: value for key, value in LLAMA.items() if key != left_out}
        assert type(build(load_target(f"hf:{write(tmp_path, fields)}"))).__name__ == "LlamaForCausalLM"


def test_builds_do_not_share_their_config(tmp_path: Path) -> None:
    target = load_target(f"hf:{write(tmp_path, LLAMA)}")
    first, second = build(target), build(target)
    assert first.config is not second.config


@pytest.mark.parametrize(("content", "message"), [
    ('{"model_type": "llama",',
     "Expecting property name enclosed in double quotes"),
    ("[1, 2]", "holds a JSON list, not an object with a model's settings"),
    ("{}", 'has neither "model_type" nor "architectures", so it names no model of transformers'),
    ('{"model_type": "lama"}', "has the \"model_type\" 'lama', unknown to transformers"),
    ('{"model_type": "lama"}', "; did you mean llama"),
    ('{"model_type": 3}', 'has the "model_type" 3, unknown to transformers'),
    ('{"architectures": ["LlamaForCasualLM"]}', "has the architecture 'LlamaForCasualLM', which transformers"),
    ('{"architectures": ["LlamaForCasualLM"]}', "does not have; did you mean LlamaForCausalLM"),
    ('{"model_type": "llama", "architectures": ["MyOwnLM"]}',
     "its config has the architecture 'MyOwnLM', which transformers"),
    ('{"model_type": "llama", "hidden_size": "wide"}', "is no LlamaConfig: "),
])
def test_bad_config_file(tmp_path: Path, content: str, message: str) -> None:
    assert message in fail(f"hf:{write(tmp_path, content)}")


def test_unreadable_config_file(tmp_path: Path) -> None:
    missing = tmp_path / "none.json"
    assert f"cannot read {missing}: No such file or directory; give the path of a model's config.json" in fail(
        f"hf:{missing}")
    assert "cannot read" in fail(f"hf:{tmp_path}")  # a directory without config.json
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8 text" in fail(f"hf:{tmp_path}")


def test_unknown_classes_of_transformers() -> None:
    neither = ("'BertConfg' is neither a config class of transformers nor a path that ends in .json; did you mean "
               "BertConfig")
    assert neither in fail("hf:BertConfg")
    assert fail("hf:electra").endswith("; did you mean ElectraConfig?")
    message = fail("hf:BertConfig:BertForMaskdLM")
    assert "it asks for the model class 'BertForMaskdLM', which transformers" in message
    assert "; did you mean BertForMaskedLM" in message
    assert "does not have" in fail("hf:BertConfig:BertTokenizer")  # exists, but is no model
    assert "EncoderDecoderConfig has no default sizes" in fail("hf:EncoderDecoderConfig")


@pytest.mark.parametrize(
    ("text", "library"),
    [("torchvision:resnet18", "torchvision"), ("timm:resnet18", "timm"), ("hf:BertConfig", "transformers")]
)
def test_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch, text: str, library: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)  # what an import finds where it is not installed
    assert fail(text, MissingExtraError) == f"{text}: {library} is not installed; {how_to_install('zoo')}"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a module `own_models`, which no other test sees."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("own_models", "own_broken", "own_needy"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    write(tmp_path, """
from torch import nn
def make_net(width=4): return nn.Linear(3, width)
def sized(width, *, depth): return nn.Linear(3, width)
def wrong(): return 7
class Holder:
    @staticmethod
    def make(): return nn.Linear(5, 6)
class Net(nn.Linear):
    def __init__(self): super().__init__(1, 2)
ready = nn.Linear(1, 1)
number = 3
""", "own_models.py")
    write(tmp_path, "raise RuntimeError('no licence')", "own_broken.py")
    write(tmp_path, "import a_module_nobody_has", "own_needy.py")
    return tmp_path


@pytest.mark.parametrize(("name", "shape"), [("make_net", (4, 3)), ("Holder.make", (6, 5)), ("Net", (2, 1))])
def test_factory(project: Path, name: str, shape: tuple[int, ...]) -> None:
    target = load_target(f"own_models:{name}")
    assert build(target).weight.shape == shape
    assert target.choose_inputs(train=True) is None


@pytest.mark.parametrize(("text", "message"), [
    ("own_models:make_nett", "own_models has no 'make_nett'; did you mean make_net?"),
    ("own_models:Holder.made", "own_models has no 'Holder.made'; did you mean make?"),
    ("own_models:number", "number is of type int; give a callable of no arguments that returns an nn.Module"),
    ("own_models:ready", "ready is a model already built; give a callable of no arguments"),
    ("own_models:sized", "sized needs width, depth; give a callable of no arguments"),
    ("own_broken:net", "importing own_broken failed: RuntimeError: no licence"),
    ("own_needy:net", "own_needy itself imports 'a_module_nobody_has', which is not installed"),
    ("own_nothing:net", "no module 'own_nothing' on the path or in "),
    ("own_models.part:net", "no module 'own_models.part' on the path or in "),
    ("torchvison:resnet18", "; did you mean torchvision?"),
    ("my-models:net", "'my-models' is no module name; TARGET is one of torchvision:NAME"),
])
def test_bad_factory(project: Path, text: str, message: str) -> None:
    assert message in fail(text)


def test_factory_that_returns_no_module(project: Path) -> None:
    with pytest.raises(TargetError,
                       match=r"own_models:wrong: wrong\(\) returned a value of type int, not an nn.Module"):
        load_target("own_models:wrong").build()


def test_example_is_a_target() -> None:
    assert call(load_target("examples.pointnet:pointnet"), given=("32x3x1024",)).shape == (32, 10)
