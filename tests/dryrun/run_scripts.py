"""Runs scripts dry, one after the other in this process, which imports their libraries once: python run_scripts.py
FOLDER [DEVICE], where jobs.json is a list of [name, script, arguments]. Leaves NAME.json, a profile, and NAME.txt,
what it said.
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
        environment = dict(os.environ)  # which trainers write into
        with (folder / f"{name}.txt").open("w") as text, contextlib.redirect_stdout(text):
            try:
                path = next(path for scripts in SCRIPTS if (path := scripts / script).exists())
                run = dry_run(path, arguments, device=sys.argv[2] if len(sys.argv) > 2 else "h200")
                print(run.format_error(), "steps", run.steps)
                if run.error is None:
                    run.profile.to_json(folder / f"{name}.json")
            except Exception:  # told by the test that misses the profile
                traceback.print_exc(file=text)
        os.environ.clear()
        os.environ.update(environment)
