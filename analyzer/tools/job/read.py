"""`read_job`: which program a file or a command is of, and the plan that it asks for."""
from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from analyzer.errors import find_close
from analyzer.on_use import load

from .document import FORMS, Document, Edit, Files, JobError
from .launch import peel
from .options import OptionReading, Options
from .plan import Plan, ServingPlan, TrainingPlan
from .program import JobLaunch, JobProgram, find_beginning, name_of
from .programs import PROGRAMS
from .shell import ShellCommand, Word, read_options, read_script, read_words

COMMAND = "the command"  #: what a command without a file is called in errors
_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
#: Names in files that say how something is launched, and not what: those of accelerate and DeepSpeed.
_BESIDE = {"distributed_type": "analyzer job -- accelerate launch --config_file FILE ...",
           "zero_optimization": "analyzer job -- COMMAND --deepspeed FILE ..."}


@dataclass(frozen=True)
class Job:
    """A configuration that was read: of which program, what it asks for, and what became of each of its options."""

    name: str                                #: the file, or `COMMAND`
    program: JobProgram
    plan: Plan
    readings: tuple[OptionReading, ...]
    launch: JobLaunch
    options: Options = field(repr=False)
    files: Files = field(repr=False)

    @property
    def missing(self) -> list[OptionReading]:
        """Options that change the cost, or may, and are not part of the answer: they are told first."""
        return [reading for reading in self.readings if reading.kind in ("not modelled", "unknown")]

    def profile(self, device: str = "h200", **settings: Any) -> Any:
        """What a step costs on a device: a `TrainedJob`, a `LaidOutJob` where ranks divide the model, or a
        `ServedProfile` of a server.
        """
        if isinstance(self.plan, ServingPlan):
            return load("analyzer.tools.job.serving:profile_serving")(self.plan, device, files=self.files, **settings)
        way = "training:profile_training" if self.plan.parallel is None else "layout:profile_layout"
        return load(f"analyzer.tools.job.{way}")(self.plan, device, files=self.files, **settings)

    def with_model(self, model: str) -> Job:
        """The same job of another model: a name, or the folder of its config.json."""
        plan = self.plan
        if isinstance(plan, TrainingPlan) and model != plan.model:
            plan = replace(plan, config=None)
        return replace(self, plan=replace(plan, model=model))

    def change(self, edits: Sequence[Edit]) -> Job:
        """The job of the changed file, read anew. Raises JobError where its program would refuse it."""
        files = self.files.replace(self.name, self.change_text(edits))
        changed = _read(self.name, files, self.launch.ranks, [self.program])
        return changed.with_model(self.plan.model)

    def change_text(self, edits: Sequence[Edit]) -> str:
        """The text of the file with values changed."""
        document = next((document for document, _ in self.options.layers if document.name == self.name),
                        self.options.layers[-1][0])
        return document.change(edits)


def read_job(path: str | Path, *, ranks: int | None = None, programs: Sequence[JobProgram] = PROGRAMS) -> Job:
    """Read a configuration of another program, or a shell script that starts it. Nothing of it is executed.

    ``ranks``: how many devices, where the file does not say it; ``programs``: of which it may be. Raises JobError,
    which names the file, the line and the key, for what cannot be read, and for what its own program would refuse.
    """
    return _read(str(path), Files(Path(path).parent), ranks, programs)


def read_command(words: Sequence[str], *, ranks: int | None = None, programs: Sequence[JobProgram] = PROGRAMS) -> Job:
    """Read a command line, such as ``["accelerate", "launch", "train.py", ...]``; it is not run. Raises JobError."""
    if not words:
        raise JobError("no command: write it after --, as in analyzer job -- vllm serve Qwen/Qwen3-8B")
    return _read(COMMAND, Files(texts={COMMAND: shlex.join(words)}), ranks, programs)


def _read(name: str, files: Files, ranks: int | None, programs: Sequence[JobProgram]) -> Job:
    suffix = Path(name).suffix.lower()
    if name == COMMAND or suffix in _SCRIPTS:
        text = files.text(name)
        commands = read_script(text, name) if name != COMMAND else [read_words(shlex.split(text))]
        return _read_commands(commands, text, name, files, ranks, programs)
    if suffix == ".py":
        raise JobError(f"{name}: is a script: `analyzer dryrun {name}` runs it without a device")
    if suffix not in FORMS:
        known = ", ".join([*FORMS, *_SCRIPTS])
        raise JobError(f"{name}: not the name of a configuration: it must end in {known}, or be a command after --")
    document = files.document(name)
    program = next((program for program in programs if program.is_file(document.data)), None)
    beside = next((tool for key, tool in _BESIDE.items() if key in document.data), None)
    if program is None and beside is not None:
        raise JobError(f"{name}: is read beside what it launches; give that command: {beside}")
    if program is None:
        raise JobError(f"{name}: is no configuration of {', '.join(p.name for p in programs)}: its first names are "
                       f"{', '.join(list(document.data)[:5]) or 'none'}")
    return _finish(name, program, Options.of(document), JobLaunch(ranks, files=files), files)


def _read_commands(commands: Sequence[ShellCommand], text: str, name: str, files: Files, ranks: int | None,
                   programs: Sequence[JobProgram]) -> Job:
    """The job of the first command of a script that starts a known program; of several that share its name that one of
    which its options are.
    """
    heads = []
    for command in commands:
        try:
            inner, launch = peel(command, name, JobLaunch(files=files))
        except JobError:
            if len(commands) == 1:
                raise
            continue
        found = [(program, count) for program in programs
                 if (count := find_beginning(program, inner.texts)) is not None]
        if found:
            read = [(program, count, _read_options(program, inner.words[count:], text, name, files))
                    for program, count in found]
            program, count, options = next((each for each in read if len(read) > 1 and each[0].is_file(
                {option: each[2].get(option) for option in each[2].names()})), read[0])
            launch.ranks = launch.ranks if ranks is None else ranks
            launch.command = tuple(inner.texts[:count])
            return _finish(name, program, options, launch, files)
        heads.append(" ".join([name_of(inner.texts[0]), *inner.texts[1:2]]))
    known = list(dict.fromkeys(beginning for program in programs for beginning in program.commands))
    near = find_close(heads[0], known) if heads else ""
    raise JobError(f"{name}: {heads[0] if heads else 'no command'}: not the command of a program that is read"
                   f"{near or '; these are: ' + ', '.join(known)}")


def _read_options(program: JobProgram, words: Sequence[Word], text: str, name: str, files: Files) -> Options:
    """The options of a command, over those of the file that it names."""
    found = read_options(words, program.switches)
    data: dict[str, Any] = dict(found.options)
    layers: list[Document] = []
    given = data.pop(program.config, None)
    paths, more = ([given[0]], given[1:]) if isinstance(given, list) else ([] if given is None else [str(given)], [])
    for word in (*more, *found.others):
        head, equals, value = word.partition("=")
        if equals and head.replace(".", "_").isidentifier():
            data[head] = value
        elif Path(word).suffix.lower() in FORMS:
            paths.append(word)
        elif program.argument and program.argument not in data:
            data[program.argument] = word
    for path in paths:
        at = next((at for form in program.config_names if (at := files.find(form.format(path)))), None)
        if at is None:
            how = program.config_copy.format(path) or "copy it here, or run where the program would"
            raise JobError(f"{name}: {path}: no such file; {how}")
        layers.append(files.document(at))
    layers.append(Document(name, text, nest(data), found.lines, "command", program.switches))
    return Options.of(*layers)


def nest(data: dict[str, Any]) -> dict[str, Any]:
    """Options with dots in their names as mappings in mappings.

    >>> nest({"optimizer.lr": "1", "optimizer.fused": "true", "seed": "2"})
    {'optimizer': {'lr': '1', 'fused': 'true'}, 'seed': '2'}
    """
    found: dict[str, Any] = {}
    for name, value in data.items():
        inner = found
        *path, last = name.split(".")
        for part in path:
            if not isinstance(inner.get(part), dict):
                inner[part] = {}
            inner = inner[part]
        inner[last] = value
    return found


def _finish(name: str, program: JobProgram, options: Options, launch: JobLaunch, files: Files) -> Job:
    options.readings = launch.readings
    repeats = [(document, repeat) for document, _ in options.layers for repeat in document.repeats]
    for document, repeat in repeats if program.refuses_repeats else ():
        raise JobError(f"{document.name}:{repeat.last + 1}: {repeat.name}: is given twice, on line {repeat.first + 1} "
                       f"too, which {program.name} refuses")
    plan = program.read(options, launch)
    launch.readings += [OptionReading(repeat.name, f"given twice, on line {repeat.first + 1} too", "assumed",
                                      "the last value counts", f"{document.name}:{repeat.last + 1}")
                        for document, repeat in repeats]
    if isinstance(plan, TrainingPlan) and launch.ranks is None:
        launch.ranks = plan.ranks
    return Job(name, program, plan, tuple(launch.readings), launch, options, files)
