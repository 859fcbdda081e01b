"""``analyzer generate``: what reading a prompt and generating tokens costs."""
from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from analyzer.output import check_output
from analyzer.recipe.option import add_recipe_options, read_dtype, read_recipe
from analyzer.report.choice import add_report_options, end_with_verdict, print_report, read_report_options
from analyzer.report.column import FORMATS
from analyzer.zoo.command_option import model_errors

from .serve_command import add_serving_options, asks_for_serving, read_cache, run_serving

_HELP = """\
Predicts what it costs to read a prompt and to generate tokens after it: the prefill, then one token after the other
while the key-value cache grows. TARGET is that of `analyzer profile`, a model that generates text.
"""

_EXAMPLES = """\
examples:
  analyzer generate gpt2 --prompt 512 --new-tokens 128
  analyzer generate hf:LlamaConfig:LlamaForCausalLM --prompt 2048 --batch 8 --dtype bfloat16 --cache static
  analyzer generate hf:llama-3.1-8b --quantize int4 --cache paged --cache-dtype fp8 --batch 16
  analyzer generate hf:llama-3.1-8b --prompt 8192 --max-sequences --device h100_sxm
  analyzer generate hf:mistral-7b-v0.3 --prompt 4096 --batches 1,2,4,8,16,32 --device l4
  analyzer generate hf:llama-3.1-70b --draft hf:llama-3.2-1b --speculate 5
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
    add_serving_options(parser)
    parser.add_argument("--autocast", metavar="DTYPE", help="run under torch.autocast with this dtype, bf16 or fp16")
    parser.add_argument("--device", default="h200",
                        help="whose memory and speed (default h200); `analyzer devices` lists them")
    parser.add_argument(
        "--samples", type=int, default=16, metavar="N", help=
        "how many of the passes after the first are run, those between them are on straight lines (default 16; 0: all)")
    parser.add_argument("--rows", type=int, default=20, metavar="N", help="rows of the table (default 20; 0: all)")
    parser.add_argument("--json", type=Path, metavar="FILE",
                        help="save the result (read it with GenerationProfile.from_json)")
    add_recipe_options(parser, ("dtype", "quantize", "lora", "attention", "compile"))
    add_report_options(parser)


def run_generate(arguments: argparse.Namespace) -> int:
    """``analyzer generate``; the result is the exit code."""
    from analyzer.api.argument import build_model
    from analyzer.hardware import find_device
    from analyzer.zoo.target import import_own_code, load_target

    from .run import profile_generate

    find_device(arguments.device)  # before any work: a wrong name costs no waiting
    import_own_code(arguments.target)  # which may register reports
    read_report_options(arguments, own=("fmt",))
    for path in (arguments.json, arguments.output):
        check_output(path)
    recipe, autocast = read_recipe(arguments), read_dtype("--autocast", arguments.autocast)
    cache = read_cache(arguments)
    target = load_target(arguments.target)
    if asks_for_serving(arguments):
        return run_serving(arguments, recipe, target, autocast)
    with model_errors(arguments.target):
        model = build_model(partial(recipe.build, target.build))
        found = profile_generate(model, arguments.prompt, arguments.new_tokens, batch_size=arguments.batch,
                                 autocast=autocast, device=arguments.device, samples=arguments.samples or None,
                                 **cache)
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
