"""``python -m analyzer``, and the command ``analyzer``."""
import sys


def run() -> int:
    """Run the command line; the result is the exit code. Ctrl-C while its own files are imported is answered here."""
    try:
        from .cli import main

        code = main()
    except KeyboardInterrupt:
        print("analyzer: interrupted", file=sys.stderr)
        code = 130  # as shells report SIGINT
    # Python ends itself by SIGINT, whatever the exit code, where Ctrl-C left the last code that was run as a text, as
    # dataclasses run theirs (Python/pythonrun.c, `run_eval_code_obj`): now that is this one
    exec("")  # nosec B102 # a text of our own
    return code


if __name__ == "__main__":
    sys.exit(run())
