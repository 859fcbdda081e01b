"""Prompts with pictures and videos: tokens by the processors' rules, the tower's kernels, time and memory."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from transformers.models.gemma4.image_processing_gemma4 import get_aspect_ratio_preserving_size
from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas
from transformers.models.llama4.image_processing_llama4 import find_supported_resolutions, get_best_fit
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.pixtral.image_processing_pixtral import get_resize_output_image_size
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as resize_video

from analyzer.errors import InputError
from analyzer.tools.serving import Batch, Chunk, Layout, PassTimer, make_deployment, profile_served, read_served_model
from analyzer.tools.serving.picture import Size, count_pictured
from analyzer.tools.serving.served_model import AttentionKernel, ServedModel
from analyzer.zoo.target import load_target

SIZES = [(1024, 768), (640, 480), (333, 1777), (1920, 1080), (90, 60), (4000, 3000), (336, 336)]


def config_of(name: str) -> Any:
    return load_target(f"hf:{name}").build.args[1]  # type: ignore[attr-defined]


@pytest.mark.parametrize("size", SIZES)
def test_tokens_are_those_of_the_processors_of_transformers(size: tuple[int, int]) -> None:
    width, height = size
    rows = count_pictured(config_of("Qwen/Qwen2.5-VL-7B-Instruct"), Size(width, height)).rows
    high, wide = smart_resize(height, width, 28, 3136, 12_845_056)
    assert rows == high * wide // 28 ** 2
    rows = count_pictured(config_of("Qwen/Qwen3-VL-8B-Instruct"), Size(width, height)).rows
    high, wide = smart_resize(height, width, 32, 65_536, 16_777_216)
    assert rows == high * wide // 32 ** 2
    if min(size) >= 32:
        found = count_pictured(config_of("Qwen/Qwen3-VL-8B-Instruct"), Size(width, height, 16))
        high, wide = resize_video(16, height, width, 2, 32, 4096, 25_165_824)
        assert (found.groups, found.rows) == (8, 8 * high * wide // 32 ** 2)
    high, wide = get_aspect_ratio_preserving_size(height, width, 16, 280 * 9, 3)
    assert count_pictured(config_of("google/gemma-4-E4B"), Size(width, height)).rows == high * wide // 48 ** 2
    tiles = torch.tensor(find_supported_resolutions(16, transformers.image_utils.SizeDict(height=336, width=336)))
    down, across = (int(side) // 336 for side in get_best_fit((height, width), tiles))
    many = down * across
    assert count_pictured(config_of("meta-llama/Llama-4-Scout-17B-16E"), Size(width, height)).groups == (
        many + 1 if many > 1 else 1)
    across, down = get_optimal_tiled_canvas((height, width), (448, 448), 1, 12)
    many = across * down
    assert count_pictured(transformers.InternVLConfig(), Size(width, height)).tokens == 2 + 256 * (
        many + 1 if many > 1 else 1)
    high, wide = get_resize_output_image_size(torch.zeros(height, width, 3).numpy(), (1540, 1540), (28, 28))
    found = count_pictured(config_of("mistralai/Mistral-Small-3.2-24B-Instruct-2506"), Size(width, height))
    assert found.tokens == (wide // 28 + 1) * (high // 28)


@pytest.mark.parametrize("size", SIZES)
def test_tiles_of_llava_next_are_those_of_its_processor(size: tuple[int, int]) -> None:
    config = transformers.LlavaNextConfig()

    class Images:
        image_grid_pinpoints = config.image_grid_pinpoints

    processor: Any = LlavaNextProcessor.__new__(LlavaNextProcessor)
    processor.image_processor, processor.patch_size, processor.num_additional_image_tokens = Images(), 14, 1
    side = config.vision_config.image_size
    expected = processor._get_number_of_features(size[1], size[0], side, side) - 1  # the class token is dropped
    assert count_pictured(config, Size(*size)).tokens == expected


# Llama 4, processing_llama4.py: 1024 x 768 has 3 x 4 tiles and the whole, of 144 tokens each; between and after tiles
# 12 separators, and 3 tokens around all. Gemma 3: 256, with two tokens before and behind. LLaVA: 24 x 24 patches.
@pytest.mark.parametrize(("name", "tokens"), [
    ("meta-llama/Llama-4-Scout-17B-16E", 13 * 144 + 12 + 3), ("google/gemma-3-4b-it", 256 + 4),
    ("llava-hf/llava-1.5-7b-hf", 24 * 24), ("Qwen/Qwen2.5-VL-7B-Instruct", 37 * 27 + 2),
    ("Qwen/Qwen3-VL-8B-Instruct", 32 * 24 + 2)])
def test_all_tokens_of_a_picture(name: str, tokens: int) -> None:
    assert count_pictured(config_of(name), Size(1024, 768)).tokens == tokens


@pytest.fixture(scope="module")
def qwen() -> ServedModel:
    return read_served_model(load_target("hf:Qwen/Qwen2.5-VL-7B-Instruct").build, "qwen")


def test_kernels_of_a_tower(qwen: ServedModel) -> None:
    """By the model's config: 32 blocks of 1,280 channels, of which 28 look at windows of 8 x 8 patches."""
    tower = qwen.tower
    assert tower is not None
    heads = AttentionKernel(16, 16, 80, 80)
    assert tower.patches[heads] == 4 and tower.windows == {heads: 28}
    block = 4 * 1280 ** 2 + 3 * 1280 * 3420
    merger = 5120 ** 2 + 5120 * 3584
    assert sum(count * product.elements for product, count in tower.products) == (
        32 * block + merger + 3 * 2 * 14 * 14 * 1280)
    picture = count_pictured(tower.config, Size(1024, 768))
    assert (picture.groups, picture.patches, picture.windows) == (1, 74 * 54, 10 * 7)


def test_pictures_are_read_where_their_prompt_begins(qwen: ServedModel) -> None:
    seen = qwen.with_pictures(2, (1024, 768))
    assert seen.picture_tokens == 2 * (37 * 27 + 2)
    timer, plain = (PassTimer(make_deployment(model, device="h100")) for model in (seen, qwen))
    begins, goes_on = Batch(3, 100, (Chunk(512, 512),)), Batch(3, 100, (Chunk(512, 1024),))
    more = timer.seconds(begins) - plain.seconds(begins)
    assert more > 0 and timer.seconds(goes_on) == plain.seconds(goes_on)
    assert timer.time(begins).seconds - plain.time(begins).seconds == pytest.approx(more, rel=1e-6)
    assert timer.seconds(Batch(0, 1, (Chunk(512, 512),) * 2)) - plain.seconds(
        Batch(0, 1, (Chunk(512, 512),) * 2)) == pytest.approx(2 * more)
    # arithmetic of its products alone at the peak rate is less, and four times that is more
    assert seen.tower is not None
    flops = 2 * 2 * 74 * 54 * sum(count * kernel.elements for kernel, count in seen.tower.patches.items()
                                  if hasattr(kernel, "elements"))
    assert flops / 989e12 < more < 4 * flops / 989e12


def test_a_server_with_pictures(qwen: ServedModel) -> None:
    found = profile_served(qwen, 100, 16, images=2, image_size=(1024, 768), device="h100")
    assert found.prompt_tokens == 100 + 2 * (37 * 27 + 2)
    text = found.summary().replace("\n  ", " ")
    assert "prompts have pictures, 2 of 1024x768: 2,002 of their 2,102 tokens" in text and "pictures" in text
    alike = profile_served(qwen, found.prompt_tokens, 16, device="h100")
    assert found.first_token.mean > alike.first_token.mean
    assert found.each_token.mean == pytest.approx(alike.each_token.mean, rel=0.05)
    video = profile_served(qwen, 100, 16, video_frames=8, image_size=(1024, 768), device="h100")
    assert video.prompt_tokens == 100 + 4 * 37 * 27 + 2


def test_memory_of_a_tower(qwen: ServedModel) -> None:
    """Ranks split its products, and vLLM reads the largest picture when it starts: 16,384 tokens of 4 patches each."""
    one, two = (make_deployment(qwen, device="h100", layout=Layout(tp), prefill_chunk=2048) for tp in (1, 2))
    assert qwen.tower is not None
    split = sum(count * product.elements for product, count in qwen.tower.products if product.split != "none")
    assert split == 32 * (4 * 1280 ** 2 + 3 * 1280 * 3420)
    assert one.weight_bytes() > two.weight_bytes() + split
    assert one.activation_bytes() == 65_536 * (2 * 2 * 3420 + 4 * 1280) * 2
    plain, seen = (make_deployment(model, device="h100", engine="sglang").activation_bytes()
                   for model in (replace(qwen, tower=None), qwen))
    assert plain == seen < make_deployment(qwen.with_pictures(6, (4000, 3000)), device="h100",
                                           engine="sglang").activation_bytes()


@pytest.mark.parametrize(("name", "given", "message"), [
    ("Qwen/Qwen2.5-VL-7B-Instruct", {"images": -1}, "0 or more"),
    ("Qwen/Qwen2.5-VL-7B-Instruct", {"images": 1, "image_size": (1, 500)}, "a factor of 200"),
    ("google/gemma-3-4b-it", {"video_frames": 8}, "how gemma3 reads videos is not known"),
    ("gpt2", {"images": 1}, "reads no pictures")])
def test_pictures_that_cannot_be_are_refused(name: str, given: dict[str, Any], message: str) -> None:
    model = read_served_model(load_target(f"hf:{name}").build, name)
    with pytest.raises(InputError, match=message):
        model.with_pictures(given.get("images", 0), given.get("image_size", (64, 64)), given.get("video_frames", 0))
