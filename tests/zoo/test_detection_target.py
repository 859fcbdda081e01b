"""Detection models on the command line: they train with made-up targets, which is said."""
import json
from pathlib import Path

import pytest
import torch

from analyzer import Profile
from analyzer.cli import main
from analyzer.zoo.command_option import make_inputs
from analyzer.zoo.input_spec import Target, parse_inputs
from analyzer.zoo.target import load_target

pytest.importorskip("torchvision")


def made_targets(target: Target, *texts: str) -> list[dict[str, torch.Tensor]]:
    specs = target.choose_inputs(parse_inputs(texts), train=True)
    assert specs is not None
    found: list[dict[str, torch.Tensor]] = make_inputs(specs)[1]["targets"]
    return found


@pytest.mark.parametrize(("name", "more"), [
    ("fcos_resnet50_fpn", ""), ("maskrcnn_resnet50_fpn", ", masks"), ("keypointrcnn_resnet50_fpn", ", keypoints")])
def test_models_of_torchvision_train_with_made_up_targets(
        name: str, more: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    saved = tmp_path / "profile.json"
    assert main(["profile", f"torchvision:{name}", "--input", "3x320x288", "--json", str(saved)]) == 0
    said = f"targets are made up: 8 objects in each image, with boxes, labels{more}"
    assert said in capsys.readouterr().err
    p = Profile.from_json(saved)
    assert p.assumptions[0] == said and p.batch_size == 1 and p.bwd_flops > p.fwd_flops
    for image in made_targets(load_target(f"torchvision:{name}"), "2x3x320x288"):
        boxes = image["boxes"]
        assert boxes.shape == (8, 4) and bool((boxes >= 0).all()) and bool((boxes[:, :2] < boxes[:, 2:]).all())
        assert bool((boxes <= torch.tensor([288, 320, 288, 320])).all())
        assert "masks" not in image or image["masks"].shape == (8, 320, 288)
        if "keypoints" in image:
            points = image["keypoints"][..., :2]
            assert points.shape == (8, 17, 2)
            assert bool(((points >= boxes[:, None, :2]) & (points <= boxes[:, None, 2:])).all())


def test_models_take_them_on_data() -> None:
    target = load_target("torchvision:ssdlite320_mobilenet_v3_large")
    specs = target.choose_inputs(parse_inputs(["2x3x96x96"]), train=True)
    assert specs is not None and [str(s) for s in specs] == [
        "float32:2x3x96x96", "targets=2x(boxes, labels of 8 objects)"]
    images, targets = (spec.fill("cpu") for spec in specs)
    losses = target.build().train()(images, targets)
    assert losses and all(bool(loss.isfinite()) for loss in losses.values())


def test_nothing_is_made_up_for_inference(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "torchvision:ssdlite320_mobilenet_v3_large", "--input", "3x96x96", "--mode", "infer"]) == 0
    assert "made up" not in "".join(capsys.readouterr())


def test_models_of_transformers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
             "image_size": [64, 64], "num_detection_tokens": 10, "use_mid_position_embeddings": False}
    (tmp_path / "yolos.json").write_text(json.dumps({
        "model_type": "yolos", "architectures": ["YolosForObjectDetection"], **sizes}))
    (tmp_path / "detr.json").write_text(json.dumps({
        "model_type": "detr", "architectures": ["DetrForObjectDetection"], "d_model": 32, "encoder_layers": 1,
        "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_queries": 10,
        "use_timm_backbone": False, "use_pretrained_backbone": False,
        "backbone_config": {"model_type": "resnet", "depths": [1, 1], "hidden_sizes": [16, 32], "embedding_size": 16,
                            "out_features": ["stage2"]}}))
    for name in ("yolos", "detr"):
        assert main(["profile", f"hf:{tmp_path / name}.json", "--input", "pixel_values=2x3x64x64"]) == 0
        assert "labels are made up: 8 objects in each image, with class_labels, boxes" in capsys.readouterr().err
    specs = load_target(f"hf:{tmp_path / 'yolos.json'}").choose_inputs(train=True)
    assert specs is not None
    for image in specs[-1].make():
        boxes = image["boxes"]
        assert bool((boxes[:, :2] - boxes[:, 2:] / 2 >= 0).all() and (boxes[:, :2] + boxes[:, 2:] / 2 <= 1).all())
