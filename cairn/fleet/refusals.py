"""Why the router refuses a request: no server has its model, or none has room. What it says to the client."""

from typing import TYPE_CHECKING

import msgspec

from cairn.core.errors import did_you_mean
from cairn.fleet.paths import plain_path

if TYPE_CHECKING:
    from cairn.fleet.router import Router


def unknown_model(router: "Router", model: str | None, aliases: bool = True) -> str | None:
    """Reason why a model is unknown; None while a server has not reported its names.

    `aliases`: they are named to clients that ask for another name. A request for one has its model's name already.
    """
    names = {name for one in router.scaled for name in one.names}
    if model is None or model in names or not (names or router.workers):
        return None
    for one in router.workers:
        if one.hello is None or model in one.hello.models:
            return None
        names |= set(one.hello.models)
    names |= set(router.aliases.names if aliases else ())
    near = did_you_mean(model, sorted(names), otherwise=f"there are: {', '.join(sorted(names))}")
    return f"no server has the model {model[:200]!r}; {near}"


def unserved_aliases(router: "Router") -> list[str]:
    """Describe the aliases of models that no server has, for which requests are refused."""
    models = {
        model: name for name, (models, _) in router.aliases.targets.items() for model in models
    }
    said = ((name, unknown_model(router, model, aliases=False)) for model, name in models.items())
    return [f"the alias {name!r}: {text}" for name, text in said if text is not None]


def why_nobody(router: "Router", model: str | None, now_s: float) -> str:
    """Describe the state of the servers that may have this model."""
    states = [
        f"{one.name} is full" if one.full else f"{one.name} is {one.state}: {one.why(now_s)}"
        for one in router.workers
        if model is None or not one.models or model in one.models
    ]
    states += [one.problem for one in router.scaled if one.problem and one.serves(model)]
    said = "; ".join(states) or "none is running"
    return f"no server has room after {router.config.hold_s:g} s of waiting ({said})"


def broken_stream(path: bytes, message: str) -> bytes:
    """The last event of a stream that cannot go on, as clients of this protocol read it."""
    encode, code = msgspec.json.encode, "server_lost"
    path = plain_path(path)
    if path.startswith(b"/api/"):
        return encode({"error": message}) + b"\n"
    error = {"message": message, "type": "server_error", "code": code}
    if path == b"/v1/messages":
        said = {"type": "error", "error": {"type": "api_error", "message": message}}
        return b"event: error\ndata: %b\n\n" % encode(said)
    if path == b"/v1/responses":
        said = {"type": "error", "code": code, "message": message, "param": None}
        return b"event: error\ndata: %b\n\n" % encode(said)
    return b"data: %b\n\n" % encode({"error": error})
