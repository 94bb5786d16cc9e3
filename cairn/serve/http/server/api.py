"""The server as an ASGI application: each path of `paths` is an endpoint, and every error becomes a document.

    request -> key -> body -> endpoint -> document, stream, or error document
                 401    408 413      400 404 429 503: Refusal    500: a bug, with its traceback in the log

Every answer carries x-request-id. Endpoints know nothing of this file.
"""

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from cairn.core.errors import CairnError
from cairn.core.shared_secret import is_loopback
from cairn.serve.http.batches.files import MOST_BYTES, FileStore, hold_folder
from cairn.serve.http.batches.perform import HOLDER, performer
from cairn.serve.http.batches.runner import BatchRunner
from cairn.serve.http.batches.store import BatchStore
from cairn.serve.http.endpoints.about import metrics
from cairn.serve.http.endpoints.chat import chat_completions
from cairn.serve.http.endpoints.completions import completions
from cairn.serve.http.endpoints.embeddings import embeddings
from cairn.serve.http.endpoints.messages import anthropic_error
from cairn.serve.http.endpoints.ollama import ollama_error
from cairn.serve.http.endpoints.prefill import prefill
from cairn.serve.http.endpoints.responses import responses
from cairn.serve.http.ledger.entry import Entry
from cairn.serve.http.ledger.reply import put_into
from cairn.serve.http.protocol.body import Gone, read_bytes
from cairn.serve.http.protocol.refusal import Refusal, bug_found, llama_error, refusal_of
from cairn.serve.http.server.call import CUT_TO, Call
from cairn.serve.http.server.continuation import ROUTED, ProgressSend, header, split_body
from cairn.serve.http.server.keys import ANYBODY
from cairn.serve.http.server.local_pages import LocalPages
from cairn.serve.http.server.model_kinds import check_kind
from cairn.serve.http.server.paths import (
    ALIASES,
    ERROR_FORMATS,
    FIELDS,
    GENERATING,
    LLAMA_CPP,
    OPEN_TO_ALL,
    PATHS,
    PROMPT_IN,
    Handle,
)
from cairn.serve.http.server.service import Service

CALL = "cairn.call"  # of an ASGI scope: the request as its endpoint sees it
EXPOSED = [
    "x-request-id",
    "x-cairn-ledger",
    CUT_TO.decode(),
    "retry-after",
]  # to pages of other origins
CLIENT_LEFT = 499  # only the metrics see this status
LONGEST_ID = 128


class Guarded(NamedTuple):
    """A page of a layer above that asks for the same key as the API, and answers errors in its way."""

    path: str
    handle: Handle
    methods: tuple[str, ...] = ("GET",)


More = Sequence[BaseRoute | Guarded]  # what a layer above adds


class Endpoint:
    """ASGI application of a path."""

    def __init__(
        self,
        service: Service,
        handle: Handle,
        *,
        guarded: bool = True,
        body: bool = False,
        path: str = "",
    ) -> None:
        self.service, self.handle, self.guarded, self.body = service, handle, guarded, body
        self.name = handle.__name__
        self.admits = handle in GENERATING
        otherwise = llama_error if path in LLAMA_CPP else Refusal.response
        self.error_response = ERROR_FORMATS.get(self.name, otherwise)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        id = request_id(scope)
        status = CLIENT_LEFT
        try:
            response = await self._answer(scope, receive, send, id)
            if response is not None:
                response.headers["x-request-id"] = id
                await response(scope, receive, _send_of(scope, send))
                if (entry := _entry(scope)) is not None:
                    entry.sent(time.monotonic())
            status = 200 if response is None else response.status_code  # a stream that began is 200
        except Gone:
            pass
        finally:
            self.service.metrics.add(
                "cairn_http_requests_total", endpoint=self.name, status=str(status)
            )
            if (entry := _entry(scope)) is not None:
                self.service.book.settle(entry)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, id: str) -> Response | None:
        service, config = self.service, self.service.config
        try:
            holder = scope.get(HOLDER) or self._holder(scope)
            body = b""
            if self.body:  # whatever becomes of it: a refusal costs work as well
                if HOLDER not in scope:
                    service.admission.bill(holder)
                body = await read_bytes(scope, receive, config.max_body_bytes, config.body_timeout)
            if self.admits:
                self._check_role()
                check_kind(service, self.handle)
                service.admission.check()  # a text that has no place need not be read
            body, continued = split_body(
                scope, body, service.router_secret, service.serving.limits.context
            )
            call = scope[CALL] = Call(scope, receive, send, holder, id)
            call.role = service.config.role
            call.continued, call.routed = continued, header(scope, ROUTED) is not None
            if call.routed and self.admits:
                call.progress = ProgressSend(send, call.headers)
            call.body = body if self.admits and service.pulse.followed else b""
            response = await self.handle(service, call, body)
            if response is not None and call.wants_ledger and call.entry is not None:
                put_into(response, service.book.view(call.entry), call.wants_field)
            if response is not None and call.cut_to is not None:
                response.headers[CUT_TO.decode()] = str(call.cut_to)
            return response
        except Refusal as error:
            refusal = error
        except CairnError as error:
            refusal = refusal_of(error, FIELDS, PROMPT_IN.get(self.name))
        except Gone:
            raise
        except Exception:  # noqa: BLE001  a bug, which is logged: the server goes on
            refusal = bug_found(id)
        if (call := scope.get(CALL)) is not None and call.stream_begun:
            raise Gone  # a second status would be no HTTP: the connection ends
        return self.error_response(refusal)

    def _holder(self, scope: Scope) -> str:
        return self.service.keys.holder(scope) if self.guarded else ANYBODY

    def _check_role(self) -> None:
        if (self.handle is prefill) != (self.service.config.role == "prefill"):
            message = f"{self.name} is not for a server of the role {self.service.config.role}"
            raise Refusal(404, message, code="wrong_role")


def _send_of(scope: Scope, send: Send) -> Send:
    """Tokens of a whole answer may have been told to a router, and then the answer itself comes behind them."""
    call = scope.get(CALL)
    return send if call is None or call.progress is None else call.progress


def _entry(scope: Scope) -> Entry | None:
    """Timing entry of the request, if it exists yet."""
    call = scope.get(CALL)
    return None if call is None else call.entry


def request_id(scope: Scope) -> str:
    """The client's own, so that it finds its request in our log; or a new one."""
    header = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    text = header.decode("latin-1")
    fine = (
        0 < len(text) <= LONGEST_ID
        and text.isascii()
        and text.replace("-", "").replace("_", "").isalnum()
    )
    return text if fine else secrets.token_hex(12)


# -- assembly -------------------------------------------------------------------------------------


class Application:
    """Straight to the endpoint where the path says which, because every token would pass starlette's layers."""

    def __init__(self, service: Service, more: More = ()) -> None:
        """`more` is what a layer above adds: the page."""
        self.rest = starlette_application(service, more)
        config = service.config
        runs_more = (
            config.admin_endpoints or config.exercises
        )  # than a page of another origin needs
        if is_loopback(config.host) and not config.cors_origins and not runs_more:
            self.answer: ASGIApp = LocalPages(self._answer, EXPOSED)
        else:
            self.answer = self._answer
        plain = not self.rest.user_middleware  # else CORS and the hosts have to see every answer
        self.direct: dict[tuple[str, str], ASGIApp] = {}
        for route in self.rest.routes if plain else ():
            if isinstance(route, Route) and "{" not in route.path:
                self.direct |= {(method, route.path): route.app for method in route.methods or ()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self.direct.get((scope.get("method", ""), scope.get("path", "")), self.rest)
        await endpoint(scope, receive, send)


def _routes(service: Service, more: More) -> list[BaseRoute]:
    """Every path; those of other layers, `more`, come last."""
    unguarded = (*OPEN_TO_ALL, metrics) if service.config.public_metrics else OPEN_TO_ALL

    def route(path: str, handle: Handle, *methods: str) -> Route:
        guarded, body = handle not in unguarded, methods == ("POST",)
        endpoint = Endpoint(service, handle, guarded=guarded, body=body, path=path)
        return Route(path, endpoint, methods=[*methods])

    return [
        *(route(path, handle, method) for method, path, handle in PATHS),
        *(
            route(alias, handle, method)
            for method, path, handle in PATHS
            for alias, meant in ALIASES.items()
            if meant == path
        ),
        *(route(*one[:2], *one.methods) if isinstance(one, Guarded) else one for one in more),
    ]


def starlette_application(service: Service, more: More = ()) -> Starlette:
    if (folder := service.config.batch_folder) is not None:
        service.batches = batch_runner(service, folder)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            await service.stop()

    return Starlette(
        routes=_routes(service, more),
        middleware=_middleware(service),
        lifespan=lifespan,
        exception_handlers={HTTPException: _outside},
    )


def batch_runner(service: Service, folder: Path) -> BatchRunner:
    """Batches of the endpoints that make sense in one."""
    handles = {
        "/v1/chat/completions": chat_completions,
        "/v1/completions": completions,
        "/v1/embeddings": embeddings,
        "/v1/responses": responses,
    }
    applications = {url: Endpoint(service, handle, body=True) for url, handle in handles.items()}
    config, keys = service.config, service.keys
    files = FileStore(folder, time.time, config.key_file_bytes if keys else MOST_BYTES)
    service.at_end(hold_folder(folder))
    return BatchRunner(
        BatchStore(folder, files, time.time), performer(applications), service, time.time
    )


def _middleware(service: Service) -> list[Middleware]:
    config, middleware = service.config, []
    if config.allowed_hosts:
        middleware.append(Middleware(TrustedHostMiddleware, allowed_hosts=config.allowed_hosts))
    if config.cors_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.cors_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=EXPOSED,
            )
        )
    return middleware


# With which clients of Ollama fetch and remove models.
MANAGES_MODELS = {f"/api/{verb}" for verb in ("pull", "push", "create", "copy", "delete")}


async def _outside(request: Request, error: Exception) -> Response:
    """Paths and methods that do not exist."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    path = request.url.path[:200]
    meant = _meant(path) if status == 404 else None
    way_out = f"; did you mean {meant}?" if meant else ""
    if path in MANAGES_MODELS or path.startswith("/api/blobs/"):
        way_out = ": a server has the models that it was started with (cairn serve MODEL ...)"
    messages = {
        404: f"there is no {path}{way_out}",
        405: f"{request.method} is not for {path}",
    }
    refusal = Refusal(status, messages.get(status, str(error)))
    response: Response = refusal.response()
    if path.startswith("/api/"):
        response = ollama_error(refusal)
    elif path.startswith("/v1/messages"):
        response = anthropic_error(refusal)
    response.headers.update(headers)
    return response


def _meant(path: str) -> str | None:
    """The path that exists: clients differ in whether /v1 belongs to the address of a server."""
    words = path.strip("/").removeprefix("v1/").removeprefix("v1/")
    candidates = (one for one in (f"/v1/{words}", f"/{words}", f"/api/{words}") if one != path)
    return next(
        (one for one in candidates if any(known_path == one for _, known_path, _ in PATHS)), None
    )
