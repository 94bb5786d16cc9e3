"""Fleet configuration (TOML): the router, and servers that are started or already run.

    [router]                        [[servers]]
    port = 8000                     model = "cairn-tiny"        # started here, `count` times
    policy = "seconds"              count = 2

                                    [[servers]]
                                    urls = ["http://10.0.0.5:8000"]     # started elsewhere

A typo is an error with the name that was meant. Nothing here starts anything.
"""

import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from cairn.cluster.spec import NAME
from cairn.core import toml
from cairn.core.errors import ConfigError, did_you_mean
from cairn.core.schema import describe
from cairn.core.units import parse_bytes
from cairn.fleet.aliases import Alias, Aliases
from cairn.fleet.quota import Count, KeyLimits, Limits
from cairn.fleet.routing_policy import POLICIES

MOST_PORT = 65535
FIELDS = "docs/fleet.md has every field"
ENDPOINT = re.compile(r"tcp://[^/\s]+:\d+")


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=MOST_PORT)] = 8000  # 0 takes a free one
    policy: str = "seconds"
    hold_s: Annotated[float, Meta(ge=0)] = 30.0  # a request waits so long while no server is up
    stall_s: Annotated[float, Meta(gt=0)] = 3.0  # a server that is silent for so long is given up
    # Without a token of any stream, until its requests go elsewhere; 0: never.
    stuck_s: Annotated[float, Meta(ge=0)] = 15.0
    attempts: Annotated[int, Meta(ge=1, le=100)] = 8  # servers that one request is sent to at most
    max_body_bytes: Annotated[int, Meta(ge=1)] = 32 * 1024 * 1024
    # Without an answer, until a second server is asked; 0: never.
    hedge_s: Annotated[float, Meta(ge=0)] = 0.0
    key_requests_per_day: Count | None = None  # of each key that [[keys]] does not name
    key_tokens_per_day: Count | None = None  # prompts and answers
    key_concurrent_requests: Count | None = None
    quota_file: str = ""  # where they are counted; empty: in the memory of one process

    @property
    def limits(self) -> Limits:
        """Default limits of each key."""
        return Limits(
            self.key_requests_per_day, self.key_tokens_per_day, self.key_concurrent_requests
        )

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            near = did_you_mean(self.policy, POLICIES, otherwise=f"one of {', '.join(POLICIES)}")
            raise ConfigError(f"policy is {self.policy!r}", hint=near)


class BlockSource(msgspec.Struct, frozen=True):
    """Addresses of a server's KV-cache events in vLLM's format."""

    events: str
    replay: str  # where batches are asked for again; empty: nowhere


class ServerGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Servers of one kind: started by the fleet (`model`), or already there (`urls`, `dns`)."""

    model: str = ""
    count: Annotated[int, Meta(ge=1, le=1024)] = 1
    least: Annotated[int, Meta(ge=0, le=1024)] | None = None  # of servers, where they are scaled
    most: Annotated[int, Meta(ge=1, le=1024)] | None = None  # scaled up to so many
    ttft_s: Annotated[float, Meta(gt=0)] = 2.0  # a longer wait for a first token starts one more
    # Without a request, until there are none (least = 0).
    idle_s: Annotated[float, Meta(gt=0)] = 300.0
    args: list[str] = []  # more flags of `cairn serve`
    gpus: Annotated[int, Meta(ge=0, le=64)] = 0  # of each server
    cpus: Annotated[float, Meta(gt=0)] = 1.0
    memory: str = "4GiB"
    urls: list[str] = []
    dns: str = ""  # host:port; every address of the host is a server, as of a headless Service
    kv_events: str = ""  # of `urls`: tcp://*:PORT where each tells its blocks; * is its host
    kv_events_replay: str = ""  # ... and tells them again

    def __post_init__(self) -> None:
        if bool(self.model) + bool(self.urls) + bool(self.dns) != 1:
            raise ConfigError(
                f"a group of servers has model {self.model!r}, {len(self.urls)} urls and dns {self.dns!r}",
                hint="give `model`, to start servers; or `urls` or `dns` of servers that run already",
            )
        if self.dns and not (":" in self.dns and _has_port(f"http://{self.dns}")):
            raise ConfigError(
                f"dns is {self.dns!r}", hint='HOST:PORT, such as "servers.default:8000"'
            )
        parse_bytes(self.memory)
        if (self.least is None) != (self.most is None) or (self.most and not self.model):
            raise ConfigError(
                f"a group of servers has least {self.least} and most {self.most}",
                hint="both, for servers that the fleet starts, or none",
            )
        if self.least is not None and self.least > (self.most or 0):
            raise ConfigError(f"least is {self.least}, most is {self.most}", hint="least <= most")
        self._check_events()
        for url in self.urls:
            if not url.startswith("http://"):
                raise ConfigError(f"the url {url!r} is not http://", hint="http://HOST:PORT")
            if not _has_port(url):
                raise ConfigError(
                    f"the url {url!r} has no host, or no port up to {MOST_PORT}",
                    hint="http://HOST:PORT",
                )

    def _check_events(self) -> None:
        for name in ("kv_events", "kv_events_replay"):
            endpoint = getattr(self, name)
            if endpoint and not ENDPOINT.fullmatch(endpoint):
                raise ConfigError(f"{name} is {endpoint!r}", hint='such as "tcp://*:5557"')
        if (self.kv_events or self.kv_events_replay) and not (self.kv_events and self.urls):
            raise ConfigError(
                f"a group of servers has kv_events {self.kv_events!r}, kv_events_replay"
                f" {self.kv_events_replay!r} and {len(self.urls)} urls",
                hint="kv_events belong to `urls`; servers that the fleet starts tell their pages anyway",
            )

    @property
    def block_sources(self) -> dict[str, BlockSource]:
        """Block-event sources by server URL."""
        hosts = {url: urlsplit(url).hostname or "" for url in self.urls if self.kv_events}
        both = self.kv_events, self.kv_events_replay
        return {
            url: BlockSource(*(one.replace("*", host) for one in both))
            for url, host in hosts.items()
        }

    @property
    def scaled(self) -> bool:
        return self.most is not None

    @property
    def most_servers(self) -> int:
        """Maximum number of servers at the same time."""
        return self.count if self.most is None else self.most

    @property
    def names(self) -> list[str]:
        """Model names of servers that the fleet starts, equal to those of `cairn serve`."""
        flag = "--served-model-name"
        if flag in self.args:
            after = self.args[self.args.index(flag) + 1 :]
            return list(takewhile(lambda word: not word.startswith("--"), after))
        return [Path(self.model).name if Path(self.model).exists() else self.model]


def _has_port(url: str) -> bool:
    """Can it be connected to? A url without a port means port 80."""
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


class FleetConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    servers: list[ServerGroup]
    router: RouterConfig = RouterConfig()
    name: str = "fleet"
    image: str = "cairn:cuda"  # where servers run in containers
    inference_pool: bool = False  # on Kubernetes: for a gateway, with the router as endpoint picker
    aliases: list[Alias] = []  # names of models that stand for others
    keys: list[KeyLimits] = []  # whose limits are not the router's

    def __post_init__(self) -> None:
        if not self.servers:
            raise ConfigError("the fleet has no servers", hint="write a [[servers]] table")
        if not NAME.fullmatch(self.name):
            raise ConfigError(
                f"name is {self.name!r}", hint="small letters, digits and -, up to 40"
            )
        Aliases(self.aliases)
        if len({one.sha256 for one in self.keys}) < len(self.keys):
            raise ConfigError(
                "two of the keys have the same sha256", hint="one [[keys]] table for each key"
            )


TABLES: dict[str, type[msgspec.Struct]] = {
    "servers": ServerGroup,
    "aliases": Alias,
    "keys": KeyLimits,
}  # of which there may be several


def read_fleet(path: Path) -> FleetConfig:
    """The fleet of a file; every way in which it cannot be read is a ConfigError."""
    values = toml.read(path).values
    _check(values, FleetConfig, "", path, without=(*TABLES, "router"))
    _check(values.get("router", {}), RouterConfig, "router", path)
    for name, schema in TABLES.items():
        tables = values.get(name, [])
        if not isinstance(tables, list):
            raise _expected(name, f"tables, [[{name}]]", tables, path)
        for at, table in enumerate(tables):
            _check(table, schema, f"{name}[{at}]", path)
    return msgspec.convert(values, FleetConfig)


def _check(
    values: Any, schema: type[msgspec.Struct], table: str, path: Path, without: Sequence[str] = ()
) -> None:
    """Every name is known, every value is of its kind, and nothing is missing. `without`: of other tables."""
    if not isinstance(values, dict):
        raise _expected(table, f"a table, [{table}]", values, path)
    prefix = f"{table}." if table else ""
    fields = {field.name: field for field in msgspec.structs.fields(schema)}
    for name, value in values.items():
        if name not in fields:
            hint = did_you_mean(name, fields, otherwise=f"known here: {', '.join(fields)}")
            raise ConfigError(f"unknown field '{prefix}{name}' in {path}", hint=hint)
        if name not in without and not _fits(value, fields[name].type):
            raise _expected(prefix + name, describe(fields[name].type), value, path)
    for field in fields.values():
        if field.required and field.name not in values:
            raise ConfigError(f"'{prefix}{field.name}' is missing in {path}", hint=FIELDS)


def _fits(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return value == value  # nan is neither too small nor too large


def _expected(name: str, what: str, got: Any, path: Path) -> ConfigError:
    return ConfigError(f"{name}: expected {what}, got {got!r} ({path})", hint=FIELDS)
