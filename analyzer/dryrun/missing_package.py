"""What to install where a script failed for want of a package."""
from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator

_OF_EXTRA = ("accelerate", "bitsandbytes", "datasets", "lightning", "peft", "torchao", "trl")  # `scripts` of pyproject


def advise_install(error: BaseException) -> str | None:
    """A sentence where ``error``, or what led to it, says that a package of the extra ``scripts`` is missing."""
    for one in _chain(error):
        if isinstance(one, ImportError):
            for name in _OF_EXTRA:
                if re.search(rf"\b{name}\b", str(one)) and importlib.util.find_spec(name) is None:
                    return (f"{name} is not installed here; pip install 'symbolic-analyzer[scripts]' has what scripts "
                            f"import, {', '.join(_OF_EXTRA)}. A GPU is not needed for any of them.")
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting += [one.__context__, one.__cause__]
