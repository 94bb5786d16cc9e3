"""POST /cairn/role: a running server computes prompts for others, asks others for them, or does both by itself.

    {"role": "prefill"}   {"role": "decode", "prefill_urls": ["http://..."]}   {"role": "both"}

Requests that come meanwhile wait; those under way, and pages that another server still reads, have `timeout_s` to end.
Then the role changes between two steps, or nothing has changed (409). Only with `--admin-endpoints`, and only servers
that `--prefill-urls` has named at the start may be asked for prompts: they are sent prompts and CAIRN_PREFILL_KEY.
"""

import asyncio
import time
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from cairn.core.errors import CairnError, RequestError
from cairn.serve.http.endpoints.weights import check_admin
from cairn.serve.http.protocol.body import decode
from cairn.serve.http.protocol.refusal import JSON, Refusal
from cairn.serve.http.server.call import Call
from cairn.serve.http.server.service import Service
from cairn.serve.http.server.settings import ServerConfig

LOOK_S = 0.02  # between two looks whether everything has ended


class RoleRequest(msgspec.Struct, kw_only=True):
    """POST /cairn/role"""

    role: Literal["both", "prefill", "decode"]
    prefill_urls: list[str] = []
    timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 30.0


async def role(service: Service, call: Call, body: bytes) -> JSON:
    check_admin(service, call)
    payload = decode(body, RoleRequest)
    _check(service, payload)
    began = time.monotonic()
    await service.wake()
    async with service.switching:
        try:
            config = msgspec.structs.replace(
                service.config, role=payload.role, prefill_urls=payload.prefill_urls
            )
            await _switch(service, config, began + payload.timeout_s)
        except CairnError as error:
            message = f"the role is {service.config.role}, as before: {error}"
            raise Refusal(409, message, param="role", code="role_not_changed") from None
        service.take_role(config)
    return JSON({"role": payload.role, "seconds": round(time.monotonic() - began, 6)})


def _check(service: Service, payload: RoleRequest) -> None:
    """Apply the checks of a server start with this role."""
    serving = service.serving
    unknown = [url for url in payload.prefill_urls if url not in service.prefill_urls]
    if unknown:
        message = f"prefill_urls has {unknown[0]!r}, and --prefill-urls of the start has not"
        raise Refusal(400, message, param="prefill_urls", code="unknown_prefill_url")
    if payload.role == "both":
        return
    adapters = [model.name for model in serving.models.values() if model.adapter]
    if serving.picture_input is not None or adapters:
        what = f"adapters are loaded: {', '.join(adapters)}" if adapters else "the model sees"
        message = f"the role is {service.config.role}, as before: {what}"
        raise Refusal(409, message, param="role", code="role_not_changed")


async def _switch(service: Service, config: ServerConfig, deadline: float) -> None:
    """A RequestError: it was still at work when its time was over."""
    engine, of_prompts = service.serving.engine, "prefill" in (config.role, service.config.role)
    while True:
        try:
            if of_prompts and service.open:
                raise RequestError(f"{len(service.open)} requests are under way")
            await asyncio.to_thread(engine.switch_role, config.role_config())
            return
        except RequestError:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(LOOK_S)
