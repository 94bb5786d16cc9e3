"""A server that gives its memory back while it is idle: POST /sleep, /wake_up, GET /is_sleeping, as vLLM has them.

    /sleep?level=1   on a GPU weights go to pinned host memory; on a CPU they stay; the cache is dropped
    /sleep?level=2   on a CPU the weights are dropped, too, and read again by waking up
    &mode=abort      requests under way are ended; by default they are a reason to refuse

A request for a model that sleeps wakes it and waits for that. Only with `--admin-endpoints`, or from the host of
several models that has started this server.
"""

import asyncio
import time
from typing import Annotated, Literal
from urllib.parse import parse_qs

import msgspec
from msgspec import Meta

from cairn.core.errors import CairnError, did_you_mean
from cairn.serve.http.endpoints.weights import check_admin
from cairn.serve.http.protocol.refusal import JSON, Refusal
from cairn.serve.http.server.call import Call
from cairn.serve.http.server.service import Service

PARTS = {"weights", "kv_cache"}


class SleepQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Query parameters of POST /sleep."""

    level: Annotated[int, Meta(ge=1, le=2)] = 1
    mode: Literal["refuse", "abort"] = "refuse"


class SleepState(msgspec.Struct, kw_only=True):
    """GET /is_sleeping"""

    is_sleeping: bool
    weights_bytes: int  # of all ranks, while it is awake
    cache_bytes: int


async def sleep(service: Service, call: Call, body: bytes) -> JSON:
    check_admin(service, call)
    payload = _query(call)
    if service.config.role != "both":
        message = f"a server of the role {service.config.role} has pages that others read, and does not sleep"
        raise Refusal(409, message, code="not_asleep")
    began, engine = time.monotonic(), service.serving.engine
    if service.open and payload.mode == "refuse":
        message = (
            f"{len(service.open)} requests are under way; wait for their end, or use mode=abort"
        )
        raise Refusal(409, message, code="not_asleep")
    try:
        async with service.waking:
            await asyncio.to_thread(
                engine.check_sleep, payload.level
            )  # before any request is ended
            if payload.mode == "abort" and not service.asleep:
                await asyncio.to_thread(engine.pause, False)
                if not service.paused:  # else an administrator's pause goes on behind the sleep
                    await asyncio.to_thread(engine.resume)
            await asyncio.to_thread(service.serving.sleep, payload.level)
    except CairnError as error:
        raise Refusal(409, str(error), code="not_asleep") from None
    return JSON({"status": "asleep", "seconds": round(time.monotonic() - began, 6)})


async def wake_up(service: Service, call: Call, body: bytes) -> JSON:
    check_admin(service, call)
    if (tags := set(_words(call).get("tags", PARTS))) != PARTS:
        message = f"tags are {', '.join(sorted(tags))}; weights and kv_cache wake up together"
        raise Refusal(400, message, param="tags", code="bad_tags")
    began = time.monotonic()
    await service.wake()
    status = "paused" if service.paused else "running"
    return JSON({"status": status, "seconds": round(time.monotonic() - began, 6)})


async def is_sleeping(service: Service, call: Call, body: bytes) -> JSON:
    check_admin(service, call)
    facts, limits = service.serving.facts, service.serving.limits
    return JSON(
        SleepState(
            is_sleeping=service.asleep,
            weights_bytes=facts.weights_bytes * facts.ranks,
            cache_bytes=facts.page_bytes * limits.pages * facts.ranks,
        )
    )


def _words(call: Call) -> dict[str, list[str]]:
    return parse_qs(call.scope["query_string"].decode("latin-1"))


def _query(call: Call) -> SleepQuery:
    words = {name: values[-1] for name, values in _words(call).items()}
    try:
        return msgspec.convert(words, SleepQuery, strict=False)
    except msgspec.ValidationError as error:
        unknown = [name for name in words if name not in SleepQuery.__struct_fields__]
        fields = SleepQuery.__struct_fields__
        near = did_you_mean(unknown[0], fields, otherwise="level and mode") if unknown else ""
        message = f"/sleep?{call.scope['query_string'].decode('latin-1')[:200]}: {error}"
        raise Refusal(400, f"{message}; {near}" if near else message, code="bad_query") from None
