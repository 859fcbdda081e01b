"""torchvision's small data sets under a dry run: black pictures of their size where they are not on the disk."""
import textwrap
from pathlib import Path

import numpy as np
import pytest

from analyzer.tools.dryrun.script import dry_run

# how it is made, its rows, the size of a picture and its classes: those of the data set's page
DATA_SETS = [
    ("MNIST(F, train=True, download=True, transform=T)", 60_000, (1, 28, 28), 10),
    ("FashionMNIST(F, False, T)", 10_000, (1, 28, 28), 10),
    ("EMNIST(F, 'letters', train=True, download=True, transform=T)", 124_800, (1, 28, 28), 27),
    ("CIFAR10(root=F, train=True, download=True, transform=T)", 50_000, (3, 32, 32), 10),
    ("CIFAR100(F, train=False, transform=T, download=True)", 10_000, (3, 32, 32), 100),
    ("SVHN(F, 'extra', transform=T, download=True)", 531_131, (3, 32, 32), 10),
    ("STL10(F, 'train', transform=T, download=True)", 5_000, (3, 96, 96), 10),
    ("USPS(F, True, T, download=True)", 7_291, (1, 16, 16), 10)]

SCRIPT = """
    import torch
    from torchvision import datasets, transforms
    F, T = "nowhere", transforms.ToTensor()
    data = datasets.CALL
    print(len(data), tuple(data[3][0].shape), data[3][1], len(data.classes))
    rows = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    model = torch.nn.Linear(data[0][0].numel(), len(data.classes)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in rows:
        torch.nn.functional.cross_entropy(model(x.cuda().flatten(1)), y.cuda()).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("call, rows, shape, classes", DATA_SETS, ids=[row[0].partition("(")[0] for row in DATA_SETS])
def test_a_data_set_that_is_not_there(call, rows, shape, classes, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT).replace("CALL", call))
    run = dry_run(tmp_path / "train.py")
    assert run.error is None, run.format_error()
    assert capsys.readouterr().out.splitlines()[-1] == f"{rows} {shape} 3 {classes}"
    assert run.profile.batch_size == 8 and run.profile.params == (np.prod(shape) + 1) * classes
    assert any("black pictures" in text and "'nowhere'" in text for text in run.profile.assumptions)
    assert not (tmp_path / "nowhere").exists()


def test_pictures_that_are_there_are_read(tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    """Of MNIST's own form: a magic number, sizes, bytes (torchvision/datasets/mnist.py)."""
    folder = tmp_path / "data/MNIST/raw"
    folder.mkdir(parents=True)
    for name, dims in (("train-images-idx3-ubyte", (5, 28, 28)), ("train-labels-idx1-ubyte", (5,)),
                       ("t10k-images-idx3-ubyte", (5, 28, 28)), ("t10k-labels-idx1-ubyte", (5,))):
        sizes = b"".join(size.to_bytes(4, "big") for size in dims)
        (folder / name).write_bytes(bytes([0, 0, 8, len(dims)]) + sizes + bytes([7]) * int(np.prod(dims)))
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT).replace("CALL", "MNIST(F, transform=T)").replace(
        '"nowhere"', repr(str(tmp_path / "data"))).replace("batch_size=8", "batch_size=1"))
    run = dry_run(tmp_path / "train.py")
    assert run.error is None, run.format_error()
    assert capsys.readouterr().out.splitlines()[-1] == "5 (1, 28, 28) 7 10"
    assert not any("black pictures" in text for text in run.profile.assumptions)


@pytest.mark.parametrize("root, rows", [("nowhere/train", 1_281_167), ("nowhere/val", 50_000)])
def test_a_folder_of_pictures_that_is_not_there_is_imagenet(root, rows, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT).replace("CALL", f"ImageFolder({root!r}, T)"))
    run = dry_run(tmp_path / "train.py")
    assert run.error is None, run.format_error()
    assert capsys.readouterr().out.splitlines()[-1] == f"{rows} (3, 375, 500) 0 1000"
    assert any(text.startswith(f"ImageFolder: {root} is not there; in its place stand {rows:,} black pictures")
               for text in run.profile.assumptions)


def test_a_folder_of_pictures_that_is_empty_is_refused(tmp_path: Path) -> None:
    """As torchvision does: a folder that is there is taken as it is."""
    (tmp_path / "pictures").mkdir()
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT).replace(
        "CALL", f"ImageFolder({str(tmp_path / 'pictures')!r}, T)"))
    assert "Couldn't find any class folder" in str(dry_run(tmp_path / "train.py").error)
