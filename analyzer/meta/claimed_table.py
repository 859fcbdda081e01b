"""Imports every module that registers what the claimed device does, operators and attention's temporaries."""
from . import (  # noqa: F401
    attention_workspace,
    claimed_activation,
    claimed_attention,
    claimed_counting,
    claimed_dropout,
    claimed_encoder,
    claimed_grad_scaler,
    claimed_grouped_mm,
    claimed_inplace,
    claimed_loss,
    claimed_normalization,
    claimed_one_hot,
    claimed_packing,
    claimed_rnn,
    claimed_softmax,
)
