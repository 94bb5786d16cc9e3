"""Other weights for a running server: POST /pause, /update_weights, /resume.

    pause (requests stay, or are aborted) -> update_weights {version, source} -> resume

Only with `--admin-endpoints`, and for the admin key: a client that may call these decides what all others are answered
with. Each returns when the engine has done it, between two steps; when weights cannot be loaded, the old ones go on
serving.
"""

import asyncio
import hmac
import os
import time
from typing import Annotated

import msgspec
from msgspec import Meta

from cairn.core.errors import CairnError
from cairn.serve.engine.weight_sources import SyncedWeights
from cairn.serve.http.protocol.body import decode
from cairn.serve.http.protocol.refusal import JSON, Refusal
from cairn.serve.http.server.call import Call
from cairn.serve.http.server.keys import ADMIN_VARIABLE
from cairn.serve.http.server.local_access import check_near, check_own_page
from cairn.serve.http.server.service import Service

HOST_SECRET = "CAIRN_HOST_SECRET"  # the host of several models proves itself with it


class PauseRequest(msgspec.Struct, kw_only=True):
    """POST /pause"""

    keep: bool = True  # false: running and waiting requests are aborted


class RanksOfTrainer(msgspec.Struct, kw_only=True):
    """Ranks that publish their weights: see `comm.transfer.weight_sync`."""

    addresses: Annotated[list[str], Meta(min_length=1)]
    transport: str = "tcp"
    timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 60.0


class UpdateRequest(msgspec.Struct, kw_only=True):
    """POST /update_weights"""

    version: Annotated[int, Meta(ge=1, le=2**62)]
    source: str | RanksOfTrainer  # a folder or file that the server can read, or ranks of a trainer


def check_admin(service: Service, call: Call) -> None:
    """The holder of the admin key, or the host. Without any keys: programs of this machine, and no page."""
    if of_host(call):
        return
    if not service.config.admin_endpoints:
        message = "this path is for servers that were started with --admin-endpoints"
        raise Refusal(404, message, code="admin_endpoints_off")
    keys = service.keys
    if keys.is_admin(call.scope):
        return
    if keys or keys.has_admin:
        message = f"this path needs the admin key ({ADMIN_VARIABLE}), which is not an API key"
        raise Refusal(403, message, code="not_an_admin")
    what = f"without an admin key ({ADMIN_VARIABLE}) this path is for programs of its machine"
    check_near(call, what)
    check_own_page(call, what)


def of_host(call: Call) -> bool:
    """Does it come from the process that has started this server beside others?"""
    secret = os.environ.get(HOST_SECRET, "").encode()
    values = (value for name, value in call.scope["headers"] if name == b"x-cairn-host")
    return bool(secret) and hmac.compare_digest(next(values, b""), secret)


async def pause(service: Service, call: Call, body: bytes) -> JSON:
    check_admin(service, call)
    payload = decode(body or b"{}", PauseRequest)
    service.paused = True  # first, because a kept request then makes no progress
    await asyncio.to_thread(service.serving.engine.pause, payload.keep)
    return JSON({"status": "paused", "kept": payload.keep})


async def resume(service: Service, call: Call, body: bytes) -> JSON:
    check_admin(service, call)
    await asyncio.to_thread(service.serving.engine.resume)
    service.paused = service.serving.asleep = False
    return JSON({"status": "running"})


async def update_weights(service: Service, call: Call, body: bytes) -> JSON:
    check_admin(service, call)
    payload = decode(body, UpdateRequest)
    source = payload.source
    if isinstance(source, RanksOfTrainer):
        source = SyncedWeights(**msgspec.structs.asdict(source))
    began = time.monotonic()
    await service.wake()
    try:
        await asyncio.to_thread(service.serving.engine.load_weights, payload.version, source)
    except CairnError as error:
        message = (
            f"version {payload.version} was not loaded, and the weights before it serve on: {error}"
        )
        raise Refusal(400, message, param="source", code="weights_not_loaded") from None
    return JSON({"version": payload.version, "seconds": round(time.monotonic() - began, 6)})


async def reset_prefix_cache(service: Service, call: Call, body: bytes) -> JSON:
    check_admin(service, call)
    await asyncio.to_thread(service.serving.engine.reset_prefix_cache)
    return JSON({"status": "ok"})
