"""A step that teaches a denoiser images: what lies on the device beside it, and what encodes its images and texts."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from analyzer.errors import find_close
from analyzer.recipe.recipe import add_lora
from analyzer.tools.diffusion import Component, Pipeline, read_pipeline
from analyzer.zoo.published_shape import find_pipeline, list_pipelines

from .build import DTYPES, lora_spec
from .checkpoint import offload_inputs
from .document import Files, JobError
from .plan import EncodingPass, PicturePlan, TrainingPlan


def find_picture_model(name: str, files: Files) -> str | Mapping[str, Any]:
    """Configs of a pipeline's components by its name on the hub, or its folder. Raises JobError, which says which files
    to bring.
    """
    for path in (Path(name), files.folder / name):
        if (path / "model_index.json").is_file():
            return str(path)
    if (found := find_pipeline(name)) is not None:
        return found
    known = list_pipelines()
    raise JobError(f"model {name}: none of the pipelines whose shapes ship with analyzer ({', '.join(known)}"
                   f"{find_close(name, known)}), and no folder; copy its model_index.json and each component's "
                   "config.json to a folder, and give that: --model FOLDER. No weights are needed")


def load_pictures(plan: TrainingPlan, files: Files) -> tuple[Callable[[], nn.Module], dict[str, Any], list[str]]:
    """What builds the step of a plan of images, the arguments of one pass, and what was taken for granted."""
    config = find_picture_model(plan.model, files)
    return lambda: _make_step(plan, _read(plan, config)), _list_inputs(plan, _read(plan, config)), []


def load_preparations(plan: TrainingPlan, files: Files) -> list[tuple[Callable[[], nn.Module], dict[str, Any]]]:
    """What builds each preparation of a plan of images, and its arguments."""
    picture = plan.picture
    if picture is None or not picture.preparations:
        return []
    config = find_picture_model(plan.model, files)
    return [(partial(_make_preparation, plan, config, each),
             _list_encoded(picture, _read(plan, config), each.images, each.texts)) for each in picture.preparations]


def _read(plan: TrainingPlan, config: str | Mapping[str, Any]) -> Pipeline:
    assert plan.picture is not None
    return read_pipeline(config, plan.sequences, height=plan.picture.height, width=plan.picture.width, steps=1,
                         guidance=1.0, dtype=DTYPES[plan.dtype])


def _list_texts(pipeline: Pipeline, which: str) -> list[Any]:
    """The text encoders that are held: all, the first ones that are no T5, none."""
    modules = [component.module for component in pipeline.text]
    return [] if which == "none" else [each for each in modules if which != "first" or not _is_t5(each)]


def _is_t5(encoder: nn.Module) -> bool:
    return not type(encoder).__name__.startswith("CLIP")


class Encoders(nn.Module):
    """An autoencoder and text encoders, called as pipelines of diffusers call them (``encode_prompt`` of each)."""

    def __init__(self, vae: Any, texts: Iterable[nn.Module], trained: int = 0) -> None:
        super().__init__()
        self.vae, self.texts, self.trained = vae, nn.ModuleList(texts), trained

    def train(self, mode: bool = True) -> Encoders:
        """What is frozen stays as it was loaded, without dropout."""
        super().train(mode)
        for part in [self.vae, *self.texts[self.trained:]]:
            if part is not None:
                part.eval()
        return self

    def encode_images(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            latents: Tensor = self.vae.encode(images.to(self.vae.dtype)).latent_dist.sample()
        scale: float = self.vae.config.scaling_factor
        return latents * scale

    def encode_texts(self, ids: Sequence[Tensor]) -> tuple[Tensor | None, list[Tensor]]:
        """The hidden states that a denoiser reads, None where their encoder is not here, and pooled texts of CLIPs."""
        layers: list[Tensor] = []
        pooled: list[Tensor] = []
        long: Tensor | None = None
        several = sum(not _is_t5(encoder) for encoder in self.texts) > 1
        for at, (encoder, words) in enumerate(zip(self.texts, ids)):
            with nullcontext() if at < self.trained else torch.no_grad():
                if _is_t5(encoder):
                    long = encoder(words)[0]
                    continue
                found = encoder(words, output_hidden_states=several)
                layers.append(found.hidden_states[-2] if several else found.last_hidden_state)
                pooled.append(found.text_embeds if "text_embeds" in found else found.pooler_output)
        if several and long is not None:  # pipeline_stable_diffusion_3.py, `encode_prompt`
            short = torch.cat(layers, dim=-1)
            return torch.cat([functional.pad(short, (0, long.shape[-1] - short.shape[-1])), long], dim=-2), pooled
        return long if long is not None else torch.cat(layers, dim=-1) if layers else None, pooled


class Preparing(Encoders):
    """Encodes images and texts once, beside what else is on the device."""

    def __init__(self, vae: Any, texts: Iterable[nn.Module], beside: Iterable[nn.Module]) -> None:
        super().__init__(vae, texts)
        self.beside = nn.ModuleList(beside)

    def forward(self, images: Tensor | None = None, ids: Sequence[Tensor] = ()) -> list[Any]:
        return [None if images is None else self.encode_images(images), *self.encode_texts(ids)]


class DenoisingStep(Encoders):
    """A denoiser with what lies beside it; its output is the loss of a batch of images with noise."""

    def __init__(self, denoiser: nn.Module, vae: Any, texts: Iterable[nn.Module], plan: TrainingPlan) -> None:
        assert plan.picture is not None
        super().__init__(vae, texts, plan.picture.trained_texts)
        self.denoiser, self.dtype = denoiser, DTYPES[plan.dtype]
        self.follows_inputs, self.casts_texts = plan.picture.follows_inputs, plan.picture.casts_texts
        self.autocast = None if plan.autocast is None else DTYPES[plan.autocast]
        self.average = nn.ParameterList(
            [nn.Parameter(p.detach().float(), requires_grad=False) for p in denoiser.parameters()]
            if plan.picture.averages else [])

    def _cast(self, casts: bool) -> Any:
        return torch.autocast("cuda", self.autocast) if casts and self.autocast is not None else nullcontext()

    def forward(self, given: dict[str, Any], images: Tensor | None = None, latents: Tensor | None = None,
                ids: Sequence[Tensor] = ()) -> Tensor:
        found = self.encode_images(images) if images is not None else latents
        assert found is not None
        found = found.to(self.dtype)
        noise = torch.randn_like(found)
        noisy, target = found * 0.5 + noise * 0.5, noise - found
        name = "sample" if "sample" in given else "hidden_states"
        if given[name].dim() == 3:
            noisy, target = _pack(noisy), _pack(target)
        with self._cast(self.casts_texts):
            hidden, pooled = self.encode_texts(ids)
        given = {**given, name: noisy.requires_grad_() if self.follows_inputs else noisy}
        if hidden is not None:
            given["encoder_hidden_states"] = hidden.to(given["encoder_hidden_states"].dtype)
        if pooled and "added_cond_kwargs" in given:
            given["added_cond_kwargs"] = {**given["added_cond_kwargs"], "text_embeds": pooled[-1]}
        elif pooled and "pooled_projections" in given:
            given["pooled_projections"] = torch.cat(pooled, dim=-1)
        with self._cast(True):
            prediction: Tensor = self.denoiser(**given)[0]
        if self.autocast is not None:
            prediction = prediction.float()  # accelerate/accelerator.py, `prepare_model`: convert_outputs_to_fp32
        return functional.mse_loss(prediction.float(), target.float())


def _pack(latents: Tensor) -> Tensor:
    """Two by two latents as one token (pipeline_flux.py, `_pack_latents`)."""
    rows, channels, height, width = latents.shape
    squares = latents.view(rows, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return squares.reshape(rows, height // 2 * (width // 2), channels * 4)


def _make_step(plan: TrainingPlan, pipeline: Pipeline) -> nn.Module:
    picture = plan.picture
    assert picture is not None
    denoiser = _make_denoiser(plan, pipeline)
    texts = _list_texts(pipeline, picture.texts)
    for at, encoder in enumerate(texts):
        nn.Module.to(encoder, DTYPES[picture.text_dtype]).requires_grad_(at < picture.trained_texts)
        if at < picture.trained_texts:
            if picture.text_adapter is not None:
                add_lora(encoder, lora_spec(encoder, picture.text_adapter))
            if plan.checkpoints != "none":
                encoder.gradient_checkpointing_enable()
            if picture.text_adapter is not None and picture.keeps_embedding_gradients:
                # Optimizers are given the adapters alone (sd-scripts, train_network.py, `prepare_optimizer_params`;
                # diffusers, `text_lora_parameters_one`).
                for weight in _find_embeddings(encoder).requires_grad_(True).parameters():
                    weight.is_updated = False  # type: ignore[attr-defined]
    vae = None
    if picture.encodes_images:
        vae = nn.Module.to(_vae(pipeline), DTYPES[picture.image_dtype]).requires_grad_(False)
    return DenoisingStep(denoiser, vae, texts, plan).train()


def _find_embeddings(encoder: Any) -> nn.Module:
    """Those of tokens and of positions, wherever a CLIP of this version of transformers has them."""
    found: nn.Module = getattr(encoder, "text_model", encoder).embeddings
    return found


def _vae(pipeline: Pipeline) -> nn.Module:
    if pipeline.decoder is None:
        raise JobError(f"model {pipeline.name}: has no config of an autoencoder (vae), which encodes images")
    found: nn.Module = pipeline.decoder.module.vae  # type: ignore[assignment]
    return found


def _make_denoiser(plan: TrainingPlan, pipeline: Pipeline) -> nn.Module:
    denoiser: Any = pipeline.denoiser.module
    assert plan.picture is not None
    if plan.quantize == "fp8":
        for module in denoiser.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                nn.Module.to(module, torch.float8_e4m3fn)
    for name, count in plan.picture.swapped:
        _share_weights(getattr(denoiser, name), count)
    if plan.attention == "eager":
        from diffusers.models.attention_processor import AttnProcessor

        denoiser.set_attn_processor(AttnProcessor())
    if plan.adapter is not None:
        add_lora(denoiser, lora_spec(denoiser, plan.adapter))
    if plan.checkpoints != "none":
        denoiser.enable_gradient_checkpointing()
    if plan.checkpoints == "inputs_offloaded":
        offload_inputs(denoiser)
    found: nn.Module = denoiser
    return found


def _share_weights(blocks: Sequence[nn.Module], count: int) -> None:
    """Let so many blocks have the weights of others, as many as lie on the device at once where these are swapped
    (sd-scripts 0.10.1, library/custom_offloading_utils.py, `swap_weight_devices_cuda`: weights of linear layers).
    """
    if count > len(blocks) - 2:
        raise JobError(f"blocks_to_swap: at most {len(blocks) - 2} of {len(blocks)} blocks can be swapped, not {count}")
    kept = len(blocks) - count
    for at in range(count):
        for module, other in zip(blocks[kept + at].modules(), blocks[at % kept].modules()):
            if isinstance(module, nn.Linear):
                module.weight = other.weight  # type: ignore[assignment]


def _make_preparation(plan: TrainingPlan, config: str | Mapping[str, Any], preparation: EncodingPass) -> nn.Module:
    picture, pipeline = plan.picture, _read(plan, config)
    assert picture is not None
    vae = _vae(pipeline) if preparation.images or "vae" in preparation.beside else None
    texts = _list_texts(pipeline, "all") if preparation.texts or "texts" in preparation.beside else []
    beside = [_make_denoiser(plan, pipeline)] if "denoiser" in preparation.beside else []
    if vae is not None:
        nn.Module.to(vae, DTYPES[picture.image_dtype])
    for encoder in texts:
        nn.Module.to(encoder, DTYPES[picture.text_dtype])
    return Preparing(vae, texts, beside).requires_grad_(False).eval()


# What goes in.

def _list_encoded(picture: PicturePlan, pipeline: Pipeline, images: int, texts: int, which: str = "all"
                  ) -> dict[str, Any]:
    """So many images and texts, for the encoders that are held."""
    found: dict[str, Any] = {}
    if images:
        found["images"] = torch.empty(images, 3, picture.height, picture.width, device="meta")
    if texts and which != "idle":
        held = _list_texts(pipeline, which)
        found["ids"] = [component.args[0].new_ones(texts, _count_tokens(picture, component))
                        for component in pipeline.text if component.module in held]
    return found


def _count_tokens(picture: PicturePlan, text: Component) -> int:
    """Of a text: those that the plan says of a T5, all others as their pipeline has them."""
    usual: int = text.args[0].shape[1]
    return picture.text_tokens or usual if _is_t5(text.module) else usual


def _list_inputs(plan: TrainingPlan, pipeline: Pipeline) -> dict[str, Any]:
    picture = plan.picture
    assert picture is not None
    given, rows = dict(pipeline.denoiser.kwargs), plan.sequences
    more = sum(_count_tokens(picture, text) - text.args[0].shape[1] for text in pipeline.text)
    if more:
        rows_, tokens, width = given["encoder_hidden_states"].shape
        given["encoder_hidden_states"] = given["encoder_hidden_states"].new_empty(rows_, tokens + more, width)
        if "txt_ids" in given:
            given["txt_ids"] = given["txt_ids"].new_empty(tokens + more, given["txt_ids"].shape[1])
    found = _list_encoded(picture, pipeline, rows if picture.encodes_images else 0, rows, picture.texts)
    if not picture.encodes_images:
        _vae(pipeline)
        assert pipeline.decoder is not None
        found["latents"] = pipeline.decoder.args[0]
    return {**found, "given": given}
