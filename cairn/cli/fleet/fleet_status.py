"""`cairn fleet status` and `cairn fleet explain REQUEST`: what a router shows of itself, as a table or as JSON."""

import urllib.error
import urllib.request
from typing import Annotated, Any

import msgspec
import tyro

from cairn.cli.columns import lines
from cairn.core.config import load
from cairn.core.errors import CairnError, system_words
from cairn.core.schema import AlsoFlag
from cairn.core.server_address import place

PATIENCE_S = 10
Url = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[URL]"), AlsoFlag("--url")]


class FleetStatus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The servers behind a router: which are up, how busy, what was lost and continued."""

    url: Url = "http://127.0.0.1:8000"
    """address of the router; also as --url"""
    json: bool = False
    """for machines"""


class FleetExplain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Servers considered for a request, and the cost of each."""

    request: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="REQUEST")]
    """its id, as the header x-request-id of the answer has it"""
    url: Url = "http://127.0.0.1:8000"
    """address of the router; also as --url"""
    json: bool = False
    """for machines"""


def run(args: list[str]) -> int:
    options = load(
        FleetStatus, args=args, env_prefix="CAIRN_FLEET_STATUS_", prog="cairn fleet status"
    ).value
    found = _get(options.url, "/cairn/fleet")
    if options.json:
        print(msgspec.json.encode(found).decode())
        return 0
    print(
        f"policy {found['policy']}: {found['open']} open, {found['waiting']} waiting, {found['moved']} moved"
    )
    shown = ("name", "state", "cache", "running", "waiting", "sent", "lost", "continued", "url")
    rows = [[str(one[key]) for key in shown] for one in found["servers"]]
    print("\n".join(lines(shown, rows)))
    for one in found["servers"]:
        if one["reason"]:
            print(f"{one['name']}: {one['reason']}")
    return 0


def run_explain(args: list[str]) -> int:
    options = load(
        FleetExplain, args=args, env_prefix="CAIRN_FLEET_EXPLAIN_", prog="cairn fleet explain"
    ).value
    found = _remembered(options.url, options.request)
    if options.json:
        print(msgspec.json.encode(found).decode())
        return 0
    for number, decision in enumerate(found["decisions"], start=1):
        print(
            f"{number}. {decision['server']} by {decision['policy']}, about {found['prompt_tokens']} prompt tokens"
        )
        shown = ("server", "cost", "cached_tokens", "queued_tokens", "running", "waiting")
        rows = [[_text(one[key]) for key in shown] for one in decision["considered"]]
        print("\n".join(lines(shown, rows)))
    return 0


def _remembered(url: str, request: str) -> dict[str, Any]:
    """Routing record of a request; with several router processes one of them has it."""
    path = f"/cairn/fleet/requests/{request}"
    for process in _get(url, "/cairn/fleet").get("processes", []):
        try:
            return _get(process, path)
        except CairnError:
            continue  # another one has had it
    return _get(url, path)


def _text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _said(body: bytes) -> str:
    """The sentence of an error document, or what came in its place."""
    try:
        return msgspec.json.decode(body)["error"]["message"]
    except (msgspec.DecodeError, KeyError, TypeError):
        return body.decode(errors="replace")[:300]


def _get(url: str, path: str) -> dict[str, Any]:
    place(url)  # refuses what is none
    try:
        with urllib.request.urlopen(url.rstrip("/") + path, timeout=PATIENCE_S) as response:
            return msgspec.json.decode(response.read())
    except urllib.error.HTTPError as error:
        raise CairnError(
            f"{url}{path} was answered with {error.code}: {_said(error.read())}"
        ) from None
    except (urllib.error.URLError, OSError) as error:
        said = f"no answer from {url}: {system_words(error)}"
        raise CairnError(said, hint="is the router running?") from None
