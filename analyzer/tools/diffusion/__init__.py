"""Image and video pipelines of diffusers: seconds, memory, watts and joules of a batch."""
from .components import Component, Pipeline
from .diffusion_profile import DiffusionPart, DiffusionProfile
from .pipeline import read_pipeline
from .run import profile_diffusion
from .sharing import Degrees

__all__ = ["Component", "Degrees", "DiffusionPart", "DiffusionProfile", "Pipeline", "profile_diffusion",
           "read_pipeline"]
