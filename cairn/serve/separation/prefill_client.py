"""Asks prefill servers over HTTP, in threads of its own, so that the engine's loop never waits for them.

    ask(Ask, on_reply) --POST /cairn/prefill--> Handoff | Ended | why there is neither

Servers take turns. One that fails is left alone for some seconds; with none left, a request gets its answer at once.
"""

import http.client
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from cairn.core.errors import ConfigError
from cairn.serve.separation.prefill import Ask, Ended, Handoff

PATH = "/cairn/prefill"
THREADS = 64  # prompts that are asked for at once
LEFT_ALONE_S = 5.0  # after a failure
MEDIA_TYPE = "application/msgpack"
decode_reply = msgspec.msgpack.Decoder(Handoff | Ended).decode


class Reply(NamedTuple):
    id: str
    found: Handoff | Ended | None
    error: str | None = None  # why nothing was found


class PrefillClient:
    def __init__(self, urls: Sequence[str], timeout_s: float, key: str | None = None) -> None:
        for url in urls:
            if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
                raise ConfigError(f"prefill_urls has {url!r}", hint="it has to be http://HOST:PORT")
        self._turns = itertools.cycle(urls)
        self._servers, self._timeout_s = len(urls), timeout_s
        self._headers = {"content-type": MEDIA_TYPE}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self._failed: dict[str, float] = {}  # until when a server is left alone
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="cairn prefill")

    def ask(self, ask: Ask, on_reply: Callable[[Reply], None]) -> None:
        """`on_reply` is called once, in another thread."""
        self._threads.submit(lambda: on_reply(self._answer(ask)))

    def close(self, finish: bool = False) -> None:
        """`finish`: what was asked for is still answered."""
        self._threads.shutdown(wait=False, cancel_futures=not finish)

    def _answer(self, ask: Ask) -> Reply:
        url = self._next()
        if url is None:
            return Reply(ask.id, None, "no prefill server answers")
        try:
            return Reply(ask.id, self._post(url, msgspec.msgpack.encode(ask)))
        except Exception as error:  # noqa: BLE001  the caller waits for a reply, whatever it was
            if not isinstance(error, _Refused):
                with self._lock:
                    self._failed[url] = time.monotonic() + LEFT_ALONE_S
            return Reply(ask.id, None, f"{url}: {type(error).__name__} {error}")

    def _next(self) -> str | None:
        with self._lock:
            now = time.monotonic()
            turns = (next(self._turns) for _ in range(self._servers))
            return next((url for url in turns if self._failed.get(url, 0.0) <= now), None)

    def _post(self, url: str, body: bytes) -> Handoff | Ended:
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=self._timeout_s)
        try:
            connection.request("POST", parts.path.rstrip("/") + PATH, body, self._headers)
            response = connection.getresponse()
            content = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise _Refused(f"status {response.status}: {content[:200].decode(errors='replace')}")
        return decode_reply(content)


class _Refused(Exception):
    """The server lives, and does not take this request."""
