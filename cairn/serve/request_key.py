"""API key of a request: one rule for servers and for a router that meters usage. Pure."""

from collections.abc import Iterable


def given_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """OpenAI's clients send a bearer token, Anthropic's a header of its own. Names are in small letters."""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            if scheme.lower() == b"bearer" and token.strip():
                return token.strip()
        elif name == b"x-api-key" and value.strip():
            return value.strip()
    return None
