"""Scripts of torch, timm and torchvision alone, in the style of the training loops that these projects ship."""
from pathlib import Path

import pytest
import torch

from analyzer.tools.dryrun.script import dry_run

SCRIPTS = Path(__file__).with_name("scripts")


@pytest.fixture(autouse=True)
def precision_stays():
    """What a script sets in torch stays set in its process: the products of float32 run as before in other tests."""
    before = torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def run(name, steps=3):
    found = dry_run(SCRIPTS / name, steps=steps)
    assert found.error is None and found.steps == steps, found.format_error()
    assert sum(found.profile.peak_by_category.values()) == found.profile.peak_allocated_bytes
    return found.profile


def test_a_script_like_nanogpt(capsys):
    """Its batches begin where random numbers say: these are drawn, or slices of nothing would be trained on."""
    p = run("nanogpt.py")
    width, layers, vocabulary, block, batch, accumulated = 128, 2, 512, 128, 8, 4
    in_products = layers * 12 * width * width
    assert p.params == in_products + layers * 4 * width + 2 * width + (vocabulary + block) * width
    assert p.optimizer_bytes == 2 * 4 * p.params + 4 * (layers * 8 + 2 + 2)
    tokens = accumulated * batch * block
    assert p.fwd_macs == tokens * (in_products + vocabulary * width) + 2 * layers * tokens * block * width
    assert p.inputs["idx"].shape == (batch, block) and not p.uncounted
    assert "step 0: val loss 1.0000" in capsys.readouterr().out  # of a tensor, which is formatted as its number


def test_the_loop_of_timm():
    pytest.importorskip("timm")
    p = run("timm_train.py")
    assert p.params == 11_176_512 + 512 * 10 + 10 and p.optimizer_bytes == p.param_bytes == 4 * p.params
    held = p.peak_by_category["held by the script"]
    assert 4 * p.params < held < 1.1 * 4 * p.params  # the averages, in blocks that may be larger
    assert p.inputs["x"].shape == (32, 3, 64, 64) and not p.uncounted
    # a convolution of 64 × 64 pixels, that is a twelfth and a quarter of one of 224 × 224
    assert 0.9 < p.fwd_macs / (32 * 1.82e9 * (64 / 224)**2) < 1.1


def test_the_loop_of_torchvision_for_detection():
    pytest.importorskip("torchvision")
    p = run("torchvision_detection.py")
    # as torchvision's documentation has it, with 5 classes for 91, and norms of its own in the backbone
    assert p.params == 41_755_286 - (91 - 5) * 5 * 1025 + 53_120
    assert any("nms" in a for a in p.assumptions) and not p.uncounted
    aligned = [operator for operator in p.operators if "roi_align" in operator.operator]
    assert {operator.operator.split(".")[1] for operator in aligned} == {"_roi_align_forward", "_roi_align_backward"}


PARAMETERS, MACS = 256 * 512 + 512 + 8 * 512 + 8, 64 * (256 * 512 + 512 * 8)


def test_a_step_that_is_captured_as_a_cuda_graph():
    """Three steps warm up, one is captured, the others are replayed: the same work, in memory that the graph keeps."""
    eager, replayed = run("cuda_graphs.py"), run("cuda_graphs.py", steps=6)
    assert any("CUDA graph" in a for a in replayed.assumptions)
    for p in (eager, replayed):
        assert (p.params, p.fwd_macs, p.bwd_macs) == (PARAMETERS, MACS, 2 * MACS - 64 * 256 * 512)
        assert p.optimizer_bytes == 2 * 4 * PARAMETERS + 4 * 4 and not p.uncounted  # capturable: steps too
    assert replayed.optimizer_flops == eager.optimizer_flops
    # the gradients of the graph, what it gives and its temporaries cannot be used by others
    assert replayed.peak_reserved_bytes > eager.peak_reserved_bytes
    assert replayed.first_step.keys() == eager.first_step.keys()


def test_graphed_callables():
    p = run("graphed_callables.py")
    assert (p.params, p.fwd_macs) == (PARAMETERS, MACS) and not p.uncounted
    assert p.bwd_macs == 2 * MACS - 64 * 256 * 512


def test_a_sampler_that_never_ends(tmp_path):
    """As minGPT draws 10 000 000 000 samples with replacement: a list of these does not fit in memory."""
    path = tmp_path / "train.py"
    path.write_text("""
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
data = TensorDataset(torch.randn(100, 8))
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for (x,) in DataLoader(data, 4, sampler=RandomSampler(data, replacement=True, num_samples=int(1e10))):
    model(x.cuda()).sum().backward()
    optimizer.step()
""")
    assert dry_run(path, steps=3).profile.inputs["input"].shape == (4, 8)


def test_a_data_set_that_is_elsewhere_is_told_as_such(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("""
import glob, torch
files = glob.glob("data/celeba/*.jpg")
loader = torch.utils.data.DataLoader(files, batch_size=4, shuffle=True)
""")
    assert dry_run(path).format_error().splitlines()[-1] == (
        "its data set has no samples here; put a few files of the right sizes where it looks for them, as many as a "
        "batch has: what they contain does not matter")


def test_what_transforms_of_a_data_set_are_given_is_no_input(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("""
import torch
from torch import nn
class Scale(nn.Module):
    def forward(self, pixels):
        return pixels / 255
class Pictures(torch.utils.data.Dataset):
    def __init__(self): self.transform = Scale()
    def __len__(self): return 32
    def __getitem__(self, i): return self.transform(torch.randn(3, 8, 8)), i % 10
model, criterion = nn.Sequential(nn.Flatten(), nn.Linear(192, 10)).cuda(), nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for images, labels in torch.utils.data.DataLoader(Pictures(), 4):
    criterion(model(images.cuda()), labels.cuda()).backward()
    optimizer.step()
""")
    assert {name: tensor.shape for name, tensor in dry_run(path, steps=3).profile.inputs.items()} == {
        "input": (4, 3, 8, 8), "target": (4,)}
