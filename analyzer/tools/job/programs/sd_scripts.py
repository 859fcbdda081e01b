"""kohya's sd-scripts: ``accelerate launch sdxl_train_network.py --config_file a.toml ...``, and the TOML alone."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ..document import Edit
from ..options import Options, names_of
from ..plan import Adapter, Checkpoints, EncodingPass, PicturePlan, TrainingPlan
from ..program import Change, JobLaunch, JobProgram, name_of, read_beside
from .trainer import OPTIMIZERS, read_optimizer

# sd-scripts 0.10.1, commit 48d368f: train_network.py, sdxl_train_network.py, flux_train_network.py,
# library/train_util.py, networks/lora.py and lora_flux.py

_SWITCHES = frozenset(names_of("sd_scripts", "switches").split())


class _NetworkScript(NamedTuple):
    model: str
    targets: tuple[str, ...]
    texts: int          # encoders that train with the denoiser, where network_train_unet_only does not say otherwise
    caches_texts: bool = True


_ATTENTION = ("to_k", "to_q", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out")
_TEXT = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
_SCRIPTS = {
    "train_network": _NetworkScript("stable-diffusion-v1-5/stable-diffusion-v1-5", _ATTENTION, 1, False),
    "sdxl_train_network": _NetworkScript("stabilityai/stable-diffusion-xl-base-1.0", _ATTENTION, 2),
    "flux_train_network": _NetworkScript("black-forest-labs/FLUX.1-dev", (r"re:(single_)?transformer_blocks\..*",), 1)}
_MORE = "further states for each parameter, of which AdamW has two"
_Kind = type(OPTIMIZERS["lion"])
#: train_util.py, `get_optimizer`, which compares names without their case.
_OPTIMIZERS = {
    **{name: OPTIMIZERS[other] for name, other in {
        "AdamW": "adamw_torch", "AdamW8bit": "adamw_bnb_8bit", "PagedAdamW8bit": "paged_adamw_8bit",
        "PagedAdamW": "paged_adamw", "PagedAdamW32bit": "paged_adamw_32bit", "Lion": "lion", "Lion8bit": "lion_8bit",
        "PagedLion8bit": "paged_lion_8bit", "Adafactor": "adafactor", "AdamWScheduleFree": "schedule_free_adamw",
        "RAdamScheduleFree": "schedule_free_radam", "SGDScheduleFree": "schedule_free_sgd"}.items()},
    "SGDNesterov": _Kind("momentum"), "SGDNesterov8bit": OPTIMIZERS["lion_8bit"],
    **{name: _Kind("adamw", _MORE, True) for name in (
        "Prodigy", "DAdaptation", "DAdaptAdamPreprint", "DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan", "DAdaptAdanIP",
        "DAdaptLion", "DAdaptSGD")}}


def read(options: Options, launch: JobLaunch) -> TrainingPlan:
    """The plan of a command or its TOML. Raises JobError for what sd-scripts refuses."""
    options.join()  # the tables of a TOML, as `read_config_from_file` joins them
    name = _find_script(options, launch)
    if name not in _SCRIPTS:
        raise options.fail("network_module", f"{name}.py is not read; these are: {', '.join(_SCRIPTS)}")
    script, is_flux = _SCRIPTS[name], name.startswith("flux")
    options.needed("pretrained_model_name_or_path", "the model is not known without it", means="model")
    _check(options, name)
    options.assume("pretrained_model_name_or_path", f"the shape of {script.model}, and modules as diffusers has them")
    said = options.text("mixed_precision", "no", choices=("no", "fp16", "bf16"),
                        means="passes, and the dtype of frozen weights")
    precision = said if said in ("fp16", "bf16") else None
    in_eight = next((each for each in ("fp8_base", "fp8_base_unet") if options.flag(each)), None)
    if in_eight and precision is None:
        raise options.fail(in_eight, "sd-scripts refuses weights of 8 bits without mixed_precision fp16 or bf16")
    size, batch = _read_data(options, launch)
    checkpoints = _read_checkpoints(options)
    adapter = Adapter(
        r=options.count("network_dim", 4, means="rank of the adapters"), casts=False,
        dropout=options.fraction("network_dropout", 0.0), targets=_read_targets(options, script, is_flux),
        dtype=precision if options.flag("full_bf16") or options.flag("full_fp16") else "fp32")
    picture = replace(_read_picture(options, script, precision or "fp32", size, batch, replace(adapter, targets=_TEXT)),
                      keeps_embedding_gradients=checkpoints != "none")  # `prepare_text_encoder_grad_ckpt_workaround`
    fused = [options.switch(each, "attention in blocks, which keeps no products of its tokens")
             for each in ("sdpa", "xformers", "mem_eff_attn")]
    plan = TrainingPlan(
        model=script.model, task="denoise", length=1, picture=picture, micro_batch=batch,
        accumulate=options.count("gradient_accumulation_steps", 1, means="passes of a step"), dtype=precision or "fp32",
        autocast=precision, quantize="fp8" if in_eight else None, adapter=adapter, checkpoints=checkpoints,
        attention=None if any(fused) or is_flux else "eager", optimizer=_read_optimizer(options),
        clips=options.fraction("max_grad_norm", 1.0) > 0, ranks=launch.size, ranks_per_host=launch.ranks_per_host,
        sharding=launch.sharding)
    if plan.attention == "eager":
        options.assume("sdpa", "neither sdpa nor xformers is given: attention holds all products of its tokens")
    if options.get("model_type") == "chroma":
        options.note("model_type", "not modelled", "Chroma's modulation, and that it has no CLIP, are left out")
    options.finish("sd_scripts", known=_SWITCHES)
    return plan


def _set(name: str, value: Any = None) -> Change:
    """`set_option` of a TOML with tables: in that which has the option."""
    def change(options: Options, plan: TrainingPlan, wanted: Any) -> list[Edit] | None:
        after, before = wanted if value is None else value, options.get(name)
        tables = options.layers[-1][0].data
        table = next((key for key, inner in tables.items() if isinstance(inner, Mapping) and name in inner), None)
        return None if before == after else [Edit((name,) if table is None else (table, name), before, after)]
    return change


def _find_script(options: Options, launch: JobLaunch) -> str:
    """By the command, else by what only one of them has; a TOML alone does not say it."""
    if launch.command:
        return name_of(launch.command[0]).removesuffix(".py")
    model = str(options.get("pretrained_model_name_or_path"))
    if "flux" in str(options.get("network_module")) or options.get("t5xxl") is not None:
        return "flux_train_network"
    name = "sdxl_train_network" if "xl" in model.lower() else "train_network"
    options.assume("network_module", f"as {name}.py reads it, by the model's name; give the whole command where it is "
                   "another script")
    return name


def _check(options: Options, name: str) -> None:
    """What the scripts refuse: `assert_extra_args`, `verify_training_args`, `get_optimizer`, and what they assert."""
    if options.get("network_module") is None:
        raise options.fail("network_module", "is not there, and the script imports it: networks.lora")
    if name.startswith("sdxl") and options.flag("v2"):
        raise options.fail("v2", "sdxl_train_network.py refuses it")
    for whole, half in (("full_fp16", "fp16"), ("full_bf16", "bf16")):
        if options.flag(whole) and options.get("mixed_precision") != half:
            raise options.fail(whole, f"sd-scripts refuses it without mixed_precision {half}")
    for flag in ("color_aug", "random_crop") if _caches(options, "latents") else ():
        if options.flag(flag):
            raise options.fail(flag, "sd-scripts refuses it with cache_latents")
    if not _SCRIPTS[name].caches_texts or not _caches(options, "text_encoder_outputs"):
        return
    if name.startswith("sdxl") and not options.flag("network_train_unet_only"):
        raise options.fail("cache_text_encoder_outputs", "sdxl_train_network.py refuses it without "
                           "network_train_unet_only: text encoders would train")
    for each in ("caption_dropout_rate", "shuffle_caption", "token_warmup_step", "caption_tag_dropout_rate"):
        if options.get(each) not in (None, False, 0, "0", 0.0, "0.0"):
            raise options.fail(each, "sd-scripts refuses it with cache_text_encoder_outputs")


def _caches(options: Options, what: str) -> bool:
    """The same to a disk asks for it too (`verify_training_args`)."""
    means = f"{'images' if what == 'latents' else 'texts'} are encoded once, before the first step"
    return options.switch(f"cache_{what}", means) | options.switch(f"cache_{what}_to_disk", means)


def _read_data(options: Options, launch: JobLaunch) -> tuple[tuple[int, int], int]:
    """Width and height of images, and how many a pass has: the most pixels of a data set of ``dataset_config``."""
    document = read_beside(options, "dataset_config", launch)
    batch = options.count("train_batch_size", 1, means="images of a pass of one device")
    found = [{}] if document is None else [
        {**(document.data.get("general") or {}), **each} for each in document.data.get("datasets") or [{}]]
    passes: list[tuple[tuple[int, int], int]] = []
    for each in found:
        name = "resolution" if document is None or "resolution" not in each else "dataset_config"
        size = each.get("resolution", options.get("resolution"))
        if size is None:
            raise options.fail("resolution", "is not there, and sd-scripts needs it, here or in dataset_config")
        passes.append((_read_size(options, size, name), int(each.get("batch_size", batch))))
    most = max(passes, key=lambda one: one[0][0] * one[0][1] * one[1])
    if document is not None:
        options.note("dataset_config", "understood", f"{most[1]} images of {most[0][0]} x {most[0][1]}")
    if options.get("resolution") is not None:
        options.note("resolution", "understood", "pixels of an image; buckets have about as many")
    return most


def _read_size(options: Options, value: Any, name: str) -> tuple[int, int]:
    """Width and height: 1024, "1024,1024", [1024, 768]; one number is both. The scripts cut both to multiples of 64."""
    parts = value if isinstance(value, list) else str(value).split(",")
    if not 1 <= len(parts) <= 2 or not all(str(part).strip().isdecimal() and int(part) >= 64 for part in parts):
        raise options.fail(name, f"{value}: one or two whole numbers of at least 64" if name != "resolution" else
                           "must be one or two whole numbers of at least 64")
    width, height = (int(part) // 64 * 64 for part in (*parts, parts[-1])[:2])
    return width, height


def _read_targets(options: Options, script: _NetworkScript, is_flux: bool) -> tuple[str, ...]:
    module = options.text("network_module", means="how adapters are made") or ""
    if not module.startswith("networks.lora"):
        options.note("network_module", "not modelled", f"{module}: taken as LoRA of that rank")
    given = dict(word.partition("=")[::2] for word in options.words("network_args"))
    if conv := given.pop("conv_dim", None):
        options.note("network_args", "not modelled", f"conv_dim={conv}: convolutions get no adapters here")
    blocks = given.pop("train_blocks", "all")
    if is_flux and blocks in ("single", "double"):
        return (rf"re:{'single_' if blocks == 'single' else ''}transformer_blocks\..*",)
    return script.targets


def _read_checkpoints(options: Options) -> Checkpoints:
    recomputes = options.flag("gradient_checkpointing", means="blocks are run again in backward")
    offloads = options.flag("cpu_offload_checkpointing")
    return "none" if not recomputes else "inputs_offloaded" if offloads else "blocks"


def _read_picture(options: Options, script: _NetworkScript, frozen: str, size: tuple[int, int], batch: int,
                  adapter: Adapter) -> PicturePlan:
    keeps_latents = _caches(options, "latents")
    keeps_texts = script.caches_texts and _caches(options, "text_encoder_outputs")
    trained = 0 if options.flag("network_train_unet_only") else script.texts
    if trained:
        options.assume("network_train_unet_only", f"text encoders train too, {trained} of them")
    before = [EncodingPass(images=options.count("vae_batch_size", 1))] if keeps_latents else []
    many = options.number("text_encoder_batch_size", batch, least=1) or batch
    before += [EncodingPass(texts=many)] if keeps_texts else []
    return PicturePlan(
        height=size[1], width=size[0], encodes_images=not keeps_latents,
        texts="all" if not keeps_texts else "first" if trained else "none", trained_texts=trained, text_adapter=adapter,
        casts_texts=True, text_tokens=options.number("t5xxl_max_token_length", 512 if "FLUX" in script.model else None),
        image_dtype="fp32" if options.flag("no_half_vae") else frozen, text_dtype=frozen, follows_inputs=True,
        swapped=_read_swap(options) if "FLUX" in script.model else (), preparations=tuple(before))


def _read_swap(options: Options) -> tuple[tuple[str, int], ...]:
    """library/flux_models.py, `enable_block_swap`: half of the number, and twice the rest."""
    count = options.number("blocks_to_swap", 18 if options.flag("split_mode") else 0) or 0
    if not count:
        return ()
    if options.flag("cpu_offload_checkpointing"):
        raise options.fail("blocks_to_swap", "sd-scripts refuses it with cpu_offload_checkpointing")
    if count // 2 > 17 or (count - count // 2) * 2 > 36:
        raise options.fail("blocks_to_swap", "at most 35 of FLUX.1's blocks can be swapped")
    options.note("blocks_to_swap", "not modelled", "these blocks lie on the host until they are needed: their memory "
                 "is left out, and so is the time of the copies")
    return ("transformer_blocks", count // 2), ("single_transformer_blocks", (count - count // 2) * 2)


def _read_optimizer(options: Options) -> str | None:
    for flag, name, means in (("use_8bit_adam", "adamw8bit", "states of AdamW in 8 bits"),
                              ("use_lion_optimizer", "momentum", "Lion, of one state")):
        if options.switch(flag, means):
            if options.get("optimizer_type"):
                raise options.fail(flag, "optimizer_type is given too; sd-scripts refuses both")
            return name
    if "." in str(options.get("optimizer_type")):
        options.note("optimizer_type", "not modelled", "a class of its own: taken as AdamW")
        return "adamw"
    return read_optimizer(options, "optimizer_type", "AdamW", _OPTIMIZERS)


def _set_batch(options: Options, plan: TrainingPlan, wanted: int) -> list[Edit] | None:
    times, rest = divmod(plan.micro_batch, wanted)
    if rest or options.get("dataset_config") is not None:
        return None
    more = _set("gradient_accumulation_steps")(options, plan, plan.accumulate * times) or []
    return [*(_set("train_batch_size")(options, plan, wanted) or []), *more]


def _cache(options: Options, plan: TrainingPlan, wanted: Any) -> list[Edit] | None:
    """Latents always; texts where their encoders do not train."""
    assert plan.picture is not None
    names = ["cache_latents"] * plan.picture.encodes_images
    if plan.picture.texts == "all" and not plan.picture.trained_texts and "v1-5" not in plan.model:
        names.append("cache_text_encoder_outputs")
    return [edit for name in names for edit in _set(name, True)(options, plan, True) or []] or None


def _set_size(options: Options, plan: TrainingPlan, wanted: int) -> list[Edit] | None:
    before = options.get("resolution")
    if before is None:
        return None
    return _set("resolution")(options, plan, f"{wanted},{wanted}" if isinstance(before, str) else wanted)


def _is_file(data: Mapping[str, Any]) -> bool:
    names = {*data, *(name for inner in data.values() if isinstance(inner, Mapping) for name in inner)}
    return {"network_module", "pretrained_model_name_or_path"} <= names


SD_SCRIPTS = JobProgram(
    name="sd-scripts", version="0.10.1", source="kohya-ss/sd-scripts library/train_util.py", read=read,
    is_file=_is_file, commands=tuple(f"{name}.py" for name in _SCRIPTS), config="config_file",
    is_command=lambda words: name_of(words[0]).endswith("_train_network.py"),
    config_names=("{}", "{}.toml"), switches=_SWITCHES,
    changes={"batch": _set_batch, "checkpoints": _set("gradient_checkpointing", True), "cache": _cache,
             "swap": lambda options, plan, wanted: _set("blocks_to_swap")(
                 options, plan, wanted) if "FLUX" in plan.model else None,
             "precision": _set("mixed_precision"), "optimizer": _set("optimizer_type", "AdamW8bit"),
             "quantize": lambda options, plan, wanted: None if plan.quantize == "fp8" else _set("fp8_base", True)(
                 options, plan, True), "length": _set_size})
