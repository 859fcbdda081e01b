"""Published shapes: what is there, what it is called, that it has the published parameters, and that no network is
asked.
"""
import copy
import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from analyzer import profile
from analyzer.api.argument import build_model
from analyzer.api.models_command import list_models
from analyzer.cli import main
from analyzer.errors import InputError, MissingExtraError, TargetError
from analyzer.zoo import input_spec as model_target
from analyzer.zoo.published_shape import (
    PublishedCount,
    PublishedShape,
    find_alike,
    find_pipeline,
    find_shape,
    list_shapes,
    tell_format,
)
from analyzer.zoo.target import load_target

# one of each family, and those whose count was published of another class or as a rounded figure
BUILT = ("bert-base-uncased", "roberta-base", "deberta-v3-base", "t5-small", "bart-base", "gpt2-xl", "pythia-1b",
         "opt-125m", "bloom-560m", "falcon-7b", "phi-4", "gemma-2-9b", "gemma-3-4b-it", "llama-3.1-405b",
         "llama-3.2-11b-vision", "llama-4-scout-17b-16e", "mixtral-8x7b-v0.1", "ministral-3-3b-instruct-2512",
         "qwen3-30b-a3b", "qwen2.5-vl-3b-instruct", "qwen3-vl-30b-a3b-instruct", "qwen3.5-4b", "qwen2.5-omni-7b",
         "qwen3-omni-30b-a3b-instruct", "qwen1.5-moe-a2.7b", "deepseek-v2-lite", "gpt-oss-20b", "glm-4.5-air",
         "glm-4.7-flash", "minimax-m2.7", "olmo-2-1124-7b", "smollm2-1.7b", "vit-base-patch16-224", "dinov2-base",
         "clip-vit-base-patch32", "siglip-base-patch16-224", "swin-large-patch4-window7-224", "whisper-large-v3",
         "wav2vec2-base-960h")


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def shape_of(name: str) -> PublishedShape:
    found = find_shape(name)
    assert found is not None, name
    return found


def count_parameters(target: str) -> int:
    return sum(parameter.numel() for parameter in build_model(load_target(target).build).parameters())


def agrees(said: PublishedCount, counted: int) -> bool:
    """Whether that count, less what was not counted there, is the published one, to the digits that it has."""
    rest = counted - said.more
    if isinstance(said.parameters, int):
        return rest == said.parameters
    found = re.fullmatch(r"(\d+)(?:\.(\d+))?([MBT])", said.parameters)
    assert found is not None, said.parameters
    unit = {"M": 10**6, "B": 10**9, "T": 10**12}[found[3]]
    return f"{rest / unit:.{len(found[2] or '')}f}{found[3]}" == said.parameters


@pytest.mark.parametrize("name", BUILT)
def test_a_built_shape_has_the_published_parameters(name: str, no_network: None) -> None:
    shape = shape_of(name)
    assert count_parameters(f"hf:{shape.name}") == shape.parameters
    assert agrees(shape.published, count_parameters(f"hf:{shape.name}:{shape.published.of}")
                  if shape.published.of else shape.parameters)


@pytest.mark.parametrize("shape", list_shapes(), ids=lambda shape: shape.name)
def test_every_shape_agrees_with_its_published_count_and_names_its_sources(shape: PublishedShape) -> None:
    said = shape.published
    assert said.of is not None or agrees(said, shape.parameters)
    assert (said.more == 0) == (said.why is None)
    assert shape.sources and all(shape.sources) and said.source
    assert shape.library == "diffusers" or "model_type" in shape.config


def test_names_are_of_one_shape_each() -> None:
    owner: dict[str, str] = {}
    for shape in list_shapes():
        for name in shape.names:
            assert owner.setdefault(name.lower(), shape.name) == shape.name
    assert len(list_shapes()) >= 40


@pytest.mark.parametrize("name", [
    "meta-llama/Llama-3.1-8B", "META-LLAMA/llama-3.1-8b", "llama-3.1-8b", "Llama-3.1-8B-Instruct",
    "meta-llama/Meta-Llama-3.1-8B", "meta-llama-3.1-8b"])
def test_a_model_has_several_names(name: str) -> None:
    assert shape_of(name).name == "meta-llama/Llama-3.1-8B"


def test_a_target_is_in_the_published_dtype_and_takes_another_class() -> None:
    target = load_target("hf:smollm2-135m")
    assert {p.dtype for p in build_model(target.build).parameters()} == {torch.bfloat16}
    assert [str(spec) for spec in target.choose_inputs(train=True) or ()] == [
        "input_ids=int64:8x128", "labels=int64:8x128"]
    other = load_target("hf:google-bert/bert-base-uncased:BertForSequenceClassification")
    assert type(build_model(other.build)).__name__ == "BertForSequenceClassification"


def test_models_built_one_after_the_other_have_their_own_dtypes() -> None:
    names = {"bloom-560m": torch.float16, "smollm2-135m": torch.bfloat16, "gpt2": torch.float32}
    for name, dtype in [*names.items(), *names.items()]:
        assert {p.dtype for p in build_model(load_target(f"hf:{name}").build).parameters()} == {dtype}


def test_the_type_that_a_config_gives_for_the_text_alone_is_that_of_all_weights() -> None:
    shape = shape_of("qwen3-vl-4b-instruct")
    assert "dtype" not in shape.config and shape.config["text_config"]["dtype"] == "bfloat16"
    assert {p.dtype for p in build_model(load_target(f"hf:{shape.name}").build).parameters()} == {torch.bfloat16}
    assert [shape_of(name).weights for name in (shape.name, "gpt-oss-20b", "gpt2")] == ["bfloat16", "mxfp4", None]


@pytest.mark.parametrize("name", ["qwen2.5-vl-3b-instruct", "qwen3-vl-4b-instruct", "qwen3-vl-30b-a3b-instruct"])
def test_a_model_of_images_is_trained_on_text_alone(name: str, tmp_path: Path) -> None:
    config = copy.deepcopy(shape_of(name).config)
    for part in (config, config.get("text_config", {})):
        if "num_hidden_layers" in part:
            part["num_hidden_layers"] = 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    target = load_target(f"hf:{tmp_path}")
    specs = target.choose_inputs(train=True) or ()
    assert [str(spec) for spec in specs] == ["input_ids=int64:8x128", "labels=int64:8x128"]
    inputs = {spec.name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in specs}
    assert {"forward", "backward"} <= set(profile(target.build, kwargs=inputs, device="h100").phases)


def test_builds_leave_the_published_fields_as_they_are() -> None:
    before = repr(shape_of("mistral-7b-v0.1").config)
    build_model(load_target("hf:mistral-7b-v0.1").build)
    assert repr(shape_of("mistral-7b-v0.1").config) == before


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text('{"model_type": "gpt2", "n_layer": 1}')
    monkeypatch.chdir(tmp_path)
    model: Any = build_model(load_target("hf:gpt2").build)
    assert len(model.transformer.h) == 1


@pytest.mark.parametrize(("name", "said"), [
    ("llama-3.1-9b", "did you mean Llama-3.1-8B"),
    ("meta-llama/Llama-3.1-9B", "none of the published shapes, which `analyzer models` lists, and no folder; did you "
     "mean meta-llama/Llama-3.1-8B"),
    ("meta-llama/Llama-3.1-9B", "; of another model, give its config.json")])
def test_a_wrong_name_is_answered_with_near_ones(name: str, said: str) -> None:
    with pytest.raises(TargetError) as error:
        load_target(f"hf:{name}")
    assert said in str(error.value)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "meta-llama/Llama-3.1-8B"])
def test_a_name_without_its_scheme_is_recognised(name: str) -> None:
    with pytest.raises(TargetError) as error:
        load_target(name)
    assert f"; did you mean hf:{name}? " in str(error.value)


def test_a_shape_of_diffusers_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_target.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError) as error:
        load_target("hf:stable-diffusion-v1-5/unet")
    assert "diffusers is not installed; pip install -e '.[diffusion]' in" in str(error.value)


def test_the_command_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "gpt-oss"]) == 0
    out = capsys.readouterr().out
    assert "openai/gpt-oss-20b" in out and "20,914,757,184" in out and "mxfp4" in out and "Llama" not in out
    assert main(["models", "llama-3.1-8b"]) == 0
    out = capsys.readouterr().out
    assert "of the same shape: meta-llama/Llama-3.1-8B-Instruct" in out and "num_key_value_heads = 8" in out
    assert len(list_models(fmt="csv").splitlines()) == 1 + len(list_shapes())
    with pytest.raises(InputError, match="models lama-9: no published shape has this in its name"):
        list_models("lama-9")


@pytest.mark.parametrize(("name", "shape", "form"), [
    ("Qwen/Qwen3-30B-A3B-Instruct-2507-FP8", "Qwen/Qwen3-30B-A3B", "fp8-block"),
    ("nvidia/DeepSeek-R1-0528-NVFP4", "deepseek-ai/DeepSeek-R1", "nvfp4"),
    ("RedHatAI/Meta-Llama-3.1-70B-Instruct-FP8-dynamic", "meta-llama/Llama-3.1-70B", "fp8"),
    ("deepseek-ai/DeepSeek-V3.2-Exp", "deepseek-ai/DeepSeek-V3.2", None),
    ("axolotl-quants/Llama-4-Scout-17B-16E-Linearized-bnb-nf4-bf16", "meta-llama/Llama-4-Scout-17B-16E", None),
    ("someone/Qwen3-8B-AWQ", "Qwen/Qwen3-8B", "int4"), ("qwen3-8b", "Qwen/Qwen3-8B", None),
    # of the name that ships less was said
    ("qwen2.5-vl-7b", "Qwen/Qwen2.5-VL-7B-Instruct", None), ("llama-3.3-70b", "meta-llama/Llama-3.1-70B", None)])
def test_names_of_other_weights_are_of_the_same_shape(name: str, shape: str, form: str | None) -> None:
    found = find_alike(name)
    assert found is not None and found.name == shape
    assert tell_format(name) == form
    assert load_target(f"hf:{name}").inputs


@pytest.mark.parametrize(("name", "kind"), [
    ("Wan-AI/Wan2.1-T2V-1.3B", "WanPipeline"),
    ("Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers", "SanaPipeline"),
    ("hunyuanvideo-community/HunyuanVideo", "HunyuanVideoPipeline"),
    ("stabilityai/stable-diffusion-3-medium", "StableDiffusion3Pipeline")])
def test_copies_of_a_pipeline_have_its_shape(name: str, kind: str) -> None:
    found = find_pipeline(name)
    assert found is not None and found["_class_name"] == kind


def test_less_of_a_name_than_tells_two_shapes_apart_is_none() -> None:
    assert find_alike("someone/model/unet") is None and find_pipeline("Qwen/Qwen2-0.5B") is None
    assert find_alike("mistral-7b") is None  # v0.1 and v0.3 have other vocabularies
    with pytest.raises(TargetError, match=r"hf:mistral-7b: .*did you mean mistral-7b-v0"):
        load_target("hf:mistral-7b")
