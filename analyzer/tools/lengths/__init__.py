"""Steps whose batches differ in size: memory and time over an epoch."""
from .batching import Batching, Epoch
from .distribution import Lengths
from .epoch_profile import EpochProfile
from .run import profile_epoch

__all__ = ["Batching", "Epoch", "EpochProfile", "Lengths", "profile_epoch"]
