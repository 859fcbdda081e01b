"""Steps of denoisers: options of diffusers' scripts and of sd-scripts, what is on the device, a script's own peak."""
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analyzer import dry_run, read_job
from analyzer.tools.job import Job, JobError, read_command
from analyzer.tools.job.change import Changes
from analyzer.tools.job.plan import Adapter, EncodingPass, PicturePlan, Sharding, TrainingPlan
from analyzer.tools.job.screen import describe_job, describe_training
from analyzer.tools.job.training import profile_training

NETWORK = "--network_module networks.lora"
MODEL = "--pretrained_model_name_or_path"
SDXL = "stabilityai/stable-diffusion-xl-base-1.0"
DREAMBOOTH = "--instance_data_dir dog --instance_prompt dog"


def _read(text: str) -> tuple[TrainingPlan, PicturePlan]:
    plan = read_command(text.split()).plan
    assert isinstance(plan, TrainingPlan) and plan.picture is not None and plan.task == "denoise"
    return plan, plan.picture


@pytest.mark.parametrize(("script", "options", "fields"), [
    # defaults of the scripts: 512 pixels, 16 images, float32
    ("train_text_to_image", "--train_data_dir d", {
        "micro_batch": 16, "dtype": "fp32", "autocast": None, "adapter": None, "checkpoints": "none",
        "optimizer": "adamw", "height": 512, "texts": "all", "encodes_images": True, "image_dtype": "fp32"}),
    ("train_text_to_image", "--train_data_dir d --mixed_precision bf16 --use_ema", {
        "dtype": "fp32", "autocast": "bf16", "image_dtype": "bf16", "text_dtype": "bf16", "averages": True}),
    ("train_text_to_image", "--train_data_dir d --use_ema --offload_ema", {"averages": False}),
    ("train_text_to_image_sdxl", "--dataset_name d", {
        "height": 1024, "encodes_images": False, "texts": "none", "image_dtype": "fp32",
        "preparations": (EncodingPass(texts=1000, beside=("vae",)), EncodingPass(images=16, beside=("texts",)))}),
    ("train_text_to_image_lora_sdxl", "--dataset_name d --mixed_precision fp16", {
        "dtype": "fp16", "texts": "all", "image_dtype": "fp32", "text_dtype": "fp16",
        "adapter": Adapter(r=4, targets=("to_k", "to_q", "to_v", "to_out.0"), dtype="fp32")}),
    ("train_text_to_image_lora_sdxl", "--dataset_name d --mixed_precision fp16 --pretrained_vae_model_name_or_path v "
     "--train_text_encoder --gradient_checkpointing", {"image_dtype": "fp16", "trained_texts": 2, "text_dtype": "fp16",
                                                       "keeps_embedding_gradients": False}),
    ("train_dreambooth_lora_sdxl", f"{DREAMBOOTH} --train_text_encoder", {
        "trained_texts": 2, "keeps_embedding_gradients": True}),
    ("train_dreambooth", f"{DREAMBOOTH} --train_text_encoder --with_prior_preservation --class_data_dir c "
     "--class_prompt c", {"trained_texts": 1, "priors": True, "sequences": 8, "text_adapter": None}),
    ("train_dreambooth_lora", f"{DREAMBOOTH} --pre_compute_text_embeddings", {
        "texts": "none", "preparations": (EncodingPass(texts=1, beside=("denoiser", "vae")),)}),
    # the script deletes a list of its text encoders, and keeps their names
    ("train_dreambooth_lora_sdxl", f"{DREAMBOOTH} --mixed_precision bf16 --rank 8", {
        "micro_batch": 4, "texts": "idle", "dtype": "bf16", "preparations": (),
        "adapter": Adapter(r=8, targets=("to_k", "to_q", "to_v", "to_out.0"), dtype="bf16")}),
    ("train_dreambooth_lora_flux", f"{DREAMBOOTH} --cache_latents --optimizer prodigy", {
        "texts": "idle", "encodes_images": False, "text_tokens": 512, "optimizer": "adamw",
        "preparations": (EncodingPass(images=4, beside=("denoiser", "texts")),)}),
    ("train_dreambooth_lora_sd3", "--dataset_name d --instance_prompt p --caption_column text --use_8bit_adam", {
        "texts": "all", "optimizer": "adamw8bit", "text_tokens": 77, "preparations": ()}),
    ("train_dreambooth_flux", f"{DREAMBOOTH} --mixed_precision bf16 --gradient_checkpointing", {
        "dtype": "fp32", "checkpoints": "blocks", "preparations": (EncodingPass(texts=1, beside=("vae",)),)})])
def test_scripts_of_diffusers(script: str, options: str, fields: dict[str, Any]) -> None:
    plan, picture = _read(f"accelerate launch examples/{script}.py {MODEL} {SDXL} {options}")
    assert {name: getattr(picture if hasattr(picture, name) else plan, name) for name in fields} == fields


@pytest.mark.parametrize(("script", "options", "fields"), [
    # neither sdpa nor xformers: attention of its own, in float32; the text encoder trains, no cache
    ("train_network", "--resolution 512", {
        "micro_batch": 1, "dtype": "fp32", "attention": "eager", "trained_texts": 1, "texts": "all",
        "encodes_images": True, "follows_inputs": True, "optimizer": "adamw", "height": 512, "width": 512}),
    ("sdxl_train_network", "--resolution 1024,768 --mixed_precision bf16 --network_train_unet_only --sdpa "
     "--cache_latents_to_disk --cache_text_encoder_outputs --network_dim 32 --optimizer_type adafactor", {
         "height": 768, "width": 1024, "encodes_images": False, "texts": "none", "attention": None,
         "optimizer": "torch.optim:Adafactor", "preparations": (EncodingPass(images=1), EncodingPass(texts=1)),
         "adapter": Adapter(r=32, dtype="fp32", casts=False, targets=(
             "to_k", "to_q", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out"))}),
    ("sdxl_train_network", "--resolution 1024 --mixed_precision bf16 --full_bf16 --no_half_vae "
     "--gradient_checkpointing --cpu_offload_checkpointing", {
         "image_dtype": "fp32", "text_dtype": "bf16", "trained_texts": 2, "checkpoints": "inputs_offloaded"}),
    # half of the number of blocks of two streams, and twice the rest of those of one
    ("flux_train_network", "--resolution 1024 --mixed_precision bf16 --fp8_base --blocks_to_swap 18 "
     "--cache_text_encoder_outputs --network_args train_blocks=single", {
         "quantize": "fp8", "texts": "first", "trained_texts": 1,
         "swapped": (("transformer_blocks", 9), ("single_transformer_blocks", 18)),
         "adapter": Adapter(r=4, targets=(r"re:single_transformer_blocks\..*",), dtype="fp32", casts=False)}),
    ("flux_train_network", "--resolution 1024 --mixed_precision bf16 --split_mode", {
        "swapped": (("transformer_blocks", 9), ("single_transformer_blocks", 18)), "texts": "all"})])
def test_sd_scripts(script: str, options: str, fields: dict[str, Any]) -> None:
    plan, picture = _read(f"accelerate launch {script}.py {MODEL} m.safetensors {NETWORK} {options}")
    assert {name: getattr(picture if hasattr(picture, name) else plan, name) for name in fields} == fields


def test_gradients_of_embeddings_under_sd_scripts() -> None:
    """Its scripts let embeddings have them for the sake of checkpoints alone."""
    command = f"train_network.py {MODEL} m {NETWORK} --resolution 512"
    found = [_read(command + more)[1].keeps_embedding_gradients for more in ("", " --gradient_checkpointing")]
    assert found == [False, True]


def test_a_toml_of_sd_scripts_is_changed_in_its_table(tmp_path: Path) -> None:
    (tmp_path / "data.toml").write_text("[general]\nresolution = 768\n[[datasets]]\nbatch_size = 2\n[[datasets]]\n"
                                        "resolution = [1024, 512]\nbatch_size = 6\n")
    path = tmp_path / "a.toml"
    path.write_text("[model]\npretrained_model_name_or_path = 'sd_xl.safetensors'\n[net]\nnetwork_module = "
                    "'networks.lora'\nnetwork_dim = 8 # small\n[data]\n"
                    f"dataset_config = '{tmp_path / 'data.toml'}'\nlearning_rote = 1\n")
    job = read_job(path)
    assert isinstance(job.plan, TrainingPlan) and job.plan.picture is not None
    assert (job.program.name, job.plan.model, job.plan.micro_batch) == ("sd-scripts", SDXL, 6)
    assert (job.plan.picture.width, job.plan.picture.height) == (1024, 512)  # the most pixels of a pass
    assert [(each.name, each.place) for each in job.missing] == [("learning_rote", f"{path}:8")]
    rank = next(each for each in job.readings if each.name == "network_dim")
    assert rank.place == f"{path}:5"
    edits = [edit for axis, value in (("checkpoints", True), ("optimizer", "adamw8bit"), ("quantize", "nf4"))
             for edit in job.program.changes[axis](job.options, job.plan, value) or []]
    text = job.change_text(edits)
    assert "network_dim = 8 # small" in text and "gradient_checkpointing = true" in text
    with pytest.raises(JobError, match="fp8_base: true: sd-scripts refuses weights of 8 bits without mixed_precision"):
        job.change(edits)
    assert isinstance(job.change(edits[:2]).plan, TrainingPlan)


@pytest.mark.parametrize(("command", "message"), [
    (f"train_dreambooth_lora_qwen_image.py {MODEL} m", "train_dreambooth_lora_qwen_image.py is not read; these are: "),
    ("train_dreambooth.py --instance_data_dir d", "pretrained_model_name_or_path: is not there"),
    (f"train_dreambooth.py {MODEL} m", "instance_data_dir: is not there, nor is dataset_name"),
    (f"train_dreambooth_lora_sdxl.py {MODEL} m --dataset_name d --caption_column t", "instance_prompt: is not there"),
    (f"train_dreambooth.py {MODEL} m {DREAMBOOTH} --dataset_name d", "dataset_name: d: instance_data_dir is given too"),
    (f"train_dreambooth.py {MODEL} m {DREAMBOOTH} --with_prior_preservation", "class_data_dir: is not there"),
    (f"train_dreambooth.py {MODEL} m {DREAMBOOTH} --train_text_encoder --pre_compute_text_embeddings",
     "pre_compute_text_embeddings: true: the script refuses it with train_text_encoder"),
    (f"train_text_to_image.py {MODEL} m", "train_data_dir: is not there"),
    (f"lumina_train_network.py {MODEL} m {NETWORK}", "lumina_train_network.py is not read; these are: train_network, "),
    (f"train_network.py {MODEL} m --resolution 512", "network_module: is not there"),
    (f"train_network.py {MODEL} m {NETWORK}", "resolution: is not there"),
    (f"train_network.py {MODEL} m {NETWORK} --resolution big", "resolution: big: must be one or two whole"),
    (f"sdxl_train_network.py {MODEL} m {NETWORK} --resolution 1024 --cache_text_encoder_outputs",
     "refuses it without network_train_unet_only"),
    (f"flux_train_network.py {MODEL} m {NETWORK} --resolution 1024 --blocks_to_swap 36",
     "blocks_to_swap: 36: at most 35"),
    (f"train_network.py {MODEL} m {NETWORK} --resolution 512 --full_bf16",
     "full_bf16: true: sd-scripts refuses it without mixed_precision bf16"),
    (f"train_network.py {MODEL} m {NETWORK} --resolution 512 --optimizer_type Adamw8",
     "is none of the 23 that are known; did you mean AdamW or AdamW8bit")])
def test_what_scripts_refuse(command: str, message: str) -> None:
    with pytest.raises(JobError) as error:
        read_command(["accelerate", "launch", *command.split()])
    assert message in str(error.value)


# A small pipeline, and what a script does with it.

PIPELINE: dict[str, dict[str, Any]] = {
    "unet": {"_class_name": "UNet2DConditionModel", "sample_size": 32, "block_out_channels": [64, 128],
             "layers_per_block": 1, "cross_attention_dim": 64, "attention_head_dim": 8, "norm_num_groups": 32,
             "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
             "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"]},
    "vae": {"_class_name": "AutoencoderKL", "block_out_channels": [32, 64], "latent_channels": 4,
            "down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2},
    "text_encoder": {"_class_name": "CLIPTextModel", "hidden_size": 64, "intermediate_size": 128,
                     "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 1000, "projection_dim": 64}}
SCRIPT = """
import json, sys, torch
from accelerate import Accelerator
from diffusers import AutoencoderKL, UNet2DConditionModel
from peft import LoraConfig
from transformers import CLIPTextConfig, CLIPTextModel

configs, recomputes = json.loads(sys.argv[1]), int(sys.argv[2])
accelerator = Accelerator(mixed_precision="bf16")
unet = UNet2DConditionModel.from_config(configs["unet"])
vae = AutoencoderKL.from_config(configs["vae"])
text = CLIPTextModel(CLIPTextConfig(**configs["text_encoder"])).eval()
for part in (unet, vae, text):
    part.requires_grad_(False)
    part.to(accelerator.device, dtype=torch.bfloat16)
if recomputes:
    unet.enable_gradient_checkpointing()
unet.add_adapter(LoraConfig(r=4, init_lora_weights="gaussian", target_modules=["to_k", "to_q", "to_v", "to_out.0"]))
optimizer = torch.optim.AdamW([p for p in unet.parameters() if p.requires_grad])
unet, optimizer = accelerator.prepare(unet, optimizer)
unet.train()
for _ in range(2):
    pixels = torch.zeros(4, 3, 256, 256, device="cuda")
    latents = vae.encode(pixels.to(torch.bfloat16)).latent_dist.sample() * vae.config.scaling_factor
    noise = torch.randn_like(latents)
    words = text(torch.ones(4, 77, dtype=torch.int64, device="cuda"))[0]
    steps = torch.randint(0, 1000, (4,), device="cuda")
    found = unet(latents * 0.5 + noise * 0.5, steps, words, return_dict=False)[0]
    accelerator.backward(torch.nn.functional.mse_loss(found.float(), noise.float()))
    accelerator.clip_grad_norm_([p for p in unet.parameters() if p.requires_grad], 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline as people have one: a folder for each component."""
    path = tmp_path_factory.mktemp("pipeline")
    index: dict[str, Any] = {"_class_name": "StableDiffusionPipeline"}
    for name, config in PIPELINE.items():
        (path / name).mkdir()
        (path / name / "config.json").write_text(json.dumps(config))
        index[name] = ["diffusers", config["_class_name"]]
    (path / "model_index.json").write_text(json.dumps(index))
    return path


def _job(folder: Path, more: str = "") -> Job:
    return read_command(f"train_text_to_image_lora.py {MODEL} {SDXL} --train_data_dir d --resolution 256 "
                        f"--train_batch_size 4 --mixed_precision bf16 {more}".split()).with_model(str(folder))


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_step_needs_what_a_script_itself_needs(folder: Path, tmp_path: Path, recomputes: bool) -> None:
    for module in ("accelerate", "peft", "diffusers"):
        pytest.importorskip(module)
    (tmp_path / "train.py").write_text(SCRIPT)
    run = dry_run(tmp_path / "train.py", [json.dumps(PIPELINE), str(int(recomputes))], device="h100", steps=2)
    assert run.error is None, run.format_error()
    job = _job(folder, "--gradient_checkpointing" if recomputes else "")
    found = job.profile("h100").profile
    assert found.peak_allocated_bytes == pytest.approx(run.profile.peak_allocated_bytes, rel=0.002)
    assert found.optimizer_bytes == run.profile.optimizer_bytes


def test_what_is_beside_the_denoiser(folder: Path) -> None:
    pytest.importorskip("diffusers")
    def profile(checkpoints: Any = "none", **fields: Any) -> Any:
        plan = TrainingPlan(model=str(folder), task="denoise", length=1, micro_batch=1, autocast="bf16",
                            checkpoints=checkpoints,
                            adapter=Adapter(r=4, dtype="fp32", casts=False),
                            picture=PicturePlan(**{"height": 64, "width": 64, **fields}))
        return profile_training(plan, "h100")

    whole = profile(texts="idle")
    assert profile(texts="none", encodes_images=False).profile.params < whole.profile.params
    trained = profile(trained_texts=1, text_adapter=Adapter(r=4, dtype="fp32"))
    assert trained.profile.optimizer_bytes > whole.profile.optimizer_bytes
    again = profile(trained_texts=1, text_adapter=Adapter(r=4, dtype="fp32"), keeps_embedding_gradients=True)
    assert again.profile.optimizer_bytes == trained.profile.optimizer_bytes  # embeddings have gradients alone
    # They stay: the forward pass finds those of 1,000 tokens, and of 77 positions in whole 512 bytes.
    assert again.profile.peak_by_category["gradient"] == 1000 * 64 * 4 + 39 * 512
    assert "gradient" not in trained.profile.peak_by_category
    before = profile(encodes_images=False, preparations=(EncodingPass(images=64, beside=("denoiser", "texts")),))
    assert before.fullest is before.preparations[0] and before.fullest.params == whole.profile.params
    assert "memory is fullest before the first step" in describe_training(before)


def test_ranks_share_all_that_a_step_of_images_has(folder: Path) -> None:
    pytest.importorskip("diffusers")
    plan = TrainingPlan(model=str(folder), task="denoise", length=1, micro_batch=2, dtype="fp32", ranks=2,
                        picture=PicturePlan(height=64, width=64), sharding=Sharding(kind="fsdp", dtype="bf16"))
    many, one = profile_training(plan, "h100").profile, profile_training(replace(plan, ranks=1), "h100").profile
    assert many.param_bytes == pytest.approx(one.param_bytes / 2, rel=0.01)
    assert many.optimizer_bytes == pytest.approx(one.optimizer_bytes / 2, rel=0.01)


def test_switches_say_what_they_mean_where_they_are_given() -> None:
    for command, names in ((f"train_dreambooth_lora_flux.py {MODEL} m {DREAMBOOTH} --cache_latents --use_8bit_adam",
                            ["cache_latents", "use_8bit_adam"]),
                           (f"train_network.py {MODEL} m {NETWORK} --resolution 512 --xformers --use_8bit_adam "
                            "--cache_latents", ["cache_latents", "xformers", "use_8bit_adam"])):
        told = {each.name: each.meaning for each in read_command(command.split()).readings}
        assert all(told[name] for name in names)
        assert not {"train_text_encoder", "sdpa", "mem_eff_attn", "cache_latents_to_disk"} & set(told)


def test_what_to_change_in_a_command(folder: Path) -> None:
    pytest.importorskip("diffusers")
    job = _job(folder, "--resolution 1024 --train_batch_size 64")
    assert "64 images of 1,024 x 1,024" in " ".join(describe_job(job).split())
    changes = Changes(job, lambda job: profile_training(job.plan, "l4"))  # type: ignore[arg-type]
    found = changes.find()
    assert found is not None and found.fits and found.job is not None
    text = job.change_text(found.edits)
    assert "--train_batch_size" in text and " true" not in text
