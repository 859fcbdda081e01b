"""diffusers' training scripts: ``train_dreambooth_lora_sdxl.py --pretrained_model_name_or_path ...`` and its like."""
from __future__ import annotations

import re
from typing import Any, NamedTuple

from analyzer.zoo.published_shape import find_pipeline

from ..options import Options, names_of
from ..plan import Adapter, EncodingPass, PicturePlan, TrainingPlan
from ..program import JobLaunch, JobProgram, name_of, set_batch, set_option
from .trainer import read_checkpoints

# diffusers 0.40, examples/text_to_image and examples/dreambooth at commit 58eb52c: defaults of options, dtypes of
# modules, and when each is on the device.

_SWITCHES = frozenset(names_of("diffusers", "switches").split())
_ATTENTION = ("to_k", "to_q", "to_v", "to_out.0")
_JOINT = tuple(f"attn.{name}" for name in ("to_k", "to_q", "to_v", "to_out.0", "add_k_proj", "add_q_proj", "add_v_proj",
                                           "to_add_out"))
_FORWARD = ("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")
_CLIP = ("q_proj", "k_proj", "v_proj", "out_proj")
#: Pipelines of the models that scripts are for; of another name they have the shape of these.
_USUAL = {"sd": "stable-diffusion-v1-5/stable-diffusion-v1-5", "sdxl": "stabilityai/stable-diffusion-xl-base-1.0",
          "sd3": "stabilityai/stable-diffusion-3.5-medium", "flux": "black-forest-labs/FLUX.1-dev"}


class _ImageScript(NamedTuple):
    """Of ``trained`` text encoders; ``texts`` are encoded in each pass, or once where all images have one prompt."""

    family: str
    targets: tuple[str, ...] = ()  # of adapters; empty: the whole denoiser trains
    resolution: int = 512
    batch: int = 4
    encodes_once: bool = True
    trained: int = 1
    image_dtype: str | None = None  # None: that of frozen weights
    text_tokens: int | None = None
    keeps: bool = False            # whether some name still holds the text encoders when they are to be freed
    embeds: bool = False           # whether it lets embeddings of text encoders with adapters have gradients


_PROMPT = "instance_prompt"
_SCRIPTS = {
    "train_text_to_image": _ImageScript("sd", batch=16, encodes_once=False),
    "train_text_to_image_lora": _ImageScript("sd", _ATTENTION, batch=16, encodes_once=False),
    "train_text_to_image_sdxl": _ImageScript("sdxl", (), 1024, 16, image_dtype="fp32"),
    "train_text_to_image_lora_sdxl": _ImageScript("sdxl", _ATTENTION, 1024, 16, False, 2, "fp32"),
    "train_dreambooth": _ImageScript("sd", encodes_once=False),
    "train_dreambooth_lora": _ImageScript("sd", (*_ATTENTION, "add_k_proj", "add_v_proj"), encodes_once=False),
    "train_dreambooth_lora_sdxl": _ImageScript("sdxl", _ATTENTION, 1024, trained=2, image_dtype="fp32", keeps=True,
                                               embeds=True),
    "train_dreambooth_sd3": _ImageScript("sd3", trained=3, image_dtype="fp32", text_tokens=77),
    "train_dreambooth_lora_sd3": _ImageScript("sd3", _JOINT, trained=2, image_dtype="fp32", text_tokens=77,
                                              embeds=True),
    "train_dreambooth_flux": _ImageScript("flux", text_tokens=77),
    "train_dreambooth_lora_flux": _ImageScript("flux", (*_JOINT, *_FORWARD), text_tokens=512, keeps=True, embeds=True)}


def read(options: Options, launch: JobLaunch) -> TrainingPlan:
    """The plan of a command. Raises JobError for what the script refuses, and for a script that is not read."""
    name = name_of(launch.command[0]).removesuffix(".py")
    model = read_picture_model(options, _USUAL[_SCRIPTS[name].family]) if name in _SCRIPTS else None
    if model is None:
        raise options.fail("pretrained_model_name_or_path", f"{name}.py is not read; these are: "
                           f"{', '.join(_SCRIPTS)}; `analyzer dryrun` runs any script itself")
    script, is_lora = _SCRIPTS[name], bool(_SCRIPTS[name].targets)
    _check(options, name)
    said = options.text("mixed_precision", launch.mixed_precision or "no", choices=("no", "fp16", "bf16"),
                        means="" if launch.mixed_precision else "passes, and the dtype of frozen weights")
    precision = said if said in ("fp16", "bf16") else None
    frozen = precision or "fp32"
    batch = options.count("train_batch_size", script.batch, means="images of a pass of one device")
    adapter = _read_adapter(options, script, frozen) if is_lora else None
    picture = _read_picture(options, name, script, frozen, batch)
    plan = TrainingPlan(
        model=model, task="denoise", length=1, picture=picture, micro_batch=batch,
        accumulate=options.count("gradient_accumulation_steps", 1, means="passes of a step"),
        dtype=frozen if is_lora else "fp32", autocast=precision, adapter=adapter,
        checkpoints=read_checkpoints(options), optimizer=_read_optimizer(options),
        clips=options.fraction("max_grad_norm", 1.0) > 0, ranks=launch.size, ranks_per_host=launch.ranks_per_host,
        sharding=launch.sharding)
    options.finish("diffusers", known=_SWITCHES)
    return plan


def read_picture_model(options: Options, usual: str) -> str | None:
    """The model that is named; where its shape does not ship and its script is for one that does, that one's name."""
    name = options.needed("pretrained_model_name_or_path", "the model is not known without it", means="model")
    if find_pipeline(name) is not None or re.search(r"stable-diffusion-(2|3-)|sd2|512-base|v2-1", name.lower()):
        return name
    options.assume("pretrained_model_name_or_path", f"the shape of {usual}, for which the script is")
    return usual


def _check(options: Options, name: str) -> None:
    """What the scripts' own ``parse_args`` refuses."""
    data, folder = options.get("dataset_name"), options.get("instance_data_dir")
    if folder is not None:  # and it is not meant for another option that is not there
        options.note("instance_data_dir", "no effect", "")
    if "dreambooth" in name and data is not None and folder is not None:
        raise options.fail("dataset_name", "instance_data_dir is given too; the script refuses both")
    if "dreambooth" in name and data is None and folder is None:
        raise options.fail("instance_data_dir", "is not there, nor is dataset_name; the script needs one of them")
    if "dreambooth" in name and options.get(_PROMPT) is None:  # `required=True` in all of them
        raise options.fail(_PROMPT, "is not there, and the script refuses to begin without it")
    if "text_to_image" in name and data is None and options.get("train_data_dir") is None:
        raise options.fail("train_data_dir", "is not there, nor is dataset_name; the script needs one of them")
    for needed in ("class_data_dir", "class_prompt") if options.flag("with_prior_preservation") else ():
        if options.get(needed) is None:
            raise options.fail(needed, "is not there, and the script refuses with_prior_preservation without it")
    if options.flag("train_text_encoder") and options.flag("pre_compute_text_embeddings"):
        raise options.fail("pre_compute_text_embeddings", "the script refuses it with train_text_encoder")


def _read_adapter(options: Options, script: _ImageScript, frozen: str) -> Adapter:
    targets, layers = script.targets, options.words("lora_layers")
    if layers:
        targets = tuple(f"attn.{layer}" if script.family == "sd3" else layer for layer in layers)
    if blocks := options.words("lora_blocks"):
        targets = tuple(f"transformer_blocks.{block}.{target}" for block in blocks for target in targets)
    in_half = options.get("mixed_precision") == "fp16"  # `cast_training_params` for this option alone
    return Adapter(r=options.count("rank", 4, means="rank of the adapters"), targets=targets,
                   dropout=options.fraction("lora_dropout", 0.0), dtype="fp32" if in_half else frozen)


def _read_picture(options: Options, name: str, script: _ImageScript, frozen: str, batch: int) -> PicturePlan:
    size = options.count("resolution", script.resolution, means="pixels of an image, each side")
    trains = options.switch("train_text_encoder", "text encoders train with the denoiser")
    caches = options.switch("cache_latents", "images are encoded once, before the first step")
    has_captions = options.get("dataset_name") is not None and options.get("caption_column") is not None
    once = options.flag("pre_compute_text_embeddings") or script.encodes_once and not trains and (
        not has_captions or "dreambooth" not in name)
    is_lora, before = bool(script.targets), []
    priors = options.flag("with_prior_preservation")
    rows = batch * (2 if priors else 1)
    encodes_images = not caches and name != "train_text_to_image_sdxl"
    if name == "train_text_to_image_sdxl":  # datasets' `map`, whose batch_size is 1,000 where none is given
        before = [EncodingPass(texts=1000, beside=("vae",)), EncodingPass(images=rows, beside=("texts",))]
        options.note("dataset_name", "assumed", "1,000 texts are encoded at once before the first step, and images in "
                     "batches of a pass")
    elif once and script.keeps:
        options.note(_PROMPT, "assumed", "encoded once; the script still holds the text encoders then, which stay on "
                     "the device")
    elif once and name != "train_dreambooth":  # whose text encoder is on the host then
        before = [EncodingPass(texts=1, beside=("denoiser", "vae") if is_lora else ("vae",))]
    if caches:
        before.append(EncodingPass(images=rows, beside=("denoiser", "texts") if script.keeps or not once else (
            "denoiser",)))
    vae = options.text("pretrained_vae_model_name_or_path")
    image_dtype = frozen if vae is not None and "text_to_image_lora" in name else script.image_dtype or frozen
    adapter = Adapter(r=options.count("rank", 4), targets=_CLIP, dtype=(
        "fp32" if options.get("mixed_precision") == "fp16" else frozen)) if trains and is_lora else None
    averages = options.flag("use_ema")
    if averages:
        options.assume("use_ema", "a copy of the weights in float32; its update is left out")
    return PicturePlan(
        height=size, width=size, priors=priors, encodes_images=encodes_images,
        texts="all" if not once else "idle" if script.keeps else "none",
        trained_texts=script.trained if trains else 0, text_adapter=adapter,
        keeps_embedding_gradients=script.embeds,  # "set top parameter requires_grad", with checkpoints and without
        text_tokens=options.number("max_sequence_length", script.text_tokens, least=1),
        image_dtype=image_dtype, text_dtype="fp32" if trains and not is_lora else frozen,
        averages=averages and not options.flag("offload_ema"), preparations=tuple(before))


def _read_optimizer(options: Options) -> str | None:
    said = options.text("optimizer", "adamw").lower()
    in_eight = options.switch("use_8bit_adam", "states of AdamW in 8 bits")
    if said == "prodigy":
        options.note("optimizer", "not modelled", "Prodigy: four states, of which AdamW has two")
    elif said != "adamw":
        options.assume("optimizer", "AdamW, which the script takes for a name that it does not know")
    return "adamw8bit" if in_eight and said != "prodigy" else "adamw"


def _cache(options: Options, plan: TrainingPlan, wanted: Any) -> Any:
    """Only two of the scripts keep latents; images that were encoded once are the same in each epoch."""
    known = plan.adapter is not None and plan.model in (_USUAL["sd3"], _USUAL["flux"])
    return set_option("cache_latents")(options, plan, True) if known else None


DIFFUSERS = JobProgram(
    name="diffusers", version="0.40", source="huggingface/diffusers examples/", read=read, config="",
    commands=tuple(f"{name}.py" for name in _SCRIPTS), switches=_SWITCHES, is_command=lambda words: re.search(
        r"(^|[/\\])train_(dreambooth|text_to_image|controlnet)\w*\.py$", words[0]) is not None,
    changes={"batch": set_batch("train_batch_size", "gradient_accumulation_steps"),
             "checkpoints": set_option("gradient_checkpointing", True), "cache": _cache,
             "precision": set_option("mixed_precision"), "optimizer": set_option("use_8bit_adam", True),
             "length": set_option("resolution")})
