"""Server configuration: engine and server options in one class for Python, flags, TOML and the environment.

The fields of the engine are those of `EngineConfig`. Times are in seconds. Nothing here starts anything.
"""

from pathlib import Path
from typing import Literal

import msgspec

from cairn.core.errors import ConfigError
from cairn.core.shared_secret import is_loopback
from cairn.serve.adapter_folder import read_module
from cairn.serve.config import EngineConfig, RoleConfig

MOST_PORT = 65535
HANG = 5  # times `progress_timeout`
POSITIVE = (
    "first_token_deadline",
    "request_timeout",
    "drain_timeout",
    "body_timeout",
    "stall_timeout",
    "progress_timeout",
)


class ServerConfig(EngineConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    step_ms: float = 25.0
    """milliseconds that a step should take while requests decode: long prompts are spread over more steps instead of
    delaying answers; 0: no limit. On a CPU all steps are limited, and the limit is at least 250"""
    load_in_advance: bool = True
    """capture all graphs before the first request, instead of when each is first needed"""
    host: str = "127.0.0.1"
    """address to listen on; 0.0.0.0 is all of them"""
    port: int = 8000
    """port to listen on; 0 takes a free one"""
    served_model_name: list[str] = msgspec.field(default_factory=list)
    """names that requests may use; by default the name of the model"""
    engine_in: Literal["auto", "thread", "process"] = "auto"
    """where the engine runs; auto: a process of its own for GPUs, a thread on a CPU"""
    role: Literal["both", "prefill", "decode"] = "both"
    """prefill: computes prompts for decode servers and nothing else; decode: asks prefill servers for long prompts"""
    prefill_urls: list[str] = msgspec.field(default_factory=list)
    """of a decode server, and of one that may become one (POST /cairn/role): addresses of prefill servers of the same
    model; CAIRN_PREFILL_KEY has their API key"""
    prefill_min_tokens: int = 128
    """of a decode server: shorter prompts are computed here"""
    prefill_when: Literal["pays", "always"] = "pays"
    """of a decode server: send long prompts to a prefill server where that saves time (pays), or always"""
    kv_transport: Literal["tcp", "shm", "nixl"] = "tcp"
    """how pages travel between prefill and decode servers"""
    kv_host: str = "127.0.0.1"
    """address on which pages are offered; off loopback CAIRN_JOB_SECRET has to be set on both sides"""
    kv_events: str | None = None
    """where cached pages are published by ZMQ as vLLM's events, such as tcp://*:5557, for routers that follow vLLM"""
    kv_events_replay: str | None = None
    """where these events can be asked for again, such as tcp://*:5558"""
    kv_events_topic: str = ""
    """what each of them begins with; llm-d wants kv@POD@MODEL"""
    chat_template: Path | None = None
    """a file with the chat template to use instead of the model's"""
    trust_request_chat_template: bool = False
    """render conversations with the chat_template of a request, which any client may send"""
    adapters: Path | None = None
    """a folder of adapters (as PEFT and `cairn tune` write them), each served under the name of its own folder; those
    that come, change or go while the server runs are followed"""
    lora_modules: list[str] = msgspec.field(default_factory=list)
    """adapters as NAME=PATH, each served under its name"""
    admin_endpoints: bool = False
    """serve POST /pause, /resume, /update_weights, /reset_prefix_cache, /sleep, /wake_up, /cairn/role,
    /v1/load_lora_adapter and /v1/unload_lora_adapter to the holder of the admin key (CAIRN_ADMIN_KEY); without any
    keys, on loopback, to programs of this machine"""
    exercises: bool = False
    """grade the code of exercises that is written on the learn page: it runs on this machine, so only for yourself,
    on 127.0.0.1 and with no proxy in front"""
    store_responses: int = 0
    """how many answers of /v1/responses are kept in memory, for previous_response_id and GET; by default none"""
    capture: Path | None = None
    """write every request with its tokens, parameters and seed into this folder, for `cairn replay`; by default none"""
    batch_folder: Path | None = None
    """where /v1/files and /v1/batches keep their files; unfinished batches go on after a restart; by default none"""
    api_key_file: Path | None = None
    """a file with API keys, one on a line, each after an optional name; CAIRN_API_KEYS has them, too"""
    admin_key_file: Path | None = None
    """a file with the key of admin endpoints, which is no API key; CAIRN_ADMIN_KEY has it, too"""
    key_requests_per_minute: int | None = None
    """most requests that one API key may make in a minute"""
    key_file_bytes: int = 4 * 2**30
    """most bytes of files that one API key may keep in the batch folder; all keys together may keep 16 GiB"""
    key_tokens_per_day: int | None = None
    """most tokens, of prompts and answers, that one API key may use in a day (UTC); more requests get 429"""
    ledger_text: bool = False
    """show in a request's ledger the words around the token at which its prompt left a cached one"""
    key_concurrent_requests: int | None = None
    """most requests of one API key at a time"""
    public_metrics: bool = False
    """answer /metrics without an API key, for a Prometheus that has none; without keys it is always open"""
    max_waiting: int = 1024
    """most requests that wait for the engine; more are refused with 429"""
    first_token_deadline: float = 60.0
    """a request whose first token cannot come within so many seconds is refused with 503; so is a waiting request when
    the engine finishes no step for as long"""
    request_timeout: float = 600.0
    """seconds after which a request ends, with the tokens that it has"""
    max_body_bytes: int = 32 * 1024 * 1024
    """largest body of a request"""
    max_request_tokens: int | None = None
    """most tokens that one request may ask for; by default what the context leaves"""
    body_timeout: float = 30.0
    """seconds that the body of a request may take to arrive"""
    stall_timeout: float = 60.0
    """seconds after which a client that reads nothing is disconnected"""
    progress_timeout: float = 120.0
    """seconds after which an engine that has work and finishes no step is not healthy; after five times as many it is
    ended, and started again where it has a process of its own"""
    drain_timeout: float = 30.0
    """seconds that running requests have to finish when the server is stopped"""
    cors_origins: list[str] = msgspec.field(default_factory=list)
    """origins whose pages may call this server; * is any"""
    allowed_hosts: list[str] = msgspec.field(default_factory=list)
    """values of the Host header that are answered; by default any"""
    media_hosts: list[str] = msgspec.field(default_factory=list)
    """hosts that images may be fetched from: NAME, *.NAME, or * for any public one; by default none: data URLs only"""
    otel_endpoint: str | None = None
    """collector of OpenTelemetry spans of requests, such as http://127.0.0.1:4318/v1/traces; needs cairn[otel]"""

    def __post_init__(self) -> None:
        super().__post_init__()
        safe = not self.exercises or is_loopback(self.host)
        _check("exercises", self.exercises, safe, f"off where others reach {self.host}")
        _check("port", self.port, 0 <= self.port <= MOST_PORT, f"between 0 and {MOST_PORT}")
        for name in POSITIVE:
            value = getattr(self, name)
            _check(name, value, 0 < value < 1e9, "above 0")
        for name in (
            "key_requests_per_minute",
            "key_concurrent_requests",
            "key_tokens_per_day",
            "max_request_tokens",
        ):
            value = getattr(self, name)
            _check(name, value, value is None or value >= 1, "at least 1")
        fine = (self.otel_endpoint or "http://").startswith(("http://", "https://"))
        _check("otel_endpoint", self.otel_endpoint, fine, "an http:// or https:// address")
        _check(
            "prefill_min_tokens",
            self.prefill_min_tokens,
            self.prefill_min_tokens >= 1,
            "at least 1",
        )
        _check("key_file_bytes", self.key_file_bytes, self.key_file_bytes >= 1, "at least 1")
        _check("store_responses", self.store_responses, self.store_responses >= 0, "at least 0")
        self._check_role()
        for module in self.lora_modules:
            read_module(module)
        _check("max_waiting", self.max_waiting, self.max_waiting >= 0, "at least 0")
        _check("max_body_bytes", self.max_body_bytes, self.max_body_bytes >= 1, "at least 1")
        _check(
            "served_model_name",
            self.served_model_name,
            all(self.served_model_name),
            "no empty name",
        )

    def _check_role(self) -> None:
        may_ask = self.role == "decode" or self.admin_endpoints  # it may become one
        if (self.prefill_urls and not may_ask) or (self.role == "decode" and not self.prefill_urls):
            raise ConfigError(
                f"role is {self.role}, and prefill_urls has {len(self.prefill_urls)} addresses",
                hint="a decode server needs --prefill-urls http://HOST:PORT, and no other but with --admin-endpoints",
            )
        if self.role != "both" and (self.adapters or self.lora_modules):
            raise ConfigError(
                f"role is {self.role}, and adapters are given",
                hint="serve adapters with a server that does both",
            )
        if self.role != "both" and self.tensor_parallel_size > 1:
            raise ConfigError(
                f"role is {self.role}, and tensor_parallel_size is {self.tensor_parallel_size}",
                hint="a prefill or decode server has one rank: use --tensor-parallel-size 1",
            )

    @property
    def separation(self) -> RoleConfig | None:
        """Role of the engine in disaggregated serving; None for both roles."""
        return None if self.role == "both" else self.role_config()

    def role_config(self) -> RoleConfig:
        return RoleConfig(
            role=self.role,
            transport=self.kv_transport,
            host=self.kv_host,
            prefill_urls=self.prefill_urls,
            prefill_min_tokens=self.prefill_min_tokens,
            prefill_when=self.prefill_when,
            prefill_timeout_s=self.first_token_deadline,
        )

    @property
    def hang_timeout(self) -> float:
        """Seconds without a step after which an engine that has work is ended; long before, it is not healthy."""
        return HANG * self.progress_timeout

    @property
    def names(self) -> list[str]:
        """Served model names; only the last part of a path, which does not expose the server's folders."""
        if self.served_model_name:
            return self.served_model_name
        return [Path(self.model).name if Path(self.model).exists() else self.model]

    def engine(self) -> EngineConfig:
        """The engine's part, which is all that its process gets."""
        names = EngineConfig.__struct_fields__
        return EngineConfig(**{name: getattr(self, name) for name in names})


def _check(name: str, value: object, fine: bool, rule: str) -> None:
    if not fine:
        raise ConfigError(f"{name} is {value}", hint=f"it has to be {rule}")
