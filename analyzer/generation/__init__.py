"""What generating text costs: the prefill, then one token after the other while the key-value cache grows."""
from .generation_profile import GenerationProfile, GenerationStep
from .run import profile_generate

__all__ = ["GenerationProfile", "GenerationStep", "profile_generate"]
