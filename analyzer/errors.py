"""Errors that users meet. Each repeats the caller's input and says how to mend it."""
from collections.abc import Iterable
from difflib import get_close_matches


class AnalyzerError(Exception):
    """Base of every error that this package raises on purpose."""


class InputError(AnalyzerError, ValueError):
    """An argument that cannot be used: a wrong name, rank, dtype or value."""


class DuplicateRegistrationError(AnalyzerError, ValueError):
    """A second registration for a key that has one."""


class UnsupportedOperatorError(AnalyzerError, NotImplementedError):
    """An operator that cannot run without data: it has neither a meta kernel nor a registered shape."""


class DataDependentError(AnalyzerError, RuntimeError):
    """A value was asked for that only real data could give."""


class TargetError(AnalyzerError, ValueError):
    """A TARGET of the command line that names no model."""


class UnknownDeviceError(AnalyzerError, ValueError):
    """A device name that the hardware catalogue does not hold."""


class UnknownSpeedError(AnalyzerError, ValueError):
    """A figure of a device that the time of a kernel takes is unknown."""


class OutputError(InputError, OSError):
    """A file that was asked for and cannot be written."""


class MissingExtraError(AnalyzerError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""


class ModelError(Exception):
    """A model's own code failed; ``__cause__`` is what it raised."""


class ProfileFormatError(AnalyzerError, ValueError):
    """A saved profile that is damaged or was written by another format version."""


def is_count(value: object, least: int = 0) -> bool:
    """Whether ``value`` is a whole number, and at least ``least``.

    >>> is_count(2, 1), is_count(0, 1), is_count("2"), is_count(True)
    (True, False, False, False)
    """
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def how_to_install(extra: str) -> str:
    """What brings the libraries of an extra, for the end of an error: the package is on no index yet."""
    return f"pip install -e '.[{extra}]' in your copy of analyzer's repository"


def find_close(word: str, options: Iterable[str]) -> str:
    """A sentence with the options that resemble the word, for the end of an error; empty if none does.

    >>> find_close("resnet81", ["resnet18", "vit_b_16"])
    '; did you mean resnet18?'
    """
    by_lower = {option.lower(): option for option in options}
    near = get_close_matches(word.lower(), by_lower, n=4)
    return f"; did you mean {' or '.join(by_lower[lower] for lower in near)}?" if near else ""
