"""A process that profiles commands one after the other, apart from the server, so that it can be stopped."""
from __future__ import annotations

import json
import multiprocessing
import signal
import threading
from multiprocessing.connection import Connection

import torch

from analyzer.api.prediction import parse_command, predict
from analyzer.errors import AnalyzerError, InputError, ModelError
from analyzer.hardware.catalogue import knowing
from analyzer.results.command import CommandInfo
from analyzer.results.profile import Profile

_PROFILE, _ERROR = b"P", b"E"


class StoppedError(Exception):
    """A run that was asked for was stopped."""


class Worker:
    """Runs one command at a time; others wait. What it is sent and sends is JSON."""

    def __init__(self) -> None:
        self._turn = threading.Lock()   # of the request that runs
        self._guard = threading.Lock()  # of what follows
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection | None = None
        self._is_busy = self._is_stopped = False

    def start(self) -> Connection:
        """Have a process ready; it imports torch meanwhile."""
        with self._guard:
            if self._process is None or self._connection is None or not self._process.is_alive():
                context = multiprocessing.get_context("spawn")  # a fork would copy locks of torch and of the server
                self._connection, theirs = context.Pipe()
                self._process = context.Process(target=_serve, args=(theirs,), name="analyzer view", daemon=True)
                self._process.start()
                theirs.close()
            return self._connection

    def run(self, command: CommandInfo) -> Profile:
        """The profile that a command makes. Raises InputError for a command that cannot be run, ModelError where the
        model fails, StoppedError after `stop`.
        """
        request = json.dumps({"target": command.target, "options": command.options}).encode()
        with self._turn:
            connection = self.start()
            with self._guard:
                self._is_busy, self._is_stopped = True, False
            try:
                connection.send_bytes(request)
                answer = connection.recv_bytes()
            except (EOFError, OSError) as error:
                if self._is_stopped:
                    raise StoppedError("stopped") from error
                raise ModelError("the process that profiles died, e.g. killed for memory; what is asked for may be too "
                                 "much for this machine") from error
            finally:
                self._is_busy = False
        kind, text = answer[:1], answer[1:].decode()
        if kind == _ERROR:
            said = json.loads(text)
            raise (ModelError if said["is_models"] else InputError)(said["error"])
        return Profile.from_json(text)

    def stop(self) -> bool:
        """End what runs; whether something did."""
        with self._guard:
            if self._process is None or not self._is_busy:
                return False
            self._is_stopped = True
            self._process.kill()
            self._process.join()
        return True

    def close(self) -> None:
        """End the process."""
        with self._guard:
            if self._process is not None:
                self._is_stopped = True
                self._process.kill()
                self._process.join()
                self._process = None


def _serve(connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of the terminal: the server ends this one
    torch.set_num_threads(1)                      # nothing is computed
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:  # the server has ended
            return
        connection.send_bytes(answer(request))


def answer(request: bytes) -> bytes:
    """A profile as JSON, or an error."""
    data = json.loads(request)
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in data["options"].items()}
    try:
        arguments = parse_command(CommandInfo(data["target"], options))
        with knowing(arguments.device):
            found, = predict(arguments)
            return _PROFILE + found.to_json().encode()
    except Exception as error:  # whatever there is, the page says it
        is_models = not isinstance(error, AnalyzerError)
        text = str(error) if isinstance(error, AnalyzerError | ModelError) else f"{type(error).__name__}: {error}"
        return _ERROR + json.dumps({"error": text, "is_models": is_models}).encode()
