"""What is viewed: profiles that were saved, and those that were made of them since."""
from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from analyzer.errors import InputError
from analyzer.parallel.rank_table import RankTable
from analyzer.report.comparison.compare import compare
from analyzer.results.command import CommandInfo
from analyzer.results.profile import Profile

from .origin import Origin, find_origin
from .setting import change_settings, describe_change

_MOST_RUNS = 10  # whose profiles are kept
_RANKS = '"analyzer.ranks"'


@dataclass(frozen=True)
class Run:
    """A profile with the command that made it, and what of that is not as it was saved."""

    change: str
    command: CommandInfo | None
    profile: Profile


@dataclass
class ViewedProfile:
    """A saved profile, and by their numbers the runs that were made of it, the last ten."""

    name: str
    saved: Profile
    origin: Origin
    runs: dict[int, Run] = field(default_factory=dict)
    made: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def as_saved(self) -> Run:
        """The profile of the file, as a run that changed nothing."""
        return Run("as saved", self.origin.command, self.saved)

    def find_run(self, number: int) -> Run | None:
        """The run of that number, 0 for the profile as it was saved; None where it is not kept."""
        return self.as_saved if number == 0 else self.runs.get(number)

    def change(self, wanted: Mapping[str, Any]) -> CommandInfo:
        """The command for other settings. Raises InputError for settings that cannot be, or where there is none."""
        if self.origin.command is None:
            raise InputError(self.origin.refusal)
        return change_settings(self.origin.command, wanted)

    def add(self, command: CommandInfo, profile: Profile) -> int:
        """Keep what a command made; the result is its number."""
        assert self.origin.command is not None
        with self._lock:
            self.made += 1
            runs = {**self.runs, self.made: Run(describe_change(self.origin.command, command), command, profile)}
            self.runs = dict(list(runs.items())[-_MOST_RUNS:])  # another object: a page may be reading the other one
            return self.made


class ViewedPage(NamedTuple):
    """A page of several profiles, which ``write`` makes."""

    name: str
    write: Callable[[], str]


class Viewed(NamedTuple):
    """The profiles of the files that were given, and pages of several of them."""

    profiles: tuple[ViewedProfile, ...]
    pages: tuple[ViewedPage, ...] = ()


def read_files(paths: Sequence[Path], target: str | None = None) -> Viewed:
    """Profiles and tables of ranks that were saved; of two profiles also what changed. Raises InputError or
    ProfileFormatError for files that hold neither, and as `find_origin` does.
    """
    found: list[ViewedProfile] = []
    pages: list[ViewedPage] = []
    for path in paths:
        if _holds_ranks(path):
            table = RankTable.from_json(path)
            kinds = {row.rank: row.kind for row in table.rows}
            pages.append(ViewedPage(str(path), table.to_html))
            found += [ViewedProfile(f"{path}, rank {rank} ({kinds.get(rank, 'each')})", profile,
                                    find_origin(profile, target))
                      for rank, profile in table.profiles.items()]
        else:
            profile = Profile.from_json(path)
            found.append(ViewedProfile(str(path), profile, find_origin(profile, target)))
    if len(found) == 2 and not pages:
        pages.append(ViewedPage(f"{found[0].name} → {found[1].name}", compare(found[0].saved, found[1].saved).to_html))
    return Viewed(tuple(found), tuple(pages))


def _holds_ranks(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8") as file:
            return _RANKS in file.read(200)
    except (OSError, ValueError):  # which the reader of profiles tells
        return False
