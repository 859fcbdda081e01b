"""The command line: the parser of all commands, and ``profile`` and ``devices`` themselves."""
from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from analyzer.advice.search import add_advise_command, find_advice, run_advise
from analyzer.api.models_command import add_models_command, run_models
from analyzer.api.prediction import add_prediction_options, check_world_options, predict
from analyzer.calibration.calibrate import add_calibrate_command, run_calibrate
from analyzer.dryrun.command import add_dryrun_command, run_dryrun
from analyzer.generation.command import add_generate_command, run_generate
from analyzer.hardware.catalogue import knowing
from analyzer.output import check_output, drawing_plainly
from analyzer.record.collector import own_traceback
from analyzer.record.options import watch_progress
from analyzer.report import choice
from analyzer.report.check import add_check_command, run_check
from analyzer.report.comparison.command import add_compare_command, run_compare
from analyzer.report.export.table_file import add_export_option, read_exports, write_exports
from analyzer.report.page.document import check_page
from analyzer.report.progress_bar import ProgressBar
from analyzer.report.run_cost import add_run_options, check_run_options, describe_run_cost
from analyzer.report.summary import DEFAULT_COLUMNS, describe_for_verdict, model_table
from analyzer.report.verdict import format_cheapest, judge
from analyzer.runtime.command import add_measure_command, run_measure
from analyzer.solver.command import add_fit_command, add_fits_command, add_plan_command, run_fit, run_fits, run_plan
from analyzer.sweep.command import add_sweep_command, run_sweep
from analyzer.view import add_view_command, run_view
from analyzer.zoo.command_option import refuse_batch_size
from analyzer.zoo.target import import_own_code

from . import __version__
from .errors import AnalyzerError, ModelError

_PROFILE_HELP = """\
Predicts what one training or inference step of a model costs: FLOPs, memory by phase, communication, time.
No GPU is needed and no weights are made.

TARGET is one of
  vit_b_16 resnet18 resnet50 gpt2 llama_1b llama_405b   models that ship with analyzer
  torchvision:NAME                                      e.g. torchvision:resnet50
  timm:NAME                                             e.g. timm:convnext_tiny
  hf:ConfigClass[:ModelClass]                           e.g. hf:BertConfig, hf:LlamaConfig:LlamaForCausalLM
  hf:NAME[:ModelClass]                                  e.g. hf:llama-3.1-8b; `analyzer models` lists them
  hf:CONFIG.json[:ModelClass]                           a config file, or the folder that holds config.json
  package.module:factory                                a callable of no arguments that returns an nn.Module
  FILE.py:factory                                       such a callable in a file, e.g. a class: mynet.py:Net

Several targets make one table with a row each. With --world, a factory wraps the model as a script would (DDP,
fully_shard, parallelize_module), and the profile is that of one rank.
"""

_PROFILE_EXAMPLES = """\
examples:
  analyzer profile vit_b_16 --input 8x3x224x224
  analyzer profile hf:BertConfig --input input_ids=int64:8x512 --optimizer adamw --autocast bfloat16
  analyzer profile llama_1b --dtype bf16 --quantize nf4 --lora r=16 --checkpointing --optimizer adamw8bit
  analyzer profile torchvision:resnet50 --mode infer --device a100 --show summary
  analyzer profile torchvision:resnet18 --mode infer --report torchinfo --columns output_size,num_params,mult_adds
  analyzer profile hf:BertConfig --mode infer --convention deepspeed --report deepspeed --top-modules 3
  analyzer profile mypackage.models:build --input tokens=int64:4x2048 --json profile.json
  analyzer profile mynet.py:Net --input 8x3x224x224 --show modules --format csv --output modules.csv
  analyzer profile resnet18 resnet50 vit_b_16 --optimizer adamw --format markdown
  analyzer profile llama_1b --device h100 --tokens 2e12 --price 2.5 --gpus 64 --roofline llama.png

exit codes: 0 done; 1 the model failed; 2 the command line or an input cannot be used; 3 a step does not fit on the
device
"""

_SHOWN = ("screen", "table", "summary", "modules", "brief")
_DEFAULT_SHOWN = "screen"


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="analyzer", description="What a PyTorch model will cost, before anyone owns the machine that runs it.")
    parser.add_argument("--version", action="version", version=f"analyzer {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    run = commands.add_parser("profile", help="predict what a step of a model costs", description=_PROFILE_HELP,
                              epilog=_PROFILE_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_prediction_options(run)
    run.add_argument("others", nargs="*", metavar="TARGET", help="more models, to be compared with the first")
    run.add_argument("--show", default=_DEFAULT_SHOWN, metavar="WHAT",
                     help=f"what to print, of {', '.join(_SHOWN)} (default {_DEFAULT_SHOWN}, all at a glance); table "
                     "is long, a row for each node")
    run.add_argument("--explain-replay", action="store_true",
                     help="print which parts were run once and replayed, and why the others were run")
    choice.add_file_options(run)
    add_export_option(run)
    add_run_options(run)
    choice.add_report_options(run)

    add_measure_command(commands)
    add_calibrate_command(commands)
    add_compare_command(commands)
    add_check_command(commands)
    add_generate_command(commands)
    add_fit_command(commands)
    add_fits_command(commands)
    add_advise_command(commands)
    add_plan_command(commands)
    add_dryrun_command(commands)
    add_sweep_command(commands)
    add_view_command(commands)

    add_models_command(commands)
    devices = commands.add_parser("devices",
                                  help="list the hardware catalogue, or one device with the source of each figure")
    devices.add_argument("name", nargs="?", metavar="DEVICE", help="show this device with its sources")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the result is the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    own = words.index("--") if words[:1] == ["dryrun"] and "--" in words else len(words)  # what follows is the script's
    commands = {"profile": run_profile, "measure": run_measure, "calibrate": run_calibrate,
                "compare": run_compare, "check": run_check,
                "generate": run_generate, "fit": run_fit, "fits": run_fits, "advise": run_advise, "plan": run_plan,
                "dryrun": run_dryrun, "sweep": run_sweep, "view": run_view, "models": run_models,
                "devices": run_devices}
    try:
        with drawing_plainly():
            arguments = make_parser().parse_args(words[:own])
            if arguments.command == "dryrun":
                arguments.arguments += words[own + 1:]
            # `calibrate` writes the file that is its device; what others ask of a profile has the device's name alone
            device = None if arguments.command == "calibrate" else getattr(arguments, "device", None)
            refuse_batch_size(arguments)
            with _showing_progress(arguments.command), knowing(device):
                return commands[arguments.command](arguments)
    except AnalyzerError as error:
        print(f"analyzer: {error}", file=sys.stderr)
        return 2
    except ModelError as error:
        print(f"analyzer: {error}", file=sys.stderr)
        if error.__cause__ is not None and (frames := own_traceback(error.__cause__)):
            print(f"\n{frames}", end="", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("analyzer: interrupted", file=sys.stderr)
        return 130  # as shells report SIGINT
    except BrokenPipeError:  # the reader (head, less) has gone
        sys.stderr.close()
        return 0


@contextmanager
def _showing_progress(command: str) -> Iterator[None]:
    """Show on a terminal how far the work of the block has come; a sweep, in many processes, does so
    itself.
    """
    if command == "sweep":
        yield
        return
    # a thread that draws would take time of what is measured
    ticks = command not in ("measure", "calibrate")
    with ProgressBar(among_output=command == "dryrun", ticks=ticks) as bar, watch_progress(bar):
        yield


def run_devices(arguments: argparse.Namespace) -> int:
    """``analyzer devices``."""
    from .hardware import format_catalogue, format_device

    print(format_device(arguments.name) if arguments.name else format_catalogue())
    return 0


def run_profile(arguments: argparse.Namespace) -> int:
    """``analyzer profile``."""
    shown = choice.read_shown(arguments.show, _SHOWN)
    import_own_code(arguments.target)  # which may register reports and exporters
    for path in (arguments.json, arguments.output):
        check_output(path)
    check_page(arguments.html)
    exports = read_exports(arguments.export)
    check_run_options(arguments)
    check_world_options(arguments)
    if arguments.others:
        choice.check_model_options(arguments, _DEFAULT_SHOWN)
        rows = list(zip([arguments.target, *arguments.others], predict(arguments, arguments.others), strict=True))
        table = model_table(rows, arguments.columns or DEFAULT_COLUMNS, arguments.format or "text")
        choice.emit(table, arguments.output)
        verdicts = [(name, judge(found, is_brief=True)) for name, found in rows]
        if arguments.output is None and arguments.format in (None, "text"):
            print("\n" + "\n".join(f"{name} {verdict}" for name, verdict in verdicts))
        return 3 if any(verdict is not None and verdict.fits is False for _, verdict in verdicts) else 0
    make_table = choice.read_table_options(arguments, shown)
    found, = predict(arguments)
    choice.save_profile(found, arguments.json, arguments.html)  # before anything is printed, for a reader that goes
    write_exports(found, exports)
    if arguments.roofline is not None:
        found.export("roofline", arguments.roofline)
    cost = describe_run_cost(found, arguments)
    texts: dict[str, Callable[[], str]] = {
        "screen": lambda: choice.draw_screen(found),
        "table": lambda: found.table(sort=arguments.sort, depth=arguments.depth),
        "summary": found.summary, "modules": lambda: found.module_tree(depth=arguments.depth, sort=arguments.sort),
        "brief": lambda: describe_for_verdict(found)}
    if arguments.report is not None:
        choice.print_report(found, arguments)
    else:
        text = "\n\n".join(texts[word]() for word in shown) if make_table is None else make_table(found)
        choice.emit(text, arguments.output)
    if arguments.explain_replay and found.replay is not None:
        print("\n" + found.replay.explain())
    if cost is not None and choice.is_text(arguments):
        print("\n" + cost)
    is_told = arguments.report == "screen" or arguments.report is None and "screen" in shown
    code = choice.end_with_verdict(found.verdict, arguments, is_told)
    if code and choice.is_text(arguments):
        advice = find_advice(arguments, quick=True)
        print(format_cheapest(advice) if is_told else advice.summary())
    return code


if __name__ == "__main__":
    sys.exit(main())
