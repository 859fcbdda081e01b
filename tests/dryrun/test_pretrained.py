"""Pretrained weights by name under a dry run: those of torchvision, timm and torch.hub have no data."""
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from analyzer.tools.dryrun.script import dry_run
from analyzer.zoo.torchvision_ops import define_torchvision_ops

STEPS = """
model = model.cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(2, CHANNELS, 64, 64, device="cuda")).sum().backward()
    optimizer.step()
"""
# what makes the model, its parameters (by the tables of torchvision's and timm's pages, less or more the head), and
# what is told of the weights
RESNET18, HEAD = 11_689_512, 513 * 1000
MODELS = {
    "torchvision": ('torchvision.models.resnet18(weights="DEFAULT")', 3, RESNET18,
                    "resnet18-f37072fd.pth of torchvision: weights without data"),
    "timm": ('timm.create_model("resnet18", pretrained=True, num_classes=10)', 3, RESNET18 - HEAD + 513 * 10,
             "resnet18.a1_in1k of timm: weights without data"),
    "timm, one channel": ('timm.create_model("resnet18", pretrained=True, num_classes=0, in_chans=1)', 1,
                          RESNET18 - HEAD - 2 * 64 * 7 * 7, "resnet18.a1_in1k of timm: weights without data"),
    "timm by the hub's name": ('timm.create_model("hf_hub:timm/resnet18.a1_in1k", pretrained=True)', 3, RESNET18,
                               "timm/resnet18.a1_in1k: the shape that ships with analyzer, weights without data"),
    "torch.hub": ('torch.hub.load("pytorch/vision:v0.10.0", "resnet18", pretrained=True)', 3, RESNET18,
                  "pytorch/vision:v0.10.0: torchvision"),
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    define_torchvision_ops()
    pytest.importorskip("timm")  # which has functions of the hub of its own, also where it was imported before
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))

    def run(text, channels=3):
        path = tmp_path / "train.py"
        path.write_text("import timm, torch, torchvision\n" + textwrap.dedent(text)
                        + STEPS.replace("CHANNELS", str(channels)))
        return dry_run(path, device="h100")
    return run


@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_its_pretrained_weights(run, name, tmp_path: Path):
    call, channels, params, told = MODELS[name]
    found = run(f"model = {call}", channels)
    assert found.error is None, found.format_error()
    assert found.profile.params == params
    assert any(text.startswith(told) for text in found.profile.assumptions), found.profile.assumptions
    assert not (tmp_path / "torch/hub/checkpoints").exists()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name, weights", [
    ("vit_b_16", "IMAGENET1K_SWAG_E2E_V1"), ("fcn_resnet50", "COCO_WITH_VOC_LABELS_V1"), ("mnasnet0_5", "DEFAULT"),
    ("vgg16", "IMAGENET1K_FEATURES"), ("ssdlite320_mobilenet_v3_large", "DEFAULT"), ("googlenet", "DEFAULT")])
def test_weights_of_other_forms_than_the_builders_default(run, name, weights):
    """Published weights of another size of image, with an auxiliary head, with a version, or without classes."""
    found = run(f"""
        torchvision.models.get_model({name!r}, weights={weights!r})
        model = torchvision.models.resnet18()
        """)
    assert found.error is None, found.format_error()


def test_a_state_by_its_address_has_the_names_and_the_device_of_the_file(run, capsys):
    found = run("""
        address = torchvision.models.ResNet18_Weights.DEFAULT.url
        state = torch.hub.load_state_dict_from_url(address, map_location="cuda")
        print(len(state), state["fc.bias"].device, tuple(state["fc.weight"].shape))
        del state["fc.weight"], state["fc.bias"]
        model = torchvision.models.resnet18(num_classes=10)
        print(model.load_state_dict(state, strict=False).missing_keys)
        """)
    assert found.error is None, found.format_error()
    assert "122 cuda:0 (1000, 512)\n['fc.weight', 'fc.bias']\n" in capsys.readouterr().out


@pytest.mark.parametrize("call, told", [
    ('torch.hub.load("ultralytics/yolov5", "yolov5s")',
     'ultralytics/yolov5: not fetched, as a dry run downloads nothing. Clone it and load it from there, '
     'torch.hub.load(FOLDER, \'yolov5s\', source="local"), or run the dry run with --allow-download'),
    ('torch.hub.load_state_dict_from_url("https://host/deit.pth")',
     "https://host/deit.pth: not downloaded, as a dry run downloads nothing. Put that file at ")])
def test_what_is_refused(run, call, told):
    found = run(f"model = {call}")
    assert told in str(found.error)


def test_a_file_that_is_there_is_read(run, tmp_path: Path, capsys):
    kept = tmp_path / "torch/hub/checkpoints/own.pth"
    kept.parent.mkdir(parents=True)
    torch.save({"weight": torch.zeros(3, 5)}, kept)
    found = run("""
        print(torch.hub.load_state_dict_from_url("https://host/own.pth")["weight"].shape)
        model = torchvision.models.resnet18()
        """)
    assert found.error is None, found.format_error()
    assert "torch.Size([3, 5])" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["stabilityai/sd-vae-ft-mse", "madebyollin/sdxl-vae-fp16-fix"])
def test_an_autoencoder_alone(run, name):
    """83.65 million parameters: that of Stable Diffusion, whose weights are fine-tuned in these repositories."""
    found = run(f"""
        from diffusers import AutoencoderKL
        vae = AutoencoderKL.from_pretrained({name!r}).cuda()
        assert sum(p.numel() for p in vae.parameters()) == 83_653_863
        model = torchvision.models.resnet18()
        """)
    assert found.error is None, found.format_error()


# What these two packages have of functions, classes and settings where they load weights.
PACKAGES = {
    "segmentation_models_pytorch/encoders/__init__.py": """
import torch
encoders = {"resnet34": {"pretrained_settings": {"imagenet": {"repo_id": "smp-hub/resnet34.imagenet"}}}}
def get_encoder(name, in_channels=3, depth=5, weights=None):
    if weights is not None:
        raise OSError(f"{name}: no network for {weights}")
    return torch.nn.Conv2d(in_channels, depth, 3)
""",
    "open_clip/pretrained.py": """
def download_pretrained(cfg, prefer_hf_hub=True, cache_dir=None):
    if cfg.get("file"):
        return cfg["file"]
    raise OSError("no network")
""",
    "open_clip/factory.py": """
from open_clip.pretrained import download_pretrained
def load_checkpoint(model, checkpoint_path, strict=True):
    raise OSError(f"{checkpoint_path} was read")
""",
    "open_clip/__init__.py": "", "segmentation_models_pytorch/__init__.py": ""}


def test_libraries_that_load_their_own_weights(run, tmp_path: Path, monkeypatch, capsys):
    for name, text in PACKAGES.items():
        (tmp_path / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("HOME", str(tmp_path))
    found = run("""
from open_clip import factory
from segmentation_models_pytorch.encoders import get_encoder
for call in (lambda: get_encoder("resnet34", weights="noisy"),
             lambda: factory.load_checkpoint(None, factory.download_pretrained({"file": "own.pt"}))):
    try:
        call()
    except OSError as error:
        print(error)
for place in ({"hf_hub": "laion/CLIP-ViT-B-32/"}, {"url": "https://example.com/ViT-B-32.pt"}):
    assert factory.load_checkpoint(None, factory.download_pretrained(place)) == {}
model = torch.nn.Sequential(get_encoder("resnet34", 3, weights="imagenet"), torch.nn.ReLU())
""")
    for name in [name for name in sys.modules if name.startswith(("open_clip", "segmentation_models_pytorch"))]:
        del sys.modules[name]
    assert found.error is None, found.format_error()
    assert capsys.readouterr().out.splitlines()[:2] == ["resnet34: no network for noisy", "own.pt was read"]
    assert found.profile.params == 3 * 5 * 9 + 5
    for told in ("resnet34 of segmentation_models_pytorch, imagenet: weights without data",
                 "laion/CLIP-ViT-B-32 of open_clip: weights without data",
                 "https://example.com/ViT-B-32.pt of open_clip: weights without data"):
        assert told in found.profile.assumptions
