"""Names of hubs and addresses of weights under a dry run: stand-ins answer, and nothing is downloaded."""
from __future__ import annotations

import fnmatch
import inspect
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch

from analyzer.errors import find_close
from analyzer.meta.intercept.replacement import Undo, replace
from analyzer.meta.state import current
from analyzer.zoo.published_shape import find_alike, find_autoencoder, find_pipeline, list_names

from . import data_set, stand_in
from .checkpoint import Everywhere
from .pipeline import write_part, write_pipeline
from .saved_file import NotThereError, SavedFiles, assume

ALLOW = "run the dry run with --allow-download (allow_download=True), which leaves the script its own way"


def _refuse_data(name: str, close: str = "") -> NotThereError:
    return NotThereError(
        f"{name}: not loaded, as a dry run downloads nothing, and none of the data sets that have a stand-in. "
        f"Save a few of its rows to a file, as in data.select(range(300)).to_json(FILE), and load that: "
        f'load_dataset("json", data_files=FILE), or {ALLOW}{close}')


def _refuse_model(name: str) -> NotThereError:
    close = find_close(name.rpartition("/")[2], list_names())
    return NotThereError(
        f"{name}: not loaded, as a dry run downloads nothing, and none of the shapes that ship with analyzer "
        f"(`analyzer models`). Copy its config.json to a folder and give that folder for the name (no weights "
        f"and no tokenizer are needed), or {ALLOW}{close}")


class Repositories:
    """Folders in the place of repositories, by name, made when they are asked for."""

    def __init__(self, files: SavedFiles) -> None:
        self._files = files
        self._root: Path | None = None
        self._folders: dict[str, Path] = {}

    def find(self, name: str, asked: Iterable[str], cache: Any = None, kind: str | None = None) -> Path | None:
        """The folder that stands for a repository, with the files ``asked`` for where it is one that has them; None for
        a folder of the script's own that has all it needs, and for what is in the hub's cache. Raises NotThereError.
        """
        if os.path.isdir(name):
            return self._complete(Path(name), asked)
        if os.path.isfile(name) or _is_cached(name, cache, kind):
            return None
        if kind == "dataset":
            raise _refuse_data(name)
        if (folder := self._folders.get(name)) is None:
            folder = self._stand_in(name, kind)
        stand_in.provide(folder, name, asked)
        return folder

    def _stand_in(self, name: str, kind: str | None) -> Path:
        pipeline = find_pipeline(name)
        shape = find_alike(name)
        config = stand_in.describe_timm(name) if shape is None or shape.library != "transformers" else shape.config
        autoencoder = find_autoencoder(name)
        if kind not in (None, "model") or pipeline is None and config is None and autoencoder is None:
            raise _refuse_model(name)
        folder = self._make_folder(name)
        if autoencoder is not None:
            write_part(self._files, folder, autoencoder)
            assume(f"{name}: the autoencoder of the shapes that ship with analyzer, weights without data")
        elif pipeline is not None:
            write_pipeline(self._files, folder, name, pipeline)
        elif config is not None:
            stand_in.write_config(folder, name, name if shape is None else shape.name, config)
            stand_in.keep_weights(self._files, folder)
        return folder

    def _complete(self, own: Path, asked: Iterable[str]) -> Path | None:
        """A model's folder may have a config alone: its weights and its tokenizer are supplied."""
        config = own / "config.json"
        if not config.is_file():
            return None
        if not stand_in.has_weights(own) and self._files.find(own / stand_in.WEIGHTS) is None:
            stand_in.keep_weights(self._files, own)
        wanted = {os.path.basename(name) for name in asked}
        if not wanted & stand_in.TOKENIZER_FILES or stand_in.has_tokenizer(own):
            return None
        name = str(own)
        if (folder := self._folders.get(name)) is None:
            folder = self._make_folder(name)
            shutil.copyfile(config, folder / "config.json")
        stand_in.provide(folder, name, asked)
        return folder

    def _make_folder(self, name: str) -> Path:
        if self._root is None:
            self._root = Path(tempfile.mkdtemp(prefix="analyzer-hub-"))
        folder = self._folders[name] = self._root / str(len(self._folders))
        folder.mkdir()
        return folder

    def close(self) -> None:
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)

    # What is asked for files of repositories.

    def cached_files(self, original: Callable[..., Any], path_or_repo_id: Any, filenames: list[str], *args: Any,
                     **kwargs: Any) -> Any:
        """In the place of ``transformers.utils.hub.cached_files``, which looks in folders too."""
        folder = self.find(str(path_or_repo_id), filenames, kwargs.get("cache_dir"), kwargs.get("repo_type"))
        return original(path_or_repo_id if folder is None else str(folder), filenames, *args, **kwargs)

    def hf_hub_download(self, original: Callable[..., Any], repo_id: str, filename: str, *args: Any,
                        **kwargs: Any) -> Any:
        """In the place of ``huggingface_hub.hf_hub_download``."""
        folder = self.find(repo_id, [filename], kwargs.get("cache_dir"), kwargs.get("repo_type"))
        if folder is None:
            return original(repo_id, filename, *args, **kwargs)
        path = os.path.join(folder, kwargs.get("subfolder") or "", filename)
        if not os.path.isfile(path):
            from huggingface_hub.errors import LocalEntryNotFoundError

            raise LocalEntryNotFoundError(f"the stand-in for {repo_id} has no {filename}")
        return path

    def snapshot_download(self, original: Callable[..., Any], repo_id: str, *args: Any, **kwargs: Any) -> Any:
        """In the place of ``huggingface_hub.snapshot_download``."""
        patterns = kwargs.get("allow_patterns") or ["*"]
        patterns = [patterns] if isinstance(patterns, str) else patterns
        asked = [name for name in (*stand_in.TOKENIZER_FILES, *stand_in.PROCESSOR_FILES)
                 if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
        folder = self.find(repo_id, asked, kwargs.get("cache_dir"), kwargs.get("repo_type"))
        return original(repo_id, *args, **kwargs) if folder is None else str(folder)

    def load_dataset(self, original: Callable[..., Any], path: str, name: str | None = None, data_dir: Any = None,
                     data_files: Any = None, split: Any = None, *args: Any, **kwargs: Any) -> Any:
        """In the place of ``datasets.load_dataset``."""
        if data_set.is_own(path, data_files) or _is_cached(path, None, "dataset"):
            return original(path, name, data_dir, data_files, split, *args, **kwargs)
        if (found := data_set.find_columns(path, name)) is None:
            raise _refuse_data(path, data_set.list_close(path))
        return data_set.make_data_set(path, *found, split, bool(kwargs.get("streaming")))


def _is_cached(name: str, cache: Any, kind: str | None) -> bool:
    """Whether some revision of a repository is in the hub's cache."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    kept = Path(cache or constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type=kind or "model"), "snapshots")
    return kept.is_dir() and any(kept.iterdir())


# Weights by address and repositories of code: torch.hub, which torchvision's builders use too, and other libraries.

def _refuse_download(original: Callable[..., Any], url: str, dst: Any, *args: Any, **kwargs: Any) -> None:
    """In the place of ``torch.hub.download_url_to_file``."""
    raise NotThereError(f"{url}: not downloaded, as a dry run downloads nothing. Put that file at {dst}, or {ALLOW}")


def _load_from_address(original: Callable[..., Any], url: str, model_dir: Any = None, map_location: Any = None,
                       progress: bool = True, check_hash: bool = False, file_name: str | None = None,
                       weights_only: bool = False) -> Any:
    """In the place of ``torch.hub.load_state_dict_from_url``: what torchvision publishes has weights without data."""
    folder = model_dir or Path(torch.hub.get_dir(), "checkpoints")
    kept = Path(folder, file_name or os.path.basename(urlparse(url).path))
    state = None if kept.exists() else _make_published_state(url)
    if state is None:
        return original(url, model_dir, map_location, progress, check_hash, file_name, weights_only)
    assume(f"{os.path.basename(url)} of torchvision: weights without data")
    if isinstance(map_location, (str, torch.device)):  # else they stay on the host
        for name, tensor in state.items():
            state[name] = tensor.to(map_location)
    return state


def _make_published_state(url: str) -> dict[str, torch.Tensor] | None:
    """The state of the model of torchvision whose weights an address has; None of others, and of quantized ones."""
    if (models := sys.modules.get("torchvision.models")) is None:
        return None
    for name in models.list_models():
        for weights in models.get_model_weights(name):
            if weights.url != url or name.startswith("quantized_"):
                continue
            taken = inspect.signature(models.get_model_builder(name)).parameters
            # `aux_loss`: published segmentation models have an auxiliary head; `weights_backbone` has a default
            options: dict[str, Any] = {key: value for key, value in (("aux_loss", True), ("weights_backbone", None))
                                       if key in taken}
            if weights.meta.get("categories"):
                options["num_classes"] = len(weights.meta["categories"])
            if name.startswith("vit_"):  # positions are learned, for one size
                options["image_size"] = weights.meta["min_size"][0]
            state: dict[str, torch.Tensor] = models.get_model(name, weights=None, **options).state_dict()
            return state
    return None


def _load_from_repository(original: Callable[..., Any], repo_or_dir: str, model: str, *args: Any,
                          source: str = "github", trust_repo: Any = None, force_reload: bool = False,
                          verbose: bool = True, skip_validation: bool = False, **kwargs: Any) -> Any:
    """In the place of ``torch.hub.load``: of pytorch/vision the installed torchvision has the models."""
    repository = repo_or_dir.partition(":")[0]
    if source != "github" or any(Path(torch.hub.get_dir()).glob(f"{repository.replace('/', '_')}_*")):
        return original(repo_or_dir, model, *args, source=source, trust_repo=trust_repo, force_reload=force_reload,
                        verbose=verbose, skip_validation=skip_validation, **kwargs)
    if repository != "pytorch/vision":
        raise NotThereError(f"{repo_or_dir}: not fetched, as a dry run downloads nothing. Clone it and load it from "
                            f'there, torch.hub.load(FOLDER, {model!r}, source="local"), or {ALLOW}')
    import torchvision

    assume(f"{repo_or_dir}: torchvision {torchvision.__version__}, which is installed, stands for it")
    return getattr(torchvision.models, model)(*args, **kwargs)


def _load_pretrained(original: Callable[..., Any], model: torch.nn.Module, pretrained_cfg: Any = None, *args: Any,
                     **kwargs: Any) -> None:
    """In the place of timm's ``load_pretrained``: weights without data are as large as the model's own."""
    config = pretrained_cfg or getattr(model, "pretrained_cfg", None) or {}
    given = config.get("state_dict") or config.get("file") or config.get("source") == "local-dir"
    if given or not (config.get("url") or config.get("hf_hub_id")):
        original(model, pretrained_cfg, *args, **kwargs)
        return
    name = ".".join(filter(None, [config.get("architecture"), config.get("tag")]))
    assume(f"{name} of timm: weights without data")
    model.load_state_dict({key: torch.empty_like(tensor) for key, tensor in model.state_dict().items()})


def _get_encoder(original: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
    """In the place of ``get_encoder`` of segmentation_models_pytorch; those of timm come to timm's own function."""
    given = inspect.signature(original).bind(name, *args, **kwargs)
    known = sys.modules["segmentation_models_pytorch.encoders"].encoders.get(name, {}).get("pretrained_settings", {})
    weights = given.arguments.get("weights")
    repository = known.get(weights, {}).get("repo_id")
    if repository and not _is_cached(repository, None, None):
        assume(f"{name} of segmentation_models_pytorch, {weights}: weights without data")
        given.arguments["weights"] = None
    return original(*given.args, **given.kwargs)


_OF_OPEN_CLIP = "weights-of-open_clip-without-data"


def _find_clip(original: Callable[..., Any], cfg: Mapping[str, Any], *args: Any, cache_dir: Any = None,
               **kwargs: Any) -> Any:
    """In the place of open_clip's ``download_pretrained``, which gives the path of weights."""
    url, repository = (cfg or {}).get("url") or "", os.path.dirname((cfg or {}).get("hf_hub") or "")
    kept = Path(cache_dir or Path.home() / ".cache" / "clip", os.path.basename(url))
    if not (url or repository) or cfg.get("file") or kept.is_file() or (
            repository and _is_cached(repository, cache_dir, None)):
        return original(cfg, *args, cache_dir=cache_dir, **kwargs)
    assume(f"{repository or url} of open_clip: weights without data")
    return _OF_OPEN_CLIP


def _load_clip(original: Callable[..., Any], model: torch.nn.Module, checkpoint_path: Any, *args: Any,
               **kwargs: Any) -> Any:
    """In the place of open_clip's ``load_checkpoint``."""
    return {} if checkpoint_path == _OF_OPEN_CLIP else original(model, checkpoint_path, *args, **kwargs)


def _answer_dry(original: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``instead`` with ``original`` before its arguments in a dry run, else ``original``."""
    def call(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if current() is None else instead(original, *args, **kwargs)

    call.__wrapped__ = original  # type: ignore[attr-defined] # of which peft asks for the signature
    return call


def stand_in_for_names(repositories: Repositories, everywhere: Everywhere) -> dict[
        str, Callable[[], Iterable[Undo]]]:
    """What to replace in which modules, once they are imported, so that the hub's names are found without it."""
    def answer_by_name(module: str, answers: Mapping[str, Callable[..., Any]]) -> tuple[Undo, ...]:
        originals = [(getattr(sys.modules[module], name), instead) for name, instead in answers.items()]
        everywhere.replace({original: _answer_dry(original, instead) for original, instead in originals})
        return ()

    def be_offline(module: str) -> Iterator[Undo]:
        yield replace(sys.modules[module], "HF_HUB_OFFLINE", lambda _: True)

    hub = "huggingface_hub"
    instead: dict[str, dict[str, Callable[..., Any]]] = {
        "datasets.load": {"load_dataset": repositories.load_dataset},
        "evaluate.loading": {"load": lambda _, *args, **kwargs: data_set.Metric(*args, **kwargs)},
        f"{hub}.file_download": {"hf_hub_download": repositories.hf_hub_download},
        f"{hub}._snapshot_download": {"snapshot_download": repositories.snapshot_download},
        "transformers.utils.hub": {"cached_files": repositories.cached_files},
        "torch.hub": {"download_url_to_file": _refuse_download, "load_state_dict_from_url": _load_from_address,
                      "load": _load_from_repository},
        "timm.models._builder": {"load_pretrained": _load_pretrained},
        "segmentation_models_pytorch.encoders": {"get_encoder": _get_encoder},
        "open_clip.pretrained": {"download_pretrained": _find_clip},
        "open_clip.factory": {"load_checkpoint": _load_clip}}
    return {**{module: partial(be_offline, module) for module in (f"{hub}.constants", "datasets.config")},
            **{module: partial(answer_by_name, module, answers) for module, answers in instead.items()}}
