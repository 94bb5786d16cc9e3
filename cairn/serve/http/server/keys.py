"""Who may use the server: API keys from a file or the environment, compared in constant time, never shown.

    # a file: one key on a line, after a name if it has one; # begins a comment
    alice   sk-4f9c...
    sk-77aa...

Only digests are kept. A key is known to limits and metrics by its name, or as key-1, key-2, ...
"""

import hashlib
import hmac
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from starlette.types import Scope

from cairn.core.errors import ConfigError
from cairn.serve.http.protocol.refusal import Refusal

VARIABLE = "CAIRN_API_KEYS"  # several are separated by commas
ANYBODY = "anybody"


class Keys:
    """No keys: everybody is let in."""

    def __init__(self, named: Iterable[tuple[str, str]] = ()) -> None:
        self._digests = [(name, _digest(key.encode())) for name, key in named]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def __repr__(self) -> str:
        return f"<Keys: {len(self._digests)}>"

    def holder(self, scope: Scope) -> str:
        """The name of the key that a request carries, or 401."""
        if not self._digests:
            return ANYBODY
        given = _given(scope)
        if given is None:
            raise Refusal(
                401,
                "this server needs an API key: Authorization: Bearer KEY",
                code="missing_api_key",
            )
        digest, found = _digest(given), None
        for name, known in self._digests:  # all of them, so that the time says nothing
            if hmac.compare_digest(digest, known):
                found = name
        if found is None:
            raise Refusal(401, "this API key is not known here", code="invalid_api_key")
        return found


def read_keys(file: Path | None, env: Mapping[str, str] = os.environ) -> Keys:
    lines = [key for key in env.get(VARIABLE, "").split(",") if key.strip()]
    if file is not None:
        try:
            lines += file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ConfigError(f"cannot read the API keys in {file}: {reason}") from None
    named = []
    for line in lines:
        words = line.partition("#")[0].split()
        if len(words) > 2:  # the line itself may be a secret
            raise ConfigError(
                "a line of API keys has more than a name and a key", hint="write NAME KEY"
            )
        if words:
            named.append((words[0] if len(words) == 2 else f"key-{len(named) + 1}", words[-1]))
    if file is not None and not named:
        raise ConfigError(
            f"{file} holds no API key", hint="write one on a line, or leave out the file"
        )
    return Keys(named)


def _given(scope: Scope) -> bytes | None:
    """OpenAI's clients send a bearer token, Anthropic's a header of its own."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            if scheme.lower() == b"bearer" and token.strip():
                return token.strip()
        elif name == b"x-api-key" and value.strip():
            return value.strip()
    return None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
