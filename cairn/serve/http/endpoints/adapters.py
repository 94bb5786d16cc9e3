"""Adapters come and go while a server runs: POST /v1/load_lora_adapter, /v1/unload_lora_adapter, as vLLM has them.

    {"lora_name": "legal", "lora_path": "runs/legal/adapter"}    ->    requests with "model": "legal"

Only with `--admin-endpoints`, because a path of the server's disk is read. No request waits: the files are read beside
the engine, and the adapter is taken in between two steps. Requests of an adapter that is unloaded finish with it.
"""

import asyncio
from typing import Annotated

import msgspec
from msgspec import Meta

from cairn.core.errors import CairnError
from cairn.serve.http.endpoints.weights import check_admin
from cairn.serve.http.protocol.body import decode
from cairn.serve.http.protocol.refusal import JSON, Refusal
from cairn.serve.http.server.call import Call
from cairn.serve.http.server.service import Service
from cairn.serve.serving import ModelNotServed

Name = Annotated[str, Meta(min_length=1, max_length=200)]


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """POST /v1/load_lora_adapter"""

    lora_name: Name
    lora_path: Annotated[
        str, Meta(min_length=1, max_length=4096)
    ]  # a folder that the server can read
    load_inplace: bool = False  # replace an adapter of this name


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    """POST /v1/unload_lora_adapter"""

    lora_name: Name
    lora_int_id: int | None = None  # vLLM's clients send it; names are enough


async def load_adapter(service: Service, call: Call, body: bytes) -> JSON:
    check_admin(service, call)
    payload = decode(body, LoadAdapterRequest)
    load = service.serving.load_adapter
    try:
        await asyncio.to_thread(load, payload.lora_name, payload.lora_path, payload.load_inplace)
    except CairnError as error:
        message = f"the adapter {payload.lora_name} was not loaded: {error}"
        raise Refusal(400, message, param="lora_path", code="adapter_not_loaded") from None
    return JSON(f"Success: LoRA adapter '{payload.lora_name}' added successfully.")


async def unload_adapter(service: Service, call: Call, body: bytes) -> JSON:
    check_admin(service, call)
    payload = decode(body, UnloadAdapterRequest)
    try:
        await asyncio.to_thread(service.serving.unload_adapter, payload.lora_name)
    except ModelNotServed as error:
        raise Refusal(404, error.message, param="lora_name", code="model_not_found") from None
    return JSON(f"Success: LoRA adapter '{payload.lora_name}' removed successfully.")
