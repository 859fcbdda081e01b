"""The file that a sweep goes on from: a JSON line a row, written as soon as the row is there."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from analyzer.errors import InputError

from .result import IDENTITY, Row, identify


class Journal:
    """Appends rows to ``path`` while it is open; `rows` are those that were there before, by identity.

    A last line that was cut short is dropped. Rows of other sweeps stay in the file.
    Raises InputError for a file that holds something else.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.rows: dict[tuple[Any, ...], Row] = {}

    def __enter__(self) -> Journal:
        if not self.path.absolute().parent.is_dir():
            raise InputError(f"{self.path}: the folder {self.path.absolute().parent} does not exist")
        whole = self._read()
        self._file = self.path.open("ab")
        self._file.truncate(whole)
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def append(self, row: Row) -> None:
        """Keep a row, whatever happens next to this process."""
        self._file.write(json.dumps(row).encode() + b"\n")
        self._file.flush()

    def _read(self) -> int:
        """Fill `rows`; the result is the length of what is whole."""
        text = self.path.read_bytes() if self.path.exists() else b""
        whole = text.rfind(b"\n") + 1
        for number, line in enumerate(text[:whole].splitlines(), 1):
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict) or not set(IDENTITY) <= row.keys():
                raise InputError(f"{self.path}:{number}: is no row of a sweep; name another file, or take the line out")
            self.rows[identify(row)] = row
        return whole
