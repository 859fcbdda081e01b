"""Pipelines of images: calls of their modules, tokens shared by devices, watts, and what is read off configs."""
import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from analyzer.cli import main
from analyzer.errors import InputError, MissingExtraError, TargetError
from analyzer.hardware import find_device
from analyzer.hardware.power import Work, add_work, joules_range, watts_of
from analyzer.tools.diffusion import Component, Degrees, DiffusionPart, DiffusionProfile, Pipeline, profile_diffusion
from analyzer.tools.diffusion.pipeline import read_pipeline
from analyzer.tools.diffusion.run import Runs, compose, find_mean_work
from analyzer.tools.diffusion.sharing import Attended
from analyzer.zoo import input_spec
from analyzer.zoo.published_shape import list_pipelines

CONSTANTS = {"host_share": 1.0, "ring_seconds": 1e-3, "exchange_share": 1.0, "idle_share": 0.2, "kernel_share": 0.4,
             "product_share": 1.0, "traffic_share": 0.5, "spread": 0.25}


@pytest.mark.parametrize(("work", "share"), [
    (Work({"launch": 1.0}, 0.0, 0.0), 0.2), (Work({"host": 3.0}, 0.0, 0.0), 0.2),
    (Work({"communication": 2.0}, 0.0, 0.0), 0.2), (Work({"latency": 2.0}, 0.0, 0.0), 0.2 + 0.4),
    (Work({"arithmetic": 2.0}, 0.6, 0.0), 0.2 + 0.4 + 0.3), (Work({"memory": 1.0}, 0.0, 0.6), 0.2 + 0.4 + 0.3),
    (Work({"arithmetic": 1.0, "launch": 1.0}, 0.2, 0.0), (0.2 + 0.4 + 0.2 + 0.2) / 2),
    (Work({"arithmetic": 1.0, "launch": 1.0}, 0.9, 0.5), (1 + 0.2) / 2)])
def test_watts_are_of_what_is_done(work, share):
    """Of an H100's 700 W; kernels take the whole at most."""
    assert watts_of(work, find_device("h100"), CONSTANTS) == pytest.approx(share * 700)


def test_watts_that_are_not_known():
    device, work = find_device("h100"), Work({"memory": 1.0}, 0.0, 0.5)
    assert watts_of(work, replace(device, power_watts=None), CONSTANTS) is None
    assert watts_of(Work({}, 0.0, 0.0), device, CONSTANTS) is None
    assert joules_range(100.0, CONSTANTS, (2.0, 2.0, 2.0)) == pytest.approx((80.0, 125.0))
    sure = {**CONSTANTS, "spread": 0.0}
    assert joules_range(100.0, sure, (2.0, 1.6, 3.0)) == pytest.approx((80.0, 150.0))


def test_work_adds_up():
    found = add_work([(2, Work({"memory": 1.0}, 0.1, 0.5)), (0.5, Work({"memory": 1.0, "host": 2.0}, 0.2, 0.0))])
    assert found == Work({"memory": 2.5, "host": 1.0}, pytest.approx(0.3), 1.0)


class Attends(nn.Module):
    """A denoiser of 2 heads, of whatever kind."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def forward(self, latents, text):
        q, k, v = (part.unflatten(-1, (2, 32)).transpose(1, 2) for part in self.qkv(latents).chunk(3, -1))
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return out.transpose(1, 2).flatten(2) + text


@pytest.fixture
def pipeline():
    with torch.device("meta"):
        denoiser, text, decoder = Attends().to(torch.bfloat16), nn.Linear(32, 64), nn.Conv2d(4, 3, 3)
        latents, hidden = torch.ones(2, 256, 64, dtype=torch.bfloat16), torch.ones(2, 256, 64, dtype=torch.bfloat16)
        return Pipeline("mine", (Component("text", text, (torch.ones(2, 7, 32),), {}, 2),),
                        Component("denoiser", denoiser, (latents,), {"text": hidden}, 20),
                        Component("decoder", decoder, (torch.ones(2, 4, 16, 16),)), 2, 128, 128, None, 20, 256)


def test_any_modules(pipeline):
    """Two texts, 20 steps, a decoder; weights of all are there, and what one call takes beside them."""
    found = profile_diffusion(pipeline, device="h100", carbon=400.0)
    assert [(part.name, part.calls) for part in found.parts] == [("text", 2), ("denoiser", 20), ("decoder", 1)]
    assert found.seconds == pytest.approx(sum(part.calls * part.seconds for part in found.parts))
    weights = [part.param_bytes for part in found.parts]
    assert weights == [(32 + 1) * 64 * 4, (64 + 1) * 192 * 2, (4 * 9 + 1) * 3 * 4]
    assert found.peak_allocated_bytes == sum(weights) + max(
        part.peak_allocated_bytes - part.param_bytes for part in found.parts)
    assert found.joules == pytest.approx(found.watts * found.seconds / 2)
    assert found.grams == pytest.approx(found.joules / 3.6e6 * 400)
    assert DiffusionProfile.from_json(found.to_json()) == found
    assert "2 images of 128 x 128, 20 steps" in found.summary() and "g of CO2 for one image" in found.summary()


def test_attention_is_chosen(pipeline):
    """FlashAttention where it is asked for; what was allowed before is allowed afterwards."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    said = [profile_diffusion(pipeline, device="h100", attention=name).assumptions[0] for name in ("flash", "sdpa")]
    assert ["FlashAttention 2" in text for text in said] == [True, False] and "PyTorch chooses" in said[1]
    assert torch.backends.cuda.cudnn_sdp_enabled() is before
    with pytest.raises(InputError, match=r"attention='eager'\): must be flash or sdpa"):
        profile_diffusion(pipeline, attention="eager")


class Masked(nn.Module):
    """Attention of 256 tokens to themselves and to ``keys``, both with a mask where ``is_masked``."""

    def __init__(self, keys, is_masked):
        super().__init__()
        self.keys, self.is_masked = keys, is_masked

    def forward(self, latents, text):
        for other in (latents, text[:, :, :self.keys]):
            mask = torch.ones(2, 1, 1, other.shape[2], dtype=torch.bool, device=latents.device)
            latents = nn.functional.scaled_dot_product_attention(
                latents, other, other, attn_mask=mask if self.is_masked else None)
        return latents


def test_attention_among_all_tokens_has_no_mask(pipeline):
    """What xDiT calls takes none; attention to a text keeps its own. PyTorch's kernels for masks are slower."""
    with torch.device("meta"):
        inputs = torch.ones(2, 2, 4096, 64, dtype=torch.bfloat16)
    seconds = {}
    for keys in (8, 4096):
        for is_masked in (True, False):
            found = replace(pipeline, tokens=4096, denoiser=Component("denoiser", Masked(keys, is_masked), (inputs,),
                                                                      {"text": inputs}))
            for attention in ("flash", "sdpa"):
                seconds[keys, is_masked, attention] = profile_diffusion(
                    found, device="a100", attention=attention).parts[1].bounds
    kernels = {key: sum(value for bound, value in bounds.items() if bound != "launch")
               for key, bounds in seconds.items()}
    assert kernels[4096, True, "flash"] == pytest.approx(kernels[4096, False, "flash"])
    assert kernels[8, True, "flash"] > kernels[8, False, "flash"]
    assert kernels[4096, True, "sdpa"] > 1.2 * kernels[4096, False, "sdpa"]


def part(**fields):
    return DiffusionPart(**{"name": "denoiser", "calls": 10, "seconds": 0.1, "flops": 10**13, "product_seconds": 0.04,
                            "traffic_seconds": 0.02, "bounds": {
        "launch": 0.02, "arithmetic": 0.07, "memory": 0.01, "latency": 0.0, "communication": 0.0}, **fields})


def spread(degrees, attentions, host_seconds=0.005, tokens=1000):
    pipeline = Pipeline("mine", (), Component("denoiser", nn.Identity()), None, 8, 1, 1, None, 10, tokens)
    return compose(pipeline, Runs((part(),), "flash", tuple(attentions), host_seconds), find_device("h100"), degrees,
                   constants=CONSTANTS).parts[0]


INNER = Attended(rows=16, heads=8, tokens=1000, keys=1000, width=64, dtype=torch.bfloat16, calls=2)


def test_tokens_are_shared():
    """On 4 devices the kernels of 80 ms take 20, the host, of 5 ms, is never waited for. In 2 layers q, k, v and the
    output have 16 * 1000 * 8 * 64 elements of 2 bytes.
    """
    assert spread(Degrees(), [INNER]).seconds == pytest.approx(0.1)
    bounds = spread(Degrees(ulysses=4), [INNER]).bounds
    assert bounds["launch"] == 0
    each = 16 * 1000 * 512 * 2 / 4
    sent = 2 * 4 * each * 3 / 4  # bytes that leave a device: 3 of 4 parts of q, k, v and the output, in 2 layers
    assert sent / 450e9 < bounds["communication"] < 3 * sent / 450e9 + 2 * 4 * 5e-5
    moved = 2 * 4 * 4 * each     # read and written, before and after, by copies of another order
    kernels = sum(bounds[bound] for bound in ("arithmetic", "memory", "latency"))
    assert moved / 3.352e12 < kernels - 0.08 / 4 < 4 * moved / 3.352e12
    ring = spread(Degrees(ring=4), [INNER])
    assert ring.seconds == pytest.approx(sum(ring.bounds.values()))
    assert ring.product_seconds == pytest.approx(0.01) and ring.traffic_seconds == pytest.approx(0.005)
    slow = spread(Degrees(ring=4), [INNER], host_seconds=0.5)
    assert slow.seconds == pytest.approx(0.5 + 2 * 4 * 1e-3)  # the host's, and of two layers of four blocks


@pytest.mark.parametrize(("attention", "share"), [
    (INNER._replace(tokens=1003, keys=1003), (250 + 3) / 1003), (INNER._replace(tokens=1004, keys=1004), 251 / 1004)])
def test_text_beside_latents(attention, share):
    """4 tokens of text are cut among 4 devices, 3 are on each."""
    assert spread(Degrees(ulysses=4), [attention]).product_seconds == pytest.approx(share * 0.04)


def test_text_that_is_looked_at():
    """Each device makes keys and values of all 300 tokens: 2 products of 16 * 300 rows and 512 x 512, in 2 layers."""
    share = 2 * 2 * 2 * 16 * 300 * 512**2 / 10**13
    found = spread(Degrees(ulysses=4), [INNER, INNER._replace(keys=300)])
    assert found.product_seconds == pytest.approx((share + (1 - share) / 4) * 0.04)


def test_one_of_the_devices_decodes():
    """The denoiser's 10 calls on each of 4 devices; the decoder's on one, for which the others wait."""
    decoder = part(calls=1, bounds={"memory": 0.4}, product_seconds=0.0, traffic_seconds=0.2)
    found = find_mean_work([part(), decoder], 1, 4)
    assert found.spent["memory"] == pytest.approx(10 * 0.01 + 0.4 / 4)
    assert found.spent["host"] == pytest.approx(0.4 * 3 / 4)
    assert (found.product_seconds, found.traffic_seconds) == pytest.approx((0.4, 0.2 + 0.05))
    assert find_mean_work([part(traffic_seconds=None)], 1, 4) is None


def test_heads_that_cannot_be_spread():
    with pytest.raises(InputError, match="--ulysses 3 does not divide its 8 heads of attention"):
        spread(Degrees(ulysses=3), [INNER])


def test_what_is_not_known_is_told(pipeline):
    found = profile_diffusion(pipeline, device=replace(find_device("h100"), power_watts=None))
    assert found.watts is None and "watts and joules are not known" in found.summary()
    assert "seconds are not known: a figure of h100_sxm" in replace(
        found, parts=(replace(found.parts[0], seconds=None),)).summary()


def test_what_has_no_tokens_is_not_shared():
    pipeline = Pipeline("mine", (), Component("denoiser", nn.Identity()), None, 1, 1, 1, None, 10)
    with pytest.raises(InputError, match="this denoiser is none, leave out --ring and --ulysses"):
        compose(pipeline, Runs((part(),), "flash"), find_device("h100"), Degrees(2, 1), constants=CONSTANTS)
    with pytest.raises(InputError, match="each must be 1 or more"):
        profile_diffusion(pipeline, degrees=Degrees(0, 1))


def test_configs_are_whole():
    """One denoiser, a decoder and text encoders, each with its class."""
    for fields in list_pipelines().values():
        parts = {name: value["_class_name"] for name, value in fields.items() if isinstance(value, dict)}
        assert len({"unet", "transformer"} & set(parts)) == 1 and {"vae", "text_encoder"} <= set(parts)


def test_without_diffusers(monkeypatch):
    monkeypatch.setattr(input_spec.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"diffusers is not installed; pip install -e '.\[diffu"):
        read_pipeline("FLUX.1-dev")


@pytest.mark.parametrize(("options", "said"), [
    (["--tp", "2"], "--tp: of models that generate text"), (["--cache", "paged"], "--cache: of models that generate"),
    (["--concurrency", "2", "--engine", "server"], "--concurrency, --engine: of models that generate text"),
    (["--server", "sglang"], "--server: of models that generate text"),
    (["--memory-share", "0"], "--memory-share: of models that generate text")])
def test_options_of_text_are_refused(options, said, capsys):
    assert main(["generate", "diffusers:FLUX.1-dev", *options]) == 2
    assert said in capsys.readouterr().err


# ---------------------------------------------------------------- with diffusers


SMALL = {
    "_class_name": "PixArtSigmaPipeline",
    "transformer": {"_class_name": "PixArtTransformer2DModel", "num_attention_heads": 2, "attention_head_dim": 8,
                    "num_layers": 1, "cross_attention_dim": 16, "caption_channels": 24, "sample_size": 32,
                    "use_additional_conditions": False},
    "text_encoder": {"_class_name": "T5EncoderModel", "d_model": 24, "d_kv": 8, "d_ff": 32, "num_layers": 1,
                     "num_heads": 2, "vocab_size": 64},
    "vae": {"_class_name": "AutoencoderKL", "latent_channels": 4, "block_out_channels": [32, 32, 32, 32],
            "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}}


def test_a_folder_is_read(tmp_path):
    """Guidance doubles the batch and encodes two texts; 300 tokens of text and 20 steps are the pipeline's own."""
    pytest.importorskip("diffusers")
    index = {name: ["diffusers", value["_class_name"]] if isinstance(value, dict) else value
             for name, value in SMALL.items()}
    (tmp_path / "model_index.json").write_text(json.dumps({**index, "tokenizer": ["transformers", "T5Tokenizer"]}))
    for name, value in SMALL.items():
        if isinstance(value, dict):
            (tmp_path / name).mkdir()
            (tmp_path / name / "config.json").write_text(json.dumps(value))
    found = read_pipeline(tmp_path, 3)
    assert (found.height, found.width, found.frames, found.steps, found.tokens) == (256, 256, None, 20, 256)
    assert found.denoiser.kwargs["hidden_states"].shape == (6, 4, 32, 32) and found.denoiser.calls == 20
    assert found.denoiser.kwargs["encoder_hidden_states"].shape == (6, 300, 24)
    assert [(part.calls, part.args[0].shape) for part in found.text] == [(2, (3, 300))]
    assert found.decoder.args[0].shape == (3, 4, 32, 32)
    plain = read_pipeline(tmp_path, 3, guidance=1, height=128, width=64, steps=4)
    assert plain.denoiser.kwargs["hidden_states"].shape == (3, 4, 16, 8) and plain.denoiser.calls == 4
    assert plain.text[0].calls == 1
    assert profile_diffusion(found, device="h100").seconds > 0


@pytest.mark.parametrize(("name", "tokens", "billions"), [
    ("PixArt-Sigma-XL-2-1024-MS", 4096, 0.611), ("stable-diffusion-3.5-medium", 4096, 2.24),
    ("stable-diffusion-xl-base-1.0", None, 2.57), ("FLUX.1-dev", 4096, 11.9), ("CogVideoX-2b", 13 * 30 * 45, 1.69),
    ("FLUX.1-schnell", 4096, 11.9), ("stable-diffusion-3-medium-diffusers", 4096, 2.03),
    ("stable-diffusion-3.5-large", 4096, 8.06), ("PixArt-XL-2-1024-MS", 4096, 0.611), ("Qwen-Image", 4096, 20.4),
    ("Z-Image-Turbo", None, 6.15), ("Lumina-Image-2.0", 4096, 2.61), ("Chroma1-HD", 4096, 8.9),
    ("AuraFlow-v0.3", 4096, 6.83), ("HunyuanDiT-v1.2-Diffusers", 4096, 1.5),
    ("Sana_600M_1024px_diffusers", 1024, 0.592),
    ("Sana_1600M_1024px_diffusers", 1024, 1.604), ("SANA1.5_4.8B_1024px_diffusers", 1024, 4.72),
    ("CogVideoX-5b", 13 * 30 * 45, 5.57), ("HunyuanVideo", 33 * 45 * 80, 12.8), ("LTX-Video", 21 * 16 * 22, 1.92),
    ("Wan2.1-T2V-1.3B-Diffusers", 21 * 30 * 52, 1.42), ("Wan2.1-T2V-14B-Diffusers", 21 * 30 * 52, 14.3),
    ("mochi-1-preview", 4 * 30 * 53, 10.03)])
def test_known_pipelines(name, tokens, billions):
    """Parameters as the model cards round them, in the sizes that pipelines take by default."""
    pytest.importorskip("diffusers")
    found = read_pipeline(name)
    count = sum(p.numel() for p in found.denoiser.module.parameters())
    assert found.tokens == tokens and count == pytest.approx(billions * 1e9, rel=4e-3)


def test_weights_that_stay_in_float32():
    """Those that a class of diffusers names; cosines of positions, which no file has, stay as they are made."""
    pytest.importorskip("diffusers")
    one = {"_class_name": "WanTransformer3DModel", "num_layers": 1, "num_attention_heads": 2, "ffn_dim": 64}
    found = read_pipeline({"_class_name": "WanPipeline", "transformer": one, "transformer_2": one, "vae": {
        "_class_name": "AutoencoderKLWan", "base_dim": 32}}, height=64, width=64, frames=5)
    first, second = found.denoiser.module.first, found.denoiser.module.second  # Wan 2.2 has one for each kind of step
    assert {first.scale_shift_table.dtype, first.rope.freqs_cos.dtype} == {torch.float32}
    assert first.blocks[0].attn1.to_q.weight.dtype == torch.bfloat16
    part = profile_diffusion(found, device="h100").parts[0]
    assert part.param_bytes == sum(p.numel() * p.itemsize for m in (first, second) for p in m.parameters())


def test_a_batch_that_is_repeated_for_guidance():
    """Z-Image repeats its latents where others double a list."""
    pytest.importorskip("diffusers")
    config = {"_class_name": "ZImagePipeline", "vae": SMALL_VAE, "transformer": {
        "_class_name": "ZImageTransformer2DModel", "n_layers": 1, "n_refiner_layers": 1}}
    assert [len(read_pipeline(config, 3, guidance=scale).denoiser.kwargs["x"]) for scale in (5.0, 0.0)] == [6, 3]


@pytest.mark.parametrize(("config", "said"), [
    ("none-such", "no folder with model_index.json, no JSON file"), ({"_class_name": "Nope"}, "no pipeline 'Nope'"),
    ({"_class_name": "FluxPipeline"}, "has no config of a transformer or unet"),
    ({"_class_name": "LattePipeline", "transformer": {"_class_name": "LatteTransformer3DModel"}},
     "LattePipeline: TypeError: .*\n  give whole configs"),
    ({"_class_name": "LTX2Pipeline", "transformer": {"_class_name": "LTX2VideoTransformer3DModel", "num_layers": 1}},
     "takes audio_hidden_states, audio_encoder_hidden_states, unknown here; call profile_diffusion from Python")])
def test_what_is_no_pipeline(config, said):
    pytest.importorskip("diffusers")
    with pytest.raises((TargetError, InputError), match=said):
        read_pipeline(config)


SMALL_VAE = {"_class_name": "AutoencoderKL", "block_out_channels": [32, 32], "down_block_types": [
    "DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}


@pytest.mark.parametrize(("pipeline", "transformer", "size"), [
    ("Lumina2Pipeline", {"_class_name": "Lumina2Transformer2DModel", "num_layers": 1, "num_refiner_layers": 1}, 1024),
    ("Flux2Pipeline", {"_class_name": "Flux2Transformer2DModel", "num_layers": 1, "num_single_layers": 1}, 256),
    ("ZImagePipeline", {"_class_name": "ZImageTransformer2DModel", "n_layers": 1, "n_refiner_layers": 1}, 1024),
    ("HunyuanDiTPipeline", {"_class_name": "HunyuanDiT2DModel", "num_layers": 2, "sample_size": 64, "patch_size": 2,
                            "in_channels": 4, "hidden_size": 1408}, 128),
    ("CogView4Pipeline", {"_class_name": "CogView4Transformer2DModel", "num_layers": 1}, 256)])
def test_denoisers_that_take_more(pipeline, transformer, size):
    """Counted tokens of texts, coordinates of four axes, lists of images, sizes and crops, two texts. Sizes are of
    their own code: 64 or 128 latents of two or eight pixels, or 1,024.
    """
    pytest.importorskip("diffusers")
    found = read_pipeline({"_class_name": pipeline, "transformer": transformer, "vae": SMALL_VAE})
    assert found.height == size
    assert profile_diffusion(found, device="h100").seconds > 0


@pytest.mark.parametrize(("frames", "latents"), [(81, 22), (85, 22), (1, 2)])
def test_frames_are_padded_to_whole_patches(frames, latents):
    """Four frames a latent, the first alone; a patch is two latents, of which all but the padding are decoded."""
    pytest.importorskip("diffusers")
    found = read_pipeline({
        "_class_name": "CogVideoXPipeline", "transformer": {
            "_class_name": "CogVideoXTransformer3DModel", "num_layers": 1, "num_attention_heads": 2, "patch_size_t": 2,
            "patch_bias": False, "use_rotary_positional_embeddings": True},
        "vae": {"_class_name": "AutoencoderKLCogVideoX", "block_out_channels": [32] * 4}}, height=64, width=64,
        frames=frames)
    assert found.denoiser.kwargs["hidden_states"].shape[1] == latents
    assert found.decoder.args[0].shape[2] == (frames - 1) // 4 + 1


def test_sizes_that_nobody_says():
    pytest.importorskip("diffusers")
    config = {"_class_name": "StableDiffusionPipeline", "unet": {"_class_name": "UNet2DConditionModel"},
              "vae": SMALL_VAE}
    with pytest.raises(InputError, match=r"nor the config of its unet says a height; give height= \(--height\)"):
        read_pipeline(config)


def test_sizes_that_cannot_be():
    pytest.importorskip("diffusers")
    with pytest.raises(InputError, match=r"read_pipeline\(batch=0\): must be 1 or more"):
        read_pipeline(SMALL, 0)
    with pytest.raises(InputError, match="frames=9: PixArtSigmaPipeline makes images"):
        read_pipeline(SMALL, frames=9)
