"""A number of seconds that may be negative, unlike the quantities of all other fields."""
from __future__ import annotations

from typing import Annotated

SIGNED = "may be negative"  #: in a field's annotation; who reads saved records looks for it
Moment = Annotated[float, SIGNED]
"""Seconds from the beginning of the step; negative for what an earlier step did."""
