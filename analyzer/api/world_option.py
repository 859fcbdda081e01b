"""Options of a command that runs ranks of a job: ``--world --rank --devices-per-host --cluster``, and ``--ranks``."""
from __future__ import annotations

import argparse

from analyzer.distributed.world import World, world
from analyzer.distributed.world_spec import WorldSpec
from analyzer.errors import InputError

_NEED_WORLD = ("rank", "ranks", "devices_per_host", "cluster")


def add_world_options(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Add them; ``several`` ranks can be asked for at once."""
    group = parser.add_argument_group("ranks of a job")
    group.add_argument("--world", type=int, metavar="N",
                       help="run as one of N ranks: torch.distributed is there and moves no data")
    group.add_argument("--rank", type=int, metavar="R", help="which one" + ("" if several else " (default 0)"))
    if several:
        group.add_argument("--ranks", type=_read_ranks, metavar="R,R",
                           help="several, each in a process of its own (default: chosen, see above)")
    group.add_argument("--devices-per-host", type=int, metavar="N",
                       help="how many ranks are on a host (default: as many as hosts of the cluster have, else 8)")
    group.add_argument("--cluster", metavar="NAME",
                       help="the hosts and links, e.g. dgx_h100 (default: the usual ones of the device)")


def check_world_options(arguments: argparse.Namespace) -> None:
    """Raise InputError for an option that no other one gives a meaning."""
    if arguments.world is None:
        for name in _NEED_WORLD:
            if (value := getattr(arguments, name, None)) is not None:
                text = ",".join(map(str, value)) if isinstance(value, list) else value
                raise InputError(f"--{name.replace('_', '-')} {text}: of how many ranks? add --world N")
    elif arguments.rank is not None and getattr(arguments, "ranks", None) is not None:
        raise InputError(f"--rank {arguments.rank} --ranks {','.join(map(str, arguments.ranks))}: give one of them")
    else:
        WorldSpec.of(arguments.world, arguments.rank or 0, arguments.devices_per_host, arguments.cluster)


def read_world(arguments: argparse.Namespace) -> World | None:
    """The world that a command line asks for; None for none."""
    if arguments.world is None:
        return None
    return world(arguments.world, arguments.rank or 0, arguments.devices_per_host, arguments.cluster)


def _read_ranks(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise argparse.ArgumentTypeError(f"{text!r}: must be numbers of ranks between commas, as in 0,8,63")
    return [int(word) for word in words]
