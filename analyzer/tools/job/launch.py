"""What stands before a program on its command line: launchers of ranks, and variables of the environment."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .document import Document, JobError
from .options import Options
from .program import JobLaunch, name_of
from .programs.accelerate import read_accelerate
from .shell import ShellCommand, Word, read_options

#: Words that only start what follows them.
_STARTERS = {"nohup", "sudo", "env", "exec", "time", "setsid"}
_RUNNERS = {"uv": ("run",), "poetry": ("run",), "pipenv": ("run",), "conda": ("run",)}
# torch/distributed/run.py: options of torchrun that take no value
_TORCHRUN_SWITCHES = frozenset(["standalone", "m", "module", "no_python", "run_path", "virtual_local_rank", "use_env"])
# accelerate 1.15, commands/launch.py: those with action="store_true"
_ACCELERATE_SWITCHES = frozenset("""quiet q cpu multi_gpu tpu enable_cpu_affinity dynamo_use_dynamic
dynamo_use_regional_compilation use_deepspeed use_fsdp use_parallelism_config use_megatron_lm m module tpu_cluster
no_tpu_cluster tpu_use_sudo downcast_bf16 fp8_use_autocast_during_eval debug no_python""".split())
# deepspeed 0.19, launcher/runner.py
_DEEPSPEED_SWITCHES = frozenset("""force_multi module no_python no_local_rank no_ssh no_ssh_check save_pid
enable_each_rank_log bind_cores_to_rank elastic_training""".split())
#: Variables by which programs are told how many ranks a host has: ms-swift, LLaMA-Factory.
_RANKS = ("NPROC_PER_NODE", "FORCE_TORCHRUN")


def peel(command: ShellCommand, name: str, launch: JobLaunch) -> tuple[ShellCommand, JobLaunch]:
    """The command that launchers start, and what they say of its ranks. Raises JobError for a launcher of nothing."""
    words = list(command.words)
    launch = _read_variables(command, name, launch)
    while words:
        head = name_of(words[0].text)
        if head in _STARTERS:
            del words[0]
        elif head in _RUNNERS and len(words) > 1 and words[1].text in _RUNNERS[head]:
            del words[:2]
        elif head.startswith("python") and len(words) > 2 and words[1].text == "-m" and words[2].text in _MODULES:
            words[:3] = [Word(word, words[0].line) for word in _MODULES[words[2].text].split()]
        elif head == "torchrun":
            words, launch = _peel_torchrun(words[1:], name, launch)
        elif head == "tune" and len(words) > 2 and words[1].text == "run":  # torchtune: options of torchrun, a recipe
            words, launch = _peel_torchrun(words[2:], name, launch)
            return replace(command, words=(Word("tune_run"), *words)), launch
        elif head == "accelerate" and len(words) > 1 and words[1].text == "launch":
            words, launch = _peel_accelerate(words[2:], name, launch)
        elif head == "deepspeed" and len(words) > 1:
            words, launch = _peel_deepspeed(words[1:], name, launch)
        elif head.startswith("python") and len(words) > 1:
            words = words[2:] if words[1].text == "-m" else words[1:]
        else:
            return replace(command, words=tuple(words)), launch
    raise JobError(f"{name}: {' '.join(command.texts)}: launches no program; give the whole command")


_MODULES = {"torch.distributed.run": "torchrun", "torch.distributed.launch": "torchrun",
            "accelerate.commands.launch": "accelerate launch"}


def _read_variables(command: ShellCommand, name: str, launch: JobLaunch) -> JobLaunch:
    variables = {**launch.variables, **command.variables}
    launch = replace(launch, variables=variables)
    ranks = launch.ranks
    said = variables.get("NPROC_PER_NODE", "")
    hosts = _read_count(variables.get("NNODES", ""))
    if said.isdecimal() and int(said):
        ranks = int(said) * (hosts or 1)
    elif variables.get("FORCE_TORCHRUN", "0") not in ("0", "") and launch.visible:
        ranks = launch.visible
    return replace(launch, ranks=ranks, hosts=hosts or launch.hosts)


def _read_count(text: str) -> int | None:
    """A number of hosts or ranks; of a range such as 1:4 the most."""
    text = text.rsplit(":", 1)[-1]
    return int(text) if text.isdecimal() and int(text) else None


def _split(words: Sequence[Word], switches: frozenset[str], name: str, launch: JobLaunch
           ) -> tuple[Options, list[Word]]:
    """The options of a launcher, and the words of its program: from the first one on that belongs to no option."""
    at = 0
    while at < len(words) and (text := words[at].text).startswith("-"):
        at += 1 if "=" in text or text.lstrip("-").replace("-", "_") in switches else 2
    found = read_options(words[:at], switches)
    document = Document(name, "", dict(found.options), found.lines, "command")
    return Options.of(document, readings=launch.readings), list(words[at:])


def _peel_torchrun(words: list[Word], name: str, launch: JobLaunch) -> tuple[list[Word], JobLaunch]:
    options, program = _split(words, _TORCHRUN_SWITCHES, name, launch)
    each = _read_count(str(options.get("nproc_per_node") or "1"))
    if each is None:  # "gpu" or "auto": as many as the host has
        each = launch.visible or 1
    hosts = _read_count(str(options.get("nnodes") or "1")) or launch.hosts or 1
    return program, replace(launch, ranks=each * hosts, hosts=hosts)


def _peel_accelerate(words: list[Word], name: str, launch: JobLaunch) -> tuple[list[Word], JobLaunch]:
    options, program = _split(words, _ACCELERATE_SWITCHES, name, launch)
    if options.get("config_file") is not None:
        path = launch.files.find(str(options.get("config_file")))
        if path is None:
            raise options.fail("config_file", "no such file; copy it beside the command, or run where it would run")
        document = launch.files.document(path)
        options.layers = [(document, document.data), *options.layers]
    if options.get("num_processes") is None and options.get("multi_gpu"):
        launch = replace(launch, ranks=launch.visible or launch.ranks)
    return program, read_accelerate(options, launch)


def _peel_deepspeed(words: list[Word], name: str, launch: JobLaunch) -> tuple[list[Word], JobLaunch]:
    options, program = _split(words, _DEEPSPEED_SWITCHES, name, launch)
    hosts = _read_count(str(options.get("num_nodes") or "1")) or 1
    each = _read_count(str(options.get("num_gpus") or ""))
    include = str(options.get("include") or "")
    if each is None and ":" in include:
        each = len(include.split(":")[-1].split(","))
    return program, replace(launch, ranks=launch.ranks if each is None else each * hosts, hosts=hosts)
