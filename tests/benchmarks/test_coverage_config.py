"""The rules that make configs of transformers small and complete, and inputs from what docstrings state."""
import pytest

from benchmarks.coverage.config import default_fields, scale, shorten

transformers = pytest.importorskip("transformers")


def test_widths_heads_and_their_shares_scale_together():
    fields = {
        "hidden_size": 256, "num_attention_heads": 16, "intermediate_size": 1024, "axial_pos_embds_dim": [64, 192],
        "conv_groups": 256, "n_groups": 1, "num_hidden_layers": 12, "vocab_size": 50_000, "eos_token_id": 49_999,
        "d_head": 64
    }
    scale(fields)
    # by 8: the width would fall below 32 with 16
    assert fields == {
        "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 128, "axial_pos_embds_dim": [8, 24],
        "conv_groups": 32, "n_groups": 1, "num_hidden_layers": 2, "vocab_size": 1024, "eos_token_id": 1023, "d_head": 64
    }


def test_large_images_shrink_in_all_parts_alike():
    fields = {
        "vision_config": {
            "backbone_config": {"image_size": [1024, 1024]}, "backbone_feature_sizes": [[256, 256], [128, 128]]
        }, "prompt_config": {"image_size": 1024, "image_embedding_size": 64}
    }
    scale(fields)
    assert fields == {
        "vision_config": {
            "backbone_config": {"image_size": [256, 256]}, "backbone_feature_sizes": [[64, 64], [32, 32]]
        }, "prompt_config": {"image_size": 256, "image_embedding_size": 16}
    }


def test_a_neck_keeps_as_many_layers_as_it_takes():
    fields = {"num_hidden_layers": 12, "backbone_out_indices": [2, 5, 8, 11]}
    shorten(fields)
    assert fields == {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]}


def test_one_layer_of_each_kind_is_kept():
    fields = {"num_hidden_layers": 6, "layer_types": ["a", "a", "b", "a", "a", "c"]}
    shorten(fields)
    assert fields == {"num_hidden_layers": 3, "layer_types": ["a", "b", "c"]}


@pytest.mark.parametrize(("name", "found"), [
    # made of parts that have no default
    ("EncoderDecoderModel", lambda f: f["decoder"]["add_cross_attention"] is True),
    # which the default config leaves out
    ("MinistralForCausalLM", lambda f: f["rope_parameters"]["rope_theta"] == 10_000.0),
    ("XmodForMaskedLM", lambda f: f["default_language"] == "en_XX"),
    ("DbrxForCausalLM", lambda f: "output_attentions" not in f["ffn_config"]),  # refused by the class of that part
])
def test_default_configs_are_completed(name, found):
    assert found(default_fields(getattr(transformers, name)))
