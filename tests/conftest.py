"""What every test runs under."""
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: no test may need a network

import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

from analyzer.zoo.torchvision_ops import define_torchvision_ops  # noqa: E402

torch.set_num_threads(1)  # the tests run in parallel processes
define_torchvision_ops()
settings.register_profile("analyzer", deadline=None)  # a first call warms caches and would look slow
settings.load_profile("analyzer")
