"""Why an optimizer's step cannot be replayed."""
from __future__ import annotations


class Mismatch(Exception):
    """What a capture on a few parameters shows cannot be told of others; the message says why."""
