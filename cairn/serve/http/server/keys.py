"""API keys from a file or the environment, compared in constant time, never logged.

    # a file: one key on a line, after a name if it has one; a line that begins with # is a comment
    alice   sk-4f9c...
    sk-77aa...

    CAIRN_API_KEYS='sk-77aa...,alice sk-4f9c...'        every character counts, # too

The key of administrators is another one (CAIRN_ADMIN_KEY, or a file): it opens the admin endpoints, which no API key
does, and all others. Only digests are kept. A key is known to limits and metrics by its name, or as key-1, key-2, ...
"""

import hashlib
import hmac
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from starlette.types import Scope

from cairn.core.errors import ConfigError
from cairn.core.shared_secret import is_loopback
from cairn.serve.http.protocol.refusal import Refusal
from cairn.serve.request_key import given_key

VARIABLE = "CAIRN_API_KEYS"  # several are separated by commas
ADMIN_VARIABLE, ADMIN = "CAIRN_ADMIN_KEY", "admin"
ANYBODY = "anybody"


class Keys:
    """No keys: every client is let in."""

    def __init__(self, named: Iterable[tuple[str, str]] = (), admin: str | None = None) -> None:
        self._digests = [(name, _digest(key.encode())) for name, key in named]
        self._admin = None if admin is None else _digest(admin.encode())
        if any(digest == self._admin for _, digest in self._digests):
            raise ConfigError(
                "the admin key is an API key, too, so its holder may change the server",
                hint=f"set {ADMIN_VARIABLE} (or --admin-key-file) to a key of its own",
            )

    def __bool__(self) -> bool:
        return bool(self._digests)

    def __repr__(self) -> str:
        return f"<Keys: {len(self._digests)}>"

    @property
    def has_admin(self) -> bool:
        return self._admin is not None

    def is_admin(self, scope: Scope) -> bool:
        key = given_key(scope["headers"])
        if key is None or self._admin is None:
            return False
        return hmac.compare_digest(_digest(key), self._admin)

    def holder(self, scope: Scope) -> str:
        """The name of the key that a request carries, or 401."""
        if not self._digests:
            return ANYBODY
        if self.is_admin(scope):
            return ADMIN
        key = given_key(scope["headers"])
        if key is None:
            raise Refusal(
                401,
                "this server needs an API key: Authorization: Bearer KEY",
                code="missing_api_key",
            )
        digest, holder_name = _digest(key), None
        for name, known_digest in self._digests:  # all of them, so that the time says nothing
            if hmac.compare_digest(digest, known_digest):
                holder_name = name
        if holder_name is None:
            raise Refusal(401, "this API key is not known here", code="invalid_api_key")
        return holder_name


def read_keys(
    file: Path | None, env: Mapping[str, str] = os.environ, admin_file: Path | None = None
) -> Keys:
    """The keys of the variable and the file. Either may be absent; one that is there and holds no key is an error."""
    entries = _from_variable(env[VARIABLE]) if VARIABLE in env else []
    entries += _from_file(file) if file is not None else []
    names = (f"key-{at}" for at in range(1, len(entries) + 1))
    named = [(name or other, key) for (name, key), other in zip(entries, names, strict=True)]
    return Keys(named, _admin_key(admin_file, env))


def _admin_key(file: Path | None, env: Mapping[str, str]) -> str | None:
    entries = _from_file(file) if file is not None else []
    if ADMIN_VARIABLE in env:
        entries += _from_variable(env[ADMIN_VARIABLE], ADMIN_VARIABLE)
    if len(entries) > 1:
        raise ConfigError(
            f"{len(entries)} admin keys are given, in {ADMIN_VARIABLE} and --admin-key-file",
            hint="give one of them",
        )
    return entries[0][1] if entries else None


def check_admin_key(admin_endpoints: bool, host: str, keys: Keys) -> None:
    """Raise unless an admin key protects the admin endpoints from generating clients and remote ones."""
    if not admin_endpoints or keys.has_admin or (not keys and is_loopback(host)):
        return
    why = "API keys are set" if keys else f"the server listens on {host}"
    raise ConfigError(
        f"admin_endpoints is on, {why}, and there is no admin key",
        hint=f"set {ADMIN_VARIABLE} or --admin-key-file; its holder may load weights and paths of this machine",
    )


def _from_variable(text: str, variable: str = VARIABLE) -> list[tuple[str | None, str]]:
    entries = [_entry(part, variable) for part in text.split(",") if part.strip()]
    if not entries:  # a list without keys is meant to close the server
        raise ConfigError(
            f"{variable} is set, and holds no API key",
            hint="write keys in it, separated by commas, or unset it to let every client in",
        )
    return entries


def _from_file(file: Path) -> list[tuple[str | None, str]]:
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"cannot read the API keys in {file}: {reason}") from None
    lines = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    entries = [_entry(line, str(file)) for line in lines]
    if not entries:
        raise ConfigError(
            f"{file} holds no API key", hint="write one on a line, or leave out the file"
        )
    if any(name is not None and key.startswith("#") for name, key in entries):
        raise ConfigError(
            f"{file} has a line with # behind a word, which may be a key or a comment",
            hint="give a comment a line of its own, and a key that begins with # in " + VARIABLE,
        )
    return entries


def _entry(text: str, where: str) -> tuple[str | None, str]:
    """A name, if it has one, and a key. The text may be a secret, so no error shows it."""
    words = text.split()
    if len(words) > 2:
        raise ConfigError(
            f"an entry of {where} has more than a name and a key",
            hint="write NAME KEY; a comment needs a line of its own in a file",
        )
    return (words[0] if len(words) == 2 else None), words[-1]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
