"""``analyzer generate``: what reading a prompt and generating tokens costs."""
from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from analyzer.errors import InputError
from analyzer.output import check_output
from analyzer.report.choice import add_report_options, end_with_verdict, print_report, read_report_options
from analyzer.report.column import FORMATS
from analyzer.zoo.command_option import model_errors
from analyzer.zoo.input_spec import DTYPES

from .decoder import CACHES

_HELP = """\
Predicts what it costs to read a prompt and to generate tokens after it: the prefill, then one token after the other
while the key-value cache grows. TARGET is that of `analyzer profile`, a model that generates text.
"""

_EXAMPLES = """\
examples:
  analyzer generate gpt2 --prompt 512 --new-tokens 128
  analyzer generate hf:LlamaConfig:LlamaForCausalLM --prompt 2048 --batch 8 --dtype bfloat16 --cache static
  analyzer generate hf:T5Config:T5ForConditionalGeneration --report tree --depth 1  (of prefill and last token)

exit codes: 0 done; 1 the model failed; 2 the command line or an input cannot be used; 3 the generation does not fit on
the device
"""


def add_generate_command(commands: Any) -> None:
    """Add ``generate`` to the subparsers of the command line."""
    parser = commands.add_parser("generate", help="predict what generating tokens costs", description=_HELP,
                                 epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", metavar="TARGET", help="the model; see `analyzer profile --help`")
    parser.add_argument("--prompt", type=int, default=512, metavar="N", help="tokens of the prompt (default 512)")
    parser.add_argument("--new-tokens", type=int, default=128, metavar="N", help="tokens to generate (default 128)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences at once (default 1)")
    parser.add_argument("--cache", choices=CACHES, default="dynamic",
                        help="grow with each token (default), or take room for all at once")
    parser.add_argument("--dtype", metavar="DTYPE",
                        help="turn the model's floating parameters into this, e.g. bfloat16 (default: as built)")
    parser.add_argument("--autocast", metavar="DTYPE", help="run under torch.autocast with this dtype, bf16 or fp16")
    parser.add_argument("--device", default="h200",
                        help="whose memory and speed (default h200); `analyzer devices` lists them")
    parser.add_argument(
        "--samples", type=int, default=16, metavar="N", help=
        "how many of the passes after the first are run, those between them are on straight lines (default 16; 0: all)")
    parser.add_argument("--rows", type=int, default=20, metavar="N", help="rows of the table (default 20; 0: all)")
    parser.add_argument("--json", type=Path, metavar="FILE",
                        help="save the result (read it with GenerationProfile.from_json)")
    add_report_options(parser)


def run_generate(arguments: argparse.Namespace) -> int:
    """``analyzer generate``; the result is the exit code."""
    from analyzer.api.argument import build_model
    from analyzer.hardware import find_device
    from analyzer.meta.mode import MetaTensorMode
    from analyzer.zoo.target import load_target

    from .run import profile_generate

    find_device(arguments.device)  # before any work: a wrong name costs no waiting
    read_report_options(arguments, own=("fmt",))
    for path in (arguments.json, arguments.output):
        check_output(path)
    dtype, autocast = (find_dtype(option, text)
                       for option, text in (("--dtype", arguments.dtype), ("--autocast", arguments.autocast)))
    target = load_target(arguments.target)
    with model_errors(arguments.target):
        model = build_model(target.build)
        if dtype is not None:
            with MetaTensorMode():
                model.to(dtype)
        found = profile_generate(model, arguments.prompt, arguments.new_tokens, batch_size=arguments.batch,
                                 cache=arguments.cache, autocast=autocast, device=arguments.device,
                                 samples=arguments.samples or None)
    if arguments.json is not None:
        found.to_json(arguments.json)  # before anything is printed, for a reader that goes
    if arguments.report is not None:
        for part in (found.prefill, found.decode):
            if part is not None:
                print_report(part, arguments)
    elif arguments.format not in (None, "text"):
        print(found.table(arguments.rows or None, fmt=FORMATS[arguments.format]))
    else:
        print(found.summary(arguments.rows or None))
    return end_with_verdict(found.verdict, arguments)


def find_dtype(option: str, text: str | None) -> Any:
    """The floating dtype of that name. Raises InputError for another."""
    if text is None:
        return None
    name = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(text, text)
    if name not in DTYPES or not DTYPES[name].is_floating_point:
        raise InputError(f"{option} {text}: no floating dtype; e.g. bfloat16, float16, float32")
    return DTYPES[name]
