"""Imports every module that registers what the claimed device does."""
from . import (  # noqa: F401
    claimed_activation,
    claimed_attention,
    claimed_dropout,
    claimed_encoder,
    claimed_inplace,
    claimed_normalization,
    claimed_one_hot,
    claimed_packing,
    claimed_rnn,
    claimed_softmax,
)
