"""The command line: a parser made from the records of `analyzer.commands`, and what calls the function of one."""
from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from types import FrameType
from typing import NoReturn

from analyzer.commands import COMMANDS
from analyzer.errors import AnalyzerError, InputError, ModelError
from analyzer.hardware.catalogue import knowing
from analyzer.on_use import load
from analyzer.output import drawing_plainly, print_error
from analyzer.record.progress import watch_progress

from . import __version__

_WRONG_CHOICE = re.compile(r"invalid choice: '(?P<given>.*?)'.* \(choose from (?P<names>.*)\)")

#: Commands that take another program's words after ``--``, and the argument that holds them.
_TAKES_WORDS = {"dryrun": "arguments", "job": "words"}


class _Parser(argparse.ArgumentParser):
    """One whose errors end with an example of what is missing, or with the name that is meant."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong, and exit with 2."""
        what, is_missing, names = message.partition("are required: ")
        if is_missing:
            message = what + is_missing + ", ".join(dict.fromkeys(names.split(", ")))
            command = COMMANDS.get(self.prog.split()[-1], COMMANDS["profile"])
            example = command.examples[command.examples.index(f"analyzer {command.name}"):]
            message += "; e.g. " + re.split("  | &&|\n", example)[0]
        if wrong := _WRONG_CHOICE.search(message):
            near = get_close_matches(wrong["given"], re.findall(r"[\w-]+", wrong["names"]), n=1)
            if near:
                message = message.replace(" (choose", f"; did you mean {near[0]}? (choose", 1)
            elif "argument --compile" in message:  # which takes the next word for its mode
                message += f"; a target goes before it: {self.prog} {wrong['given']} --compile"
        self.print_usage(sys.stderr)
        print_error(message, f"{self.prog}: error")
        self.exit(2)


def make_parser(called: str | None = None) -> argparse.ArgumentParser:
    """The parser of the command line, with the options of the command that is ``called``, by default of all."""
    parser = _Parser(
        prog="analyzer", description="Predicts what a PyTorch model costs, without the machine that will run it.")
    parser.add_argument("--version", action="version", version=f"analyzer {__version__}")
    parser.add_argument("--quiet", action="store_true", help="do not show on stderr how far a command is (else "
                        "a bar on a terminal, in a log a line every ten seconds); may stand anywhere in a command")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS.values():
        command.add_to(commands, with_options=called in (None, command.name))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the result is the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    called = next((word for word in words if not word.startswith("-")), "")
    is_quiet = "--quiet" in words[:words.index("--") if "--" in words else None]
    if is_quiet:
        words.remove("--quiet")
    takes_words = called in _TAKES_WORDS and "--" in words
    own = words.index("--") if takes_words else len(words)  # what follows is the script's, or another program's
    try:
        with drawing_plainly():
            if called == "fits":
                raise InputError("fits: write `analyzer fit`, without --device or with one for each device of a table")
            arguments, unknown = make_parser(called).parse_known_args(words[:own])
            if unknown:
                raise InputError(_explain(called, unknown, words))
            if takes_words:
                getattr(arguments, _TAKES_WORDS[called]).extend(words[own + 1:])
            # `calibrate` writes the file that is its device; what others ask of a profile has the device's name alone
            device = None if called == "calibrate" else getattr(arguments, "device", None)
            device = device[0] if isinstance(device, list) else device
            if getattr(arguments, "batch_size", None) is not None:
                load("analyzer.zoo.command_option:refuse_batch_size")(arguments)
            settings = getattr(arguments, "alloc_conf", None)
            with (_noting_interrupts() as noted, _showing_progress(called, is_quiet), knowing(device),
                  _allocating(settings)):
                run = load(COMMANDS[called].run)
                if noted:
                    raise KeyboardInterrupt
                code: int = run(arguments)
                return code
    except AnalyzerError as error:
        print_error(str(error))
        return 2
    except ModelError as error:
        print_error(str(error))
        # torch is imported already: by the model that failed
        if error.__cause__ is not None and (frames := load("analyzer.record.failure:own_traceback")(error.__cause__)):
            print(f"\n{frames}", end="", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stop:
        print_error("; ".join(["interrupted", *map(str, stop.args)]))
        return 130  # as shells report SIGINT
    except BrokenPipeError:  # the reader (head, less) has gone
        sys.stderr.close()
        return 0


def _explain(called: str, unknown: Sequence[str], words: Sequence[str]) -> str:
    """Why a command does not take these of its words, and which one does."""
    flag = unknown[0].partition("=")[0]
    near = get_close_matches(flag, COMMANDS[called].flags, n=1) if flag.startswith("-") else []
    takers = [f"`analyzer {command.name}`" for command in COMMANDS.values() if flag in command.flags]
    hint = f"; it belongs to {' and '.join(takers)}" if takers else f"; did you mean {near[0]}?" if near else ""
    if called == "dryrun":
        script = next((word for word in words if word.endswith(".py")), "SCRIPT")
        hint = (f"; did you mean {near[0]}?" if near else "") + (
            f"; arguments of the script go after `--`: analyzer dryrun {script} -- {' '.join(unknown)}")
    is_saved = called == "profile" and flag in COMMANDS["show"].flags
    return (f"{' '.join(unknown)}: `analyzer {called}` does not take this{hint}"
            + ("; save the profile with --json FILE for it" if is_saved else ""))


@contextmanager
def _noting_interrupts() -> Iterator[list[int]]:
    """A block of which the value holds each SIGINT, for not every one becomes known as KeyboardInterrupt: the C code of
    a library that is being imported may swallow that, and go on, or fail with something that says nothing of it. Where
    the block fails after one, it ends with KeyboardInterrupt.
    """
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        signal.default_int_handler(number, frame)

    watches = threading.current_thread() is threading.main_thread() and (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    if watches:
        signal.signal(signal.SIGINT, note)
    try:
        yield noted
    except Exception as error:
        if noted:
            said = "".join(str(error).splitlines()[:1])
            raise KeyboardInterrupt(f"then {type(error).__name__}: {said}") from error
        raise
    finally:
        if watches and signal.getsignal(signal.SIGINT) is note:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _allocating(settings: str | None) -> Iterator[None]:
    """A block in which the environment has these settings of PyTorch's allocator, as processes that it starts have."""
    if settings is None:
        yield
        return
    try:
        load("analyzer.memory.allocator_options:AllocatorOptions").from_string(settings)
    except InputError as error:
        raise InputError(f"--alloc-conf: {error}") from None
    name = "PYTORCH_CUDA_ALLOC_CONF"
    before, os.environ[name] = os.environ.get(name), settings
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def _showing_progress(command: str, is_quiet: bool) -> Iterator[None]:
    """Show how far the block has come, if it is not quiet; what runs in many processes does so itself."""
    with load("analyzer.report.progress_bar:working_for")(command, is_quiet=is_quiet):
        if command in ("sweep", "search", "posttrain"):
            yield
            return
        # a thread that draws would take time of what is measured
        ticks = command not in ("measure", "calibrate")
        with load("analyzer.report.progress_bar:ProgressBar")(among_output=command == "dryrun", ticks=ticks) as bar, \
                watch_progress(bar):
            yield


if __name__ == "__main__":
    sys.exit(main())
