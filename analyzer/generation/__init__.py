"""What generating text costs: the prefill, then one token after the other while the key-value cache grows; and what
serving several sequences at once takes.
"""
from .capacity import MaxSequences, max_sequences
from .generation_profile import GenerationProfile, GenerationStep
from .run import profile_generate
from .serving import ServingPoint, profile_serving, sweep_sequences
from .serving_pass import PassCost
from .serving_table import serving_table
from .speculative import SpeculativeStep, profile_speculative

__all__ = ["GenerationProfile", "GenerationStep", "MaxSequences", "PassCost", "ServingPoint", "SpeculativeStep",
           "max_sequences", "profile_generate", "profile_serving", "profile_speculative", "serving_table",
           "sweep_sequences"]
