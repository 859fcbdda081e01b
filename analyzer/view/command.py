"""``analyzer view``: saved profiles in a browser."""
from __future__ import annotations

import argparse
import contextlib
import webbrowser
from pathlib import Path
from typing import Any

from analyzer.report.page.document import check_charts

from .server import ADDRESS, ViewServer
from .viewed import read_files

_HELP = f"""\
Serves the page of a saved profile on {ADDRESS}, with a panel that profiles it again for another batch, sequence length
or image size, device, precision, optimizer, and with or without checkpointing. Ctrl-C ends it.

FILE is what `analyzer profile --json` wrote, or a table of ranks (`analyzer dryrun --json`, RankTable.to_json). Of
several files there is a list, of two profiles also a page of what changed.

A file says which command made it. Models of a library or of analyzer are profiled again as it says; code of your own
(FILE.py:factory, package.module:factory) runs only if --target names it here, for a file can come from anyone.
"""

_EXAMPLES = """\
examples:
  analyzer profile hf:BertConfig --optimizer adamw --json bert.json && analyzer view bert.json
  analyzer view net.json --target mynet.py:Net
  analyzer view before.json after.json --no-browser --port 8800

exit codes: 0 ended by Ctrl-C; 2 the command line or a file cannot be used
"""


def add_view_command(commands: Any) -> None:
    """Add ``view`` to the subparsers of the command line."""
    parser = commands.add_parser("view", help="look at saved profiles in a browser, and ask what if", description=_HELP,
                                 epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="a profile saved with --json")
    parser.add_argument("--target", metavar="TARGET",
                        help="the model of the files: one that they do not name, or code of your own that may run")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="where to listen (default: any free one)")
    parser.add_argument("--no-browser", action="store_true", help="print the address and open nothing")


def run_view(arguments: argparse.Namespace) -> int:
    """``analyzer view``; the result is the exit code."""
    check_charts(arguments.files[0])
    with ViewServer(read_files(arguments.files, arguments.target), arguments.port) as server:
        print(f"{server.url}  (Ctrl-C ends it)", flush=True)
        if any(one.origin.command is not None for one in server.viewed.profiles):
            server.worker.start()
        if not arguments.no_browser:
            webbrowser.open(server.url)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0
