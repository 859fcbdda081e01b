"""What generating text costs: the prefill, then one token after the other while the key-value cache grows; and what
serving several sequences at once takes.
"""
from .generation_profile import GenerationProfile, GenerationStep
from .run import profile_generate
from .serving import (
    MaxSequences,
    PassCost,
    ServingPoint,
    max_sequences,
    profile_eager_passes,
    serving_table,
    sweep_sequences,
)

__all__ = ["GenerationProfile", "GenerationStep", "MaxSequences", "PassCost", "ServingPoint", "max_sequences",
           "profile_generate", "profile_eager_passes", "serving_table", "sweep_sequences"]
