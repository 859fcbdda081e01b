"""Denoisers and autoencoders of diffusers, from small configs."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from .coverage_case import Candidate, Case, Inputs

BATCH = 2


def diffusers_cases() -> list[Case]:
    return [
        Case(f"diffusers:{name}", "diffusers", options.get("group", "denoiser"), partial(_candidates, name))
        for name, options in _MODELS.items()
    ]


def _candidates(name: str) -> list[Candidate]:
    import diffusers

    entry = _MODELS[name]
    build = partial(getattr(diffusers, entry.get("class", name)), **entry["config"])
    make: Callable[[], dict[str, Any]] = entry["inputs"]

    def inputs(model: nn.Module, train: bool) -> Inputs:
        torch.manual_seed(11)
        return (), make()

    return [Candidate("small config", build, inputs)]


def _steps() -> torch.Tensor:
    return torch.tensor([7, 11])


def _image(channels: int = 4, side: int = 16) -> torch.Tensor:
    return torch.rand(BATCH, channels, side, side)


def _video(channels: int = 4, frames: int = 3, side: int = 16) -> torch.Tensor:
    return torch.rand(BATCH, channels, frames, side, side)


def _text(width: int, tokens: int = 6) -> torch.Tensor:
    return torch.rand(BATCH, tokens, width)


_BLOCKS: dict[str, Any] = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}
_VAE: dict[str, Any] = {
    **_BLOCKS, "down_block_types": ("DownEncoderBlock2D", ) * 2, "up_block_types": ("UpDecoderBlock2D", ) * 2,
    "latent_channels": 4
}
_CROSS: dict[str, Any] = {
    **_BLOCKS, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "cross_attention_dim": 32,
    "attention_head_dim": 8
}

_MODELS: dict[str, dict[str, Any]] = {
    "UNet1DModel": {
        "config": {
            "sample_size": 64, "in_channels": 2, "out_channels": 2, "extra_in_channels": 64,
            "block_out_channels": (32, 32, 64), "layers_per_block": 1
        }, "inputs": lambda: {"sample": torch.rand(BATCH, 2, 64), "timestep": _steps()}
    },
    "UNet2DModel": {
        "config": {
            **_BLOCKS, "sample_size": 16, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 8
        }, "inputs": lambda: {"sample": _image(3), "timestep": _steps()}
    },
    "UNet2DConditionModel": {
        "config": {**_CROSS, "sample_size": 16, "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")},
        "inputs": lambda: {"sample": _image(), "timestep": _steps(), "encoder_hidden_states": _text(32)}
    },
    "UNet2DConditionModel (XL)": {
        "class": "UNet2DConditionModel", "config": {
            **_CROSS, "sample_size": 16, "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "transformer_layers_per_block": (1, 2),
            "use_linear_projection": True, "addition_embed_type": "text_time", "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 80
        }, "inputs": lambda: {
            "sample": _image(), "timestep": _steps(), "encoder_hidden_states": _text(32),
            "added_cond_kwargs": {"text_embeds": torch.rand(BATCH, 32), "time_ids": torch.ones(BATCH, 6)}
        }
    },
    "UNet3DConditionModel": {
        "config": {
            **_CROSS, "sample_size": 16, "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D")
        }, "inputs": lambda: {"sample": _video(), "timestep": _steps(), "encoder_hidden_states": _text(32)}
    },
    "UNetMotionModel": {
        "config": {
            **_BLOCKS, "cross_attention_dim": 32, "sample_size": 16,
            "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
            "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"), "num_attention_heads": 2,
            "motion_num_attention_heads": 2
        }, "inputs": lambda: {"sample": _video(), "timestep": _steps(), "encoder_hidden_states": _text(32)}
    },
    "ControlNetModel": {
        "config": {**_CROSS, "conditioning_embedding_out_channels": (16, 32)}, "inputs": lambda: {
            "sample": _image(), "timestep": _steps(), "encoder_hidden_states": _text(32), "controlnet_cond": _image(
                3, 32)
        }
    },
    "Transformer2DModel": {
        "config": {
            "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 32, "norm_num_groups": 8,
            "cross_attention_dim": 32
        }, "inputs": lambda: {"hidden_states": _image(32), "encoder_hidden_states": _text(32)}
    },
    "DiTTransformer2DModel": {
        "config": {
            "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 8, "num_layers": 2,
            "sample_size": 16, "num_embeds_ada_norm": 100, "norm_num_groups": 8
        }, "inputs": lambda: {"hidden_states": _image(), "timestep": _steps(), "class_labels": torch.tensor([1, 2])}
    },
    "PixArtTransformer2DModel": {
        "config": {
            "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "cross_attention_dim": 32,
            "caption_channels": 24, "sample_size": 16
        }, "inputs": lambda: {
            "hidden_states": _image(), "timestep": _steps(), "encoder_hidden_states": _text(24),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}
        }
    },
    "SD3Transformer2DModel": {
        "config": {
            "sample_size": 16, "patch_size": 2, "in_channels": 4, "num_layers": 2, "attention_head_dim": 8,
            "num_attention_heads": 4, "joint_attention_dim": 32, "caption_projection_dim": 32,
            "pooled_projection_dim": 16, "out_channels": 4
        }, "inputs": lambda: {
            "hidden_states": _image(), "timestep": _steps(), "encoder_hidden_states": _text(32),
            "pooled_projections": torch.rand(BATCH, 16)
        }
    },
    "FluxTransformer2DModel": {
        "config": {
            "in_channels": 8, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
            "num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 16,
            "axes_dims_rope": (4, 4, 8)
        }, "inputs": lambda: {
            "hidden_states": torch.rand(BATCH, 16, 8), "timestep": _steps().float(), "encoder_hidden_states": _text(32),
            "pooled_projections": torch.rand(BATCH, 16), "img_ids": torch.rand(16, 3), "txt_ids": torch.zeros(6, 3)
        }
    },
    "AuraFlowTransformer2DModel": {
        "config": {
            "sample_size": 16, "num_mmdit_layers": 1, "num_single_dit_layers": 1, "attention_head_dim": 8,
            "num_attention_heads": 4, "joint_attention_dim": 32, "caption_projection_dim": 32, "pos_embed_max_size": 256
        },
        "inputs": lambda: {"hidden_states": _image(), "timestep": _steps().float(), "encoder_hidden_states": _text(32)}
    },
    "SanaTransformer2DModel": {
        "config": {
            "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2,
            "num_cross_attention_heads": 2, "cross_attention_head_dim": 16, "cross_attention_dim": 32,
            "caption_channels": 24, "sample_size": 16
        }, "inputs": lambda: {"hidden_states": _image(), "timestep": _steps(), "encoder_hidden_states": _text(24)}
    },
    "Lumina2Transformer2DModel": {
        "config": {
            "sample_size": 16, "in_channels": 4, "hidden_size": 32, "num_layers": 2, "num_refiner_layers": 1,
            "num_attention_heads": 2, "num_kv_heads": 1, "multiple_of": 16, "axes_dim_rope": (4, 4, 8),
            "axes_lens": (64, 32, 32), "cap_feat_dim": 24
        }, "inputs": lambda: {
            "hidden_states": _image(), "timestep": _steps().float(), "encoder_hidden_states": _text(24),
            "encoder_attention_mask": torch.ones(BATCH, 6, dtype=torch.bool)
        }
    },
    "CogVideoXTransformer3DModel": {
        "config": {
            "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4,
            "text_embed_dim": 32, "num_layers": 2, "sample_width": 16, "sample_height": 16, "sample_frames": 9,
            "time_embed_dim": 8, "max_text_seq_length": 6
        }, "inputs": lambda:
        {"hidden_states": torch.rand(BATCH, 3, 4, 16, 16), "encoder_hidden_states": _text(32), "timestep": _steps()}
    },
    "LTXVideoTransformer3DModel": {
        "config": {
            "in_channels": 8, "out_channels": 8, "num_attention_heads": 2, "attention_head_dim": 16,
            "cross_attention_dim": 32, "num_layers": 2, "caption_channels": 24
        }, "inputs": lambda: {
            "hidden_states": torch.rand(BATCH, 24, 8), "encoder_hidden_states": _text(24), "timestep": _steps(),
            "encoder_attention_mask": torch.ones(BATCH, 6, dtype=torch.bool), "num_frames": 2, "height": 3, "width": 4
        }
    },
    "WanTransformer3DModel": {
        "config": {
            "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 24,
            "freq_dim": 32, "ffn_dim": 32, "num_layers": 2, "rope_max_seq_len": 32
        }, "inputs": lambda: {"hidden_states": _video(), "timestep": _steps(), "encoder_hidden_states": _text(24)}
    },
    "MochiTransformer3DModel": {
        "config": {
            "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "pooled_projection_dim": 16,
            "in_channels": 4, "text_embed_dim": 24, "time_embed_dim": 8, "max_sequence_length": 6
        }, "inputs": lambda: {
            "hidden_states": _video(), "encoder_hidden_states": _text(24), "timestep": _steps(),
            "encoder_attention_mask": torch.ones(BATCH, 6, dtype=torch.bool)
        }
    },
    "PriorTransformer": {
        "config": {
            "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "embedding_dim": 24,
            "num_embeddings": 7, "additional_embeddings": 4
        }, "inputs": lambda: {
            "hidden_states": torch.rand(BATCH, 24), "timestep": 2, "proj_embedding": torch.rand(BATCH, 24),
            "encoder_hidden_states": _text(24, 7)
        }
    },
    "AutoencoderKL": {"group": "autoencoder", "config": _VAE, "inputs": lambda: {"sample": _image(3, 32)}},
    "AutoencoderKL (sampled)": {
        "class": "AutoencoderKL", "group": "autoencoder", "config": _VAE,
        "inputs": lambda: {"sample": _image(3, 32), "sample_posterior": True}
    },
    "AsymmetricAutoencoderKL": {
        "group": "autoencoder", "config": {
            "down_block_types": ("DownEncoderBlock2D", ), "down_block_out_channels": (32, ),
            "up_block_types": ("UpDecoderBlock2D", ), "up_block_out_channels": (32, ), "latent_channels": 4,
            "norm_num_groups": 8
        }, "inputs": lambda: {"sample": _image(3, 32), "mask": torch.ones(BATCH, 1, 32, 32)}
    },
    "AutoencoderTiny": {
        "group": "autoencoder", "inputs": lambda: {"sample": _image(3, 32)}, "config": {
            "encoder_block_out_channels": (32, 32), "decoder_block_out_channels": (32, 32),
            "num_encoder_blocks": (1, 2), "num_decoder_blocks": (2, 1)
        }
    },
    "AutoencoderDC": {
        "group": "autoencoder", "inputs": lambda: {"sample": _image(3, 32)}, "config": {
            "latent_channels": 4, "attention_head_dim": 8, "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "decoder_block_types": ("ResBlock", "EfficientViTBlock"), "encoder_block_out_channels": (16, 32),
            "decoder_block_out_channels": (16, 32), "encoder_qkv_multiscales": ((), (5, )),
            "decoder_qkv_multiscales": ((), (5, )), "encoder_layers_per_block": (1, 1),
            "decoder_layers_per_block": (1, 1)
        }
    },
    "AutoencoderKLTemporalDecoder": {
        "group": "autoencoder", "inputs": lambda: {"sample": _image(3, 32), "num_frames": 2}, "config": {
            "block_out_channels": (32, 64), "layers_per_block": 1, "down_block_types": ("DownEncoderBlock2D", ) * 2,
            "latent_channels": 4
        }
    },
    "AutoencoderKLCogVideoX": {
        "group": "autoencoder", "inputs": lambda: {"sample": torch.rand(1, 3, 5, 16, 16)}, "config": {
            "down_block_types": ("CogVideoXDownBlock3D", ) * 4, "up_block_types": ("CogVideoXUpBlock3D", ) * 4,
            "block_out_channels": (8, 8, 8, 8), "layers_per_block": 1, "norm_num_groups": 2, "latent_channels": 4
        }
    },
    "AutoencoderKLWan": {
        "group": "autoencoder", "inputs": lambda: {"sample": torch.rand(1, 3, 5, 16, 16)}, "config": {
            "base_dim": 8, "z_dim": 16, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1,
            "temperal_downsample": [False, True, True]
        }
    },
    "VQModel": {
        "group": "autoencoder", "inputs": lambda: {"sample": _image(3, 32)}, "config": {
            **_BLOCKS, "down_block_types": ("DownEncoderBlock2D", ) * 2, "up_block_types": ("UpDecoderBlock2D", ) * 2,
            "latent_channels": 4, "num_vq_embeddings": 64
        }
    },
}
