"""Endpoints about the server: models, health, version, metrics and the OpenAPI document."""

from datetime import UTC, datetime
from pathlib import Path

from starlette.responses import Response

from cairn import __version__
from cairn.core.metrics import CONTENT_TYPE
from cairn.serve.http.protocol.answers import ModelCard, ModelList, Version
from cairn.serve.http.protocol.messages import ModelInfo, ModelPage
from cairn.serve.http.protocol.openapi import document
from cairn.serve.http.protocol.refusal import JSON
from cairn.serve.http.server.call import Call
from cairn.serve.http.server.health import HOPELESS, READY
from cairn.serve.http.server.service import Service
from cairn.serve.serving import ServedModel


async def models(service: Service, call: Call, body: bytes) -> JSON:
    served = [*service.serving.models.values()]
    if not _asks_as_anthropic(call):
        return JSON(ModelList(data=[_card(service, one) for one in served]))
    data = [_info(service, one) for one in served]
    return JSON(ModelPage(data=data, first_id=data[0].id, last_id=data[-1].id))


async def model(service: Service, call: Call, body: bytes) -> JSON:
    served = service.named(call.scope["path_params"]["name"])
    return JSON((_info if _asks_as_anthropic(call) else _card)(service, served))


def _asks_as_anthropic(call: Call) -> bool:
    """Both interfaces list models under one path; only Anthropic's clients name a version of theirs."""
    return any(name == b"anthropic-version" for name, _ in call.scope["headers"])


def _info(service: Service, served: ServedModel) -> ModelInfo:
    created = datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z")
    context = service.serving.limits.context
    return ModelInfo(
        id=served.name, display_name=served.name, created_at=created, max_input_tokens=context
    )


def _card(service: Service, served: ServedModel) -> ModelCard:
    card = ModelCard(
        id=served.name, created=service.created, max_model_len=service.serving.limits.context
    )
    if served.adapter:
        card.parent, card.root = served.parent, Path(served.root).name
    return card


async def health(service: Service, call: Call, body: bytes) -> JSON:
    status = service.health()
    return JSON(status, 200 if status.status in READY else 503)


async def load(service: Service, call: Call, body: bytes) -> JSON:
    """GET /load: the number of requests inside the server, in vLLM's format."""
    return JSON({"server_load": service.admission.inside})


async def live(service: Service, call: Call, body: bytes) -> JSON:
    health = service.health()
    return JSON(health, 503 if health.status in HOPELESS else 200)


async def version(service: Service, call: Call, body: bytes) -> JSON:
    return JSON(Version(__version__))


async def metrics(service: Service, call: Call, body: bytes) -> Response:
    return Response(service.metrics_text(), media_type=CONTENT_TYPE)


async def openapi(service: Service, call: Call, body: bytes) -> JSON:
    return JSON(document())
