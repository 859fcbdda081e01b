"""Private torch API: what `torch.optim.LBFGS` asks of data, answered as in a search that goes on."""
from __future__ import annotations

import linecache

import torch
from torch.optim import lbfgs

from analyzer.meta.source_line import first_frame, is_user_code
from analyzer.meta.state import MetaState

#: Conditions of torch/optim/lbfgs.py that hold while it searches: a pair of vectors is kept, and the first length of a
#: line search is taken (strong Wolfe conditions). All others end the search, or belong to lengths that are not taken.
MET = ("if ys > 1e-10:", "if abs(gtd_new) <= -c2 * gtd:")


def searching_answer(state: MetaState, tensor: torch.Tensor) -> bool | float | None:
    """What LBFGS is told of an unknown scalar: whether a condition holds, or a loss, each below the one before; None
    where other code asks.
    """
    frame = first_frame(lambda filename: filename == lbfgs.__file__ or is_user_code(filename))
    if frame is None or frame.f_code.co_filename != lbfgs.__file__:
        return None
    state.assume("LBFGS: its search is taken to go on: each pair of vectors is kept, the first length of a line search "
                 f"is taken, and no tolerance is met {state.where()}")
    if tensor.dtype is torch.bool:
        return linecache.getline(lbfgs.__file__, frame.f_lineno).strip() in MET
    state.unknown_sizes += 1
    return -float(state.unknown_sizes)
