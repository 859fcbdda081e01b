"""A pipeline of diffusers from its configs: which modules it calls, how often, and with what. No weights are read.

What a pipeline calls its denoiser with is read off its own code: the names of the arguments, whether guidance doubles
the batch or calls twice, and the shape of its latents (``prepare_latents``). Its loop is not run.
"""
from __future__ import annotations

import ast
import inspect
import json
import math
import os
import re
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from analyzer.errors import AnalyzerError, InputError, TargetError, find_close
from analyzer.zoo.input_spec import import_extra
from analyzer.zoo.published_shape import find_pipeline, list_pipelines

from .components import Component, Experts, ImageDecoder, Pipeline

PREFIX = "diffusers:"
_DENOISERS = ("transformer", "unet")
#: Fields of a denoiser's config that say how wide the hidden states of the text are.
_WIDTHS = ("caption_channels", "joint_attention_dim", "text_embed_dim", "text_dim", "cap_feat_dim",
           "cross_attention_dim")
_CLIP_TOKENS = 77  # CLIPTextConfig.max_position_embeddings of transformers
#: Tokens of a second text, where its encoder has a length of its own (pipeline_hunyuandit.py, ``encode_prompt``).
_SECOND_TOKENS = {"HunyuanDiTPipeline": 256}
#: Pipelines that put the tokens of CLIP before those of T5 (pipeline_stable_diffusion_3.py, ``encode_prompt``).
_JOINED = ("StableDiffusion3Pipeline",)


def read_pipeline(config: str | Path | Mapping[str, Any], batch: int = 1, *, height: int | None = None,
                  width: int | None = None, frames: int | None = None, steps: int | None = None,
                  guidance: float | None = None, dtype: torch.dtype = torch.bfloat16) -> Pipeline:
    """The components of a pipeline and what they are called with; sizes, steps and guidance are by default its own.

    ``config`` is a folder with ``model_index.json`` and a ``config.json`` for each component, the same as one JSON file
    or mapping (``_class_name``, and a config with its ``_class_name`` for each component), or the name of a pipeline
    whose configs this package has. Raises MissingExtraError without diffusers, TargetError for what is no pipeline,
    InputError for sizes that cannot be.
    """
    for name, value in (("batch", batch), ("height", height), ("width", width), ("frames", frames), ("steps", steps)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise InputError(f"read_pipeline({name}={value!r}): must be 1 or more")
    said = "the pipeline" if isinstance(config, Mapping) else os.fspath(config).removeprefix(PREFIX)
    diffusers = import_extra("diffusers", f"{PREFIX}{said}", "diffusion")
    fields = config if isinstance(config, Mapping) else _read_config(said)
    with telling(f"{PREFIX}{said}: {fields['_class_name']}"):
        return _PipelineReader(diffusers, said, dict(fields), batch, dtype).read(height, width, frames, steps, guidance)


_WAY_OUT = ("give whole configs (a folder with model_index.json and each component's config.json), or call "
            "profile_diffusion from Python with a Pipeline of its Components")


@contextmanager
def telling(what: str) -> Iterator[None]:
    """Errors of other packages' code become TargetError, which says what was asked of them, and what can be done."""
    try:
        yield
    except AnalyzerError:
        raise
    except Exception as error:
        raise TargetError(f"{what}: {type(error).__name__}: {error}\n  {_WAY_OUT}") from error


def _read_config(text: str) -> Mapping[str, Any]:
    path = Path(text)
    try:
        if path.is_file():
            found = json.loads(path.read_text())
        elif (path / "model_index.json").is_file():
            found = json.loads((path / "model_index.json").read_text())
            for name, value in found.items():
                if isinstance(value, list) and (path / name / "config.json").is_file():
                    found[name] = {**json.loads((path / name / "config.json").read_text()), "_class_name": value[1]}
        else:
            found = find_pipeline(text)
            if found is None:
                known = list_pipelines()
                raise TargetError(f"{PREFIX}{text}: no folder with model_index.json, no JSON file, and none of "
                                  f"{', '.join(known)}{find_close(text, list(known))}")
    except (OSError, ValueError) as error:
        raise TargetError(f"{PREFIX}{text}: {error}") from error
    if not isinstance(found, dict) or "_class_name" not in found:
        raise TargetError(f"{PREFIX}{text}: no pipeline: _class_name says of which class of diffusers it is")
    return found


class _PipelineReader:
    """Reads one pipeline's components."""

    def __init__(self, diffusers: Any, said: str, fields: dict[str, Any], batch: int, dtype: torch.dtype) -> None:
        self.diffusers, self.said, self.fields, self.batch, self.dtype = diffusers, said, fields, batch, dtype
        name = str(fields["_class_name"])
        if not hasattr(diffusers, name):
            raise TargetError(f"{PREFIX}{said}: diffusers has no pipeline {name!r}")
        self.kind: Any = getattr(diffusers, name)
        self.main = next((name for name in _DENOISERS if isinstance(fields.get(name), dict)), "")
        if not self.main:
            raise TargetError(f"{PREFIX}{said}: has no config of a {' or '.join(_DENOISERS)}")
        self.denoiser = self._build(self.main)
        self.vae = self._build("vae") if isinstance(fields.get("vae"), dict) else None
        self.defaults = {name: parameter.default for name, parameter in inspect.signature(
            self.kind.__call__).parameters.items() if parameter.default is not inspect.Parameter.empty}
        self.shell = self._make_shell()
        self.assumptions: list[str] = []

    def read(self, height: int | None, width: int | None, frames: int | None, steps: int | None,
             guidance: float | None) -> Pipeline:
        self.height, self.width, self.frames = self._find_sizes(height, width, frames)
        calls, doubles, negates = _read_loop(self.kind, self.main)
        guidance = self.defaults.get("guidance_scale") if guidance is None else guidance
        guided = negates and guidance is not None and guidance > 1
        self.rows = self.batch * (2 if guided and doubles else 1)
        if "true_cfg_scale" in self.defaults:
            self.assumptions.append("no negative prompt is given, so the denoiser runs once a step")
        text, self.text_tokens, pooled = self._read_text(2 if guided else 1)
        latents = self._prepare_latents()
        kwargs = self._fill(calls[0], latents, pooled)
        steps = steps or self.defaults.get("num_inference_steps")
        if steps is None:
            raise InputError(f"{PREFIX}{self.said}: {self.kind.__name__} has no number of steps of its own; give steps "
                             "(--denoising-steps)")
        module, second = self.denoiser, f"{self.main}_2"  # as Wan 2.2's
        if isinstance(self.fields.get(second), dict):
            module = Experts(module, self._build(second))
        return Pipeline(
            self.said, text, Component("denoiser", module, (), kwargs,
                                       steps * (2 if guided and not doubles and len(calls) > 1 else 1)),
            self._read_decoder(), self.batch, self.height, self.width, self.frames, steps,
            self._count_tokens(latents[0]), tuple(self.assumptions))

    # --- modules ---

    def _class(self, name: str) -> Any:
        kind = str(self.fields[name].get("_class_name") or (self.fields[name].get("architectures") or [""])[0])
        found = getattr(self.diffusers, kind, None)
        if found is None:
            found = getattr(import_extra("transformers", f"{PREFIX}{self.said}"), kind, None)
        if found is None:
            raise TargetError(f"{PREFIX}{self.said}: {name}: neither diffusers nor transformers has a class {kind!r}")
        return found

    def _build(self, name: str) -> Any:
        config = {key: value for key, value in self.fields[name].items() if key != "torch_dtype"}
        kind = self._class(name)
        with torch.device("meta"):
            of = getattr(kind, "config_class", None)
            model: Any = kind.from_config(config) if of is None else kind(of.from_dict(config))
        # modules of diffusers name what stays in float32 (model_loading_utils.py); buffers that no file has keep their
        # dtype, as from_pretrained's do
        kept = set(getattr(model, "_keep_in_fp32_modules", None) or ()) if of is None else set()
        for place, weight in model.state_dict(keep_vars=True).items():
            if weight.is_floating_point():
                weight.data = weight.data.to(self.dtype if kept.isdisjoint(place.split(".")) else torch.float32)
        return model.eval()

    def _make_shell(self) -> Any:
        """The pipeline without text encoders, of which only what it says about sizes is asked."""
        held, logging = {self.main: self.denoiser, "vae": self.vae}, self.diffusers.utils.logging
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()  # it would warn of parts that are left out
        try:
            shell = self.kind(**{name: held.get(name) for name, parameter in inspect.signature(
                self.kind.__init__).parameters.items() if name != "self" and parameter.default is parameter.empty})
        finally:
            logging.set_verbosity(verbosity)
        shell.scheduler = SimpleNamespace(init_noise_sigma=1.0, order=1)
        return shell

    def _read_text(self, calls: int) -> tuple[tuple[Component, ...], int, int]:
        """The text encoders, the tokens that the denoiser sees of them, and the width of a pooled text."""
        longest, tokens, pooled = self.defaults.get("max_sequence_length"), {}, 0
        found: list[Component] = []
        for name in sorted(key for key, value in self.fields.items() if key.startswith("text_encoder")
                           and isinstance(value, dict)):
            module = self._build(name)
            config = getattr(module.config, "text_config", module.config)
            is_clip = type(module).__name__.startswith("CLIP")
            second = _SECOND_TOKENS.get(self.kind.__name__) if found else None
            count = second or (_CLIP_TOKENS if is_clip or not longest else int(longest))
            ids = torch.ones((self.batch, count), dtype=torch.int64, device="meta")
            found.append(Component(name, module, (ids,), {} if is_clip else {"attention_mask": torch.ones_like(ids)},
                                   calls))
            tokens[is_clip] = count
            if is_clip:
                pooled = getattr(config, "projection_dim", None) or config.hidden_size
        seen = sum(tokens.values()) if self.kind.__name__ in _JOINED else tokens.get(False, tokens.get(True, 0))
        return tuple(found), seen or int(longest or _CLIP_TOKENS), pooled

    def _read_decoder(self) -> Component | None:
        if self.vae is None:
            return None
        config = self.vae.config
        channels = getattr(config, "latent_channels", None) or getattr(config, "z_dim", None)
        if channels is None:
            raise InputError(f"{PREFIX}{self.said}: vae: its config has neither latent_channels nor z_dim")
        space, time = self._scales()
        deep = () if not any(isinstance(part, nn.Conv3d) for part in self.vae.modules()) else (
            ((self.frames or 1) - 1) // time + 1,)
        batch, calls = (self.batch, 1) if self.frames is None else (1, self.batch)
        if calls > 1:
            self.assumptions.append("videos are decoded one after the other (enable_slicing)")
        latents = torch.empty((batch, channels, *deep, self.height // space, self.width // space),
                              dtype=self.dtype, device="meta")
        return Component("decoder", ImageDecoder(self.vae), (latents,), {}, calls)

    # --- sizes ---

    def _scales(self) -> tuple[int, int]:
        """Pixels of a latent, and frames of one."""
        def first(*names: str) -> int:
            values = [getattr(self.shell, name, None) for name in names]
            return next((value for value in values if isinstance(value, int)), 1)

        return (first("vae_scale_factor_spatial", "vae_spatial_scale_factor", "vae_spatial_compression_ratio",
                      "vae_scale_factor"),
                first("vae_scale_factor_temporal", "vae_temporal_scale_factor", "vae_temporal_compression_ratio"))

    def _find_sizes(self, height: int | None, width: int | None, frames: int | None) -> tuple[int, int, int | None]:
        """Those that are given, else what the pipeline's call, the pipeline or the denoiser's config says."""
        config, (space, _) = self.denoiser.config, self._scales()
        usual = getattr(config, "sample_size", None) or getattr(self.shell, "default_sample_size", None)
        tall, wide = (usual, usual) if usual is None or isinstance(usual, int) else usual

        def own(name: str, latents: int | None) -> int:
            latents = getattr(config, f"sample_{name}", None) or latents
            said = re.search(rf"\b{name} = {name} or (\d+)\b", inspect.getsource(self.kind.__call__))
            pixels = self.defaults.get(name) or getattr(self.shell, f"default_{name}", None) or (
                latents and space * latents) or (said and said[1])
            if pixels is None:
                raise InputError(f"{PREFIX}{self.said}: neither {self.kind.__name__} nor the config of its {self.main} "
                                 f"says a {name}; give {name}= (--{name})")
            return int(pixels)

        is_video = "num_frames" in self.defaults
        if frames is not None and not is_video:
            raise InputError(f"{PREFIX}{self.said}: frames={frames}: {self.kind.__name__} makes images; leave it out")
        many = self.defaults.get("num_frames") or getattr(config, "sample_frames", None) or 1
        return height or own("height", tall), width or own("width", wide), (frames or many) if is_video else None

    def _prepare_latents(self) -> tuple[Any, ...]:
        """The latents, and whatever else the pipeline makes with them."""
        config = self.denoiser.config
        channels = getattr(config, "in_channels", None) or config.in_visual_dim
        if "img_ids" in _names(self.denoiser.forward) or "img_shapes" in _names(self.denoiser.forward):
            channels //= 4  # two by two latents are one token (_pack_latents)
        frames, deep, time = self.frames, getattr(config, "patch_size_t", None) or 1, self._scales()[1]
        if frames is not None:  # padded to whole patches, which are not decoded (pipeline_cogvideox.py)
            frames += -((frames - 1) // time + 1) % deep * time
        given = {"batch_size": self.rows, "num_channels_latents": channels, "num_latents_channels": channels,
                 "num_channels": channels, "height": self.height, "width": self.width, "num_frames": frames,
                 "dtype": self.dtype, "device": torch.device("meta"), "generator": None, "latents": None}
        names = _names(self.shell.prepare_latents)
        found = self.shell.prepare_latents(**{name: value for name, value in given.items() if name in names})
        return found if isinstance(found, tuple) else (found,)

    def _count_tokens(self, latents: Tensor) -> int | None:
        if self.main == "unet":
            return None
        if latents.dim() == 3:
            return int(latents.shape[1])
        config = self.denoiser.config
        patch, deep = getattr(config, "patch_size", None), getattr(config, "patch_size_t", None) or 1
        if patch is None:
            return None
        area = patch**2 * deep if isinstance(patch, int) else math.prod(patch)
        return int(math.prod(latents.shape[1:]) // config.in_channels // area)

    def _fill(self, call: ast.Call, latents: tuple[Any, ...], pooled: int) -> dict[str, Any]:
        """What the loop calls the denoiser with, by the names of its arguments; of others its own defaults."""
        names = _names(self.denoiser.forward)
        wanted = [*names[:len(call.args)], *(word.arg for word in call.keywords if word.arg)]
        (space, time), rate = self._scales(), self.defaults.get("frame_rate") or 1
        made = {**self._text_inputs(pooled), "return_dict": False,
                "hidden_states": latents[0], "sample": latents[0], "x": [x.unsqueeze(1) for x in latents[0]],
                "img_ids": latents[1] if len(latents) > 1 else None,
                "img_shapes": [[(1, self.height // space // 2, self.width // space // 2)]] * self.rows,
                "num_frames": ((self.frames or 1) - 1) // time + 1, "height": self.height // space,
                "width": self.width // space, "rope_interpolation_scale": (time / rate, space, space)}
        if made["img_ids"] is not None:
            made["txt_ids"] = torch.empty((self.text_tokens, latents[1].shape[-1]), dtype=self.dtype, device="meta")
        rotary = getattr(self.shell, "_prepare_rotary_positional_embeddings", None)
        if rotary is not None and getattr(self.denoiser.config, "use_rotary_positional_embeddings", False):
            made["image_rotary_emb"] = rotary(self.height, self.width, latents[0].shape[1], torch.device("meta"))
        if "image_meta_size" in names:  # HunyuanDiT reads two texts
            made |= self._two_texts()
        required = [name for name, parameter in inspect.signature(self.denoiser.forward).parameters.items()
                    if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
        missing = [name for name in required if name not in made]
        if missing:
            raise InputError(f"{PREFIX}{self.said}: {type(self.denoiser).__name__} takes {', '.join(missing)}, unknown "
                             "here; call profile_diffusion from Python with a Pipeline of its Components")
        return {name: made[name] for name in dict.fromkeys([*wanted, *required]) if made.get(name) is not None}

    def _two_texts(self) -> dict[str, Any]:
        """What HunyuanDiT's denoiser is called with besides latents (pipeline_hunyuandit.py, ``__call__``)."""
        def empty(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        config, rows, second = self.denoiser.config, self.rows, _SECOND_TOKENS["HunyuanDiTPipeline"]
        area = self.height * self.width // (self._scales()[0] * config.patch_size) ** 2
        rotary = empty(area, self.denoiser.inner_dim // self.denoiser.num_heads, dtype=torch.float32)
        return {"timestep": empty(rows), "encoder_hidden_states": empty(rows, _CLIP_TOKENS, config.cross_attention_dim),
                "text_embedding_mask": empty(rows, _CLIP_TOKENS, dtype=torch.int64),
                "encoder_hidden_states_t5": empty(rows, second, config.cross_attention_dim_t5),
                "text_embedding_mask_t5": empty(rows, second, dtype=torch.int64), "image_meta_size": empty(rows, 6),
                "style": empty(rows, dtype=torch.int64), "image_rotary_emb": (rotary, rotary)}

    def _text_inputs(self, pooled: int) -> dict[str, Any]:
        """What a denoiser reads of texts and times, by the names of its arguments."""
        def empty(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        config, rows, tokens = self.denoiser.config, self.rows, self.text_tokens
        wide = next((value for name in _WIDTHS if (value := getattr(config, name, None))), pooled)
        mask = torch.ones((rows, tokens), dtype=torch.int64)  # with its contents: some count the tokens
        projected = getattr(config, "pooled_projection_dim", None) or pooled
        found: dict[str, Any] = {
            "timestep": empty(rows, dtype=torch.float32), "encoder_hidden_states": empty(rows, tokens, wide),
            "encoder_attention_mask": mask, "encoder_hidden_states_mask": mask,
            "pooled_projections": empty(rows, projected),
            "guidance": empty(rows) if getattr(config, "guidance_embeds", False) else None,
            "original_size": empty(rows, 2), "target_size": empty(rows, 2), "crop_coords": empty(rows, 2),
            "t": empty(rows, dtype=torch.float32), "cap_feats": [empty(tokens, wide) for _ in range(rows)]}
        if getattr(config, "addition_embed_type", None) == "text_time":
            found["added_cond_kwargs"] = {"text_embeds": empty(rows, pooled), "time_ids": empty(rows, 6)}
        elif hasattr(config, "use_additional_conditions"):
            found["added_cond_kwargs"] = {"resolution": empty(rows, 2), "aspect_ratio": empty(rows, 1)}
        return found


def _names(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def _read_loop(kind: Any, main: str) -> tuple[list[ast.Call], bool, bool]:
    """The calls of the denoiser in the pipeline's loop, whether guidance doubles the batch, and whether it is guided
    by a second prediction at all.
    """
    source = textwrap.dedent(inspect.getsource(kind.__call__))
    every = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    calls = [call for call in every if isinstance(call.func, ast.Attribute) and call.func.attr == main]
    if not calls:  # held in a variable of another name
        calls = [call for call in every if isinstance(call.func, ast.Name)
                 and call.func.id in ("current_model", "model")]
    if not calls:
        raise InputError(f"{PREFIX}{kind.__name__}: its loop does not call self.{main}")
    doubles = "[latents] * 2" in source or re.search(r"latents\w*\.repeat\(2\b", source) is not None
    return calls, doubles, "do_classifier_free_guidance" in source
