"""Talking to a model while it learns: a small HTTP server beside an aligning run.

    GET  /                      the page of the run: curves, and answers with their rewards
    GET  /v1/models             the model, under the name of the run
    POST /v1/chat/completions, /v1/completions      as OpenAI has them, without streaming

Requests wait until the trainer is between two steps; the engine then answers all of them in one batch, with the weights
of that step. So weights that are half updated are never read, and a request waits for one step at most. Listens on this
machine only. `cairn serve` serves what the run leaves behind, with everything that a server has.
"""

import contextlib
import json
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from cairn.align.policy import Policy, Sampled
from cairn.core.errors import CairnError, RequestError
from cairn.core.shared_secret import is_loopback
from cairn.serve.engine.sampling_params import SamplingParams

HOST = "127.0.0.1"
MOST_BYTES = 1 << 20
LONGEST_NUMBER = 20  # digits of a Content-Length
MOST_TOKENS = 64  # of an answer, where a request does not say


class Body(msgspec.Struct, frozen=True):
    """Fields of a request that are read; others are ignored."""

    messages: list[dict[str, str]] | None = None
    prompt: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float = 1.0
    seed: int | None = None
    stream: bool = False


class PendingRequest(NamedTuple):
    prompt: list[int]
    params: SamplingParams
    answer: "Future[Sampled]"


class ChatServer:
    """Chat access to a policy during training."""

    def __init__(
        self, policy: Policy, name: str, longest: int, page: Callable[[], str], port: int = 0
    ) -> None:
        """`longest`: tokens of a prompt with its answer. `port`: 0 takes a free one."""
        self.policy, self.name, self.longest, self.page = policy, name, longest, page
        self._pending: queue.Queue[PendingRequest] = queue.Queue()
        self._closed = False
        handler = type("Handler", (_Handler,), {"talk": self})
        self.server = ThreadingHTTPServer((HOST, port), handler)
        self.server.daemon_threads = True
        self.address = f"http://{HOST}:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def ask(self, body: Body) -> Sampled:
        """Waits for the trainer. A RequestError says what is wrong."""
        pending = PendingRequest(self._prompt(body), self._params(body), Future())
        left, most = self.longest - len(pending.prompt), pending.params.max_tokens or MOST_TOKENS
        if left < most:
            raise RequestError(
                f"a prompt of {len(pending.prompt)} tokens with an answer of {most} is longer than "
                f"the {self.longest} that this run has room for",
                hint=f"max_tokens can be {max(left, 0)} at most, or make data.sequence larger",
            )
        self._pending.put(pending)
        if self._closed:
            self._refuse_all()
        return pending.answer.result()

    def answer(self, step: int) -> None:
        """Between two steps of the trainer: all waiting requests, in one batch."""
        waiting = self._take_all()
        if not waiting:
            return
        try:
            self.policy.updated(step)
            samples = self.policy.generate([(one.prompt, one.params) for one in waiting])
        except Exception as problem:  # noqa: BLE001  if the engine itself is broken, the next rollout says so
            for one in waiting:
                one.answer.set_exception(problem)
            return
        except BaseException:
            for one in waiting:
                one.answer.set_exception(RequestError("the run was stopped", hint="start it again"))
            raise
        for one, sampled in zip(waiting, samples, strict=True):
            one.answer.set_result(sampled)

    def close(self) -> None:
        self._closed = True
        self.server.shutdown()
        self.server.server_close()
        self._refuse_all()

    def _refuse_all(self) -> None:
        for one in self._take_all():
            over = RequestError("the run is over", hint="serve what it left: cairn serve FOLDER")
            one.answer.set_exception(over)

    def _take_all(self) -> list[PendingRequest]:
        taken = []
        with contextlib.suppress(queue.Empty):
            while True:
                taken.append(self._pending.get_nowait())
        return taken

    def _prompt(self, body: Body) -> list[int]:
        tokenizer = self.policy.tokenizer
        if body.stream:
            raise RequestError("stream is true, and a run answers whole", hint="leave it out")
        if body.messages:
            if tokenizer.templates:
                return tokenizer.encode_chat(body.messages)
            return tokenizer.encode(str(body.messages[-1].get("content", "")))
        if body.prompt:
            return tokenizer.encode(body.prompt)
        raise RequestError(
            "there is neither a message nor a prompt", hint="send messages or prompt"
        )

    def _params(self, body: Body) -> SamplingParams:
        most = body.max_tokens or body.max_completion_tokens or MOST_TOKENS
        return SamplingParams(
            temperature=body.temperature, seed=body.seed, max_tokens=most, logprobs=0
        )


class _Handler(BaseHTTPRequestHandler):
    talk: ChatServer

    def do_GET(self) -> None:
        if not self._is_near():
            self._refuse_host()
        elif self.path == "/":
            self._send(200, self.talk.page().encode(), "text/html; charset=utf-8")
        elif self.path == "/v1/models":
            model = {"id": self.talk.name, "object": "model", "owned_by": "cairn"}
            self._json(200, {"object": "list", "data": [model]})
        else:
            self._json(404, _problem(f"there is no {self.path}"))

    def do_POST(self) -> None:
        if self.path not in ("/v1/chat/completions", "/v1/completions"):
            self._json(404, _problem(f"there is no {self.path}"))
            return
        if not self._is_near():
            self._refuse_host()
            return
        # A page of another site cannot send JSON without a preflight, which is not answered.
        if not self.headers.get("Content-Type", "").startswith("application/json"):
            self._json(415, _problem("send content-type: application/json"))
            return
        length = self.headers.get("Content-Length") or "0"
        if not (length.isdecimal() and len(length) <= LONGEST_NUMBER):
            self._json(400, _problem(f"Content-Length is {length[:LONGEST_NUMBER]!r}"))
            return
        size = int(length)
        if size > MOST_BYTES:
            self._json(413, _problem(f"a body of {size} bytes; {MOST_BYTES} at most"))
            return
        try:
            body = msgspec.json.decode(self.rfile.read(size), type=Body)
            sampled = self.talk.ask(body)
        except (CairnError, msgspec.DecodeError) as problem:
            self._json(400, _problem(str(problem)))
            return
        except Exception as problem:  # noqa: BLE001  of the engine: the waiting clients get it
            self._json(500, _problem(f"{type(problem).__name__}: {problem}", "server_error"))
            return
        self._json(200, self._completion(sampled, chat=self.path.endswith("chat/completions")))

    def _is_near(self) -> bool:
        """Return whether this machine was asked by its own name: another site's may be bound to its address."""
        try:
            return is_loopback(urlsplit(f"//{self.headers.get('Host', '')}").hostname or "")
        except ValueError:
            return False

    def _refuse_host(self) -> None:
        host = self.headers.get("Host", "no host")
        self._json(403, _problem(f"{host} was asked for: this is {self.talk.address}"))

    def _completion(self, sampled: Sampled, chat: bool) -> dict[str, Any]:
        text = self.talk.policy.tokenizer.decode(sampled.tokens)
        answer = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        end = "stop" if sampled.stopped else "length"
        kind = "chat.completion" if chat else "text_completion"
        model = f"{self.talk.name}@{sampled.version}"
        choice = {"index": 0, "finish_reason": end, **answer}
        return {"object": kind, "model": model, "choices": [choice]}

    def _json(self, status: int, value: dict[str, Any]) -> None:
        self._send(status, json.dumps(value).encode(), "application/json")

    def _send(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """The run writes its own lines."""


def _problem(message: str, kind: str = "invalid_request_error") -> dict[str, Any]:
    return {"error": {"message": message, "type": kind}}
