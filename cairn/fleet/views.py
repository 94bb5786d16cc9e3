"""Views of the router: health, metrics, servers, and explanations of routing decisions."""

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cairn.fleet.downstream import JSON, error_body

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cairn.fleet.exchange import Exchange
    from cairn.fleet.router import Router
    from cairn.fleet.routing_policy import Candidate
    from cairn.fleet.worker import Worker

MOST_RECORDS = 256
SHOWN = 50  # requests of the page
PAGE = Path(__file__).with_name("fleet_page.html")
HTML = b"content-type: text/html; charset=utf-8\r\n"
TEXT = b"content-type: text/plain; version=0.0.4; charset=utf-8\r\n"
REQUESTS = b"/cairn/fleet/requests/"
Answer = tuple[int, bytes, bytes]


class Considered(msgspec.Struct, frozen=True):
    """State of a server at a routing decision."""

    server: str
    cost: float  # in the unit of the policy; of `seconds`: seconds
    cached_tokens: int
    queued_tokens: int
    running: int
    waiting: int


class Decision(msgspec.Struct, frozen=True):
    policy: str
    server: str
    considered: list[Considered]


class Choice(msgspec.Struct, gc=False):
    """A decision as it was made; its view is only written when it is asked for."""

    policy: str
    chosen: "Worker"
    position: int  # of it, in `workers`
    workers: "Sequence[Worker]"
    candidates: "Sequence[Candidate]"
    costs: "Sequence[float]"

    def view(self) -> Decision:
        considered = [
            Considered(
                worker.name, cost, one.cached_tokens, one.queued_tokens, one.running, one.waiting
            )
            for worker, one, cost in zip(self.workers, self.candidates, self.costs, strict=True)
        ]
        return Decision(self.policy, self.chosen.name, considered)


class RequestView(msgspec.Struct, frozen=True):
    id: str
    prompt_tokens: int
    ended: bool
    decisions: list[Decision]  # one for each server that it was sent to


class RequestRecord(msgspec.Struct, gc=False):
    id: bytes
    prompt_tokens: int
    choices: list[Choice]
    ended: bool = False

    def view(self) -> RequestView:
        decisions = [choice.view() for choice in self.choices]
        return RequestView(self.id.decode("latin-1"), self.prompt_tokens, self.ended, decisions)


class Views:
    def __init__(self, router: "Router") -> None:
        self._router = router
        self._requests = deque[RequestRecord](maxlen=MOST_RECORDS)  # oldest first
        self._pages: dict[bytes, Callable[[], Answer | None]] = {
            b"/health": self._health,
            b"/v1/models": self._openai_models,
            b"/api/tags": self._ollama_models,
            b"/metrics": lambda: (200, TEXT, self.metrics().encode()),
            b"/fleet": lambda: (200, HTML, PAGE.read_bytes()),
            b"/cairn/fleet": lambda: (200, JSON, msgspec.json.encode(self.fleet())),
            REQUESTS[:-1]: self._newest_requests,
        }
        self.total = self.moved = self.hedged = 0
        self.refused: Counter[str] = Counter()  # by the code of the error

    def note(self, exchange: "Exchange", choice: Choice) -> None:
        record = exchange.record
        if record is None:
            record = RequestRecord(exchange.id, exchange.ask.prompt_tokens, [choice])
            exchange.record = record
            self._requests.append(record)
            self.total += 1
        else:
            self.moved += 1
            record.choices.append(choice)

    def answer(self, path: bytes) -> Answer | None:
        """Response for a path of the router itself; None for other paths."""
        if (page := self._pages.get(path)) is not None:
            return page()
        if path.startswith(REQUESTS):
            return self._request(path[len(REQUESTS) :])
        return None

    def _health(self) -> Answer:
        up = sum(one.state in ("up", "asleep") for one in self._router.workers)
        starting, scaled = self._router.starting, bool(self._router.scaled)
        # Where servers come with requests, whoever asks has to reach the router while there is none.
        status = "starting" if starting else "ok" if up or scaled else "no server is up"
        body = {"status": status, "servers": up, "waiting": len(self._router.waiting)}
        return 200 if status == "ok" else 503, JSON, msgspec.json.encode(body)

    def _openai_models(self) -> Answer | None:
        names = self._models()
        return (200, JSON, msgspec.json.encode(_openai_list(names))) if names else None

    def _ollama_models(self) -> Answer | None:
        names = self._models()
        return (200, JSON, msgspec.json.encode(_ollama_list(names))) if names else None

    def _newest_requests(self) -> Answer:
        newest = [one.view() for one in itertools.islice(reversed(self._requests), SHOWN)]
        return 200, JSON, msgspec.json.encode({"requests": newest})

    def _request(self, id: bytes) -> Answer:
        record = next((one for one in reversed(self._requests) if one.id == id), None)
        if record is None:
            said = f"this request is not remembered; the last {MOST_RECORDS} are"
            return 404, *error_body(404, said, "request_not_found")
        return 200, JSON, msgspec.json.encode(record.view())

    def _models(self) -> list[str]:
        """Model names if servers differ, including starting servers and aliases; empty if any server can answer."""
        workers, aliases = self._router.workers, self._router.aliases.names
        told = [one.hello.models if one.hello else list(one.promised) for one in workers]
        told += [one.names for one in self._router.scaled]
        known = [names for names in told if names]
        can_tell = any(one.state in ("up", "asleep") for one in workers)
        if can_tell and not aliases and all(names == known[0] for names in known):
            return []
        return list(dict.fromkeys([*(name for models in known for name in models), *aliases]))

    def fleet(self) -> dict[str, object]:
        router, shares = self._router, self._hit_shares()
        return {
            "policy": router.config.policy,
            "requests": self.total,
            "open": len(router.open),
            "waiting": len(router.waiting),
            "moved": self.moved,
            "hedged": self.hedged,
            "processes": router.processes,
            "keys": len(router.index),
            "servers": [self._server(one, shares.get(one)) for one in router.workers],
        }

    def _hit_shares(self) -> dict["Worker", float]:
        """Share of recent prompt tokens that were cached on the chosen server."""
        prompts: Counter[Worker] = Counter()
        hits: Counter[Worker] = Counter()
        for one in self._requests:
            for choice in one.choices:
                cached = choice.candidates[choice.position].cached_tokens
                hits[choice.chosen] += min(cached, one.prompt_tokens)
                prompts[choice.chosen] += one.prompt_tokens
        return {worker: hits[worker] / tokens for worker, tokens in prompts.items() if tokens}

    def _server(self, one: "Worker", hit_share: float | None) -> dict[str, object]:
        exact = (one.hello is None or one.hello.exact) and self._router.index.knows(one.number)
        return {
            "name": one.name,
            "url": one.url,
            "state": one.state,
            "reason": one.why(time.monotonic()),
            "models": one.hello.models if one.hello is not None else [],
            "cache": "exact" if exact else "unknown",
            "prefixes": self._router.index.count(one.number),
            "hit_share": hit_share,
            "running": max(one.decoding, one.load.running),
            "waiting": max(one.waiting, one.load.waiting),
            "queued_tokens": one.queued_tokens,
            "sent": one.sent,
            "lost": one.lost,
            "continued": one.continued,
            "step_s": one.load.step_s,
            "token_s": one.load.token_s,
        }

    def metrics(self) -> str:
        """Metrics in Prometheus' text format."""
        router = self._router
        lines = [
            "# TYPE cairn_router_requests_total counter",
            f"cairn_router_requests_total {self.total}",
            "# TYPE cairn_router_moved_requests_total counter",
            f"cairn_router_moved_requests_total {self.moved}",
            "# TYPE cairn_router_hedged_requests_total counter",
            f"cairn_router_hedged_requests_total {self.hedged}",
            "# TYPE cairn_router_open_requests gauge",
            f"cairn_router_open_requests {len(router.open)}",
            "# TYPE cairn_router_waiting_requests gauge",
            f"cairn_router_waiting_requests {len(router.waiting)}",
            "# TYPE cairn_router_server_up gauge",
        ]
        refused = [
            f'cairn_router_refused_requests_total{{code="{code}"}} {count}'
            for code, count in sorted(self.refused.items())
        ]
        lines = ["# TYPE cairn_router_refused_requests_total counter", *refused, *lines]
        lines += [
            f'cairn_router_server_up{{server="{one.name}"}} {int(one.state == "up")}'
            for one in router.workers
        ]
        lines.append("# TYPE cairn_router_lost_requests_total counter")
        lines += [
            f'cairn_router_lost_requests_total{{server="{one.name}"}} {one.lost}'
            for one in router.workers
        ]
        return "\n".join(lines) + "\n"


def _openai_list(names: list[str]) -> dict[str, object]:
    card = {"object": "model", "created": 0, "owned_by": "cairn"}
    return {"object": "list", "data": [{"id": name, **card} for name in names]}


def _ollama_list(names: list[str]) -> dict[str, object]:
    """GET /api/tags: what the servers alone know, such as sizes, is left out."""
    return {"models": [{"name": name, "model": name, "details": {}} for name in names]}
