"""Command lines and shell scripts, read as words and never run: variables, what launches a program, its options."""
from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .document import JobError, Keys
from .options import has_name

_VARIABLE = re.compile(r"\$(?:\{(\w+)(?:\[[@*]\])?(?:(:?-)([^{}]*))?\}|(\w+))")
_ARRAY = re.compile(r"\s*(\w+)(\+?)=\((.*)", re.DOTALL)
_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_SUM = re.compile(r"\$\((?:\s*expr\s+([^()]*)|\(([^()]*)\))\)")
#: The folder of the script itself, from which its files are found: $(dirname "$0"), $(cd "$(dirname "$0")" && pwd).
_DIRNAME = r'"?\$\(\s*dirname\s+(?:--\s+)?"?\$\{?(?:0|BASH_SOURCE(?:\[0\])?)\}?"?\s*\)"?'
_FOLDER = re.compile(rf"\$\(\s*cd\s+{_DIRNAME}\s*(?:&&|;)\s*pwd(?:\s+-P)?\s*\)|{_DIRNAME}")
_MOST_WORDS = 2_000


class Word(NamedTuple):
    """A word of a command, and the line on which it stands, from 1; 0 where it came without a file."""

    text: str
    line: int = 0


@dataclass(frozen=True)
class ShellCommand:
    """A command with the variables that are set for it: ``NPROC_PER_NODE=2 swift sft --model ...``."""

    words: tuple[Word, ...]
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def texts(self) -> list[str]:
        return [word.text for word in self.words]


def read_words(texts: Sequence[str]) -> ShellCommand:
    """The command that stands behind ``--`` on our own command line."""
    return next(_read_line([Word(text) for text in texts], {}), ShellCommand(()))


def read_script(text: str, name: str) -> list[ShellCommand]:
    """The commands of a shell script, in order; variables that it sets are put in, nothing is run. Raises JobError.

    >>> command, = read_script("NPROC=2 python train.py --size ${SIZE:-7} # fast", "train.sh")
    >>> command.texts, command.variables["NPROC"]
    (['python', 'train.py', '--size', '7'], '2')
    """
    known: dict[str, str] = {}
    found: list[ShellCommand] = []
    for number, line in _join_lines(text):
        line = _FOLDER.sub(".", line)
        try:
            words = [Word(word, number + after) for word, after in _split(_fill_sums(line, known))]
        except ValueError as error:
            raise JobError(f"{name}:{number}: is no line of a shell: {error}") from error
        found += _read_line(words, known)
        if sum(len(command.words) for command in found) > _MOST_WORDS:
            raise JobError(f"{name}: has more than {_MOST_WORDS:,} words of commands")
    return found


def _join_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with those that they are continued on, each by the number of its first; comments between are left out."""
    whole, first, inside = "", 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        if inside:  # a document that is given to a command: cat <<EOF
            inside = "" if line.strip() == inside else inside
            continue
        if whole and line.lstrip().startswith("#") and not _is_open(whole):
            continue
        first = first if whole else number
        whole += line
        if line.endswith("\\"):
            whole = whole[:-1] + " \n"
            continue
        if _is_open(whole) or _ARRAY.match(whole) and not whole.rstrip().endswith(")"):
            whole += "\n"
            continue
        if document := re.search(r"<<-?\s*['\"]?(\w+)", whole):
            inside = document[1]
        if whole.strip():
            yield first, whole
        whole = ""
    if whole.strip():
        yield first, whole


def _is_open(line: str) -> bool:
    """Whether a quotation that begins in the line goes on in the next one."""
    try:
        _split(line)
    except ValueError:
        return True
    return False


_INNER = "\ue000"  # a # within a word, while it is split: no character of a script


def _split(line: str) -> list[tuple[str, int]]:
    """Words, each with how many line ends are before its own. In a shell a comment begins where a word would, for
    `shlex` within one too: data#500 loses all behind it.
    """
    lexer = shlex.shlex(re.sub(r"(?<=[^\s;&|(])#", _INNER, line), posix=True, punctuation_chars=";&|")
    lexer.whitespace_split, lexer.commenters = True, "#"
    return [(word.replace(_INNER, "#"), lexer.lineno - 1) for word in iter(lexer.get_token, lexer.eof)
            if word is not None]


def _read_line(words: Sequence[Word], known: dict[str, str]) -> Iterator[ShellCommand]:
    """The commands of a line; what it sets for all later ones is added to ``known``."""
    part: list[Word] = []
    for word in [*words, Word(";")]:
        if word.text and not set(word.text) <= set(";&|"):
            part.append(word)
            continue
        own: dict[str, str] = {}
        if part and (array := _ARRAY.fullmatch(part[0].text)):  # words in brackets: NAME=(--a 1 --b), NAME+=(--c)
            words_ = [Word(array[3], part[0].line), *part[1:]]
            words_[-1] = Word(words_[-1].text.removesuffix(")"), words_[-1].line)
            values = [word.text for each in words_ for word in _fill_word(each, known) if word.text]
            known[array[1]] = " ".join([*([known.get(array[1], "")] if array[2] else []), *values])
            part = []
        while part and (match := _ASSIGNMENT.fullmatch(part[0].text)):
            own[match[1]] = _fill(match[2], {**known, **own})
            del part[0]
        if part and part[0].text == "export":
            for word_ in part[1:]:
                if match := _ASSIGNMENT.fullmatch(word_.text):
                    known[match[1]] = _fill(match[2], known)
            part = []
        if part:
            filled = [text for each in part for text in _fill_word(each, {**known, **own})]
            yield ShellCommand(tuple(filled), {**known, **own})
        else:
            known.update(own)
        part = []


def _fill_word(word: Word, known: Mapping[str, str]) -> list[Word]:
    """A word with its variables put in; one that is a variable alone may be several words, or none."""
    text = _fill(word.text, known)
    if text != word.text and _VARIABLE.fullmatch(word.text):
        return [Word(part, word.line) for part in text.split()]
    return [Word(text, word.line)]


def _fill(text: str, known: Mapping[str, str]) -> str:
    def find(match: re.Match[str]) -> str:
        name = match[1] or match[4]
        return known.get(name, match[3] if match[3] is not None else match[0])

    return _VARIABLE.sub(find, text)


def _fill_sums(line: str, known: Mapping[str, str]) -> str:
    def compute(match: re.Match[str]) -> str:
        text = _fill(match[1] or match[2], known)
        if match[2]:  # between these names stand for their values without a sign, too
            text = re.sub(r"[A-Za-z_]\w*", lambda name: known.get(name[0], name[0]), text)
        return _compute(text, match[0])

    return _SUM.sub(compute, line)


def _compute(text: str, usual: str) -> str:
    """Products and quotients, or sums and differences, of whole numbers, as `expr` and $((...)) compute them.

    >>> _compute("32 / 4 * 2", "")
    '16'
    """
    words = re.findall(r"\d+|[-+*/]|[^\s\d*/+-]+", text.replace("\\", ""))
    for signs in ({"*", "/"}, {"+", "-"}):
        if words[1::2] and set(words[1::2]) <= signs and all(map(str.isdecimal, words[::2])) and len(words) % 2:
            value = int(words[0])
            for sign, number in zip(words[1::2], map(int, words[2::2])):
                if sign == "/" and not number:
                    return usual
                value = {"*": value * number, "/": value // (number or 1), "+": value + number,
                         "-": value - number}[sign]
            return str(value)
    return usual


@dataclass(frozen=True)
class OptionWords:
    """The options of a command, and its words that belong to none."""

    options: Mapping[str, str | bool | list[str]]
    lines: Mapping[Keys, int]   #: from 0
    others: tuple[str, ...]


def read_options(words: Sequence[Word], switches: frozenset[str] = frozenset()) -> OptionWords:
    """``--name value``, ``--name=value``, ``--name`` alone, and ``--name a b``; hyphens in names are underscores.

    ``switches`` take no value, so that a word after one belongs to none; ``enable_*`` stands for all that begin so.

    >>> read_options([Word(w) for w in "train.py --lr=1e-4 --target-modules q k --packing".split()]).options
    {'lr': '1e-4', 'target_modules': ['q', 'k'], 'packing': True}
    """
    options: dict[str, str | bool | list[str]] = {}
    lines: dict[Keys, int] = {}
    others: list[str] = []
    name = ""
    for text, line in words:
        if re.match(r"--?[A-Za-z]", text):
            given, equals, value = text.lstrip("-").partition("=")
            name = given.replace("-", "_")
            options[name] = value if equals else True
            if line:
                lines[name,] = line - 1
            name = "" if equals or has_name(switches, name) else name
        elif not name:
            others.append(text)
        else:
            so_far = options[name]
            options[name] = text if so_far is True else [*([so_far] if isinstance(so_far, str) else so_far or []), text]
    return OptionWords(options, lines, tuple(others))
