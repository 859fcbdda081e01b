"""The TARGET of the command line: which model to profile.

======================================  ====================================================================
`NAME`                                  a model that ships with the project (`analyzer.zoo.MODELS`)
`torchvision:NAME`                      classification, segmentation, detection, video, optical flow
`timm:NAME`                             with or without a tag
`hf:CONFIG.json[:ModelClass]`           a config file of transformers, or the directory that holds config.json
`hf:ConfigClass[:ModelClass]`           a config class of transformers with its default sizes
`package.module:factory`                any callable of no arguments that returns an nn.Module; the working
                                        directory is searched first
======================================  ====================================================================

No weights are ever loaded.
"""
from __future__ import annotations

import importlib
import inspect
import os
import sys
from typing import Any

from torch import nn

from analyzer.errors import TargetError
from analyzer.zoo import MODELS

from .input_spec import parse_input
from .model_target import LabelRule, Target, find_close
from .transformers_models import find_transformers_model
from .vision_models import find_timm_model, find_torchvision_model

__all__ = ["LabelRule", "Target", "load_target"]

FORMS = "torchvision:NAME, timm:NAME, hf:CONFIG.json, hf:ConfigClass, package.module:factory"
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
    if not colon:
        return _find_shipped_model(text)
    if not rest:
        raise TargetError(f"{text}: nothing follows the colon; TARGET is one of {', '.join(MODELS)}, {FORMS}")
    if scheme in LIBRARIES:
        return LIBRARIES[scheme](rest, text)
    return _find_factory(scheme, rest, text)


def _find_shipped_model(name: str) -> Target:
    if name not in MODELS:
        raise TargetError(f"{name}: no model of that name ships with analyzer; TARGET is one of {', '.join(MODELS)}, "
                          f"{FORMS}{find_close(name, MODELS)}")
    factory, input, labelled = MODELS[name]
    spec = parse_input(input)
    labels = (LabelRule("labels", spec.name),) if labelled and spec.name else ()
    return Target(name, factory, (spec,), labels)


def _find_factory(module_name: str, factory_name: str, text: str) -> Target:
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise TargetError(
            f"{text}: {module_name!r} is no module name; TARGET is one of {FORMS}{find_close(module_name, LIBRARIES)}")
    module = _import_module(module_name, text)
    factory: Any = module
    for part in factory_name.split("."):
        if not hasattr(factory, part):
            public = [name for name, value in vars(factory).items() if callable(value) and not name.startswith("_")]
            raise TargetError(f"{text}: {module_name} has no {factory_name!r}{find_close(part, public)}")
        factory = getattr(factory, part)
    if not callable(factory) or isinstance(factory, nn.Module):
        kind = "a model already built" if isinstance(factory, nn.Module) else f"of type {type(factory).__name__}"
        raise TargetError(
            f"{text}: {factory_name} is {kind}; give a callable of no arguments that returns an nn.Module")
    needed = _list_required_parameters(factory)
    if needed:
        raise TargetError(
            f"{text}: {factory_name} needs {', '.join(needed)}; give a callable of no arguments that returns an "
            f"nn.Module")

    def build() -> nn.Module:
        model = factory()
        if not isinstance(model, nn.Module):
            raise TargetError(
                f"{text}: {factory_name}() returned a value of type {type(model).__name__}, not an nn.Module")
        return model

    return Target(text, build)


def _import_module(name: str, text: str) -> Any:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does; a console script has its own directory there instead
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            close = find_close(name, LIBRARIES)
            raise TargetError(
                f"{text}: no module {error.name!r} on the path or in {here}; TARGET is one of {FORMS}{close}"
            ) from error
        raise TargetError(f"{text}: {name} itself imports {error.name!r}, which is not installed") from error
    except Exception as error:  # whatever a user's module does while it is imported
        raise TargetError(f"{text}: importing {name} failed: {type(error).__name__}: {error}") from error


def _list_required_parameters(factory: Any) -> list[str]:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # some builtins have no signature; the call will tell
        return []
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
