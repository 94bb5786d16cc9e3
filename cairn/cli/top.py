"""`cairn top`: a server, live in the terminal, until q, Ctrl-C, a signal, or the end of the server."""

import json
import os
import select
import shutil
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from typing import Annotated, Any

import msgspec
import tyro

from cairn.cli.top_screen import screen
from cairn.core.config import load
from cairn.core.errors import CairnError, system_words
from cairn.core.schema import AlsoFlag
from cairn.core.server_address import place

TIMEOUT_S = 10.0
HOME_AND_CLEAR = "\033[H\033[J"
ALTERNATE, ORDINARY = "\033[?1049h\033[?25l", "\033[?25h\033[?1049l"


class Top(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Show a server of `cairn serve` live: requests, rates, caches, keys, and steps beside the least time they need.

    q or Ctrl-C leaves.
    """

    url: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[URL]"), AlsoFlag("--url")] = (
        "http://127.0.0.1:8000"
    )
    """where the server listens; also as --url"""
    every: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """seconds between two updates"""
    once: bool = False
    """print one screen and leave, as where the output is no terminal"""
    json: bool = False
    """print what the screen is made of, once, as JSON"""


def run(args: list[str]) -> int:
    options = load(Top, args=args, env_prefix="CAIRN_TOP_").value
    place(options.url)  # refuses what is none
    if options.json:
        print(json.dumps(_documents(options.url), indent=1))
        return 0
    if options.once or not sys.stdout.isatty():
        print("\n".join(_drawn(options.url)))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the terminal is given back
    try:
        with _whole_terminal():
            while True:
                sys.stdout.write(HOME_AND_CLEAR + "\n".join(_drawn(options.url)))
                sys.stdout.flush()
                if _leaves_within(max(options.every, 0.1)):
                    return 0
    except KeyboardInterrupt:
        return 0


@contextmanager
def _whole_terminal() -> Generator[None]:
    """A screen of its own, on which typed keys do not appear; afterwards the terminal is as it was."""
    import termios
    import tty

    typed = sys.stdin.fileno() if sys.stdin.isatty() else None
    before = None if typed is None else termios.tcgetattr(typed)
    sys.stdout.write(ALTERNATE)
    try:
        if typed is not None:
            tty.setcbreak(typed)
        yield
    finally:
        sys.stdout.write(ORDINARY)
        sys.stdout.flush()
        if typed is not None and before is not None:
            termios.tcsetattr(typed, termios.TCSADRAIN, before)


def _leaves_within(seconds: float) -> bool:
    """Waits so long for a q."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if not sys.stdin.isatty():
            time.sleep(left)
        elif select.select([sys.stdin], [], [], left)[0]:
            key = os.read(sys.stdin.fileno(), 64)
            if not key or b"q" in key:  # the terminal has gone, or it was asked for
                return True
    return False


def _drawn(url: str) -> list[str]:
    found, size = _documents(url), shutil.get_terminal_size((80, 24))
    return screen(found["engine"], found["usage"], found["requests"], size.columns, size.lines)


def _documents(url: str) -> dict[str, Any]:
    base = url.rstrip("/").removesuffix("/v1")
    return {
        "engine": _get(f"{base}/cairn/engine"),
        "usage": _get(f"{base}/cairn/usage"),
        "requests": _get(f"{base}/cairn/requests?limit=50")["requests"],
    }


def _get(url: str) -> dict[str, Any]:
    key = os.environ.get("CAIRN_API_KEY") or os.environ.get("OPENAI_API_KEY")
    asked = urllib.request.Request(url, headers={"authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        error.close()
        hint = (
            "set CAIRN_API_KEY to a key that it knows"
            if error.code == 401
            else "is it a Cairn server?"
        )
        raise CairnError(f"{url} answered {error.code}", hint=hint) from None
    except (OSError, ValueError) as error:
        raise CairnError(
            f"cannot look at {url}: {system_words(error)}",
            hint="is it running? `cairn serve` starts one",
        ) from None
