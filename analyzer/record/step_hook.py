"""Private torch API: whether somebody runs code of his own inside an optimizer's step."""
from __future__ import annotations

import torch
from torch.optim import optimizer as _module


def has_step_hooks(optimizer: torch.optim.Optimizer, known: int = 0) -> bool:
    """Whether hooks run before or after ``optimizer.step()``, besides ``known`` pairs that are registered for all
    optimizers.
    """
    own = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
    return own + len(_module._global_optimizer_pre_hooks) + len(_module._global_optimizer_post_hooks) > 2 * known
