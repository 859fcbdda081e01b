"""What a program's reader is: how its files and commands are known, and what makes a plan of its options."""
from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .document import Document, Edit, Files
from .options import OptionReading, Options
from .plan import Plan, Sharding, TrainingPlan


@dataclass
class JobLaunch:
    """What stands before a program on its command line, or beside it: how many ranks, and how they are launched.

    - ``ranks``, ``hosts``: None where nothing said it; ``variables``: of the environment;
    - ``sharding``: what the configuration file of `accelerate` asks for; ``files``: where others are read from;
    - ``command``: the words of a command line that name the program, such as ``("trl", "dpo")``.
    """

    ranks: int | None = None
    hosts: int | None = None
    sharding: Sharding | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Files = field(default_factory=Files)
    readings: list[OptionReading] = field(default_factory=list)
    mixed_precision: str | None = None  #: of `accelerate`: bf16, fp16, no
    recomputes: bool = False            #: whether FSDP's settings of `accelerate` ask that blocks run again in backward
    command: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """The number of ranks; 1 where nothing said it."""
        return self.ranks or 1

    @property
    def visible(self) -> int:
        """How many devices ``CUDA_VISIBLE_DEVICES`` names; 0 where it is not set."""
        return sum(bool(word.strip()) for word in self.variables.get("CUDA_VISIBLE_DEVICES", "").split(","))

    @property
    def ranks_per_host(self) -> int | None:
        """None where there is one host, or nothing said how many there are."""
        return self.size // self.hosts if self.hosts and self.hosts > 1 else None


#: The values of a plan that people change, by the options of a program: each gives the edits that make it, or None
#: where the program has no such option. The arguments: its options, the plan, the value that is wanted.
Change = Callable[[Options, Any, Any], list[Edit] | None]


@dataclass(frozen=True)
class JobProgram:
    """A program that people configure.

    - ``version``: of which defaults are; ``source``: where its options are defined, in its own repository;
    - ``is_file``: whether the data of a file are a configuration of it; ``commands``: with what its commands begin,
      such as ``swift sft``, or how the path of its script ends, with a slash in it: ``swift/cli/sft.py``;
      ``is_command``: whether words, of which the first is a script, are a command of it that no such beginning tells;
    - ``argument``: the option that a word without a name is;
    - ``config``: the option that names a file of further options;
    - ``config_names``: what files such a name may stand for; ``config_copy``: how to get one that is not there;
    - ``switches``: options of a command that take no value; ``refuses_repeats``: whether it refuses a YAML in which a
      key is given twice, as OmegaConf does;
    - ``changes``: by names of `change.AXES`, of servers of `server_change.AXES`, what makes a change of its options.
    """

    name: str
    version: str
    source: str
    read: Callable[[Options, JobLaunch], Plan]
    is_file: Callable[[Mapping[str, Any]], bool] = lambda data: False
    commands: tuple[str, ...] = ()
    is_command: Callable[[Sequence[str]], bool] = lambda words: False
    argument: str = ""
    config: str = "config"
    config_names: tuple[str, ...] = ("{}",)
    config_copy: str = ""
    switches: frozenset[str] = frozenset()
    refuses_repeats: bool = False
    changes: Mapping[str, Change] = field(default_factory=dict)


def name_of(path: str) -> str:
    r"""The name of a program or a script at a path, also one of Windows.

    >>> name_of("/usr/bin/torchrun"), name_of(r"C:\venv\Scripts\accelerate.exe")
    ('torchrun', 'accelerate')
    """
    return re.split(r"[/\\]", path)[-1].removesuffix(".exe")


def find_beginning(program: JobProgram, words: Sequence[str]) -> int | None:
    """How many words of a command name the program; None where it is no command of it."""
    for beginning in program.commands:
        known = beginning.split()
        names = [name_of(word) if at == 0 else word for at, word in enumerate(words[:len(known)])]
        path = words[0].replace("\\", "/") if words else ""
        if names == known or "/" in beginning and f"/{path}".endswith(f"/{beginning}"):
            return len(known)
    return 1 if words and program.is_command(words) else None


def set_option(name: str, value: Any = None) -> Change:
    """A change that gives an option the wanted value, or ``value``, which may be a function of the options that gives
    None where there is none; ``training.seq_len`` is an option of a part.
    """
    *parts, last = name.split(".")

    def change(options: Options, plan: Any, wanted: Any) -> list[Edit] | None:
        after = wanted if value is None else value(options) if callable(value) else value
        before = (options.get(parts[0]) or {}).get(last) if parts else options.get(last)
        return None if after is None or str(before) == str(after) else [Edit((*parts, last), before, after)]
    return change


def set_batch(batch: str, accumulate: str = "", *, whole: str = "") -> Change:
    """A change of the micro-batch with which a step trains on as many tokens: by more passes, or where these follow
    from a batch of all ranks, ``whole``, with that written out.
    """
    def change(options: Options, plan: TrainingPlan, wanted: int) -> list[Edit] | None:
        times, rest = divmod(plan.micro_batch, wanted)
        if rest or times < 2:
            return None
        sequences = plan.micro_batch * plan.accumulate * plan.data_ranks
        values = {batch: wanted, accumulate or whole: plan.accumulate * times if accumulate else sequences}
        return [edit for name, value in values.items() for edit in set_option(name)(options, plan, value) or []]
    return change


def read_beside(options: Options, name: str, launch: JobLaunch) -> Document | None:
    """The file that an option names; None where the option is not given. Raises JobError where it is not there."""
    path = options.text(name)
    if path is None:
        return None
    found = launch.files.find(path)
    if found is None:
        raise options.fail(name, "no such file; copy it beside the configuration, or run where the program would")
    return launch.files.document(found)
