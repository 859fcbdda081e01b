"""``analyzer dryrun``: the command line of `dry_run`."""
from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from analyzer.api.prediction import check_world_options, read_world
from analyzer.errors import InputError
from analyzer.meta.value.data_dependent import STAND_IN
from analyzer.output import check_output
from analyzer.report.choice import end_with_verdict, make_text, read_shown, save_profile
from analyzer.report.page.document import check_page
from analyzer.results.profile import Profile


def run_dryrun(arguments: argparse.Namespace) -> int:
    """``analyzer dryrun``; the result is the exit code."""
    shown = read_shown(arguments.show)
    check_world_options(arguments)
    check_output(arguments.json)
    check_page(arguments.html)
    # the script may change the directory
    outputs = [None if path is None else path.absolute() for path in (arguments.json, arguments.html)]

    if arguments.world is not None and arguments.rank is None:
        return _run_ranks(arguments, shown, *outputs)

    from .script import dry_run

    run = dry_run(arguments.script, arguments.arguments, device=arguments.device, steps=arguments.steps,
                  world=read_world(arguments))
    sys.stdout.flush()  # what the script printed comes before what follows on the other stream
    print(run.format_error(), end="", file=sys.stderr)
    found = run.profile
    if not (run.error or run.steps or found.params or found.timeline or found.out_of_memory):
        named = re.search(r"^(?:class|def) (\w+)", arguments.script.read_text(), re.MULTILINE)
        raise InputError(f"{arguments.script}: it ran no model and no optimizer step; for a class or function in it "
                         f"use analyzer profile {arguments.script}:{'Net' if named is None else named[1]} --input SPEC")
    if found.out_of_memory is not None:
        ended = "the script would run out of memory"
    elif run.error is not None:
        ended = "the script failed"
    else:
        ended = "ended here" if run.is_stopped else "the script ended by itself"
    taken = f"{run.steps} optimizer step{'s' if run.steps > 1 else ''}" if run.steps else "no optimizer step was taken"
    has_ended_early = run.error is not None and not run.steps
    if not has_ended_early:
        save_profile(found, *outputs)  # before anything is printed, for a reader that goes
    print(f"\n--- dry run of {arguments.script}: {taken}, {ended}")
    if any(line.startswith(STAND_IN) for line in found.assumptions):
        print("numbers that it read from tensors, such as a loss of 1.0, are stand-ins: there are no data")
    if has_ended_early:
        return 1  # of what little ran there is nothing to tell
    return _print_profile(found, shown, run.error is not None)


def _print_profile(found: Profile, shown: list[str], has_failed: bool) -> int:
    print(f"\n{make_text(found, shown)}")
    code = end_with_verdict(found.verdict, is_told="screen" in shown)
    return 3 if found.out_of_memory is not None else 1 if has_failed else code


def _run_ranks(arguments: argparse.Namespace, shown: list[str], json: Path | None, html: Path | None) -> int:
    """Several ranks of a job: their table, then the profile of the one that decides."""
    from .job import dry_run_ranks

    run = dry_run_ranks(arguments.script, arguments.arguments, size=arguments.world, ranks=arguments.ranks,
                        devices_per_host=arguments.devices_per_host, cluster=arguments.cluster,
                        device=arguments.device, steps=arguments.steps)
    failed, rank = run.failed_rank, run.table.deciding_rank
    found = None if rank is None else run.table.profiles[rank]
    if failed is not None:
        print(f"rank {failed}:\n{run.results[failed].error}", end="", file=sys.stderr)
    if json is not None and run.table.profiles:
        run.table.to_json(json)
    if html is not None and run.table.profiles:
        run.table.to_html(html)
    print(f"\n--- dry run of {arguments.script} as {len(run.results)} of {arguments.world} ranks"
          f"{'' if failed is None else ', the script failed'}\n\n{run.table.render()}")
    if found is None:
        return 1
    if len(run.table.profiles) > 1:
        print(f"\n--- rank {rank}")
    return _print_profile(found, shown, failed is not None)
