"""`kvtier hint`: tell a running engine about a session, as a tool runner or an agent framework would."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Annotated

import typer

from kvtier.errors import HintError
from kvtier.place.hint_message import parse_hints

_TIMEOUT_S = 10.0
DEFAULT_URL = "http://127.0.0.1:7077"


def hint(
    session: Annotated[str, typer.Argument(help="The session: what requests carry as session_id.")],
    returns_in: Annotated[str, typer.Option(help='It is back in about this time, such as "3s".')] = "",
    pin: Annotated[str, typer.Option(help='Keep it in memory for this time, such as "10m".')] = "",
    pin_bytes: Annotated[str, typer.Option(help='At most so much of it, such as "2GiB".')] = "",
    retain_for: Annotated[str, typer.Option(help="Keep it in some tier for this time.")] = "",
    demote: Annotated[bool, typer.Option("--demote", help="It will not be back soon.")] = False,
    prefetch: Annotated[bool, typer.Option("--prefetch", help="Bring it to memory now.")] = False,
    share: Annotated[bool, typer.Option("--share", help="Others will use its prefix.")] = False,
    client: Annotated[str, typer.Option(help="Who says so; caps on pins are per client.")] = "",
    url: Annotated[str, typer.Option(envvar="KVTIER_CONTROL_URL", help="The engine's control endpoint.")] = DEFAULT_URL,
    token: Annotated[str, typer.Option(envvar="KVTIER_CONTROL_TOKEN", help="Its token, if it asks for one.")] = "",
) -> None:
    """Say when a session is back, or what to do with it meanwhile. Exits with 1 if a hint was rejected."""
    said = {
        "session": session,
        "returns_in": returns_in,
        "pin": pin,
        "pin_bytes": pin_bytes,
        "retain_for": retain_for,
        "demote": demote,
        "prefetch": prefetch,
        "share": share,
        "client": client,
    }
    message = {key: value for key, value in said.items() if value}
    parse_hints(message, 0.0)  # what is wrong with it is said here, without a server
    results = send(url, token, message)
    for result in results:
        reason = f" ({result['reason']})" if result["reason"] else ""
        typer.echo(f"{result['kind']}: {result['outcome']}{reason}")
    if any(result["outcome"] == "rejected" for result in results):
        raise typer.Exit(1)


def send(url: str, token: str, message: object) -> list[dict[str, str]]:
    """Post hints to a control endpoint. Raises HintError that says what went wrong."""
    if not url.startswith(("http://", "https://")):
        raise HintError(f"--url is {url!r}; it must begin with http:// or https://, such as {DEFAULT_URL}")
    if not (token.isascii() and (token.isprintable() or not token)):
        raise HintError("--token must be printable ASCII on one line")  # and is not repeated here
    headers = {"Content-Type": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    try:
        request = urllib.request.Request(
            f"{url.rstrip('/')}/v1/hints", json.dumps(message).encode(), headers, method="POST"
        )
        # A proxy has no business between a machine and itself, and an environment may name one.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=_TIMEOUT_S) as response:
            answer: dict[str, list[dict[str, str]]] = json.load(response)
            return answer["results"]
    except urllib.error.HTTPError as error:
        raise HintError(f"{url} refused it: {_error_of(error)}") from error
    except (OSError, ValueError, KeyError) as error:
        why = getattr(error, "reason", error)
        raise HintError(
            f"{url} does not answer as a control endpoint of kvtier: {why}; see the option control"
        ) from error


def _error_of(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {error.code}"
