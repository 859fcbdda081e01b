"""The command that made a profile, as plain data."""
from __future__ import annotations

import shlex
from dataclasses import dataclass, field

Option = str | int | bool | tuple[str, ...]
"""The value of an option: True for one that takes none, a tuple for one that may be repeated."""


@dataclass(frozen=True, slots=True)
class CommandInfo:
    """``analyzer profile TARGET`` with ``options`` by their names (``loss_chunks`` is ``--loss-chunks``), its inputs
    written out.
    """

    target: str
    options: dict[str, Option] = field(default_factory=dict)

    def __str__(self) -> str:
        """As one would type it.

        >>> print(CommandInfo("gpt2", {"input": ("int64:2x64",), "device": "h100", "checkpointing": True}))
        analyzer profile gpt2 --input int64:2x64 --device h100 --checkpointing
        """
        words = ["analyzer", "profile", self.target]
        for name, value in self.options.items():
            for text in value if isinstance(value, tuple) else (value,):
                words += [f"--{name.replace('_', '-')}", *([] if text is True else [str(text)])]
        return shlex.join(words)
