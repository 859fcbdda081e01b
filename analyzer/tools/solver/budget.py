"""How much memory a plan may take."""
from __future__ import annotations

from analyzer.errors import InputError


class InfeasibleBudgetError(InputError):
    """No plan meets the budget; the message says the smallest one that can be met."""


def read_share(budget: float | str) -> float:
    """The share of the activations' memory that a budget is. Raises InputError for what is none.

    >>> read_share("50%"), read_share(0.5)
    (0.5, 0.5)
    """
    try:
        share = budget if isinstance(budget, float) else float(budget.strip()[:-1]) / 100
    except ValueError:
        raise InputError(f"budget={budget!r}: write a share of the activations' memory as '50%'") from None
    if not 0 < share <= 1:
        raise InputError(f"budget={budget!r}: a share of the activations' memory is above 0 and at most 1; "
                         f"give bytes as an int or as text such as '24GiB'")
    return share
