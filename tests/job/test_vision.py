"""Rows with a picture: what models that see are given, and the step of one by LLaMA-Factory's file."""
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from analyzer.errors import InputError
from analyzer.tools.job import read_job
from analyzer.tools.job.plan import TrainingPlan
from analyzer.tools.job.vision import show_pictures

TEXT = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
QWEN = {"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"], "image_token_id": 7,
        "vision_start_token_id": 5, "video_token_id": 8, "dtype": "bfloat16", **TEXT,
        "vision_config": {"depth": 2, "hidden_size": 64, "num_heads": 4, "intermediate_size": 128, "patch_size": 14,
                          "out_hidden_size": 64, "spatial_merge_size": 2, "temporal_patch_size": 2,
                          "fullatt_block_indexes": [1]}}


def _build(kind: str, config: dict[str, Any]) -> Any:
    import transformers

    found: Any = getattr(transformers, f"{kind}ForConditionalGeneration")
    return partial(lambda kind, config: None, found, found.config_class(**config))


@pytest.mark.parametrize(("pixels", "length", "side"), [
    (112 * 112, 64, 8), (150 * 112, 64, 8), (1_000_000, 64, 14)])
def test_a_picture_of_any_size(pixels: int, length: int, side: int) -> None:
    """A token is 2 x 2 patches of 14 x 14 pixels, twice of three colours; 64 tokens have room for 7 x 7."""
    inputs, said = show_pictures(_build("Qwen2_5_VL", QWEN), 2, length, pixels)
    assert inputs["pixel_values"].shape == (2 * side * side, 3 * 2 * 14 * 14)
    assert inputs["image_grid_thw"].tolist() == [[1, side, side]] * 2
    assert (inputs["input_ids"] == 7).sum(1).tolist() == [side * side // 4] * 2
    assert said.startswith(f"each row has one picture of {14 * side} x {14 * side} pixels")


def test_a_picture_of_the_models_own_size() -> None:
    config = {"image_token_index": 9, "vision_config": {"model_type": "clip_vision_model", "image_size": 56,
                                                        "patch_size": 14}}
    inputs, _ = show_pictures(_build("Llava", config), 1, 32, 1)
    assert inputs["pixel_values"].shape == (1, 3, 56, 56)
    assert (inputs["input_ids"] == 9).sum() == 16
    with pytest.raises(InputError, match="a picture has 16 tokens, and rows have 16"):
        show_pictures(_build("Llava", config), 1, 16, 1)


@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_the_step_of_a_model_that_sees(tmp_path: Path, stage: str) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/config.json").write_text(json.dumps(QWEN))
    text = (f"model_name_or_path: {tmp_path}/tiny\nstage: {stage}\ndo_train: true\nfinetuning_type: lora\n"
            "lora_target: all\ntemplate: qwen2_vl\ndataset: d\ncutoff_len: 64\nbf16: true\noutput_dir: o\n"
            "per_device_train_batch_size: 2\n")
    (tmp_path / "text.yaml").write_text(text)
    (tmp_path / "a.yaml").write_text(f"{text}image_max_pixels: 12544\n")
    job = read_job(tmp_path / "a.yaml")
    assert isinstance(job.plan, TrainingPlan)
    assert (job.missing, job.plan.pixels) == ([], 12_544)
    found, alone = job.profile("h100"), read_job(tmp_path / "text.yaml").profile("h100")
    assert found.verdict.fits
    assert any("one picture of 112 x 112 pixels, which is 16 of its 64 tokens" in said for said in found.assumptions)
    assert found.profile.phases["forward"].flops > alone.profile.phases["forward"].flops


def test_rows_of_a_model_whose_pictures_are_not_known_are_text() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    inputs, said = show_pictures(partial(lambda kind, config: None, LlamaForCausalLM, LlamaConfig()), 1, 8, 100)
    assert torch.equal(inputs["input_ids"], torch.zeros(1, 8, dtype=torch.int64)) and len(inputs) == 1
    assert said == "rows are text alone: how LlamaForCausalLM is given pictures is not known here"
