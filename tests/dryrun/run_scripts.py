"""Runs scripts dry, one after the other in this process, which imports their libraries once: python run_scripts.py
FOLDER, where jobs.json is a list of [name, script, arguments]. Leaves NAME.json, a profile, and NAME.txt, what it said.
"""
import contextlib
import json
import os
import sys
import traceback
from pathlib import Path

from analyzer.tools.dryrun.script import dry_run

SCRIPTS = Path(__file__).with_name("scripts"), Path(__file__).parents[2] / "examples"

if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it
    folder = Path(sys.argv[1]).absolute()
    os.chdir(folder)
    for name, script, arguments in json.loads((folder / "jobs.json").read_text()):
        with (folder / f"{name}.txt").open("w") as text, contextlib.redirect_stdout(text):
            try:
                run = dry_run(next(path for scripts in SCRIPTS if (path := scripts / script).exists()), arguments)
                print(run.format_error(), "steps", run.steps)
                if run.error is None:
                    run.profile.to_json(folder / f"{name}.json")
            except Exception:  # told by the test that misses the profile
                traceback.print_exc(file=text)
