"""Ollama's model endpoints: POST /api/show, GET /api/tags, /api/ps and /api/version.

A server has the models that it was started with, so all of them are listed, and all of them are loaded.
"""

import hashlib
from datetime import UTC, datetime
from typing import Any

import msgspec

from cairn import __version__
from cairn.serve.http.protocol.body import decode
from cairn.serve.http.protocol.refusal import JSON, Refusal
from cairn.serve.http.server.call import Call
from cairn.serve.http.server.service import Service

OLLAMA = "0.12.11"  # whose interface this is: clients refuse versions that are too old for them
NEVER = "2318-01-01T00:00:00Z"  # far away: a time that has passed reads as "stopping"


class OllamaShow(msgspec.Struct, kw_only=True):
    """POST /api/show"""

    model: str = ""
    name: str = ""  # what older clients call it


def check_served(service: Service, name: str) -> str:
    """The name to answer with. Their clients name a tag, and `latest` where the user gave none."""
    known = served_name(service, name)
    served = service.check_model(known)
    return name if served == known else served


def served_name(service: Service, name: str) -> str:
    return name if name in service.serving.models else name.removesuffix(":latest")


def _details(service: Service) -> dict[str, Any]:
    spec, facts = service.serving.opened.spec, service.serving.facts
    count = spec.parameters()
    size = f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"
    checkpoint = service.serving.opened.checkpoint
    stored = facts.dtype if checkpoint is None else checkpoint.stored_form()
    is_gguf = checkpoint is not None and checkpoint.path.suffix == ".gguf"
    return {
        "parent_model": "",
        "format": "gguf" if is_gguf else "safetensors",
        "family": spec.family,
        "families": [spec.family],
        "parameter_size": size,
        "quantization_level": stored,
    }


def _entry(service: Service, name: str) -> dict[str, Any]:
    """A model in a list. Their command line cuts the digest to twelve digits and fails where there is none; nothing
    is fetched by it here, so it is one of the name and the size.
    """
    weights = _size(service)
    return {
        "name": name,
        "model": name,
        "digest": hashlib.sha256(f"{name} {weights}".encode()).hexdigest(),
        "size": weights,
        "details": _details(service),
    }


def _size(service: Service) -> int:
    """Bytes of the weights on all ranks."""
    facts = service.serving.facts
    return facts.weights_bytes * facts.ranks


async def api_tags(service: Service, call: Call, body: bytes) -> JSON:
    created = datetime.fromtimestamp(service.created, UTC).isoformat()
    names = service.serving.models
    return JSON({"models": [_entry(service, name) | {"modified_at": created} for name in names]})


async def api_ps(service: Service, call: Call, body: bytes) -> JSON:
    """Loaded models: all models of this server."""
    on_gpu = _size(service) if service.serving.facts.device.startswith("cuda") else 0
    about = {
        "size_vram": on_gpu,
        "expires_at": NEVER,
        "context_length": service.serving.limits.context,
    }
    return JSON({"models": [_entry(service, name) | about for name in service.serving.models]})


async def api_show(service: Service, call: Call, body: bytes) -> JSON:
    payload = decode(body, OllamaShow)
    if not (payload.model or payload.name):
        raise Refusal(400, "model is missing", param="model", code="missing_field")
    service.named(served_name(service, payload.model or payload.name))
    tokenizer, spec = service.serving.opened.tokenizer, service.serving.opened.spec
    sources = {} if tokenizer is None else tokenizer.templates.sources
    info = {
        "general.architecture": spec.family,
        "general.parameter_count": spec.parameters(),
        f"{spec.family}.context_length": service.serving.limits.context,
    }
    return JSON(
        {
            "details": _details(service),
            "model_info": info,
            "template": sources.get("default", ""),
            "capabilities": _capabilities(service),
        }
    )


def _capabilities(service: Service) -> list[str]:
    """Their words; clients offer tools and pictures only to models that are said to take them."""
    shown = service.serving.has_tokenizer and service.tokenizer.templates.tool_support.offered
    sees = service.serving.picture_input is not None
    return ["completion", *(["tools"] if shown else []), *(["vision"] if sees else [])]


async def api_version(service: Service, call: Call, body: bytes) -> JSON:
    return JSON({"version": OLLAMA, "cairn": __version__})
