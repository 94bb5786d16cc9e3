"""Error responses: one exception, and the error document of the OpenAI API.

    raise Refusal(429, "1024 requests wait already", retry_after_s=3)
      -> 429, Retry-After: 3, {"error": {"message": ..., "type": "rate_limit_error", "param": null, "code": ...}}

A `CairnError` from the layers below becomes a refusal with its message and its hint. Knows no endpoint.
"""

import logging
import math
from http import HTTPStatus

import msgspec
from starlette.responses import Response

from cairn.core.errors import CairnError, ConfigError, RequestError, TokenizerError
from cairn.serve.engine.request_checks import ContextExceeded

log = logging.getLogger("cairn")
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class ErrorInfo(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None = None  # the field that is wrong
    code: str | None = None
    # llama.cpp's, where a prompt is longer than the context.
    n_prompt_tokens: int | msgspec.UnsetType = msgspec.UNSET
    n_ctx: int | msgspec.UnsetType = msgspec.UNSET


class ErrorBody(msgspec.Struct):
    error: ErrorInfo


class Refusal(Exception):
    """The request is answered with an error, and nothing else happens to it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        prompt_tokens: int = 0,
        context: int = 0,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.code = code or HTTPStatus(status).phrase.lower().replace(" ", "_")
        self.retry_after_s = retry_after_s
        self.prompt_tokens, self.context = prompt_tokens, context  # of a prompt that is too long

    def body(self) -> ErrorBody:
        kind = KINDS.get(self.status, "server_error")
        error = ErrorInfo(message=self.message, type=kind, param=self.param, code=self.code)
        if self.prompt_tokens:
            error.n_prompt_tokens, error.n_ctx = self.prompt_tokens, self.context
        return ErrorBody(error)

    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers

    def response(self) -> Response:
        return JSON(self.body(), self.status, self.headers())


def llama_error(refusal: Refusal) -> Response:
    """Error response on llama.cpp's paths, whose clients expect a type of its own for a prompt that is too long."""
    body = refusal.body()
    if refusal.code == "context_length_exceeded":
        body.error.type = "exceed_context_size_error"
    return JSON(body, refusal.status, refusal.headers())


class JSON(Response):
    """A Struct as a response."""

    media_type = "application/json"

    def __init__(
        self, content: object, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(msgspec.json.encode(content), status, headers)


def refusal_of(
    error: CairnError, fields: tuple[str, ...] = (), prompt: str | None = None
) -> Refusal:
    """Convert an error of the engine or tokenizer to a refusal.

    `fields` are names of the body that a message may begin with, `prompt` is the one that holds the prompt.
    """
    hint = f"; {error.hint}" if error.hint else ""
    if isinstance(error, RequestError | TokenizerError | ConfigError):
        first = error.message.partition(" ")[0].partition("[")[0].partition(".")[0]
        code = "context_length_exceeded" if "context" in error.message else "invalid_value"
        param = first if first in fields else prompt if "prompt" in error.message else None
        message = error.message
        if prompt is not None and first == "prompts":  # several, which have the field's name here
            message = prompt + message.removeprefix(first)
        numbers: dict[str, int] = {}
        if isinstance(error, ContextExceeded):
            numbers = {"prompt_tokens": error.prompt_tokens, "context": error.context}
        return Refusal(400, f"{message}{hint}", param=param, code=code, **numbers)
    return Refusal(500, f"{error.message}{hint}")


def bug_found(id: str) -> Refusal:
    """Log the current exception with its traceback, and return a 500 that refers to the log."""
    log.exception("request %s failed", id)
    return Refusal(500, f"this is a bug in the server; its log has more about request {id}")
