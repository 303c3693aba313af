"""A small HTTP server for control: hints come in, state goes out. Standard library, one thread a call, no secrets.

It listens on loopback, or it asks for a token: there is no third way. On loopback without a token it still refuses what
a web page in somebody's browser could send: requests under a foreign host name, and bodies that are not JSON.
Whatever is wrong with a request is one JSON object {"error": "one line"} and has changed nothing.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import socket
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from kvtier import __version__
from kvtier.errors import ConfigError, KVTierError

TOKEN_VARIABLE = "KVTIER_CONTROL_TOKEN"
_MOST_BYTES = 1 << 20
_PATIENCE_S = 10.0
_POLL_S = 0.1  # how soon `close` is heard

Answer = object
Route = Callable[[object], Answer]
"""Takes the decoded body (None for GET) and gives what is sent back as JSON. Raises KVTierError for a bad request."""


class _Refusal(NamedTuple):
    status: HTTPStatus
    error: str


def is_loopback(host: str) -> bool:
    """Whether an address or a name is this machine's own."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of "127.0.0.1:7077", "[::1]:7077" or ":7077" (loopback). Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f'control is {text!r}; write an address and a port, such as "127.0.0.1:7077"')
    return host.strip("[]") or "127.0.0.1", int(port)


class ControlServer:
    """Serves `routes` ("GET /v1/state" → function) until closed. Functions are called from the server's threads."""

    def __init__(self, host: str, port: int, token: str, routes: Mapping[str, Route]) -> None:
        """Listens at once. Raises ConfigError for an address that cannot be had, or one that needs a token."""
        if not is_loopback(host) and not token:
            raise ConfigError(
                f"control listens on {host}, which others can reach; set {TOKEN_VARIABLE}, or listen on 127.0.0.1"
            )
        try:
            self._server = _Server((host, port), token, routes)
        except OSError as error:
            raise ConfigError(f"control cannot listen on {host}:{port}: {error.strerror}; choose another") from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="kvtier-control", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_PATIENCE_S)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], token: str, routes: Mapping[str, Route]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.token = token
        self.routes = routes
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = f"kvtier/{__version__}"
    sys_version = ""
    timeout = _PATIENCE_S

    def do_GET(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the engine's log is not ours to fill, and metrics count what happened."""

    def _serve(self, method: str) -> None:
        refusal = self._refusal(method)
        if refusal is not None:
            self._send(refusal.status, {"error": refusal.error})
            return
        try:
            body = json.loads(self._body()) if method == "POST" else None
            answer = self.server.routes[f"{method} {self._path()}"](body)
        except (ValueError, RecursionError):
            self._send(HTTPStatus.BAD_REQUEST, {"error": "the body is not JSON"})
        except KVTierError as error:
            self._send(HTTPStatus.BAD_REQUEST, {"error": str(error)})
        except TimeoutError:
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, {"error": "the engine is busy; try again"})
        except Exception as error:  # noqa: BLE001 - thread boundary: the caller is told, the server goes on
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": f"{type(error).__name__} inside kvtier"})
        else:
            self._send(HTTPStatus.OK, answer)

    def _refusal(self, method: str) -> _Refusal | None:
        token = self.server.token
        if token:
            said = self.headers.get("Authorization", "")
            if not hmac.compare_digest(said.encode(), f"Bearer {token}".encode()):
                return _Refusal(HTTPStatus.UNAUTHORIZED, "send the header Authorization: Bearer TOKEN")
        elif not is_loopback(_host_name(self.headers.get("Host", ""))):
            return _Refusal(HTTPStatus.FORBIDDEN, "without a token only requests to a loopback address are served")
        paths = {route.split(" ", 1)[1] for route in self.server.routes}
        if self._path() not in paths:
            return _Refusal(HTTPStatus.NOT_FOUND, f"no such path; there are {', '.join(sorted(paths))}")
        if f"{method} {self._path()}" not in self.server.routes:
            return _Refusal(HTTPStatus.METHOD_NOT_ALLOWED, f"{self._path()} does not take {method}")
        if method == "POST":
            if self.headers.get_content_type() != "application/json":
                return _Refusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send Content-Type: application/json")
            length = self.headers.get("Content-Length", "")
            if not length.isdecimal():
                return _Refusal(HTTPStatus.LENGTH_REQUIRED, "send a Content-Length")
            if int(length) > _MOST_BYTES:
                return _Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body has at most {_MOST_BYTES} bytes")
        return None

    def _path(self) -> str:
        return self.path.split("?", 1)[0]

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def _send(self, status: HTTPStatus, answer: object) -> None:
        data = json.dumps(answer).encode()
        self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)


def _host_name(header: str) -> str:
    """The host of a Host header, without its port and brackets."""
    if header.startswith("["):
        return header[1:].split("]", 1)[0]
    return header.rsplit(":", 1)[0] if header.count(":") == 1 else header
