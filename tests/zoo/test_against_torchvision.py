"""ViT and ResNet of the zoo are torchvision's: same modules, same names, same numbers."""
import pytest
import torch
from torch import nn

from analyzer import zoo
from analyzer.zoo.resnet import BasicBlock, Bottleneck, ResNet
from analyzer.zoo.vit import VisionTransformer

models = pytest.importorskip("torchvision.models")

# name -> parameters, as torchvision's documentation of the pretrained weights gives them
PARAMETERS = {"vit_b_16": 86_567_656, "resnet18": 11_689_512, "resnet50": 25_557_032}


def list_modules(model: nn.Module) -> list[tuple[str, str]]:
    # torchvision's MLP is a subclass of Sequential too: compare what the layers are, not what the containers are called
    return [(name, type(module).__name__) for name, module in model.named_modules()
            if not isinstance(module, nn.Sequential)]


@pytest.mark.parametrize("name", PARAMETERS)
def test_has_the_modules_and_parameters_of_torchvision(name: str) -> None:
    with torch.device("meta"):
        ours, theirs = zoo.MODELS[name].factory(), models.get_model(name, weights=None)
    assert list_modules(ours) == list_modules(theirs)
    assert {n: p.shape for n, p in ours.state_dict().items()} == {n: p.shape for n, p in theirs.state_dict().items()}
    assert sum(p.numel() for p in ours.parameters()) == PARAMETERS[name]


SMALL_VIT = dict(image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=24, num_classes=5)
SMALL = {"vit": (lambda: VisionTransformer(**SMALL_VIT), lambda: models.VisionTransformer(**SMALL_VIT)),
         "basic": (lambda: ResNet(BasicBlock, (1, 2, 1, 1), 5),
                   lambda: models.ResNet(models.resnet.BasicBlock, [1, 2, 1, 1], 5)),
         "bottleneck": (lambda: ResNet(Bottleneck, (1, 2, 1, 1), 5),
                        lambda: models.ResNet(models.resnet.Bottleneck, [1, 2, 1, 1], 5))}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("case", SMALL)
def test_computes_what_torchvision_computes(case: str, train: bool) -> None:
    torch.manual_seed(0)
    ours, theirs = (build().train(train) for build in SMALL[case])
    # torchvision starts ViT's head at zero, which would hide everything before it
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.1)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 32, 32)
    outputs = [model(x) for model in (ours, theirs)]
    assert outputs[0].abs().max() > 0
    torch.testing.assert_close(*outputs, rtol=0, atol=0)
    for output in outputs:
        output.square().sum().backward()
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=0, msg=lambda m, name=name: f"{name}: {m}")
