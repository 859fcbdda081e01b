"""The TARGET of the command line: which model to profile.

======================================  ====================================================================
`NAME`                                  a model that ships with the project (`analyzer.zoo.MODELS`)
`torchvision:NAME`                      classification, segmentation, detection, video, optical flow
`timm:NAME`                             with or without a tag
`hf:NAME[:ModelClass]`                  a published shape by its name on the hub, with or without the organisation:
                                        `hf:meta-llama/Llama-3.1-8B`, `hf:llama-3.1-8b`; `analyzer models` lists them
`hf:CONFIG.json[:ModelClass]`           a config file of transformers, or the directory that holds config.json
`hf:ConfigClass[:ModelClass]`           a config class of transformers with its default sizes
`package.module:factory`                any callable of no arguments that returns an nn.Module, for instance a class;
                                        the working directory is searched first
`FILE.py:factory`                       such a callable in a file, e.g. `mynet.py:Net` or `models/mynet.py:build`
======================================  ====================================================================

No weights are ever loaded.
"""
from __future__ import annotations

from analyzer.errors import TargetError
from analyzer.zoo import MODELS

from .factory import describe_factories, find_factory
from .input_spec import parse_input
from .model_target import LabelRule, Target, find_close
from .published_shape import find_shape
from .target_file import import_file, import_name
from .transformers_models import find_transformers_model
from .vision_models import find_timm_model, find_torchvision_model

__all__ = ["LabelRule", "Target", "load_target"]

FORMS = "torchvision:NAME, timm:NAME, hf:CONFIG.json, hf:ConfigClass, package.module:factory"
FILE = "FILE.py:factory"
LIBRARIES = {"torchvision": find_torchvision_model, "timm": find_timm_model, "hf": find_transformers_model}


def load_target(text: str) -> Target:
    """Find the model that `text` names; nothing is built until its `build()` is called.

    Raises TargetError if it names none (with the names that resemble it), MissingExtraError if the library it comes
    from is not installed.

    >>> target = load_target("vit_b_16")
    >>> [str(spec) for spec in target.choose_inputs(train=True)]
    ['float32:8x3x224x224']
    >>> load_target("vit_b_61")
    Traceback (most recent call last):
    analyzer.errors.TargetError: vit_b_61: no model of that name ships with analyzer; ...; did you mean vit_b_16?
    """
    scheme, colon, rest = text.partition(":")
    path, _, name = (text, "", "") if text.endswith(".py") else text.rpartition(":")
    if path.endswith(".py") and scheme not in LIBRARIES:
        return _find_in_file(path, name, text)
    if not colon:
        return _find_shipped_model(text)
    if not rest:
        raise TargetError(f"{text}: nothing follows the colon; TARGET is one of {', '.join(MODELS)}, {FILE}, {FORMS}")
    if scheme in LIBRARIES:
        return LIBRARIES[scheme](rest, text)
    return _find_in_module(scheme, rest, text)


def names_own_code(text: str) -> bool:
    """Whether `load_target` would import a file or module that ``text`` names, and not a model of a library.

    >>> [names_own_code(text) for text in ("gpt2", "timm:vit_base_patch16_224", "mynet.py:Net", "os.path:join")]
    [False, False, True, True]
    """
    scheme, colon, _ = text.partition(":")
    return scheme not in LIBRARIES and (bool(colon) or text.endswith(".py"))


def import_own_code(text: str) -> None:
    """Import the file or module of the user's own that ``text`` names, if it names one, for what it registers. Raises
    TargetError as `load_target` does.
    """
    if names_own_code(text):
        load_target(text)


def _find_shipped_model(name: str) -> Target:
    if name not in MODELS:
        hint = f"; did you mean hf:{name}?" if find_shape(name) is not None else find_close(name, MODELS)
        raise TargetError(f"{name}: no model of that name ships with analyzer; TARGET is one of {', '.join(MODELS)}, "
                          f"{FILE}, {FORMS}{hint}")
    factory, input, labelled = MODELS[name]
    spec = parse_input(input)
    labels = (LabelRule("labels", spec.name),) if labelled and spec.name else ()
    return Target(name, factory, (spec,), labels)


def _find_in_file(path: str, name: str, text: str) -> Target:
    module = import_file(path, text)
    if not name:
        raise TargetError(f"{text}: says not what in the file, as in {path}:Net{describe_factories(module, path)}")
    return find_factory(module, path, name, text)


def _find_in_module(module_name: str, factory_name: str, text: str) -> Target:
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise TargetError(
            f"{text}: {module_name!r} is no module name; TARGET is one of {FORMS}, {FILE}"
            f"{find_close(module_name, LIBRARIES)}")
    hint = f"TARGET is one of {FORMS}, {FILE}{find_close(module_name, LIBRARIES)}"
    return find_factory(import_name(module_name, text, hint), module_name, factory_name, text)
