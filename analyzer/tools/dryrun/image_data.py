"""Stand-ins for torchvision's data sets under a dry run: pictures of their size, as many as they have."""
from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.intercept.replacement import Undo, answer

from .saved_file import assume


class _Kind(NamedTuple):
    """Data sets of one form. ``rows``: of each split; of those with an argument ``train`` the splits are its values."""

    shape: tuple[int, ...]  #: of a picture, as ``data`` keeps it
    classes: int
    rows: Mapping[str | bool, int]
    labels: str = "targets"  #: the attribute that has them


_DIGITS = _Kind((28, 28), 10, {True: 60_000, False: 10_000})
_CIFAR = _Kind((32, 32, 3), 10, {True: 50_000, False: 10_000})
# Sizes by the pages of the data sets that torchvision/datasets name: yann.lecun.com/exdb/mnist, EMNIST (Cohen et al.
# 2017, table II), cs.toronto.edu/~kriz/cifar.html, ufldl.stanford.edu/housenumbers, cs.stanford.edu/~acoates/stl10,
# USPS of LIBSVM.
_EMNIST = {"byclass": (697_932, 116_323), "bymerge": (697_932, 116_323), "balanced": (112_800, 18_800),
           "letters": (124_800, 20_800), "digits": (240_000, 40_000), "mnist": (60_000, 10_000)}
_KINDS: dict[str, dict[str, _Kind]] = {
    "mnist": {"MNIST": _DIGITS},  # whose other classes are made by its own `__init__`
    "cifar": {"CIFAR10": _CIFAR, "CIFAR100": _CIFAR._replace(classes=100)},
    "svhn": {"SVHN": _Kind((3, 32, 32), 10, {"train": 73_257, "test": 26_032, "extra": 531_131}, "labels")},
    "stl10": {"STL10": _Kind((3, 96, 96), 10, {"train": 5_000, "test": 8_000, "unlabeled": 100_000,
                                               "train+unlabeled": 105_000}, "labels")},
    "usps": {"USPS": _Kind((16, 16), 10, {True: 7_291, False: 2_007})}}


def stand_in_for_pictures() -> dict[str, Callable[[], Iterator[Undo]]]:
    """What to replace in which modules of torchvision, once they are imported."""
    return {"torchvision.datasets.folder": _replace_folder,
            **{f"torchvision.datasets.{module}": partial(_replace_init, module, kinds)
               for module, kinds in _KINDS.items()}}


# Folders of pictures with a folder for each class: as many as ImageNet has (Russakovsky et al. 2015, table 2). Their
# size decides nothing where a transform cuts them to one: 4:3, with 500 pixels as the longer side of Flickr's medium
# ones.
_CLASSES, _TRAINING, _VALIDATION, _SIDES = 1000, 1_281_167, 50_000, (500, 375)


def _open_folder(original: Any, data_set: Any, root: Any, *args: Any, **kwargs: Any) -> None:
    """``torchvision.datasets.ImageFolder``: in the place of a folder that is not there stand ImageNet's classes."""
    signature = inspect.signature(original)
    usual = signature.parameters["loader"].default
    loader = signature.bind(data_set, root, *args, **kwargs).arguments.get("loader", usual)
    try:
        original(data_set, root, *args, **kwargs)
    except FileNotFoundError:
        if Path(root).exists() or loader is not usual:
            raise
        rows = _TRAINING if "train" in Path(root).name else _VALIDATION
        data_set.loader, data_set.extensions = _load_black, None
        data_set.classes = [f"class {number}" for number in range(_CLASSES)]
        data_set.class_to_idx = {name: number for number, name in enumerate(data_set.classes)}
        pairs = [(str(Path(root, name, "picture.jpg")), number) for name, number in data_set.class_to_idx.items()]
        data_set.samples = data_set.imgs = [pairs[row * _CLASSES // rows] for row in range(rows)]
        data_set.targets = [label for _, label in data_set.samples]
        assume(f"{type(data_set).__name__}: {root} is not there; in its place stand {rows:,} black pictures of "
               f"{' x '.join(map(str, _SIDES))} in {_CLASSES:,} classes, as ImageNet has")


def _load_black(path: str) -> Any:
    from PIL import Image

    return Image.new("RGB", _SIDES)


def _replace_folder() -> Iterator[Undo]:
    yield answer(sys.modules["torchvision.datasets.folder"].ImageFolder, "__init__", _open_folder, passes_original=True)


def _replace_init(module: str, kinds: Mapping[str, _Kind]) -> Iterator[Undo]:
    first = next(iter(kinds))  # its subclasses have its `__init__`, or call it
    yield answer(getattr(sys.modules[f"torchvision.datasets.{module}"], first), "__init__", partial(_open, kinds),
                 passes_original=True)


def _open(kinds: Mapping[str, _Kind], original: Any, data_set: Any, *args: Any, **kwargs: Any) -> None:
    """What is on the disk is read; in the place of what is not stand black pictures, and nothing is downloaded."""
    bound = inspect.signature(original).bind(data_set, *args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    given["download"] = False
    try:
        with without_modes():
            original(*bound.args)
    except (RuntimeError, FileNotFoundError):  # torchvision's "Dataset not found", and USPS without its file
        own = type(data_set)
        kind = next(kinds[cls.__name__] for cls in own.__mro__ if cls.__name__ in kinds)
        if hasattr(own, "classes_split_dict"):  # EMNIST
            kind = kind._replace(classes=len(own.classes_split_dict[data_set.split]),
                                 rows=dict(zip((True, False), _EMNIST[data_set.split])))
        rows = kind.rows[given["train" if True in kind.rows else "split"]]
        _fill(data_set, kind, rows)
        for name in ("train", "transform", "target_transform"):
            setattr(data_set, name, given.get(name))
        shape = " x ".join(map(str, kind.shape))
        assume(f"{own.__name__}: {rows:,} black pictures of {shape} in the place of that data set, which is not in "
               f"{given['root']!r}")


def _fill(data_set: Any, kind: _Kind, rows: int) -> None:
    """Pictures take no memory before they are written to; labels go through the classes in turn."""
    pictures, labels = np.zeros((rows, *kind.shape), np.uint8), np.arange(rows) % kind.classes
    if kind.shape == _DIGITS.shape:
        with without_modes():
            data_set.data, data_set.targets = torch.from_numpy(pictures), torch.from_numpy(labels)
        return
    data_set.data = pictures
    setattr(data_set, kind.labels, labels if kind.labels == "labels" else labels.tolist())
    if not hasattr(data_set, "classes"):
        data_set.classes = [f"class {number}" for number in range(kind.classes)]
        data_set.class_to_idx = {name: number for number, name in enumerate(data_set.classes)}
