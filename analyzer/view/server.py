"""The server of a view: on the loopback address only, for requests that name it and know its token."""
from __future__ import annotations

import hmac
import json
import secrets
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from analyzer.errors import AnalyzerError, InputError, ModelError
from analyzer.json_text import decode_json
from analyzer.report.comparison.compare import compare

from .page import tell_change, write_list, write_run
from .viewed import Viewed, ViewedProfile
from .worker import StoppedError, Worker

ADDRESS = "127.0.0.1"
MOST_BYTES = 16_384  # of a request's body: settings take some hundreds
_HEADERS = {
    "Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY", "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "frame-ancestors 'none'"}
_IDLE_SECONDS = 60  # for a request to arrive


class ViewServer(ThreadingHTTPServer):
    """Answers for ``viewed`` below a path that no one can guess. Raises InputError for a port that is taken."""

    daemon_threads = True

    def __init__(self, viewed: Viewed, port: int = 0) -> None:
        self.viewed, self.worker = viewed, Worker()
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            said = getattr(error, "strerror", None) or error
            raise InputError(f"--port {port}: {said}; give another one, or leave it out") from error
        self.root = f"/{secrets.token_urlsafe(18)}/"
        #: by which a browser may call it; what another name leads here is refused (DNS rebinding)
        self.hosts = {f"{name}:{self.server_port}" for name in (ADDRESS, "localhost")}
        self.hosts |= {ADDRESS, "localhost"} if self.server_port == 80 else set()

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://{ADDRESS}:{self.server_port}{self.root}"

    def server_close(self) -> None:
        """End what it runs, too."""
        super().server_close()
        self.worker.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing for a browser that has gone."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Answer(NamedTuple):
    status: HTTPStatus
    kind: str
    text: str


class _RefusedError(Exception):
    """A request that gets no answer but its status."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: ViewServer
    server_version, sys_version = "analyzer", ""
    timeout = _IDLE_SECONDS

    def do_GET(self) -> None:
        self._respond()

    def do_POST(self) -> None:
        self._respond()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal is the user's."""

    def _respond(self) -> None:
        try:
            self._check_host()
            words = self._check_token()
            answer = self._act(words, self._read_body()) if self.command == "POST" else self._show(words)
        except _RefusedError as error:
            answer = _Answer(error.status, "text/plain", f"{error}\n")
        data = answer.text.encode("utf-8", "backslashreplace")
        self.send_response(answer.status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{answer.kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _check_host(self) -> None:
        if self.headers.get_all("Host", []) not in [[host] for host in self.server.hosts]:
            raise _RefusedError(HTTPStatus.FORBIDDEN, f"this server answers on {ADDRESS} only")

    def _check_token(self) -> list[str]:
        """What the path names below the token."""
        token = self.server.root.strip("/")
        first, _, rest = self.path.partition("?")[0].removeprefix("/").partition("/")
        if not hmac.compare_digest(first.encode(), token.encode()):
            raise _RefusedError(HTTPStatus.NOT_FOUND, "no such page; open the address that `analyzer view` printed")
        return [word for word in rest.split("/") if word]

    def _read_body(self) -> dict[str, Any]:
        """The JSON object of a request that a page of this server makes."""
        origin = self.headers.get("Origin")
        if origin is not None and origin.removeprefix("http://") not in self.server.hosts:
            raise _RefusedError(HTTPStatus.FORBIDDEN, f"a page of {origin} may ask nothing here")
        if self.headers.get_content_type() != "application/json":
            raise _RefusedError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send application/json")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal()):
            raise _RefusedError(HTTPStatus.LENGTH_REQUIRED, "say the Content-Length")
        if len(length) > 9 or int(length) > MOST_BYTES:
            raise _RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {MOST_BYTES} bytes")
        try:
            found = decode_json(self.rfile.read(int(length)))
        except InputError as error:
            raise _RefusedError(HTTPStatus.BAD_REQUEST, f"no JSON: {error}") from error
        if not isinstance(found, dict):
            raise _RefusedError(HTTPStatus.BAD_REQUEST, "send an object of settings")
        return found

    def _show(self, words: list[str]) -> _Answer:
        server = self.server
        viewed, root = server.viewed, server.root
        if not words:
            if len(viewed.profiles) + len(viewed.pages) != 1:
                return _answer_page(write_list(viewed, root))
            words = ["0"] if viewed.profiles else ["pages", "0"]
        if words[0] == "pages":
            number = _read_number(words[1]) if len(words) == 2 else -1
            if not 0 <= number < len(viewed.pages):
                raise _RefusedError(HTTPStatus.NOT_FOUND, "no such page")
            return _answer_page(viewed.pages[number].write())
        place, one, rest = self._find_profile(words)
        number = _read_number(rest[0]) if rest else 0
        run = one.find_run(number) if rest[1:] in ([], ["change"]) else None
        if run is None:
            raise _RefusedError(HTTPStatus.NOT_FOUND, "no such run, or too many came after it")
        if rest[1:]:
            return _answer_page(compare(one.saved, run.profile).to_html())
        return _answer_page(write_run(one, number, run, f"{root}{place}/"))

    def _act(self, words: list[str], body: dict[str, Any]) -> _Answer:
        place, one, rest = self._find_profile(words)
        if rest == ["stop"]:
            return _answer_data(HTTPStatus.OK, {"stopped": self.server.worker.stop()})
        if rest != ["run"]:
            raise _RefusedError(HTTPStatus.NOT_FOUND, "there is run and stop")
        try:
            command = one.change(body)
            number = one.add(command, profile := self.server.worker.run(command))
        except StoppedError:
            return _answer_data(HTTPStatus.CONFLICT, {"error": "stopped"})
        except AnalyzerError as error:
            return _answer_data(HTTPStatus.BAD_REQUEST, {"error": str(error)})
        except ModelError as error:
            return _answer_data(HTTPStatus.UNPROCESSABLE_ENTITY, {"error": str(error)})
        return _answer_data(HTTPStatus.OK, {"page": f"{self.server.root}{place}/{number}",
                                            "change": tell_change(one.saved, profile)})

    def _find_profile(self, words: list[str]) -> tuple[int, ViewedProfile, list[str]]:
        profiles = self.server.viewed.profiles
        place = _read_number(words[0]) if words else -1
        if not 0 <= place < len(profiles):
            raise _RefusedError(HTTPStatus.NOT_FOUND, "no such profile")
        return place, profiles[place], words[1:]


def _read_number(word: str) -> int:
    """The number that a word is, -1 for another."""
    return int(word) if word.isascii() and word.isdecimal() and len(word) < 10 else -1


def _answer_page(text: str) -> _Answer:
    return _Answer(HTTPStatus.OK, "text/html", text)


def _answer_data(status: HTTPStatus, data: dict[str, Any]) -> _Answer:
    return _Answer(status, "application/json", json.dumps(data))
